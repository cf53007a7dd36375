"""Gradients are made in the bucket: `.grad` of a parameter is a view of it.

Autograd puts a gradient wherever it likes. A hook that it calls when a parameter's gradient is complete copies it into the
bucket, while backward goes on and the gradient is still in the cache, and makes `.grad` the view. From then on whatever
changes `.grad` in place changes the bucket. All of this is a matter of speed: at `step()` every gradient that is not a view,
for whatever reason, is copied (`Copier.gather`).

Not staged, because a view would not do: parameters whose memory is not in the usual order (channels_last), on a GPU, or
frozen when the optimizer was wrapped; sparse gradients; gradients that are differentiated again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from polytempo.train.flat import Flat


class Staging:
    """The parameters of one optimizer whose gradients live in a bucket."""

    def __init__(self, params: Sequence[torch.Tensor], flat: Flat) -> None:
        self._views = {
            index: flat.views[index]
            for index, param in enumerate(params)
            if param.device.type == "cpu" and param.is_contiguous()
        }
        self._params = list(params)
        self._flat = flat
        hook = _hook(weakref.ref(self))
        for index in self._views:
            if params[index].requires_grad:
                params[index].register_post_accumulate_grad_hook(hook(index))

    def complete(self, index: int) -> None:
        """Backward has made this parameter's gradient."""
        param, view = self._params[index], self._views[index]
        grad = param.grad
        if grad is not view and _fits(grad, view):
            with torch.no_grad():
                view.copy_(grad)
                self._flat.find_finite(index)  # now it is in the cache
            param.grad = view

    def adopt(self) -> None:
        """What `step()` has copied into the bucket need not be copied again: from now on it is there."""
        for index, view in self._views.items():
            param = self._params[index]
            if param.grad is not None and param.grad is not view and _fits(param.grad, view):
                param.grad = view


def _fits(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    return grad is not None and grad.layout == torch.strided and grad.dtype == view.dtype and not grad.requires_grad


def _hook(staging: weakref.ref[Staging]) -> Callable[[int], Callable[[torch.Tensor], None]]:
    """Hooks that do not keep an optimizer alive which nobody uses any more."""

    def of(index: int) -> Callable[[torch.Tensor], None]:
        def complete(param: torch.Tensor) -> None:
            owner = staging()
            if owner is not None:
                owner.complete(index)

        return complete

    return of
