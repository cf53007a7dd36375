"""Negotiation: which calls of different ranks belong together, and when they may start.

Horovod's ranks may make named calls in any order. Here each call of a rank is a *round* of its process set: one call of the
group (`collectives/group.py`), in which all ranks exchange a record of 128 bytes and then carry out, in the same order, the
calls that have become complete.

    records      what a rank is about to call: kind, dtype, size, digests of shape, factors and name
    matching     calls of one name in any order; calls without a name in their order. Pure: no tensors, no messages
    negotiator   rounds of one process set on one rank, and the calls that are pending in them
    join         a rank that has run out of data takes part in the rounds of the others

Ranks see the same records in the same rounds, so that each keeps the same table and all decide alike. A call starts in the
round in which every rank has made it or has joined. Calls that do not fit (another shape, dtype or operation) fail on all
ranks, and later calls go on. A rank that waits for a call that others have not made yet takes part in further rounds with a
WAIT record; when all ranks that have not joined wait and nothing can start, the pending calls fail on all ranks instead of
deadlocking. As long as all ranks make their calls in the same order, there is one round for each call.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from polytempo.errors import PolytempoError, UsageError
from polytempo.horovod.errors import DuplicateNameError, MismatchError
from polytempo.horovod.ops import OPS, Op
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set, group_of, state
from polytempo.session import session
from polytempo.train import communication

# Records.

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
#: The layout of a record: nine integers, and the beginning of the name.
RECORD = struct.Struct("<9q56s")


class CallKind(IntEnum):
    """The kind of a call."""

    JOIN = 0
    ALLREDUCE = 1
    STEP = 2
    ALLGATHER = 3
    BROADCAST = 4
    ALLTOALL = 5
    REDUCESCATTER = 6
    OBJECT = 7
    BARRIER = 8
    WAIT = 9  #: no call: this rank waits for one it has made before


#: The calls that go on while a rank has joined.
ALLOWED_AFTER_JOIN = (CallKind.ALLREDUCE, CallKind.STEP, CallKind.BARRIER)


@dataclass(frozen=True)
class Call:
    """The record of a call: the same on all ranks except for `own`."""

    kind: CallKind
    op: int = 0
    dtype: int = 0
    count: int = 0
    shape: int = 0  #: a digest
    root: int = 0  #: a rank, or the number of an optimizer
    scale: int = 0  #: a digest of the factors
    own: int = 0  #: of this rank alone: the length of its tensor, or whether gradients changed
    key: int = 0  #: a digest of the whole name; 0 without one
    name: str = ""

    def __str__(self) -> str:
        named = f", name={self.name!r}" if self.key else ""
        if self.kind in (CallKind.STEP, CallKind.JOIN):
            return f"{self.kind.name.lower()}()"
        if self.kind in (CallKind.BARRIER, CallKind.OBJECT):
            return "barrier" if self.kind == CallKind.BARRIER else f"broadcast_object({named[2:]})"
        numbers = f"{self.count} {str(DTYPES[self.dtype]).removeprefix('torch.')}"
        if self.kind in (CallKind.ALLREDUCE, CallKind.REDUCESCATTER):
            return f"{self.kind.name.lower()}({numbers}, {OPS[self.op]}{named})"
        if self.kind == CallKind.BROADCAST:
            return f"broadcast({numbers}, root_rank={self.root}{named})"
        return f"{self.kind.name.lower()}({numbers.split()[1]}{named})"


def call_of(kind: CallKind, name: str | None = None, **about: Any) -> Call:
    """The record of a call. A name is of its kind: calls of two kinds may have the same name, as in Horovod."""
    return Call(kind, **about, key=digest(kind.name, name) if name else 0, name=name or "")


def encode_call(call: Call) -> torch.Tensor:
    """The record as a tensor of 16 integers."""
    numbers = (call.kind, call.op, call.dtype, call.count, call.shape, call.root, call.scale, call.own, call.key)
    return torch.frombuffer(bytearray(RECORD.pack(*numbers, call.name.encode()[:56])), dtype=torch.int64)


def decode_call(row: torch.Tensor) -> Call:
    """The reverse of `encode_call`."""
    *numbers, name = RECORD.unpack(row.numpy().tobytes())
    kind, op, dtype, count, shape, root, scale, own, key = numbers
    return Call(CallKind(kind), op, dtype, count, shape, root, scale, own, key, name.rstrip(b"\0").decode(errors="ignore"))


def digest(*about: object) -> int:
    """A digest of 56 bits; 0 of nothing."""
    return int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:7], "big") if any(about) else 0


def dtype_code(dtype: torch.dtype) -> int:
    """The code of a dtype in a record.

    Raises:
        UsageError: Tensors of that dtype cannot be sent.
    """
    if dtype not in DTYPES:
        raise UsageError(f"tensors of {dtype} cannot be sent; convert to one of {', '.join(map(str, DTYPES))}")
    return DTYPES.index(dtype)


# Matching.

#: (digest of the name, 0), or (0, count) for the count-th call of a rank without a name.
CallKey = tuple[int, int]


@dataclass
class Match:
    """Calls that belong together, by rank. With an `error` they fail on all ranks."""

    key: CallKey
    calls: dict[int, Call]
    error: str = ""


@dataclass
class RoundResult:
    """The outcome of a round, the same on all ranks."""

    keys: dict[int, CallKey]  #: of the calls made in it, by rank
    matches: list[Match] = field(default_factory=list)
    last: int | None = None  #: once all ranks have joined, the last to do so


class Matching:
    """The table of calls that some ranks have made and that have not started."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._round = 0
        self._pending: dict[CallKey, dict[int, Call]] = {}
        self._unnamed: Counter[int] = Counter()
        self._joined: dict[int, int] = {}  # rank -> round

    def match_round(self, calls: Sequence[Call]) -> RoundResult:
        """Enter the records of a round, one of each rank in their order, and return the calls that are complete."""
        self._round += 1
        found = RoundResult({})
        for rank, call in zip(self._ranks, calls, strict=True):
            if call.kind == CallKind.JOIN:
                self._joined.setdefault(rank, self._round)
            elif call.kind != CallKind.WAIT:
                key: CallKey = (call.key, 0)
                if not call.key:
                    self._unnamed[rank] += 1
                    key = (0, self._unnamed[rank])
                found.keys[rank] = key
                self._pending.setdefault(key, {})[rank] = call
        ready = [key for key, made in self._pending.items() if made.keys() | self._joined.keys() >= set(self._ranks)]
        found.matches = [Match(key, made := self._pending.pop(key), self._problem(made)) for key in ready]
        if not found.matches and not found.keys and any(call.kind == CallKind.WAIT for call in calls):
            # Each of the pending calls would wait for a call that is never made.
            found.matches = [Match(key, made, self._missing(made)) for key, made in self._pending.items()]
            self._pending = {}
        if len(self._joined) == len(self._ranks):
            found.last = max(self._joined, key=lambda rank: (self._joined[rank], rank))
            self._joined.clear()
            self._unnamed.clear()  # ranks that joined early have made fewer calls
        return found

    def _problem(self, calls: dict[int, Call]) -> str:
        """Why calls do not fit together, or need ranks that have joined; empty if they can start."""
        (first, mine), *others = sorted(calls.items())
        for rank, call in others:
            if comparable(mine) != comparable(call):
                return (
                    f"rank {first} calls {mine} where rank {rank} calls {call}{_difference(mine, call)}; "
                    "all ranks must make the same calls"
                )
        if self._joined and mine.kind not in ALLOWED_AFTER_JOIN:
            return (
                f"rank {first} calls {mine}, but rank {min(self._joined)} has called join(): only allreduce, optimizer "
                "steps and barrier go on until all ranks have joined"
            )
        return ""

    def _missing(self, calls: dict[int, Call]) -> str:
        first, mine = min(calls.items())
        absent = next(rank for rank in self._ranks if rank not in calls and rank not in self._joined)
        theirs = next((made[absent] for made in self._pending.values() if absent in made and first not in made), None)
        instead = f"rank {absent} calls {theirs}" if theirs is not None else f"rank {absent} calls nothing"
        return f"rank {first} calls {mine} where {instead}, and all ranks wait; all ranks must make the same calls, by name"


