"""Gradient hooks: `.grad` of a parameter becomes a view of the flat buffer while backward runs.

Autograd puts a gradient wherever it likes. A hook that it calls when a parameter's gradient is complete copies it into the
flat buffer, while backward goes on and the gradient is still in the cache, and makes `.grad` the view. From then on whatever
changes `.grad` in place changes the buffer. All of this is a matter of speed: at `step()` every gradient that is not a view,
for whatever reason, is copied (`Copier.gather`).

Without hooks, because a view would not do: parameters whose memory is not in the usual order (channels_last), on a GPU, or
frozen when the optimizer was wrapped; sparse gradients; gradients that are differentiated again. Left as they are: gradients
that the script holds a reference to or has put into memory of its own, and views that it still holds (`ReferenceCounts`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from polytempo.reducer.flat_buffer import FlatBuffer


class ReferenceCounts:
    """Decides by `sys.getrefcount` whether the script holds a gradient or a view of the flat buffer.

    A script that keeps `g = param.grad` expects `g` to stay what it is; replacing `.grad` by a view, or writing the next
    gradient into a view that it holds, would change what it sees. Torch has no call that tells, so references are counted,
    and compared with counts taken where the script certainly holds none: those depend on the versions of torch and Python
    (torch may or may not count its own reference through `.grad`), so they are measured, never written down here.
    A wrong answer costs speed in one direction (a copy at `step()`) and the script's values in the other;
    `tests/threads/test_gradient_hooks.py` has both.
    """

    def __init__(self, buffer: FlatBuffer, indices: Sequence[int]) -> None:
        self._buffer = buffer
        self._views_at_rest = {index: sys.getrefcount(buffer.views[index]) for index in indices}
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        self._fresh_gradient = sys.getrefcount(param.grad)

    def only_parameter_holds_gradient(self, param: torch.Tensor) -> bool:
        """Is `.grad` referenced by its parameter alone, and memory of its own?"""
        return sys.getrefcount(param.grad) <= self._fresh_gradient and (param.grad is None or not param.grad._is_view())

    def is_view_unused(self, index: int) -> bool:
        """Is a view of the flat buffer referenced by the buffer alone?"""
        return sys.getrefcount(self._buffer.views[index]) <= self._views_at_rest[index]


class HearsCompletion(Protocol):
    """Wants to hear of gradients."""

    def complete(self, index: int) -> None:
        """Backward has made this parameter's gradient."""


def tell_completion(params: Sequence[torch.Tensor], indices: Sequence[int], hears: HearsCompletion) -> None:
    """Hooks of these parameters, which do not keep an optimizer alive that the script has dropped. They are optional: a
    gradient that appears without a call is taken at `step()`."""
    reference = weakref.ref(hears)

    def hook(index: int) -> Callable[[torch.Tensor], None]:
        def complete(param: torch.Tensor) -> None:
            owner = reference()
            if owner is not None:
                owner.complete(index)

        complete.optional = True  # type: ignore[attr-defined]
        return complete

    for index in indices:
        params[index].register_post_accumulate_grad_hook(hook(index))


class GradientHooks:
    """The parameters of one optimizer whose gradients live in a flat buffer.

    Args:
        params: All parameters.
        buffer: Where their gradients go.
        on_complete: Called with a parameter's index once its gradient is in the buffer.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], buffer: FlatBuffer, on_complete: Callable[[int], None] | None = None
    ) -> None:
        self._may = [i for i, param in enumerate(params) if param.device.type == "cpu" and param.is_contiguous()]
        self._active = set(self._may)
        self._params = list(params)
        self._buffer = buffer
        self._references = ReferenceCounts(buffer, self._may)
        self.on_complete = on_complete
        self.indices = [index for index in self._may if params[index].requires_grad]  #: of gradients that the hooks copy
        tell_completion(params, self.indices, self)

    def complete(self, index: int) -> None:
        """Backward has made this parameter's gradient."""
        param = self._params[index]
        if index not in self._active:
            return
        if not self._buffer.is_in_place(index):
            self._buffer.renew(index)
        # Before the names below hold references of their own.
        free = self._references.only_parameter_holds_gradient(param) and self._references.is_view_unused(index)
        grad, view = param.grad, self._buffer.views[index]
        if not _fits(grad, view):
            return
        if grad is not view:
            if not free:
                return
            with torch.no_grad():
                view.copy_(grad)
                self._buffer.find_finite(index)  # now it is in the cache
            param.grad = view
        if self.on_complete is not None:
            self.on_complete(index)

    def renew(self) -> None:
        """Parameters were moved: some may have other strides now, or the usual ones again."""
        self._active = {index for index in self._may if self._params[index].is_contiguous()}

    def adopt(self) -> None:
        """Make `.grad` the view where `step()` has copied a gradient into the buffer: it need not be copied again."""
        for index in self._active:
            param, view = self._params[index], self._buffer.views[index]
            if param.grad is view or not self._references.only_parameter_holds_gradient(param):
                continue
            if _fits(param.grad, view):
                param.grad = view


def _fits(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    return grad is not None and grad.layout == torch.strided and grad.dtype == view.dtype and not grad.requires_grad
