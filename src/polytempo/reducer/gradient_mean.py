"""The mean gradient of a round, on which every worker runs the wrapped optimizer itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polytempo.reducer.flat_buffer import Copier, FlatBuffer

#: These optimizers only read gradients, so they may be given the mean where it lies; their foreach forms may write.
READERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


class GradientMean:
    """The mean of the last round, in a flat buffer."""

    def __init__(self, copier: Copier, buffer: FlatBuffer) -> None:
        self._copier, self.buffer = copier, buffer
        self._copies: dict[int, torch.Tensor] = {}
        self.absent: tuple[int, ...] = ()  #: parameters that had no gradient on any worker
        self.skipped = False  #: a worker skipped the round, and so did all: there is no mean

    def assign(self) -> None:
        """Make `.grad` of every parameter the mean, which the script may change."""
        for index, param in enumerate(self._copier.params):
            if index in self.absent:
                param.grad = None  # this worker may have a gradient, of weight zero
                continue
            if param.grad is None or param.grad.layout != torch.strided:
                param.grad = torch.empty_like(param)
            param.grad.copy_(self.buffer.views[index])

    @contextmanager
    def as_gradients(self, in_place: bool) -> Iterator[None]:
        """Inside, `.grad` of every parameter is the mean: the buffer itself (read only), or a copy that may be changed."""
        params = self._copier.params
        own = [param.grad for param in params]
        for index, param in enumerate(params):
            mean = self.buffer.views[index] if in_place else self._copy(index)
            param.grad = None if index in self.absent else mean
        try:
            yield
        finally:
            for param, grad in zip(params, own, strict=True):
                param.grad = grad

    def _copy(self, index: int) -> torch.Tensor:
        if index not in self._copies:
            self._copies[index] = torch.empty_like(self._copier.params[index])
        return self._copies[index].copy_(self.buffer.views[index])

    def forget_copies(self) -> None:
        """Parameters were moved: copies are made anew, like them."""
        self._copies.clear()

    def may_read_in_place(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does this optimizer leave the gradients as they are? On a device the mean is this worker's own, to be changed."""
        if self.buffer.on_device:
            pairs = ((self.buffer.views[index], param) for index, param in enumerate(self._copier.params))
            return all(view.device == param.device and view.stride() == param.stride() for view, param in pairs)
        plain = not any(group.get("foreach") for group in optimizer.param_groups)
        usual = all(param.device.type == "cpu" and param.is_contiguous() for param in self._copier.params)
        return plain and usual and type(optimizer) in READERS
