"""How a worker takes part in rounds with deadlines (`sync/anytime.py`): over servers, or among workers.

Two threads of a worker meet here. The script's thread adds up gradients of micro-batches; the communication thread of
`train/deadline_rounds.py` hands the sum over and hears how the round ended, also while the script computes:

    exchange    communication thread: this worker's part of a round goes out, and the answer is waited for
    install     script's thread, inside `step()`: what rounds brought goes into the parameters, never under a backward

Sums are made in flat buffers of the exchange's layout. A buffer that was handed over is left alone until `exchange` returns;
so there are two, used in turn.

**Over servers** (`ServerRounds`) these divide a round's sum by its divisor and run the optimizer (`server/shard.py`). An
answer brings their values of now, however many rounds were missed: they are copied aside in the thread that takes the
answer, and the newest are put into the parameters by the script's thread. Parameters on a GPU pass through the host.

**Among workers** (`PeerRounds`) values stay with each:

    at the deadline  the sequencer hears of this worker's samples, closes the round, and names the workers in it
    the mean         exactly these add up their sums, over the round's divisor (`reducer/deadline_peers.py`)
    the update       each runs the wrapped optimizer on the mean, with the ROUND's hyper-parameters, so all stay alike:
                     schedulers that are stepped by micro-batch may stand at different places on different workers

A worker that computes while rounds end takes part in them by its communication thread, and keeps their means, up to `KEPT`;
its script applies them in order in its next `step()`. With more it stops taking part.

A worker without which a round has closed (it was stopped, or has kept too many means) has missed updates. Its next push is
discarded; when the round that is open then ends, the lowest rank in that round hands over its values, its optimizer's state
and the means that its own script has yet to apply. So all replicas are the same before they compute again.

Where this departs from `docs/design/0014`: any rank in the round may hand over, also one whose script computes. Backward
passes only read values; a lock keeps `install` out while they are copied.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.client.client import BackgroundWait
from polytempo.errors import JobEnded, PeerError, UsageError
from polytempo.protocol.push import Measures, no_steps
from polytempo.protocol.values import ClosedRound
from polytempo.reducer.deadline_peers import DeadlinePeers, EndedRound
from polytempo.reducer.exchange import Exchange, GradientMean, GroupValues
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.servers import ServerExchange
from polytempo.sync.directives import NextDeadline
from polytempo.train.communication import load_in_place
from polytempo.train.safe_serialization import decode_from, encode_for_all
from polytempo.train.update import Wrapped, step_unwrapped
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes

#: Means of rounds that a worker keeps while its script computes.
KEPT = 4


class RoundExchange(ABC):
    """The rounds of one optimizer.

    Args:
        reducer: The optimizer's exchange, with which this worker takes part in the job.
    """

    def __init__(self, reducer: Exchange) -> None:
        self.reducer = reducer

    @property
    def has_room(self) -> bool:
        """May this worker take part in another round before `install` is called? If not, it lets rounds pass without it,
        and catches up."""
        return True

    @abstractmethod
    def buffers(self) -> tuple[FlatBuffer, FlatBuffer]:
        """The two flat buffers in which sums of gradients are made, in turn."""

    @abstractmethod
    def exchange(self, total: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int]) -> None:
        """Take part in a round, and wait until it has ended. Called in the communication thread, once for each round.

        Args:
            total: The sum of `samples * gradient` over the micro-batches; it may be written to. None where there is none.
            hyper: The hyper-parameters of all groups, as of the last micro-batch.
            measures: Of all micro-batches; with None there are no samples.
            absent: The indices of the parameters for which none has a gradient, ascending.

        Raises:
            PolytempoError: The job has ended or this worker was refused; the script's next `step()` raises it.
        """

    @abstractmethod
    def give_up(self) -> None:
        """This worker leaves the job: no answer is waited for any more."""

    @abstractmethod
    def install(self) -> None:
        """Bring the parameters to the values after the last round. Called in the script's thread, inside `step()`, where no
        round is under way and at least one has ended since the last call."""

    def look(self) -> None:
        """Before a step, in the script's thread: `UsageError` where the script has written to parameters and may not."""

    def reload(self) -> None:
        """Put the newest values that were installed into the parameters again: the script has written to them. Called in the
        script's thread."""

    def close(self) -> None:
        """No further round comes."""


