"""Partition of a model: a chain of layers, cut into parts, one for each stage.

An `nn.Sequential` (also inside another) and a list of layers are chains already. Any other module is traced with torch.fx,
and its graph is cut where as little as possible has to pass: a *layer* is then a stretch of the graph between two points at
which only one value passes. When there are too few of these, any two operations can be separated, and all values that are
still needed pass, as a tuple. Weights never pass: a part that needs one holds it.

A module whose Python code depends on values cannot be traced symbolically; given an example of its inputs, it is run once
and exported (torch.export). The result holds for inputs whose shapes are like the example's, which a guard checks. The guard
is no layer: it would count as one in plans and cuts.

A part holds the parameters of the model itself, under its names. A parameter that several parts hold is tied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from polytempo.errors import UsageError, WrongType


class PlannedLayers(Protocol):
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
    def stages(self) -> Sequence[PlannedLayers]: ...


class LayerChain:
    """A sequence of layers."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = layers
        self.names = [name for name, _ in layers]
        self.costs = [1 + sum(param.numel() for param in layer.parameters()) for _, layer in layers]

    def refine(self, stages: int) -> None:
        """Layers cannot be cut more finely."""

    def part(self, first: int, last: int) -> ModelPart:
        """The layers from `first` up to, but not including, `last`."""
        chosen = self._layers[first:last]
        return ModelPart(nn.Sequential(*(layer for _, layer in chosen)), tuple(name for name, _ in chosen))


