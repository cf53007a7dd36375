"""The mean of everybody's floating point buffers (running means of batch norm, and the like)."""

from __future__ import annotations

import torch

from polytempo.protocol.values import OptimizerSpec, TensorInfo
from polytempo.reducer.flat_buffer import describe
from polytempo.reducer.server_reducer import ServerReducer
from polytempo.session.session import Session


class BufferMean:
    """The buffers of one model. What they travel through is made once, and used again as long as they have the same form."""

    def __init__(self, session: Session, model: torch.nn.Module) -> None:
        self._session, self._model = session, model
        self._side: ServerReducer | None = None
        self._infos: tuple[TensorInfo, ...] = ()
        self._copies: list[torch.Tensor] = []  # buffers are replaced by a model's `to(...)`; these are not

    def take(self) -> None:
        """Make the buffers their mean. All workers must call this."""
        floating = [(name, buffer) for name, buffer in self._model.named_buffers() if buffer.is_floating_point()]
        tensors = [buffer for _, buffer in floating]
        if not floating:
            return
        if self._session.client is None:
            self._session.world().all_ranks.all_reduce(tensors, "mean").wait()
            return
        side = self._side_for(describe(tensors, [name for name, _ in floating], [0] * len(floating)))
        torch._foreach_copy_(self._copies, tensors)
        flat, _ = side.flat_of(lambda copy: copy)
        side.push(flat, ())
        torch._foreach_copy_(tensors, self._copies)

    def _side_for(self, infos: tuple[TensorInfo, ...]) -> ServerReducer:
        if self._side is None or infos != self._infos:
            self._infos = infos
            self._copies = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in infos]
            proposal = OptimizerSpec(sync="bsp", apply="mean", optimizer="", tensors=infos, groups=({},))
            self._side = ServerReducer(self._session, f"{self._session.next_track()}/mean", proposal, self._copies)
            self._side.line.take = self._side.copier.scatter
        return self._side