class ServerRounds(RoundExchange):
    """The rounds of one optimizer whose values servers hold."""

    def __init__(self, reducer: ServerExchange) -> None:
        super().__init__(reducer)
        self._server_reducer = reducer
        self._wait = BackgroundWait(reducer.client, reducer.session.lock)
        self._given_up = False
        self._buffers = FlatBuffer(reducer.layout, reducer.client.pool), FlatBuffer(reducer.layout, reducer.client.pool)
        self._newest = FlatBuffer(reducer.layout, Pool())  # values that were not installed yet
        self._access = threading.Lock()  # one thread writes them, another reads
        reducer.deliver_to(self._keep)

    def buffers(self) -> tuple[FlatBuffer, FlatBuffer]:
        return self._buffers

    def exchange(self, total: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int]) -> None:
        reducer = self._server_reducer
        if total is not None:
            views = list(total.views.values())
            torch._foreach_div_(views, measures.samples)  # servers weigh means by samples
        with torch.no_grad():
            reducer.begin(total, hyper, measures, absent)
            if not self._wait.for_release(reducer.client_state, reducer.step + 1, lambda: self._given_up):
                raise JobEnded("this worker has left its job")
            reducer.answered()

    def give_up(self) -> None:
        self._given_up = True

    def _keep(self, parts: dict[int, list[Bytes]], absent: Sequence[int]) -> None:
        """Values of an answer, copied: their memory is received into again."""
        with self._access:
            self._newest.receive(parts)

    def install(self) -> None:
        with self._access:
            self._server_reducer.copier.scatter(dict(enumerate(self._newest.parts)))

    def look(self) -> None:
        watch = self._server_reducer.copier.watch
        if watch.touched:
            raise UsageError(
                f"{watch.touched} was changed in place since the last step(), and in {self.reducer.spec.sync} the values of "
                "each round are the servers'; change values before DistributedOptimizer(), or call consolidate() to "
                "take the servers' again"
            )

    def reload(self) -> None:
        reducer = self._server_reducer
        newest = reducer.held.newest()
        if newest is not None:
            reducer.copier.scatter(newest)


@dataclass(eq=False)
class RoundMean:
    """The mean gradient of a round, and the hyper-parameters with which it is applied."""

    gradient: GradientMean
    hyper: GroupValues


@dataclass(eq=False)
class HandedState:
    """What a rank has handed over to this one: values and optimizer state, and the means to apply to them."""

    values: list[torch.Tensor]
    state: dict[Any, Any]
    means: list[RoundMean]


class MissedRound(Exception):
    """This worker was stopped for so long that the sum of its round is gone."""


