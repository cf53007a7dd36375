"""Which way the gradients of an optimizer travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polytempo.client.row_traffic import WorkerTable
from polytempo.optim.worker_momentum import GradientMomentum
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.collective_reducer import CollectiveReducer
from polytempo.reducer.neighbour_reducer import NeighbourReducer
from polytempo.reducer.peer_reducer import PeerReducer
from polytempo.reducer.reducer import Reducer
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.reducer.shared_memory_reducer import SharedMemoryReducer
from polytempo.server.optimizer_state import SegmentState
from polytempo.session.session import Session
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.spec import Spec


def make_reducer(
    session: Session,
    name: str,
    params: Sequence[torch.Tensor],
    sync: Spec,
    dense: Sequence[int],
    spec_of: Callable[[str], OptimizerSpec],
    initial_state: Callable[[OptimizerSpec], Sequence[SegmentState]],
    tables: Sequence[WorkerTable],
    on_servers: bool,
    momentum: GradientMomentum | None = None,
) -> Reducer:
    """The reducer of one optimizer; it takes part in the job when this returns.

    Args:
        session: The job.
        name: The optimizer's name in the job.
        params: All its parameters.
        sync: Its mode.
        dense: Indices of those that are no tables.
        spec_of: The optimizer's spec: "" for values on servers, "peers" for values on the workers, "mean" to average only.
        initial_state: The state of the wrapped optimizer, which the servers start from.
        tables: Tables whose rows travel with the pushes.
        on_servers: Do servers hold the values? Otherwise workers reduce among themselves: with neighbours where the mode has
            them, in groups of the ranks of each round where it has deadlines, through shared memory on one host under
            `polytempo run`, else by collectives.
        momentum: Of this worker, whose look-ahead is pushed in place of each gradient.
    """
    has_deadlines = sync.capabilities.work is PushedWork.DEADLINE
    if on_servers:
        spec = spec_of("")
        return ServerReducer(
            session,
            name,
            spec,
            [params[index] for index in dense],
            initial_state(spec),
            hooked=spec.apply == "server" and not spec.push_filter and not has_deadlines,  # else the sum
            tables=tables,
            mean=(spec_of("mean"), params),
            momentum=momentum,
        )
    if sync.capabilities.neighbours:
        return NeighbourReducer(session, name, spec_of("peers"), params)
    if has_deadlines:
        return PeerReducer(session, name, spec_of("peers"), params)
    if session.client is not None and session.job.meeting:
        return SharedMemoryReducer(session, name, spec_of("peers"), params)
    return CollectiveReducer(session, name, spec_of("peers"), params)


def make_value_reducer(
    session: Session,
    name: str,
    spec: OptimizerSpec,
    tensors: Sequence[torch.Tensor],
    on_servers: bool,
    beside: Reducer | None = None,
) -> Reducer:
    """A reducer of values, in modes that average models: gradients stay as they are.

    Args:
        session: The job.
        name: Its name in the job.
        spec: Its spec.
        tensors: What is averaged.
        on_servers: Do servers hold the values?
        beside: A reducer of the same optimizer, whose rounds and these follow one another in one order on all workers.
    """
    if on_servers:
        return ServerReducer(session, name, spec, tensors)
    if session.client is not None and session.job.meeting:
        return SharedMemoryReducer(session, name, spec, tensors, hooked=False)
    other = beside if isinstance(beside, CollectiveReducer) else None
    return CollectiveReducer(session, name, spec, tensors, hooked=False, beside=other)