def comparable(call: Call) -> Call:
    """The part of a record that must be the same on all ranks."""
    return replace(call, own=0, name="")


def _difference(one: Call, other: Call) -> str:
    """The field in which two calls differ that read the same as text."""
    if str(one) != str(other):
        return ""
    fields = ("count", "shape", "root", "scale")
    different = [field for field in fields if getattr(one, field) != getattr(other, field)]
    words = {"count": "size", "root": "optimizer" if one.kind == CallKind.STEP else "root rank", "scale": "factor"}
    return f" with another {words.get(different[0], different[0])}" if different else ""


# The negotiator.

CallSteps = Generator[Any, None, Any]
#: What a call does once all ranks have made it, given the records by rank and the group within the call.
CallBody = Callable[[dict[int, Call], Any], CallSteps]


class PendingCall:
    """A call of this rank that has not ended."""

    def __init__(self, negotiator: Negotiator, body: CallBody, on: Any = None) -> None:
        self._negotiator, self.body = negotiator, body
        self._on = on  # of a call on tensors of a GPU: its place among what the caller's stream does
        self.round = 0
        self.done = self.seen = False  #: seen: the script has waited for it or polled its end
        self.result: Any = None
        self.error: Exception | None = None

    def finish(self, result: Any, error: Exception | None = None) -> None:
        """End the call with a result or an error."""
        self.result, self.error, self.body = result, error, no_body
        self.done = True

    def is_completed(self) -> bool:
        """Whether the call has ended."""
        return self._negotiator.poll(self)

    def wait(self) -> Any:
        """Wait for the end; returns the result or raises the error. On a GPU the current stream waits for the result."""
        result = self._negotiator.wait(self)
        if self._on is not None:
            self._on.order_stream()
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return result

    def steps(self, calls: dict[int, Call], group: Any) -> CallSteps:
        """What this rank does in the call: on a GPU behind what the caller's stream was given before."""
        if self._on is None:
            return (yield from self.body(calls, group))
        return (yield from self._on.run(None, lambda: self.body(calls, group)))


