"""A model as a chain of layers, and its cut into parts, one for each stage.

An `nn.Sequential` (also inside another) and a list of layers are chains already. Any other module is traced (`tracing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from polytempo.errors import UsageError, WrongType
from polytempo.pipeline.graph_partition import Traced
from polytempo.pipeline.model_part import ModelPart


class Planned(Protocol):
    """A stage of a plan: the layers `first` to `last`, both included."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def replicas(self) -> int: ...


class PartitionPlan(Protocol):
    """How to cut a model, and how many replicas each stage has."""

    @property
    def stages(self) -> Sequence[Planned]: ...


class LayerChain:
    """Layers that follow each other."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = layers
        self.names = [name for name, _ in layers]
        self.costs = [1 + sum(param.numel() for param in layer.parameters()) for _, layer in layers]

    def refine(self, stages: int) -> None:
        """Cut more finely, if so many parts need it: there is nothing finer."""

    def part(self, first: int, last: int) -> ModelPart:
        """The layers from `first` up to, but not including, `last`."""
        chosen = self._layers[first:last]
        return ModelPart(nn.Sequential(*(layer for _, layer in chosen)), tuple(chosen))


def layers_of(model: nn.Module | Sequence[nn.Module], example: tuple[Any, ...] | None = None) -> LayerChain | Traced:
    """A model as a chain. `example`: inputs with which a module that cannot be traced by symbols is run once."""
    if isinstance(model, nn.Module):
        return LayerChain(list(_flattened(model, ""))) if type(model) is nn.Sequential else Traced(model, example)
    layers = list(model)
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise WrongType(f"expected a module or a list of modules, got {type(model).__name__} with {layers[:3]}")
    return LayerChain([(str(index), layer) for index, layer in enumerate(layers)])


def _flattened(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model._modules.items():
        assert child is not None
        whole = f"{prefix}{name}"
        if type(child) is nn.Sequential and len(child) and not child._forward_hooks and not child._forward_pre_hooks:
            yield from _flattened(child, f"{whole}.")
        else:
            yield whole, child


def cut(
    model: nn.Module | Sequence[nn.Module],
    stages: int | Sequence[int] | PartitionPlan,
    example: tuple[Any, ...] | None = None,
) -> list[ModelPart]:
    """Cut into so many parts of about equal cost, into parts of so many layers each, or as planned."""
    chain = layers_of(model, example)
    ends = _ends(chain, stages)
    return [chain.part(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def _ends(chain: LayerChain | Traced, stages: int | Sequence[int] | PartitionPlan) -> list[int]:
    """Where each part ends."""
    if isinstance(stages, int):
        chain.refine(stages)
        have = len(chain.costs)
        if not 1 <= stages <= have:
            raise UsageError(
                f"expected 1 to {have} stages, for the model has {have} layers; got {stages}; "
                f"nearest: {min(max(stages, 1), have)}"
            )
        return balanced(chain.costs, stages)
    counts = list(stages) if isinstance(stages, Sequence) else [stage.last - stage.first + 1 for stage in stages.stages]
    have = len(chain.costs)
    if not counts or min(counts) < 1 or sum(counts) != have:
        raise UsageError(
            f"expected a number of layers for each stage, {have} together ({', '.join(chain.names[:4])}, ...); "
            f"got {counts}, which is {sum(counts)}; nearest: {_mended(counts, have)}"
        )
    return [sum(counts[: index + 1]) for index in range(len(counts))]


def _mended(counts: Sequence[int], have: int) -> list[int]:
    """The same beginning, and a last stage with what is left."""
    kept = [max(1, count) for count in counts][:have] or [have]
    while len(kept) > 1 and sum(kept[:-1]) >= have:
        del kept[-1]
    return [*kept[:-1], have - sum(kept[:-1])]


def balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Where each part ends so that the dearest part is as cheap as possible; no part is empty."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, middle, parts)) <= parts else (middle + 1, high)
    return _filled(costs, low, parts)


def _filled(costs: Sequence[int], limit: int, parts: int) -> list[int]:
    """Each part takes what it can within a limit, but leaves a layer to each part behind it."""
    ends: list[int] = []
    total = 0
    for index, cost in enumerate(costs):
        if index and (total + cost > limit or len(costs) - index < parts - len(ends)):
            ends.append(index)
            total = 0
        total += cost
    return [*ends, len(costs)]
