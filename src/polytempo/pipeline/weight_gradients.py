"""Weight gradients that are computed while no other rank waits for them.

The backward of a layer has two halves: the gradient of its input, for which the stage before waits, and that of its weights,
which is not needed before the update. Here a backward computes the first half and defers the second; the runtime computes
deferred pieces while it would wait for messages. (Zero-bubble schedules make the halves two actions, each at its place. Here
schedules stay as they are, and no more microbatches are held than they say.) Gradients of matrices are accumulated in place.

This is for linear layers and convolutions, however they are called. All other operations are autograd's, and so are these
where the difference could be seen: hooks on the parameter or on saved tensors (checkpointing), autocast, torch.func,
compiled modules. Hooks that say they are optional, as those of `DistributedOptimizer` do, do not count: autograd calls them
though there is no gradient yet, and `call_hooks` when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn import grad as of_convolutions
from torch.overrides import TorchFunctionMode


class SplitBackward(TorchFunctionMode):  # type: ignore[misc]
    """Layers that are called inside this mode have backwards that may be split. `deferred`: where second halves go; None
    outside a stage's backward: then both halves are computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: list[WeightGradient] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        make = _LAYERS.get(func)
        if make is not None and args and _is_plain():
            call = _splittable(make, *args, **kwargs)
            if call is not None:
                return _Split.apply(*call, self)
        return func(*args, **kwargs)


def may_split(module: nn.Module) -> bool:
    """Compiled modules have backwards of their own."""
    return not any(
        hasattr(member, "_orig_mod") or getattr(member, "_compiled_call_impl", None) is not None
        for member in module.modules()
    )


def _is_plain() -> bool:
    """Is this plain autograd: no autocast, no saved-tensor hooks, no torch.func?"""
    return (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _splittable(make: Any, x: Any, weight: Any, bias: Any = None, *rest: Any, **others: Any) -> Any:
    """The tensors of a call and its layer; None where the call is left to autograd."""
    simple = type(x) is torch.Tensor and x.layout == torch.strided
    if not simple or not _can_defer(weight) or (bias is not None and bias.requires_grad and not _can_defer(bias)):
        return None
    layer = make(x, weight, *rest, **others)
    return (x, weight, bias, layer) if layer is not None else None


def _can_defer(param: Any) -> bool:
    return (
        type(param) is nn.Parameter
        and param.requires_grad
        and param.is_floating_point()
        and not param._backward_hooks
        and all(getattr(hook, "optional", False) for hook in (param._post_accumulate_grad_hooks or {}).values())
    )


@dataclass(slots=True)
class WeightGradient:
    """The second half of the backward of one layer."""

    layer: Linear | Convolution
    given: torch.Tensor  # the gradient of its output
    x: torch.Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None

    def compute(self) -> None:
        """Accumulate the gradients of the layer's weights."""
        with torch.no_grad():
            self.layer.add_of_weight(self.given, self.x, self.weight)
            if self.bias is not None:
                _add(self.layer.of_bias(self.given), self.bias)

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters whose gradients it adds to."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def call_hooks(param: nn.Parameter) -> None:
    """Call the optional hooks of a parameter whose gradient is complete."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        if getattr(hook, "optional", False):
            hook(param)


class _Split(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        layer: Linear | Convolution,
        mode: SplitBackward,
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.mode, ctx.leaves = layer, mode, (weight, bias)
        return layer.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        (x, weight), layer, deferred = ctx.saved_tensors, ctx.layer, ctx.mode.deferred
        wanted, _, wants_bias, *_ = ctx.needs_input_grad
        back = layer.of_input(given, x, weight) if wanted else None
        if deferred is None:
            of_bias = layer.of_bias(given) if wants_bias else None
            return back, layer.of_weight(given, x, weight), of_bias, None, None
        leaf, bias = ctx.leaves
        deferred.append(WeightGradient(layer, given, x, leaf, bias if wants_bias else None))
        return back, None, None, None, None


class Linear:
    """y = x W' + b."""

    forward = staticmethod(functional.linear)

    def of_input(self, given: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of the input."""
        return given @ weight

    def of_weight(self, given: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight."""
        return _rows(given).t() @ _rows(x)

    def of_bias(self, given: torch.Tensor) -> torch.Tensor:
        """The gradient of the bias."""
        return _rows(given).sum(0)

    def add_of_weight(self, given: torch.Tensor, x: torch.Tensor, weight: nn.Parameter) -> None:
        """Accumulate the gradient of the weight."""
        if weight.grad is None:
            weight.grad = self.of_weight(given, x, weight)
        else:
            weight.grad.addmm_(_rows(given).t(), _rows(x))


@dataclass(slots=True)
class Convolution:
    """A convolution in 1, 2 or 3 dimensions."""

    dimensions: int
    options: tuple[Any, ...]  # stride, padding, dilation, groups

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer itself."""
        result: torch.Tensor = getattr(functional, f"conv{self.dimensions}d")(x, weight, bias, *self.options)
        return result

    def of_input(self, given: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of the input."""
        compute = getattr(of_convolutions, f"conv{self.dimensions}d_input")
        result: torch.Tensor = compute(x.shape, weight, given, *self.options)
        return result

    def of_weight(self, given: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight."""
        compute = getattr(of_convolutions, f"conv{self.dimensions}d_weight")
        result: torch.Tensor = compute(x, weight.shape, given, *self.options)
        return result

    def of_bias(self, given: torch.Tensor) -> torch.Tensor:
        """The gradient of the bias."""
        return given.sum([0, *range(2, given.dim())])

    def add_of_weight(self, given: torch.Tensor, x: torch.Tensor, weight: nn.Parameter) -> None:
        """Accumulate the gradient of the weight."""
        _add(self.of_weight(given, x, weight), weight)


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1])


def _add(found: torch.Tensor, leaf: nn.Parameter) -> None:
    leaf.grad = found if leaf.grad is None else leaf.grad.add_(found)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> Linear | None:
    return Linear() if weight.dim() == 2 else None


def _convolution(
    dimensions: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Convolution | None:
    """None where the input has no batch dimension, or padding is a word such as "same"."""
    if isinstance(padding, str) or x.dim() != dimensions + 2:
        return None
    return Convolution(dimensions, (stride, padding, dilation, groups))


_LAYERS: dict[Any, Callable[..., Linear | Convolution | None]] = {
    functional.linear: _linear,
    torch.ops.aten.linear.default: _linear,
    functional.conv1d: partial(_convolution, 1),
    functional.conv2d: partial(_convolution, 2),
    functional.conv3d: partial(_convolution, 3),
    torch.ops.aten.conv1d.default: partial(_convolution, 1),
    torch.ops.aten.conv2d.default: partial(_convolution, 2),
    torch.ops.aten.conv3d.default: partial(_convolution, 3),
}
