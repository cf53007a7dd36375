"""`register_for_checkpointing`: state of the script that rides in the job's checkpoints, without pickles.

The servers hold the model, and decide when a checkpoint is made. What the script holds (a schedule, random generators, its
own counters) each worker reports to the coordinator (`server/script_state.py`), as it is when the worker draws its next
batch: by then the script has done all that follows a step, such as `scheduler.step()`, and nothing of the next. Where no
sampler draws, it is as the next `step()` begins, or at the end.

    after each push     objects that are small, if they have changed: they are in a checkpoint of an interrupted job
    for a checkpoint    all objects, when the answer to a push has said that one is made of this moment
    at the end          all objects

In rounds all workers stand at one step, and an object has the same state on all of them: after a resume every worker is
given the newest. In other modes each goes on from its own, and one that is new from that of the worker that was furthest.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from polytempo.errors import UsageError
from polytempo.protocol.messages import GIVEN, MEAN, NEWEST, OWN, ScriptState, StateRecalled
from polytempo.protocol.values import SavedObject, beside
from polytempo.records.lines import MAIN
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session, current
from polytempo.sync.capabilities import PushedWork
from polytempo.train.safe_serialization import TensorList, decode, encode
from polytempo.transport.channel import Bytes

#: Bytes above which an object's state does not travel after each push.
LARGE = 1 << 20

#: The state of an object as it travels: all but its tensors, their dtypes, and their content.
Packed = tuple[bytes, tuple[str, ...], list[Bytes]]


class RngState:
    """The random generators of this process, to be registered for checkpoints: Python's, NumPy's global one, torch's, and
    that of the current GPU.

    After a resume they go on as if the job had not ended, from the first batch that is drawn. Each rank has its own: seed
    them by rank first. A rank that the earlier job did not have keeps the seed that the script has given it.

    Example:
        ```python
        torch.manual_seed(1 + pt.rank())
        pt.register_for_checkpointing(pt.RngState())
        ```
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators.

        Returns:
            Plain data and tensors.
        """
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {"python": (version, np.array(words, dtype=np.int64), gauss)}
        state |= {"numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from this state.

        Args:
            state_dict: What `state_dict()` returned.
        """
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])


def register_for_checkpointing(*objects: Any, per_rank: bool = False) -> None:
    """Let state of the script ride in the job's checkpoints (`polytempo run --checkpoint DIR`); load it after `--resume`.

    Each object is loaded here and now where the job goes on from a checkpoint that has its state. Register what the script
    needs to go on and the job does not know: learning-rate schedules (the rates they have set come back with them),
    `RngState()`, a `GradScaler`, counters of your own. The model, the optimizer and the positions of samplers are in the
    checkpoint without it. State is stored as it is when the next batch is drawn, so call `scheduler.step()` right after
    `optimizer.step()`, or between epochs.

    State is plain data: numbers, texts, tensors and arrays in lists, tuples, dicts and sets. It is written as safetensors
    and msgpack, never as a pickle. In a job without `--checkpoint` and `--resume` there is nothing to do.

    Args:
        *objects: Anything with `state_dict()` and `load_state_dict()`. Objects of one class are told apart by the order in
            which they are registered.
        per_rank: Every rank has a state of its own, which means nothing to others: it comes back to that rank alone. By
            default a rank that the earlier job did not have takes that of another, and in modes with rounds (`bsp`,
            `local`, ...) all take the same.

    Raises:
        UsageError: `init` was not called, an object has no `state_dict`, or its state is not plain data.

    Example:
        ```python
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10 * len(loader))
        pt.register_for_checkpointing(scheduler, pt.RngState())
        ```
    """
    registered = registered_in(current())
    for one in objects:
        registered.add(one, per_rank or isinstance(one, RngState))


def registered_in(session: Session) -> Registered:
    """What the script of this session has registered."""
    if session.registered is None:
        session.registered = Registered(session)
        session.on_leave(LeavingStep.REPORT, lambda: found.mark(whole=True))
    found: Registered = session.registered
    return found


