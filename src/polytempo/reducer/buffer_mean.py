"""The mean of all workers' floating point module buffers (running means of batch norm, and the like)."""

from __future__ import annotations

import torch

from polytempo.collectives.group import RankGroup
from polytempo.protocol.push import Measures
from polytempo.protocol.values import OptimizerSpec, TensorInfo, number_of, part_of
from polytempo.reducer.flat_buffer import describe
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.session.session import Session


class BufferMean:
    """The buffers of one model. Their reducer is made once, and used as long as names, shapes and dtypes stay."""

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
            self._ranks().all_reduce(tensors, "mean").wait()
            return
        reducer = self._reducer_for(describe(tensors, [name for name, _ in floating], [0] * len(floating)))
        torch._foreach_copy_(self._copies, tensors)
        buffer, _ = reducer.buffer_of(lambda copy: copy)
        reducer.push(buffer, (), Measures())
        torch._foreach_copy_(tensors, self._copies)

    def _ranks(self) -> RankGroup:
        if self._group is None:
            world = self._session.world()
            number = number_of(self._name) if self._members else 0
            self._group = world.group_of_optimizer(self._members, number, 1) if self._members else world.all_ranks
        return self._group

    def _reducer_for(self, infos: tuple[TensorInfo, ...]) -> ServerReducer:
        if self._reducer is None or infos != self._infos:
            self._infos = infos
            self._copies = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in infos]
            self._parts += 1
            members = self._members
            name = part_of(self._name, self._parts) if members else self._session.next_optimizer_id()
            spec = OptimizerSpec(sync="bsp", apply="mean", optimizer="", tensors=infos, groups=({},), members=members)
            self._reducer = ServerReducer(self._session, f"{name}/mean", spec, self._copies)
            self._reducer.client_state.take = self._reducer.copier.scatter  # values, not gradients
        return self._reducer
