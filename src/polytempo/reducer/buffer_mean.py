"""The mean of all workers' floating point module buffers (running means of batch norm, and the like)."""

from __future__ import annotations

import torch

from polytempo.protocol.values import OptimizerSpec, TensorInfo
from polytempo.reducer.flat_buffer import describe
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.session.session import Session


class BufferMean:
    """The buffers of one model. Their reducer is made once, and used as long as names, shapes and dtypes stay."""

    def __init__(self, session: Session, model: torch.nn.Module) -> None:
        self._session, self._model = session, model
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
            self._session.world().all_ranks.all_reduce(tensors, "mean").wait()
            return
        reducer = self._reducer_for(describe(tensors, [name for name, _ in floating], [0] * len(floating)))
        torch._foreach_copy_(self._copies, tensors)
        buffer, _ = reducer.buffer_of(lambda copy: copy)
        reducer.push(buffer, ())
        torch._foreach_copy_(tensors, self._copies)

    def _reducer_for(self, infos: tuple[TensorInfo, ...]) -> ServerReducer:
        if self._reducer is None or infos != self._infos:
            self._infos = infos
            self._copies = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in infos]
            spec = OptimizerSpec(sync="bsp", apply="mean", optimizer="", tensors=infos, groups=({},))
            self._reducer = ServerReducer(self._session, f"{self._session.next_optimizer_id()}/mean", spec, self._copies)
            self._reducer.client_state.take = self._reducer.copier.scatter  # values, not gradients
        return self._reducer