class Registered:
    """What the script of one worker has registered."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._objects: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._sent: dict[str, Packed] = {}  # as of the last report
        self._marked = self._whole = -2  # the pushes after which the last reports were, and those of all objects
        self._generators: list[tuple[RngState, Any]] = []  # to be set before the first batch
        self._recalled: dict[str, dict[str, tuple[SavedObject, list[Bytes]]]] = {}
        self._step = self._size = 0  # of the checkpoint that the job goes on from
        self._pushed = -1  # the last push in it of a worker of this rank

    def add(self, one: Any, per_rank: bool, name: str = "", averaged: bool = False) -> None:
        """Take an object in, and load it where the job goes on from a checkpoint; `averaged`: a job of another number of
        workers goes on from the mean of all states."""
        kind = type(one).__name__
        if isinstance(one, torch.optim.Optimizer):
            raise UsageError(
                f"register_for_checkpointing() got a {kind}, which is in the job's checkpoint by itself; leave it out"
            )
        if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
            raise UsageError(
                f"register_for_checkpointing() expected objects with state_dict() and load_state_dict(), got a {kind}; give "
                "its class both, returning and taking plain data"
            )
        if any(other is one for other in self._objects.values()):
            raise UsageError(f"register_for_checkpointing() got the same {kind} twice; register each object once")
        if not name:
            name = f"{kind} {self._counts.get(kind, 0)}"
            self._counts[kind] = self._counts.get(kind, 0) + 1
        self._packed(name, one)  # refused here and now, if it is
        self._objects[name] = one
        if self._session.job.resumed and self._session.client is not None:
            self._load(name, one, per_rank, averaged)

    def _load(self, name: str, one: Any, per_rank: bool, averaged: bool) -> None:
        can = self._session.job.spec.capabilities
        own, shared = self._recall(OWN).get(name), self._recall(NEWEST).get(name)
        if averaged and (own is None or self._size != self._session.size):
            own = self._recall(MEAN).get(name)
        if can.common and not per_rank:
            own = shared or own
        held = own if per_rank else own or shared
        if held is None:
            if not per_rank:
                self._say(f"the checkpoint has no state of {name}: it starts as the script has made it")
            return
        newest = max(saved.exchange for saved, _ in self._recall(NEWEST).values())
        if can.common and can.work is PushedWork.BATCH:  # every worker makes one push a step
            due = self._step - 1
        else:  # without rounds each worker has made its own number
            due = newest if can.rounds or can.averages else self._pushed
        if held[0].exchange < due and (due != newest or _size(held[1]) > LARGE or per_rank):
            self._say(
                f"the state of {name} in the checkpoint is of step {held[0].exchange + 1}, and the parameters of step "
                f"{due + 1}: the job was killed before its script had reported it, or it is large"
            )
        state = _unpacked(*held)
        if isinstance(one, LRScheduler):
            _load_schedule(one, state)
        else:
            one.load_state_dict(state)
        if isinstance(one, RngState):
            self._generators.append((one, state))

    def mean(self, name: str) -> Any:
        """Of an object that is not registered here, the mean of what the checkpoint has of all workers; None where it has
        nothing."""
        held = self._recall(MEAN).get(name)
        return None if held is None else _unpacked(*held)

    def _recall(self, which: str) -> dict[str, tuple[SavedObject, list[Bytes]]]:
        if which not in self._recalled:
            self._recalled[which], message = _recalled(self._session, which)
            self._step, self._size, self._pushed = message.step, message.size, message.due
        return self._recalled[which]

    def _say(self, text: str) -> None:
        sys.stderr.write(f"polytempo: rank {self._session.rank}: {text}\n")

    # Reports.

    def begin_epoch(self, is_whole: Callable[[], bool]) -> None:
        """An epoch begins, maybe one of which an earlier job has done a part. A loader that begins one takes a number from
        torch's generator: it did so before state that was reported with a draw, and after the last of a whole epoch."""
        if self._generators and is_whole() and not any(state["drawn"] for _, state in self._generators):
            self._restore()

    def draw(self) -> None:
        """A batch to train on is about to be drawn: what follows the last step is done."""
        self._restore()
        self.mark(drawn=True)

    def _restore(self) -> None:
        for generators, state in self._generators:
            generators.load_state_dict(state)
        self._generators.clear()

    def mark(self, whole: bool = False, drawn: bool = False) -> None:
        """Report the state as it is, if there was a push since the last report. `whole`: objects of any size; `drawn`: with
        the draw of the next batch."""
        client = self._session.client
        if client is None or not self._objects or not self._session.job.saves:
            return
        clock = next((state for state in client.exchanges.states.values() if beside(state.name) == MAIN), None)
        if clock is None:
            return
        whole = whole or bool(clock.wanted)
        if clock.pushed == (self._whole if whole else self._marked) and not clock.wanted:
            return
        fresh: dict[str, Packed] = {}
        same: list[str] = []
        partial = False
        for name, one in self._objects.items():
            packed = self._packed(name, one, drawn)
            if _size(packed[2]) + len(packed[0]) > LARGE:
                fresh |= {name: packed} if whole else {}
                partial = partial or not whole
            elif _same(packed, self._sent.get(name)):
                same.append(name)
            else:
                fresh[name] = self._sent[name] = packed
        objects = tuple(SavedObject(name, structure, dtypes, clock.pushed) for name, (structure, dtypes, _) in fresh.items())
        report = ScriptState(
            objects=objects, exchange=clock.pushed, same=tuple(same), checkpoint=clock.wanted, partial=partial
        )
        clock.wanted, self._marked = "", clock.pushed
        self._whole = clock.pushed if whole else self._whole
        with self._session.lock:
            client.send(0, report, [buffer for _, _, buffers in fresh.values() for buffer in buffers])

    def _packed(self, name: str, one: Any, drawn: bool = False) -> Packed:
        return _packed(name, {**one.state_dict(), "drawn": drawn} if isinstance(one, RngState) else _state_of(one))