def layers_of(model: nn.Module | Sequence[nn.Module], example: tuple[Any, ...] | None = None) -> LayerChain | TracedModel:
    """A model as a chain. `example`: inputs with which a module that cannot be traced symbolically is exported."""
    if isinstance(model, nn.Module):
        return LayerChain(list(_flattened(model, ""))) if type(model) is nn.Sequential else TracedModel(model, example)
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
    """Cut into a number of parts of about equal cost, into parts of given numbers of layers, or as planned."""
    if stages == 1 and isinstance(model, nn.Module) and type(model) is not nn.Sequential:
        return [ModelPart(model, spreads=True)]  # nothing is cut: it need not be traced, and has both of its modes
    chain = layers_of(model, example)
    ends = _ends(chain, stages)
    return [chain.part(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def _ends(chain: LayerChain | TracedModel, stages: int | Sequence[int] | PartitionPlan) -> list[int]:
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
            f"got {counts}, which is {sum(counts)}; nearest: {_nearest_counts(counts, have)}"
        )
    return [sum(counts[: index + 1]) for index in range(len(counts))]


def _nearest_counts(counts: Sequence[int], have: int) -> list[int]:
    """The same counts, with the remaining layers in the last stage."""
    kept = [max(1, count) for count in counts][:have] or [have]
    while len(kept) > 1 and sum(kept[:-1]) >= have:
        del kept[-1]
    return [*kept[:-1], have - sum(kept[:-1])]


def balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Where each part ends so that the largest cost of a part is least; no part is empty."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, middle, parts)) <= parts else (middle + 1, high)
    return _filled(costs, low, parts)


def _filled(costs: Sequence[int], limit: int, parts: int) -> list[int]:
    """Fill each part up to a limit of cost, but leave a layer for each part behind it."""
    ends: list[int] = []
    total = 0
    for index, cost in enumerate(costs):
        if index and (total + cost > limit or len(costs) - index < parts - len(ends)):
            ends.append(index)
            total = 0
        total += cost
    return [*ends, len(costs)]


#: Tracing patches the call of every module, in all threads.
_tracing = threading.Lock()


class TracedModel:
    """A traced module; `costs` are of its layers."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...] | None = None) -> None:
        with _tracing:
            self._root = _graph_of(model, example)
        self._guards: nn.Module | None = None
        for node in self._root.graph.find_nodes(op="call_module", target="_guards_fn"):
            # Newer versions of torch.export put it first in the graph.
            self._root.graph.erase_node(node)
            self._guards = self._root.get_submodule("_guards_fn")
        self._known = frozenset(model.state_dict())  # torch.fx makes all buffers persistent
        nodes = list(self._root.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._nodes = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._output = next(node for node in nodes if node.op == "output")
        if not self._nodes:
            raise UsageError(f"{type(model).__name__} computes nothing: there is nothing to cut")
        self._last_use: dict[fx.Node, int] = {}  # the place of the last operation that needs each value
        for place, node in enumerate([*self._nodes, self._output]):
            self._last_use |= dict.fromkeys(node.all_input_nodes, place)
        self._ends = [at for at in range(1, len(self._nodes)) if len(self._passing(at)) == 1] + [len(self._nodes)]
        self._describe()

    def refine(self, stages: int) -> None:
        """Allow cuts between any two operations, if this number of stages needs them."""
        if stages > len(self._ends):
            self._ends = list(range(1, len(self._nodes) + 1))
            self._describe()

    def part(self, first: int, last: int) -> ModelPart:
        """The layers from `first` up to, but not including, `last`."""
        start, end = self._ends[first - 1] if first else 0, self._ends[last - 1]
        module = fx.GraphModule(self._root, self._graph(start, end))
        if not start and self._guards is not None:
            module.register_forward_pre_hook(Guard(self._guards))
        return ModelPart(module, spreads=True, known=self._known)

    # Analysis of the graph.

    def _passing(self, at: int) -> list[fx.Node]:
        """The values that operations from this place on need from before it."""
        return [node for node in (*self._inputs, *self._nodes[:at]) if self._last_use.get(node, -1) >= at]

    def _describe(self) -> None:
        starts, seen = [0, *self._ends[:-1]], set[str]()
        self.names = [self._nodes[start].name for start in starts]
        stretches = [self._nodes[start:end] for start, end in zip(starts, self._ends, strict=True)]
        self.costs = [sum(1 + self._parameters(node, seen) for node in stretch) for stretch in stretches]

    def _parameters(self, node: fx.Node, seen: set[str]) -> int:
        """The number of parameters that no node before it has."""
        targets = [str(other.target) for other in (node, *node.all_input_nodes) if other.op in ("call_module", "get_attr")]
        new = [target for target in targets if target not in seen]
        seen.update(new)
        return sum(_size(self._root, target) for target in new)

    # Making a part.

    def _graph(self, start: int, end: int) -> fx.Graph:
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._passing(start) if start else self._inputs:
            made[node] = graph.placeholder(node.name)

        def copied(node: fx.Node) -> fx.Node:
            if node not in made:  # a weight
                made[node] = graph.node_copy(node)
            return made[node]

        for node in self._nodes[start:end]:
            made[node] = graph.node_copy(node, copied)
        if end == len(self._nodes):
            graph.output(fx.node.map_arg(self._output.args[0], copied))
        else:
            graph.output(tuple(made[node] for node in self._passing(end)))
        graph.lint()
        return graph


class Guard:
    """Refuses inputs for which the exported graph does not hold."""

    def __init__(self, check: nn.Module) -> None:
        self._check = check
        self._good = set[tuple[Any, ...]]()

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook of the first part. torch checks sizes and plain values: once for each is enough."""
        seen = tuple(value.shape if isinstance(value, torch.Tensor) else value for value in inputs)
        if seen in self._good:
            return
        try:
            self._check(*inputs)
        except AssertionError as problem:
            raise UsageError(
                f"the model was traced with an example of its inputs, and these inputs are not like it: {problem}"
            ) from None
        self._good.add(seen)


def _size(root: nn.Module, target: str) -> int:
    found: Any = root
    for name in target.split("."):
        found = getattr(found, name)
    if isinstance(found, nn.Module):
        return sum(param.numel() for param in found.parameters())
    return found.numel() if isinstance(found, nn.Parameter) else 0


def _graph_of(model: nn.Module, example: tuple[Any, ...] | None) -> fx.GraphModule:
    try:
        return fx.symbolic_trace(model)
    except Exception as problem:
        if example is None:
            said = " ".join(str(problem).split())[:200]
            raise UsageError(
                f"{type(model).__name__} cannot be traced symbolically ({said}); give its layers as nn.Sequential or a "
                "list, or an example of its inputs (example=(x,))"
            ) from problem
    return _exported(model, example)


def _exported(model: nn.Module, example: Sequence[Any]) -> fx.GraphModule:
    shapes = tuple({0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) else None for value in example)
    try:
        program = torch.export.export(model, tuple(example), dynamic_shapes=shapes, strict=False)
    except Exception as problem:
        said = " ".join(str(problem).split())[:200]
        raise UsageError(
            f"{type(model).__name__} can be traced neither symbolically nor with an example ({said}); "
            "give its layers as nn.Sequential or as a list"
        ) from problem
    exported = program.module()
    assert isinstance(exported, fx.GraphModule)
    spec, output = program.call_spec.out_spec, next(node for node in exported.graph.nodes if node.op == "output")
    if spec.is_leaf():  # torch.export wraps the output of the module in a tuple
        output.args = (output.args[0][0],)
    elif spec.type not in (tuple, list):
        raise UsageError(f"expected {type(model).__name__} to give tensors or a tuple of them, got {spec.type.__name__}")
    return exported


@dataclass(frozen=True)
class ModelPart:
    """The module of one stage. `names`: of its layers in the whole model; none for a module with the whole model's names."""

    module: nn.Module
    names: tuple[str, ...] = ()
    #: A tuple of values becomes the module's arguments, instead of one argument.
    spreads: bool = False
    #: The names in the model's `state_dict`, where modules have more (None: all).
    known: frozenset[str] | None = None

    @property
    def members(self) -> tuple[tuple[str, nn.Module], ...]:
        """The modules that hold its tensors now, with their names in the whole model."""
        if not self.names:
            return (("", self.module),)
        layers = [layer for layer in self.module._modules.values() if layer is not None]
        return tuple(zip(self.names, layers, strict=True))

    def replace(self, name: str, layer: nn.Module) -> None:
        """Put a layer in the place of the one with this name in the whole model."""
        self.module._modules[str(self.names.index(name))] = layer

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name in the whole model, and parameter; one with several names comes once for each."""
        for prefix, member in self.members:
            yield from member.named_parameters(prefix, remove_duplicate=False)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the whole model: what its `state_dict` would have of them."""
        found: dict[str, Tensor] = {}
        for prefix, member in self.members:
            found |= member.state_dict(prefix=f"{prefix}." if prefix else "")
        known = found if self.known is None else self.known
        return {name: value for name, value in found.items() if isinstance(value, Tensor) and name in known}

    def changes_its_input(self) -> bool:
        """Might its first layer work in place? For a traced part: might any?"""
        return any(getattr(module, "inplace", False) for module in self.members[0][1].modules())


def tied(parts: Sequence[ModelPart]) -> dict[tuple[int, ...], list[nn.Parameter]]:
    """The parameters that several parts hold: which parts, and the parameters in the order of the model."""
    holders: dict[nn.Parameter, list[int]] = {}
    for stage, part in enumerate(parts):
        for _, param in part.parameters():
            held = holders.setdefault(param, [])
            if stage not in held:
                held.append(stage)
    found: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for param, stages in holders.items():
        if len(stages) > 1:
            found.setdefault(tuple(stages), []).append(param)
    return found


#: Parts of the names of operations whose result depends on training or evaluation mode.
MODE_DEPENDENT = ("dropout", "batch_norm")


def training_only(modules: Iterable[nn.Module]) -> str:
    """The name of an operation that was traced in training mode and cannot evaluate; empty if there is none."""
    graphs = [module.graph for module in modules if isinstance(module, fx.GraphModule)]
    functions = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    names = (getattr(function, "__name__", str(function)) for function in functions)
    return next((name for name in names if any(word in name for word in MODE_DEPENDENT)), "")