class PeerRounds(RoundExchange):
    """The rounds of one optimizer, on one worker.

    Args:
        reducer: Its part in the job.
        wrapped: The script's optimizer, which runs here.
    """

    reducer: DeadlinePeers

    def __init__(self, reducer: DeadlinePeers, wrapped: Wrapped) -> None:
        super().__init__(reducer)
        self._wrapped, self._rank = wrapped, reducer.session.rank
        self._installing = threading.Lock()  # values and optimizer state are changed, or copied
        self.pending: list[RoundMean | HandedState] = []  #: what `install` has yet to apply
        self._free: list[GradientMean] = []
        self._touched = ""  # a parameter that the script has written to, which the next round compares

    @property
    def has_room(self) -> bool:
        return len(self.pending) < KEPT

    def buffers(self) -> tuple[FlatBuffer, FlatBuffer]:
        return self.reducer.new_buffer(), self.reducer.new_buffer()

    # In the communication thread.

    def exchange(self, total: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int]) -> None:
        began, watch, busy = time.perf_counter(), self.reducer.copier.watch, measures.busy
        if not busy:
            self.reducer.touched, watch.touched, self._touched = watch.touched or self._touched, "", ""
        while True:
            self.reducer.push(total, hyper, measures, absent)
            try:
                self._end(busy)
                break
            except (
                MissedRound
            ):  # the next round has closed without it, too: it reports that, without samples, and catches up
                total, measures, absent = None, no_steps(), ()
                measures.busy = busy
        self.reducer.took(time.perf_counter() - began)

    def give_up(self) -> None:
        self.reducer.given_up = True

    def _end(self, busy: bool) -> None:
        """A round has ended: make its mean, or take what this worker gets to catch up."""
        closed, starts = self.reducer.last_round, self.reducer.directive
        behind = starts.catching_up if isinstance(starts, NextDeadline) else ()
        if self._rank not in (*closed.ranks, *behind):
            raise PeerError(
                f"rank {self._rank} has not heard how its round ended, and the last was made by ranks {closed.ranks} "
                "without it; start the job again"
            )
        source = min(closed.ranks or behind)
        others = [rank for rank in behind if rank != source] if self._rank == source else []
        try:
            content = self._receive(source) if self._rank in behind and self._rank != source else self._mean(closed, busy)
        except MissedRound:
            self._hand_over(None, others)
            raise
        if content is not None:
            with self._installing:
                self.pending.append(content)
        if others:
            self._hand_over(self._snapshot(), others)

    def _mean(self, closed: EndedRound, busy: bool) -> RoundMean | None:
        """The mean of the round; None where no worker had a sample."""
        answer = self.reducer.client_state.answer
        if answer.touched:
            self._compare(closed, answer.touched, busy)
        if answer.skipped or not closed.divisor:
            return None
        gradient = self._new_mean()
        if not self.reducer.sums.make(gradient.buffer, closed):
            raise MissedRound
        if self.reducer.sums.remade:
            self.reducer.sums.remade, self._touched = False, self._touched or "values"
        gradient.absent = answer.absent
        return RoundMean(gradient, (answer.closed or ClosedRound()).hyper)

    def _new_mean(self) -> GradientMean:
        with self._installing:
            if self._free:
                return self._free.pop()
        return GradientMean(self.reducer.copier, self.reducer.new_buffer())

    def _compare(self, closed: EndedRound, name: str, busy: bool) -> None:
        """A script has written to parameters on some rank: refuse them if they are not the same on all. Workers that compute
        have yet to apply means."""
        digest = bytes(8) if busy else hashlib.blake2b(self.reducer.copier.watch.digests(), digest_size=8).digest()
        found = self.reducer.round_groups.gather(bytes([not busy]) + digest, closed)
        self.reducer.copier.watch.check_alike({rank: data[1:] for rank, data in found.items() if data[0]}, name)

    # Catching up.

    def _snapshot(self) -> dict[str, Any]:
        """This rank's values, optimizer state and the means to apply to them, as they are now."""
        with self._installing:
            handed, means = _newest(self.pending)
            if handed is None:
                values = [param.detach().cpu().clone() for param in self._wrapped.params]
                handed = HandedState(values, _copied(self._wrapped.optimizer.state_dict()["state"]), [])
            buffers = [(mean.gradient.buffer.tensors, mean) for mean in (*handed.means, *means)]
            kept = [
                ({dtype: flat.clone() for dtype, flat in flats.items()}, mean.gradient.absent, mean.hyper)
                for flats, mean in buffers
            ]
            return {"values": handed.values, "state": handed.state, "means": kept}

    def _hand_over(self, handed: dict[str, Any] | None, ranks: Sequence[int]) -> None:
        """To each of these ranks: the length of a description, the description, and the tensors; None where this rank has
        missed the round itself."""
        tensors: list[torch.Tensor] = []
        data, _ = encode_for_all(handed, tensors)
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for rank in ranks:
            self.reducer.messages.send([torch.tensor([len(data)]), text, *tensors], rank, self.reducer.step)

    def _receive(self, source: int) -> HandedState:
        """What a rank has handed over."""
        tag, length = self.reducer.step, torch.zeros(1, dtype=torch.int64)
        self.reducer.messages.receive([length], source, tag)
        text = torch.empty(int(length), dtype=torch.uint8)
        self.reducer.messages.receive([text], source, tag)
        tensors: list[torch.Tensor] = []
        handed = decode_from(source, text.numpy().tobytes(), tensors)
        if handed is None:
            raise MissedRound
        self.reducer.messages.receive(tensors, source, tag)
        means = []
        for flats, absent, hyper in handed["means"]:
            gradient = self._new_mean()
            for dtype, flat in gradient.buffer.tensors.items():
                flat.copy_(flats[dtype])
            gradient.absent = absent
            means.append(RoundMean(gradient, hyper))
        return HandedState(handed["values"], handed["state"], means)

    # In the script's thread.

    def install(self) -> None:
        with self._installing, torch.no_grad():
            handed, means = _newest(self.pending)
            if handed is not None:
                optimizer, means = self._wrapped.optimizer, [*handed.means, *means]
                self.reducer.copier.write(handed.values)
                load_in_place(optimizer, {"state": handed.state, "param_groups": optimizer.state_dict()["param_groups"]})
            for mean in means:
                self._apply(mean)
            for content in self.pending:
                self._free += [mean.gradient for mean in (content.means if isinstance(content, HandedState) else [content])]
            self.pending = []
        self.reducer.copier.watch.record()

    def _apply(self, mean: RoundMean) -> None:
        wrapped = self._wrapped
        in_place = wrapped.clip_norm is None and mean.gradient.may_read_in_place(wrapped.optimizer)
        with _hyper_parameters(wrapped.optimizer, mean.hyper), mean.gradient.as_gradients(in_place):
            wrapped.clip()
            step_unwrapped(wrapped.optimizer)

    def reload(self) -> None:
        self._touched = self._touched or self.reducer.copier.watch.touched  # values are here alone: they are compared

    def close(self) -> None:
        self.reducer.settle()


def _newest(contents: Sequence[RoundMean | HandedState]) -> tuple[HandedState | None, list[RoundMean]]:
    """The last state that was handed over, and the means after it."""
    handed: HandedState | None = None
    means: list[RoundMean] = []
    for content in contents:
        if isinstance(content, HandedState):
            handed, means = content, []
        else:
            means.append(content)
    return handed, means


@contextmanager
def _hyper_parameters(optimizer: torch.optim.Optimizer, hyper: GroupValues) -> Iterator[None]:
    """Inside, the optimizer has these hyper-parameters, whatever this worker's schedulers have set."""
    before = [{name: group[name] for name in values} for group, values in zip(optimizer.param_groups, hyper, strict=False)]
    for group, values in zip(optimizer.param_groups, hyper, strict=False):
        group.update({name: _like(value, group[name]) for name, value in values.items()})
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=False):
            group.update(values)


def _like(value: Any, before: Any) -> Any:
    """A hyper-parameter that came as plain data, in the form that the optimizer has it."""
    if isinstance(before, torch.Tensor):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(before, tuple) else value


def _copied(state: Any) -> Any:
    """Optimizer state on the host, which does not change any more."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(_copied(part) for part in state) if isinstance(state, list | tuple) else state
