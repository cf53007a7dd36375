"""`join()`: a rank that has run out of data takes part in what the others do until they have run out too.

Each round it reads what the others call (`records.py`) and does the same with values that change nothing: zeros for sums and
means, which still divide by the number of all ranks, as in Horovod. Its own model stays as it is. What can go on is what
adds up: allreduce, steps of optimizers, barriers. Another call ends with one line on all ranks.
"""

from __future__ import annotations

import torch

from polytempo.errors import UsageError
from polytempo.horovod.ops import OPS, Op
from polytempo.horovod.records import DTYPES, Call, Kind, exchange
from polytempo.horovod.reduction import word_for
from polytempo.horovod.sets import ProcessSet, check_member, global_process_set
from polytempo.horovod.state import state
from polytempo.train import communicate, session


def join(device: int = -1) -> int:
    """Wait until all ranks have joined; the rank that came last, which has the newest model. `device` changes nothing."""
    _check_idle()
    if session.size() == 1:
        return session.rank()
    rounds = 0
    while True:
        calls = exchange(Call(Kind.JOIN, own=rounds), global_process_set)
        active = next((call for call in calls if call.kind != Kind.JOIN), None)
        if active is None:
            return max(range(len(calls)), key=lambda rank: (-calls[rank].own, rank))
        _take_part(active, 2 if active.kind == Kind.STEP and any(c.own for c in calls if c.kind == Kind.STEP) else 1)
        rounds += 1


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks are here: the record alone does that."""
    check_member(process_set, "barrier")
    if process_set.size() > 1:
        exchange(Call(Kind.BARRIER), process_set)


def _check_idle() -> None:
    for reference in state().optimizers:
        optimizer = reference()
        if optimizer is not None:
            optimizer.check_idle("join()")


def _take_part(call: Call, times: int) -> None:
    if call.kind == Kind.ALLREDUCE:
        op, dtype = OPS[call.op], DTYPES[call.dtype]
        communicate.all_reduce(_neutral(call.count, dtype, op), word_for(op, dtype))
    elif call.kind == Kind.STEP:
        optimizer = state().optimizers[call.root]() if call.root < len(state().optimizers) else None
        if optimizer is None:
            raise UsageError(f"the others step an optimizer (number {call.root}) that rank {session.rank()} does not have")
        optimizer.take_part(times)


def _neutral(count: int, dtype: torch.dtype, op: Op) -> torch.Tensor:
    """Values that change nothing."""
    value = op.neutral
    if abs(value) == float("inf") and not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.full((count,), limits.max if value > 0 else limits.min, dtype=dtype)
    return torch.full((count,), value, dtype=dtype)
