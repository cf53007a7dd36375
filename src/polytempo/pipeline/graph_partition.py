"""Any module as a chain: its graph (torch.fx), cut where as little as possible has to pass.

A *layer* here is a stretch of the graph between two places where only one value passes. When these are too few, any two
operations can be cut apart, and all values that are still needed pass, as a tuple. Weights never pass: a part that
needs one holds it. A module whose Python code depends on values cannot be traced by symbols; given an example of its inputs,
it is run once and what it did is taken (torch.export). That holds for inputs of shapes like the example's, which is checked,
but is no layer: it would be one in plans and cuts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from polytempo.errors import UsageError
from polytempo.pipeline.model_part import ModelPart

#: While torch traces, it changes what calling any module does, in all threads.
_tracing = threading.Lock()


class Traced:
    """A traced module; `costs` are of its layers."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...] | None = None) -> None:
        with _tracing:
            self._root = _graph_of(model, example)
        self._guards = _guards_taken_from(self._root)
        self._known = frozenset(model.state_dict())  # torch.fx makes all buffers persistent
        nodes = list(self._root.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._nodes = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._output = next(node for node in nodes if node.op == "output")
        if not self._nodes:
            raise UsageError(f"{type(model).__name__} computes nothing: there is nothing to cut")
        self._last_use = self._find_last_uses()
        self._ends = [at for at in range(1, len(self._nodes)) if len(self._passing(at)) == 1] + [len(self._nodes)]
        self._describe()

    def refine(self, stages: int) -> None:
        """Cut between any two operations, if so many parts need it."""
        if stages > len(self._ends):
            self._ends = list(range(1, len(self._nodes) + 1))
            self._describe()

    def part(self, first: int, last: int) -> ModelPart:
        """The layers from `first` up to, but not including, `last`."""
        start, end = self._ends[first - 1] if first else 0, self._ends[last - 1]
        module = fx.GraphModule(self._root, self._graph(start, end))
        if not start and self._guards is not None:
            module.register_forward_pre_hook(Guard(self._guards))
        return ModelPart(module, (("", module),), spreads=True, known=self._known)

    # Looking at the graph.

    def _find_last_uses(self) -> dict[fx.Node, int]:
        """The place of the last operation that needs each value."""
        uses: dict[fx.Node, int] = {}
        for place, node in enumerate([*self._nodes, self._output]):
            uses |= dict.fromkeys(node.all_input_nodes, place)
        return uses

    def _passing(self, at: int) -> list[fx.Node]:
        """The values that operations from this place on need from before it."""
        return [node for node in (*self._inputs, *self._nodes[:at]) if self._last_use.get(node, -1) >= at]

    def _describe(self) -> None:
        starts, seen = [0, *self._ends[:-1]], set[str]()
        self.names = [self._nodes[start].name for start in starts]
        stretches = [self._nodes[start:end] for start, end in zip(starts, self._ends, strict=True)]
        self.costs = [sum(1 + self._parameters(node, seen) for node in stretch) for stretch in stretches]

    def _parameters(self, node: fx.Node, seen: set[str]) -> int:
        """How many numbers it has that nobody before had."""
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
    """Refuses inputs for which what the example did is not what the module would do."""

    def __init__(self, check: nn.Module) -> None:
        self._check = check
        self._good = set[tuple[Any, ...]]()

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Before the first part. What torch checks is sizes, and values that are no tensors: once for each is enough."""
        seen = tuple(value.shape if isinstance(value, torch.Tensor) else value for value in inputs)
        if seen in self._good:
            return
        try:
            self._check(*inputs)
        except AssertionError as problem:
            raise UsageError(
                f"the model was traced by an example of its inputs, and these are not like it: {problem}"
            ) from None
        self._good.add(seen)


def _guards_taken_from(root: fx.GraphModule) -> nn.Module | None:
    """The call that torch.export puts before everything else, in newer versions; it is then no longer there."""
    for node in root.graph.find_nodes(op="call_module", target="_guards_fn"):
        root.graph.erase_node(node)
        return root.get_submodule("_guards_fn")
    return None


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
                f"{type(model).__name__} cannot be traced by symbols ({said}); give its layers as nn.Sequential or a list, "
                "or an example of its inputs (example=(x,))"
            ) from problem
    return _exported(model, example)


def _exported(model: nn.Module, example: Sequence[Any]) -> fx.GraphModule:
    shapes = tuple({0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) else None for value in example)
    try:
        program = torch.export.export(model, tuple(example), dynamic_shapes=shapes, strict=False)
    except Exception as problem:
        said = " ".join(str(problem).split())[:200]
        raise UsageError(
            f"{type(model).__name__} can be traced neither by symbols nor by an example ({said}); "
            "give its layers as nn.Sequential or as a list"
        ) from problem
    exported = program.module()
    assert isinstance(exported, fx.GraphModule)
    spec, output = program.call_spec.out_spec, next(node for node in exported.graph.nodes if node.op == "output")
    if spec.is_leaf():  # torch makes a tuple of it, which is not what the module gave
        output.args = (output.args[0][0],)
    elif spec.type not in (tuple, list):
        raise UsageError(f"expected {type(model).__name__} to give tensors or a tuple of them, got {spec.type.__name__}")
    return exported
