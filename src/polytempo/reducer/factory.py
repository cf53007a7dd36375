"""Which way the gradients of an optimizer travel, and its values and module buffers, where they are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polytempo.client.row_traffic import WorkerTable
from polytempo.collectives.group import RankGroup
from polytempo.optim.worker_momentum import GradientMomentum
from polytempo.protocol.push import Measures
from polytempo.protocol.values import OptimizerSpec, TensorInfo, number_of, part_of
from polytempo.reducer.collective_reducer import CollectiveReducer
from polytempo.reducer.flat_buffer import describe
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
    spec = spec_of("peers")
    if sync.capabilities.neighbours:
        return NeighbourReducer(session, name, spec, params)
    if has_deadlines:
        return PeerReducer(session, name, spec, params)
    if session.client is not None and session.job.meeting:
        return SharedMemoryReducer(session, name, spec, params)
    return CollectiveReducer(session, name, spec, params)


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


class BufferMean:
    """The mean of all workers' floating point module buffers (running means of batch norm, and the like), of one model.
    Their reducer is made once, and used as long as names, shapes and dtypes stay."""

    def __init__(self, session: Session, model: torch.nn.Module, name: str = "", members: tuple[int, ...] = ()) -> None:
        """`name` and `members`: of the optimizer, where its steps are taken by a group."""
        self._session, self._model, self._name, self._members = session, model, name, members
        self._group: RankGroup | None = None  # without a sequencer
        self._parts = 0  # reducers made so far, in a group
        self._reducer: ServerReducer | None = None
        self._infos: tuple[TensorInfo, ...] = ()
        self._copies: list[torch.Tensor] = []  # `model.to(...)` replaces buffers, but not these

    def average(self) -> None:
        """Make the buffers their mean. All workers must call this."""
        floating = [(name, buffer) for name, buffer in self._model.named_buffers() if buffer.is_floating_point()]
        tensors = [buffer for _, buffer in floating]
        if not floating:
            return
        if self._session.client is None:
            if self._group is None:
                world, members = self._session.world(), self._members
                number = number_of(self._name) if members else 0
                self._group = world.group_of_optimizer(members, number, 1) if members else world.all_ranks
            self._group.all_reduce(tensors, "mean").wait()
            return
        infos = describe(tensors, [name for name, _ in floating], [0] * len(floating))
        if self._reducer is None or infos != self._infos:
            self._reducer = self._new_reducer(infos)
        torch._foreach_copy_(self._copies, tensors)
        buffer, _ = self._reducer.buffer_of(lambda copy: copy)
        self._reducer.push(buffer, (), Measures())
        torch._foreach_copy_(tensors, self._copies)

    def _new_reducer(self, infos: tuple[TensorInfo, ...]) -> ServerReducer:
        self._infos, self._parts, members = infos, self._parts + 1, self._members
        self._copies = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in infos]
        name = part_of(self._name, self._parts) if members else self._session.next_optimizer_id()
        spec = OptimizerSpec(sync="bsp", apply="mean", optimizer="", tensors=infos, groups=({},), members=members)
        reducer = ServerReducer(self._session, f"{name}/mean", spec, self._copies)
        reducer.client_state.take = reducer.copier.scatter  # values, not gradients
        return reducer
