"""Moves between parameters on a device and flat memory of it, on the current stream: the host waits for nothing.

Tensors whose memory has the same form as their place in the flat memory are copied together, by one call for each dtype;
the others, such as convolution weights in channels_last, one by one. A flat buffer has its elements in the canonical order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from polytempo.reducer.parameter_watch import ParameterWatch


def shaped_like(view: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The view with the strides of a parameter, where these mean the same order in memory: those of dimensions of size 1
    have no meaning, and a copy is straight only where all are equal."""
    pairs = zip(param.shape, param.stride(), view.stride(), strict=True)
    same = all(own == other for size, own, other in pairs if size > 1)
    return view.as_strided(param.shape, param.stride()) if same and param.numel() else view


def is_permuted(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in another order than the canonical one (channels_last)."""
    at = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if stride != at:
            return False
        at *= size
    return not tensor.is_contiguous()


class Copies:
    """Copies to make together: of each pair `(target, source)` the source into the target."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._straight: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in pairs:
            if source.dtype == target.dtype and source.stride() == target.stride() and source.device == target.device:
                targets, sources = self._straight.setdefault(target.dtype, ([], []))
                targets.append(target)
                sources.append(source)
            else:
                self._others.append((target, source))

    def make(self) -> None:
        """On the current stream."""
        for targets, sources in self._straight.values():
            torch._foreach_copy_(targets, sources)
        for target, source in self._others:
            target.copy_(source)


def copy_together(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its target: `(target, source)`."""
    Copies(pairs).make()


def largest(flat: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in a flat tensor, on its device: not finite where an element is not. One pass, no copy."""
    return torch.linalg.vector_norm(flat, float("inf")) if flat.numel() else flat.new_zeros(())


class DeviceMoves:
    """Of the parameters of one optimizer.

    Args:
        params: The parameters.
        order: Their indices, in the order of the flat buffer.
        watch: Told that what is written to parameters here is this library's.
    """

    def __init__(self, params: Sequence[torch.Tensor], order: Sequence[int], watch: ParameterWatch) -> None:
        self._params, self._order, self._watch = params, order, watch
        self._landings = Copies(())

    def land_from(self, views: dict[int, torch.Tensor]) -> None:
        """New values will be in these views. Called again when parameters lie elsewhere than before."""
        self._landings = Copies((self._params[index].detach(), views[index]) for index in self._order)

    def gather(self, views: dict[int, torch.Tensor], of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[int, ...]:
        """Copy `of(param)` of every parameter to its view; where it is None, zeros. Returns those parameters."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        absent: list[int] = []
        for index in self._order:
            tensor = of(self._params[index])
            if tensor is None:
                absent.append(index)
            elif tensor is not views[index]:
                pairs.append((views[index], tensor if tensor.layout == torch.strided else tensor.to_dense()))
        copy_together(pairs)
        if absent:
            torch._foreach_zero_([views[index] for index in absent])
        return tuple(absent)

    def land(self) -> None:
        """Copy new values into the parameters."""
        self._watch.see_writes()
        with torch.no_grad():
            self._landings.make()
        self._watch.record()
