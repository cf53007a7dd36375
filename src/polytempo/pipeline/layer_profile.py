"""A measured model as a chain of layers, the only shape the planner cuts.

A graph (nodes with times and sizes, edges from producer to consumer) becomes a chain: nodes are put in an order in which
every node follows those it needs, and the order may be cut only where at most `width` outputs pass from before to after; all
between two cuts is one layer. With a width of one that is where a single output separates the model. The paper instead
searches over all antichains of the graph, of which there can be many: a chain knows a part of those cuts, and is small.
What is lost is the branches: both sides of a branch end in the same stage where `width` is less than what runs side by side.

Four things about the order. A node is put as late as it can be, so the embedding of a decoder stands beside its decoder and
is not carried through the encoder. A node that leads nowhere (an unused output) follows what it needs at once.
An output without bytes is no reason against a cut. Inputs (nodes without producers whose names begin with "Input") are left
out: reading data is no work of a stage, and the first stage has it wherever the model is cut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from polytempo.errors import UsageError, nearest

_MEASURES = ("forward_ms", "backward_ms", "activation_bytes", "weight_bytes")


@dataclass(frozen=True)
class Layer:
    """The costs of one layer for one minibatch."""

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float  #: sent to the next layer
    weight_bytes: float
    made_bytes: float | None = None  #: all outputs made in this layer, kept for backward; None: only what passes on
    spread_s: float | None = None  #: half of the interquartile range of its measured seconds; None: not known

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def kept_bytes(self) -> float:
        """The bytes that a minibatch in flight keeps here until its backward."""
        return self.activation_bytes if self.made_bytes is None else self.made_bytes

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in ("made_bytes", "spread_s") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UsageError(f"layer {self.name!r}: expected {field.name} to be a number of at least 0, got {value!r}")


@dataclass(frozen=True)
class Profile:
    """A model's layers in order, measured with minibatches of `batch` samples."""

    model: str
    layers: tuple[Layer, ...]
    batch: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError(f"profile of {self.model!r}: expected at least one layer, got none")
        if self.batch < 1:
            raise UsageError(f"profile of {self.model!r}: expected a batch of at least 1 sample, got {self.batch}")


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile as JSON."""
    Path(path).write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")


def load_profile(path: str | Path) -> Profile:
    """A profile from a file that `save_profile` or `polytempo plan --json` wrote, or from a graph of nodes and edges."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the profile {path}: {error}") from None
    try:
        if isinstance(data, dict) and "nodes" in data:
            return chain_of(data)
        if isinstance(data, dict) and "profile" in data:
            data = data["profile"]
        return Profile(data["model"], tuple(_layer(one) for one in data["layers"]), data["batch"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is no profile: expected model, batch and layers, or nodes and edges ({type(error).__name__}: {error}); "
            "polytempo plan SCRIPT --json FILE writes one"
        ) from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _layer(data: Mapping[str, Any]) -> Layer:
    known = [field.name for field in fields(Layer)]
    for key in data:
        if key not in known:
            raise UsageError(f"a layer has no {key!r}{nearest(key, known)}; it has {', '.join(known)}")
    return Layer(**data)


def chain_of(graph: Mapping[str, Any], *, batch: int = 1, width: int = 1) -> Profile:
    """A graph as a chain of layers; at most `width` outputs may pass from one layer to the next."""
    if width < 1:
        raise UsageError(f"expected width, the outputs that may pass between layers, to be at least 1, got {width}")
    nodes = {node["id"]: node for node in graph["nodes"]}
    edges = _without_inputs(nodes, graph["edges"])
    order = _order(list(nodes), edges)
    place = {node: n for n, node in enumerate(order)}
    last_use = dict(place)
    for producer, consumer in edges:
        last_use[producer] = max(last_use[producer], place[consumer])
    layers, begun = [], 0
    for end in range(len(order)):
        passing = [nodes[n] for n in order[: end + 1] if last_use[n] > end and nodes[n]["activation_bytes"]]
        if len(passing) <= width or end + 1 == len(order):
            last = end + 1 == len(order)
            layers.append(_merged([nodes[n] for n in order[begun : end + 1]], [nodes[order[end]]] if last else passing))
            begun = end + 1
    return Profile(graph.get("model", "model"), tuple(layers), batch)


def _merged(nodes: Sequence[Mapping[str, Any]], passing: Sequence[Mapping[str, Any]]) -> Layer:
    forward, backward, made, weights = (math.fsum(node[key] for node in nodes) for key in _MEASURES)
    names = [node["name"] for node in nodes]
    name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    passes = math.fsum(node["activation_bytes"] for node in passing)
    return Layer(name, forward / 1e3, backward / 1e3, passes, weights, made)


def _without_inputs(nodes: dict[str, Mapping[str, Any]], edges: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """Takes the inputs out of `nodes`, and their edges."""
    pairs = [(a, b) for a, b in edges]
    unknown = next((end for pair in pairs for end in pair if end not in nodes), None)
    if unknown is not None:
        raise UsageError(f"an edge of the graph names node {unknown!r}, which is not there{nearest(unknown, nodes)}")
    fed = {b for _, b in pairs}
    for node in [n for n in nodes if n not in fed and nodes[n]["name"].startswith("Input")]:
        del nodes[node]
    if not nodes:
        raise UsageError("expected a graph with nodes that are not inputs, got none")
    return [(a, b) for a, b in pairs if a in nodes]


def _order(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> list[str]:
    """Every node after those it needs, as late as possible; see the head of this file."""
    before: dict[str, list[str]] = {node: [] for node in nodes}
    after: dict[str, list[str]] = {node: [] for node in nodes}
    for producer, consumer in edges:
        before[consumer].append(producer)
        after[producer].append(consumer)
    depth = _longest_paths(before)
    final = max((node for node in nodes if not after[node]), key=lambda node: depth[node])
    needed, to_do = {final}, [final]
    while to_do:
        more = set(before[to_do.pop()]) - needed
        needed |= more
        to_do.extend(more)
    height = _longest_paths({node: [n for n in after[node] if n in needed] for node in nodes if node in needed})
    places: dict[str, tuple[int, int]] = {node: (-height[node], 0) for node in needed}
    for node in sorted((n for n in nodes if n not in needed), key=lambda n: depth[n]):
        rank, side = max((places[n] for n in before[node]), default=(-len(nodes), 0))
        places[node] = (rank, side + 1)
    return sorted(nodes, key=lambda n: places[n])


def _longest_paths(neighbours: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """For each node, the length of the longest path from it along `neighbours`."""
    paths: dict[str, int] = {}
    try:
        for node in TopologicalSorter(neighbours).static_order():
            paths[node] = max((paths[n] + 1 for n in neighbours[node]), default=0)
    except CycleError as error:
        raise UsageError(f"expected a graph without cycles, got {' -> '.join(error.args[1])}") from None
    return paths