def _recalled(session: Session, which: str) -> tuple[dict[str, tuple[SavedObject, list[Bytes]]], StateRecalled]:
    """What the servers keep of scripts, by name, and the message that brought it."""
    assert session.client is not None
    with session.lock:
        message, buffers = session.client.recall_state(which)
    rest = iter(buffers)
    return {one.name: (one, [np.array(next(rest)) for _ in one.dtypes]) for one in message.objects}, message


def _packed(name: str, state: Any) -> Packed:
    """A state as it travels; refused, with the place, where it is no plain data."""
    aside: TensorList = []
    try:
        structure = encode(state, aside)
    except UsageError as error:
        where = _culprit(state, "state_dict()")
        raise UsageError(f"the state of {name} cannot be stored in a checkpoint: {where}: {error}") from None
    tensors = [tensor.detach().cpu().contiguous().resolve_conj().reshape(-1) for tensor in aside]
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return structure, dtypes, [np.array(tensor.view(torch.uint8).numpy()) for tensor in tensors]


def _unpacked(saved: SavedObject, buffers: list[Bytes]) -> Any:
    aside: TensorList = []
    state = decode(saved.structure, aside)
    for tensor, buffer in zip(aside, buffers, strict=True):
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(buffer))
    return state


def _state_of(one: Any) -> Any:
    """Its state; of a schedule with what it has set in its optimizer, from which the next step of many is computed."""
    state = one.state_dict()
    if not isinstance(one, LRScheduler):
        return state
    numbers = (int, float, tuple, torch.Tensor)  # what schedules may set of a parameter group
    groups = [
        {name: value for name, value in group.items() if isinstance(value, numbers) and not isinstance(value, bool)}
        for group in one.optimizer.param_groups
    ]
    return {"schedule": state, "groups": groups}


def _load_schedule(one: LRScheduler, state: Any) -> None:
    one.load_state_dict(state["schedule"])
    for group, saved in zip(one.optimizer.param_groups, state["groups"], strict=False):
        for name, value in saved.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _culprit(state: Any, path: str) -> str:
    """Where in a state that is no plain data the first thing is that is none."""
    parts: list[tuple[str, Any]] = []
    if isinstance(state, dict):
        parts = [(f"{path}[{key!r}]", value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        parts = [(f"{path}[{index}]", value) for index, value in enumerate(state)]
    for where, part in parts:
        try:
            encode(part, [])
        except UsageError:
            return _culprit(part, where)
    return path


def _same(packed: Packed, before: Packed | None) -> bool:
    if before is None or packed[:2] != before[:2]:
        return False
    return all(np.array_equal(one, other) for one, other in zip(packed[2], before[2], strict=True))


def _size(buffers: list[Bytes]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


class WorkerOptimizerState:
    """State of a wrapped optimizer that runs on the worker, as in `local:8` and with `apply="delta"`: no server has it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> Any:
        """Without the groups: hyper-parameters are the script's."""
        return self._optimizer.state_dict()["state"]

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})


class GivenState:
    """State that the script of one worker has loaded into its optimizer before the first step: the others start from it,
    too, unless their scripts have loaded one themselves."""

    def __init__(self, session: Session, name: str, state: WorkerOptimizerState) -> None:
        self._session, self._name, self._state = session, f"optimizer {name}", state
        self._is_mine = False

    def give(self) -> None:
        """The state as it is now is what workers start from."""
        structure, dtypes, buffers = _packed(self._name, self._state.state_dict())
        message = ScriptState(objects=(SavedObject(self._name, structure, dtypes, 0),), exchange=0, given=True)
        assert self._session.client is not None
        with self._session.lock:
            self._session.client.send(0, message, buffers)
        self._is_mine = True

    def take(self) -> None:
        """Start from what another worker has given."""
        held = None if self._is_mine else _recalled(self._session, GIVEN)[0].get(self._name)
        if held is not None:
            self._state.load_state_dict(_unpacked(*held))
