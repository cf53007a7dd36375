"""`join()`: a rank that has run out of data takes part in what the others do until they have run out too.

Each round it reads what the others call (`records.py`) and does the same with values that change nothing: zeros for sums and
means, which still divide by the number of all ranks, as in Horovod. Its own model stays as it is. What can go on is what
adds up: allreduce, steps of optimizers, barriers. Another call ends with one line on the ranks that made it, as in Horovod;
those that have joined go on waiting.
"""

from __future__ import annotations

from polytempo.errors import UsageError
from polytempo.horovod.negotiation import CallSteps, negotiator_of
from polytempo.horovod.negotiation_records import Call, CallKind, call_of
from polytempo.horovod.process_sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.session_state import state
from polytempo.session import session


def join(device: int = -1) -> int:
    """Wait until all ranks have joined; the rank that came last, which has the newest model. `device` changes nothing."""
    _check_idle()
    if session.size() == 1:
        return session.rank()
    negotiator = negotiator_of(global_process_set)
    while True:
        last, duties = negotiator.join()
        for calls in duties:
            _take_part(list(calls.values()))
        if last is not None:
            return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks are here: the record alone does that."""
    check_member(process_set, "barrier")
    if process_set.size() > 1:
        negotiator_of(process_set).start(call_of(CallKind.BARRIER), nothing, background=False).wait()


def nothing(calls: dict[int, Call], inside: object) -> CallSteps:
    """Records are all there is to it."""
    yield from ()
    return calls


def _check_idle() -> None:
    for reference in state().reducers:
        reducer = reference()
        if reducer is not None:
            reducer.check_idle("join()")


def _take_part(calls: list[Call]) -> None:
    number = calls[0].root
    reducer = state().reducers[number]() if number < len(state().reducers) else None
    if reducer is None:
        raise UsageError(f"the others step an optimizer (number {number}) that rank {session.rank()} does not have")
    reducer.take_part(2 if any(call.own for call in calls) else 1)
