"""Gradients are made in the bucket: `.grad` of a parameter is a view of it.

Autograd puts a gradient wherever it likes. A hook that it calls when a parameter's gradient is complete copies it into the
bucket, while backward goes on and the gradient is still in the cache, and makes `.grad` the view. From then on whatever
changes `.grad` in place changes the bucket. All of this is a matter of speed: at `step()` every gradient that is not a view,
for whatever reason, is copied (`Copier.gather`).

Not staged, because a view would not do: parameters whose memory is not in the usual order (channels_last), on a GPU, or
frozen when the optimizer was wrapped; sparse gradients; gradients that are differentiated again. Left alone, because they
are somebody's: gradients that the script holds or has put into memory of its own, and views that it still holds.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence

import torch

from polytempo.reducer.flat_buffer import FlatBuffer


class GradientHooks:
    """The parameters of one optimizer whose gradients live in a bucket."""

    def __init__(self, params: Sequence[torch.Tensor], flat: FlatBuffer, told: Callable[[int], None] | None = None) -> None:
        self._may = [i for i, param in enumerate(params) if param.device.type == "cpu" and param.is_contiguous()]
        self._staged = set(self._may)
        self._params = list(params)
        self._flat = flat
        self._at_rest = {index: sys.getrefcount(flat.views[index]) for index in self._may}
        self._fresh = _references_to_a_fresh_gradient()
        self.told = told  #: is told which gradient is complete, once it is in the bucket
        hook = _hook(weakref.ref(self))
        for index in self._may:
            if params[index].requires_grad:
                params[index].register_post_accumulate_grad_hook(hook(index))

    def complete(self, index: int) -> None:
        """Backward has made this parameter's gradient."""
        param = self._params[index]
        if index not in self._staged:
            return
        if not self._flat.is_in_place(index):
            self._flat.renew(index)
        free = self._is_nobodys(param) and sys.getrefcount(self._flat.views[index]) <= self._at_rest[index]
        grad, view = param.grad, self._flat.views[index]
        if not _fits(grad, view):
            return
        if grad is not view:
            if not free:
                return
            with torch.no_grad():
                view.copy_(grad)
                self._flat.find_finite(index)  # now it is in the cache
            param.grad = view
        if self.told is not None:
            self.told(index)

    def renew(self) -> None:
        """Parameters lie elsewhere: some may be in another order now, or in the usual one again."""
        self._staged = {index for index in self._may if self._params[index].is_contiguous()}

    def indices(self) -> list[int]:
        """The parameters whose gradients are staged by hooks."""
        return [index for index in self._may if self._params[index].requires_grad]

    def adopt(self) -> None:
        """What `step()` has copied into the bucket need not be copied again: from now on it is there."""
        for index in self._staged:
            param, view = self._params[index], self._flat.views[index]
            if param.grad is not view and self._is_nobodys(param) and _fits(param.grad, view):
                param.grad = view

    def _is_nobodys(self, param: torch.Tensor) -> bool:
        """Does only the parameter hold its gradient?"""
        return sys.getrefcount(param.grad) <= self._fresh and (param.grad is None or not param.grad._is_view())


def _references_to_a_fresh_gradient() -> int:
    """What `sys.getrefcount` says where nobody else holds it: torch's versions differ."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    return sys.getrefcount(param.grad)


def _fits(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    return grad is not None and grad.layout == torch.strided and grad.dtype == view.dtype and not grad.requires_grad


def _hook(staging: weakref.ref[GradientHooks]) -> Callable[[int], Callable[[torch.Tensor], None]]:
    """Hooks that do not keep an optimizer alive which nobody uses any more."""

    def of(index: int) -> Callable[[torch.Tensor], None]:
        def complete(param: torch.Tensor) -> None:
            owner = staging()
            if owner is not None:
                owner.complete(index)

        return complete

    return of
