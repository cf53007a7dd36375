"""Calls under way in one process set: announced in rounds, matched by name, and carried out when all ranks have made them.

Each call of a rank is a round of its process set: one call of the group (`collectives/executor.py`), in which all ranks
exchange records and then carry out, in the same order, what has become complete (`matching.py`). A rank that waits for a
call which others have not made yet takes part in further rounds with a record that says so, and so does one that has
joined. As long as all ranks make their calls in the same order, there is one round for each call and none besides.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch

from polytempo.errors import PolytempoError
from polytempo.horovod.errors import DuplicateNameError, MismatchError
from polytempo.horovod.negotiation_matching import CallKey, Matching
from polytempo.horovod.negotiation_records import DTYPES, Call, CallKind, read_row, row_of
from polytempo.horovod.ops import OPS, Op, word_for
from polytempo.horovod.process_sets import ProcessSet, group_of
from polytempo.horovod.session_state import state
from polytempo.session import session
from polytempo.train import communication

CallSteps = Generator[Any, None, Any]
#: What a call does once all ranks have made it: the records of all by rank, and the group within the call.
CallBody = Callable[[dict[int, Call], Any], CallSteps]


class Flight:
    """A call of this rank that is under way."""

    def __init__(self, negotiator: Negotiator, act: CallBody) -> None:
        self._negotiator, self.act = negotiator, act
        self.round = 0
        self.done = self.seen = False  #: seen: the script knows that it is done
        self.result: Any = None
        self.error: Exception | None = None

    def finish(self, result: Any, error: Exception | None = None) -> None:
        """The end."""
        self.result, self.error, self.act = result, error, _nothing
        self.done = True

    def is_completed(self) -> bool:
        """Has it ended?"""
        return self._negotiator.poll(self)

    def wait(self) -> Any:
        """Its result, or its error."""
        return self._negotiator.wait(self)


class Negotiator:
    """Of one process set, on one rank."""

    def __init__(self, members: ProcessSet) -> None:
        self._ranks, self._group = members.ranks, group_of(members)
        self._lock = threading.RLock()
        self._matching = Matching(self._ranks)
        self._rounds = 0
        self._tasks: dict[int, Any] = {}  # by round: those that have not ended
        self._flights: dict[int, Flight] = {}  # by round: calls that have not ended
        self._flying: dict[CallKey, Flight] = {}  # those that were announced
        self._names: dict[int, weakref.ref[Flight]] = {}
        self._duties: list[dict[int, Call]] = []  # steps of the others' optimizers, while this rank has joined
        self._last: int | None = None

    # What calls use.

    def start(self, call: Call, act: CallBody, background: bool = True) -> Flight:
        """Announce a call, and carry it out when all ranks have made it."""
        flight = Flight(self, act)
        with self._lock:
            if call.key:
                self._take_name(call, flight)
            self._issue(call, flight, background)
        return flight

    def _take_name(self, call: Call, flight: Flight) -> None:
        found = self._names.get(call.key)
        before = found() if found is not None else None
        if before is not None and not before.seen:
            kind = call.kind.name.lower()
            raise DuplicateNameError(
                f"{kind} by the name {call.name!r} is under way already; synchronize() it first, or give another name"
            )
        self._names = {key: ref for key, ref in self._names.items() if ref() is not None}
        self._names[call.key] = weakref.ref(flight)

    def wait(self, flight: Flight) -> Any:
        """Until a call has ended; its result."""
        while not flight.done:
            task = self._under_way() or self._issue(Call(CallKind.WAIT), None, False)
            try:
                task.wait()
            except PolytempoError:
                if not flight.done:
                    raise
        flight.seen = True
        if flight.error is not None:
            raise flight.error
        return flight.result

    def poll(self, flight: Flight) -> bool:
        """Has a call ended?"""
        if not flight.done:
            task = self._under_way() or self._issue(Call(CallKind.WAIT), None, True)
            task.is_completed()
        flight.seen |= flight.done
        return flight.done

    def _under_way(self) -> Any:
        """The next round to end; None when all have."""
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            if not task.done:
                return task
            if task.error is not None:
                raise task.error
        return None

    def join(self) -> tuple[int | None, list[dict[int, Call]]]:
        """A round of a rank that has joined: who came last, once all have; steps of optimizers to take part in."""
        self._issue(Call(CallKind.JOIN), None, False).wait()
        duties, self._duties = self._duties, []
        last, self._last = self._last, None
        return last, duties

    # Rounds.

    def _issue(self, call: Call, flight: Flight | None, background: bool) -> Any:
        with self._lock:
            self._rounds += 1
            number = self._rounds
            if flight is not None:
                flight.round, self._flights[number] = number, flight
            joined = call.kind == CallKind.JOIN
            task = communication.exchange(row_of(call), partial(self._round, flight, joined), self._group, background)
            self._tasks[number] = task
            task.when_done(partial(self._ended, number))
        return task

    def _round(self, flight: Flight | None, joined: bool, rows: list[torch.Tensor], inside: Any) -> CallSteps:
        heard = self._matching.hear([read_row(row) for row in rows])
        if flight is not None:
            self._flying[heard.keys[session.rank()]] = flight
        for match in heard.matches:
            mine = self._flying.pop(match.key, None)
            if match.error:
                self._settle(mine, None, MismatchError(match.error))
            elif mine is not None:
                self._settle(mine, (yield from mine.act(match.calls, inside)))
            else:
                yield from self._take_part(match.calls, inside)
        if joined:
            self._last = heard.last

    def _settle(self, flight: Flight | None, result: Any, error: Exception | None = None) -> None:
        if flight is not None:
            flight.finish(result, error)
            with self._lock:
                self._flights.pop(flight.round, None)

    def _take_part(self, calls: dict[int, Call], inside: Any) -> CallSteps:
        """With nothing: this rank has joined."""
        call = next(iter(calls.values()))
        if call.kind == CallKind.ALLREDUCE:
            op, dtype = OPS[call.op], DTYPES[call.dtype]
            yield from inside.all_reduce([_neutral(call.count, dtype, op)], word_for(op, dtype))
        elif call.kind == CallKind.STEP:
            self._duties.append(calls)

    def _ended(self, number: int, task: Any) -> None:
        """A round. One that failed, on whatever rank, ends what was called up to it on all ranks, and tables begin anew."""
        with self._lock:
            self._tasks.pop(number, None)
            if task.error is None:
                return
            for old in [old for old in self._flights if old <= number]:
                self._flights.pop(old).finish(None, task.error)
            self._flying.clear()
            self._duties.clear()
            self._matching = Matching(self._ranks)


def negotiator_of(members: ProcessSet) -> Negotiator:
    """That of a process set, in the session of now."""
    known, number = state().negotiators, members.process_set_id
    assert number is not None
    if number not in known:
        known[number] = Negotiator(members)
    found: Negotiator = known[number]
    return found


def _nothing(calls: dict[int, Call], inside: Any) -> CallSteps:
    yield from ()


def _neutral(count: int, dtype: torch.dtype, op: Op) -> torch.Tensor:
    """Values that change nothing."""
    value = op.neutral
    if abs(value) == float("inf") and not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.full((count,), limits.max if value > 0 else limits.min, dtype=dtype)
    return torch.full((count,), value, dtype=dtype)