class Negotiator:
    """The rounds of one process set, on one rank."""

    def __init__(self, members: ProcessSet) -> None:
        self._ranks, self._group = members.ranks, group_of(members)
        self._lock = threading.RLock()
        self._matching = Matching(self._ranks)
        self._rounds = 0
        self._tasks: dict[int, Any] = {}  # by round: rounds that have not ended
        self._pending: dict[int, PendingCall] = {}  # by round: calls that have not ended
        self._announced: dict[CallKey, PendingCall] = {}  # calls whose record was exchanged, by key
        self._names: dict[int, weakref.ref[PendingCall]] = {}
        self._joined_steps: list[dict[int, Call]] = []  # optimizer steps of other ranks while this one has joined
        self._last: int | None = None

    # For the collectives.

    def start(
        self, call: Call, body: CallBody, background: bool = True, tensors: Sequence[torch.Tensor] = ()
    ) -> PendingCall:
        """Announce a call on these tensors; its `body` runs when all ranks have made it."""
        pending = PendingCall(self, body, communication.device_call(tensors, self._group))
        with self._lock:
            if call.key:
                self._claim_name(call, pending)
            self._issue(call, pending, background)
        return pending

    def _claim_name(self, call: Call, pending: PendingCall) -> None:
        found = self._names.get(call.key)
        before = found() if found is not None else None
        if before is not None and not before.seen:
            kind = call.kind.name.lower()
            raise DuplicateNameError(
                f"{kind} by the name {call.name!r} has not ended yet; synchronize() it first, or give another name"
            )
        self._names = {key: ref for key, ref in self._names.items() if ref() is not None}
        self._names[call.key] = weakref.ref(pending)

    def wait(self, pending: PendingCall) -> Any:
        """Wait until a call has ended; returns its result or raises its error."""
        while not pending.done:
            task = self._under_way() or self._issue(Call(CallKind.WAIT), None, False)
            try:
                task.wait()
            except PolytempoError:
                if not pending.done:
                    raise
        pending.seen = True
        if pending.error is not None:
            raise pending.error
        return pending.result

    def poll(self, pending: PendingCall) -> bool:
        """Whether a call has ended."""
        if not pending.done:
            task = self._under_way() or self._issue(Call(CallKind.WAIT), None, True)
            task.is_completed()
        pending.seen |= pending.done
        return pending.done

    def _under_way(self) -> Any:
        """The next round to end; None when all have ended."""
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            if not task.done:
                return task
            if task.error is not None:
                raise task.error
        return None

    def join(self) -> tuple[int | None, list[dict[int, Call]]]:
        """One round of a rank that has joined: the last rank to join, once all have, and optimizer steps to take part in."""
        self._issue(Call(CallKind.JOIN), None, False).wait()
        steps, self._joined_steps = self._joined_steps, []
        last, self._last = self._last, None
        return last, steps

    # Rounds.

    def _issue(self, call: Call, pending: PendingCall | None, background: bool) -> Any:
        with self._lock:
            self._rounds += 1
            number = self._rounds
            if pending is not None:
                pending.round, self._pending[number] = number, pending
            joined = call.kind == CallKind.JOIN
            task = communication.exchange(encode_call(call), partial(self._round, pending, joined), self._group, background)
            self._tasks[number] = task
            task.when_done(partial(self._ended, number))
        return task

    def _round(self, pending: PendingCall | None, joined: bool, rows: list[torch.Tensor], group: Any) -> CallSteps:
        found = self._matching.match_round([decode_call(row) for row in rows])
        if pending is not None:
            self._announced[found.keys[session.rank()]] = pending
        for match in found.matches:
            mine = self._announced.pop(match.key, None)
            if match.error:
                self._settle(mine, None, MismatchError(match.error))
            elif mine is not None:
                self._settle(mine, (yield from mine.steps(match.calls, group)))
            else:
                yield from self._take_part(match.calls, group)
        if joined:
            self._last = found.last

    def _settle(self, pending: PendingCall | None, result: Any, error: Exception | None = None) -> None:
        if pending is not None:
            pending.finish(result, error)
            with self._lock:
                self._pending.pop(pending.round, None)

    def _take_part(self, calls: dict[int, Call], group: Any) -> CallSteps:
        """Take part in a call of the others with neutral values, since this rank has joined."""
        call = next(iter(calls.values()))
        if call.kind == CallKind.ALLREDUCE:
            op, dtype = OPS[call.op], DTYPES[call.dtype]
            yield from group.all_reduce([_neutral(call.count, dtype, op)], op.word)
        elif call.kind == CallKind.STEP:
            self._joined_steps.append(calls)

    def _ended(self, number: int, task: Any) -> None:
        """A round has ended. If it failed, on any rank, all calls up to it fail on all ranks, and the tables begin anew."""
        with self._lock:
            self._tasks.pop(number, None)
            if task.error is None:
                return
            for old in [old for old in self._pending if old <= number]:
                self._pending.pop(old).finish(None, task.error)
            self._announced.clear()
            self._joined_steps.clear()
            self._matching = Matching(self._ranks)


def negotiator_of(members: ProcessSet) -> Negotiator:
    """The negotiator of a process set, in the current session."""
    known, number = state().negotiators, members.process_set_id
    assert number is not None
    if number not in known:
        known[number] = Negotiator(members)
    found: Negotiator = known[number]
    return found


def _neutral(count: int, dtype: torch.dtype, op: Op) -> torch.Tensor:
    """Values that do not change the result of an operation."""
    value = op.neutral
    if abs(value) == float("inf") and not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.full((count,), limits.max if value > 0 else limits.min, dtype=dtype)
    return torch.full((count,), value, dtype=dtype)


# Join and barrier.


def join(device: int = -1) -> int:
    """Wait until all ranks have joined, for a rank that has run out of data.

    Meanwhile this rank takes part in allreduce, optimizer steps and barriers of the others, with values that do not change
    the result: zeros for sums and means, which still divide by the number of all ranks, as in Horovod. Its own model stays
    as it is. Other calls fail on the ranks that make them, and `join` goes on waiting.

    Args:
        device: Ignored.

    Returns:
        The rank that joined last, which has the newest model.

    Raises:
        UsageError: An optimizer of this rank has gradients under way.
        HorovodInternalError: A rank failed.
    """
    for reference in state().reducers:
        reducer = reference()
        if reducer is not None:
            reducer.check_idle("join()")
    if session.size() == 1:
        return session.rank()
    negotiator = negotiator_of(global_process_set)
    while True:
        last, steps = negotiator.join()
        for calls in steps:
            number = next(iter(calls.values())).root
            reducer = state().reducers[number]() if number < len(state().reducers) else None
            if reducer is None:
                raise UsageError(f"other ranks step optimizer {number}, which rank {session.rank()} does not have")
            reducer.take_part(2 if any(call.own for call in calls.values()) else 1)
        if last is not None:
            return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have made this call.

    Args:
        process_set: The ranks that take part.

    Raises:
        UsageError: This rank is not in the process set.
    """
    check_member(process_set, "barrier")
    if process_set.size() > 1:
        negotiator_of(process_set).start(call_of(CallKind.BARRIER), no_body, background=False).wait()


def no_body(calls: dict[int, Call], group: object) -> CallSteps:
    """The body of a call that consists of its records alone."""
    yield from ()
    return calls
