"""PipeDream's search for stages: which layers go together, and how many devices share them.

For each level of links, from the inside out, A(first, last, m) is the slowest part of the best pipeline for these layers on
m components of the level, and T(first, last, m) that of one stage of m replicas of a component, each of which may be a
pipeline by itself, the best one of the level below:

    T(i, j, m) = replicated(A of the level below for i..j on all that a component has, m)
    A(i, j, m) = least of T(i, j, m) and, for all s and m', the largest of A(i, s, m - m'), cut(s), T(s + 1, j, m')

Departures. By levels a stage has a part of one host, or whole hosts: fifteen devices of four hosts and one for the rest
cannot be said, though that is what the paper reports for VGG-16. So all devices are also searched side by side, with every
link taken for the slowest, and the better of the two plans is the answer; `whole_hosts=True` is the paper's search alone.
The paper does not say how a limit of memory enters; here it is exact: what a stage keeps depends on the devices behind it,
so where there is a limit the level below is searched once for each number of devices that can be behind (for each replica,
so a fraction). All devices are used, as in the paper; `use_all=False` also tries all topologies with fewer components in a
level.

Costs. A stage of m replicas, each of which takes `inside` seconds for a minibatch and has weights of w bytes, behind links
of bandwidth B:

    paper       max(inside, 2 (m - 1) w / B) / m          updates are sent while the next minibatch is computed
    released    (inside + 4 (m - 1) / m w / B) / m        the code that came with the paper: in sequence, as a ring

The default is that of the released code, because only with it the published profiles give the published plans. The paper's m
- 1 is that of a server or of an exchange of all with all; a ring sends 2 (m - 1) / m. A cut costs 2 a / B in both:
activations of a bytes forward, and as many bytes of gradients back. The released code divides that by the replicas behind
the cut and counts it only by an option; here it is always counted, and whole, as in the paper.

The memory of a device is that of all minibatches in flight: for each, one version of the weights and one set of activations,
the stage's input among them. By 1F1B, the number in flight on each replica is the number of devices in this stage and behind
it, divided by the stage's replicas and rounded up. Gradients and optimizer state are not counted.

Of equally good plans, one stage is preferred to a cut, then the earliest cut before the last stage, then the fewest replicas
of that stage; of the two searches, the one with fewer stages.

The levels of a topology: devices in a host, hosts in a rack, and so on. Every component of a level is built of as many
components of the level below, so the text of a topology is short, the innermost level first, in counts and in bandwidths:

    16:10Gb/s               sixteen devices, each behind a link of 10 Gb/s
    4x4:12GB/s,10Gb/s       four devices to a host with 12 GB/s between them, four hosts with 10 Gb/s between them
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, product
from typing import Protocol

from polytempo.errors import UsageError, nearest
from polytempo.options import split
from polytempo.pipeline.layer_profile import Profile
from polytempo.units import parse_rate

_EXAMPLE = "such as 4x4:12GB/s,10Gb/s"


@dataclass(frozen=True)
class Level:
    """`count` components of the level below, each with a link of this bandwidth in bytes a second."""

    count: int
    bandwidth: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"expected at least 1 component in a level of a topology, got {self.count}")
        if not 0 < self.bandwidth < math.inf:
            raise UsageError(f"expected a bandwidth above 0 bytes a second in a topology, got {self.bandwidth:g}")


@dataclass(frozen=True)
class Topology:
    """Levels, the innermost first."""

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise UsageError("expected at least one level in a topology, got none; one device alone is Level(1, 1e9)")

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return math.prod(level.count for level in self.levels)

    def flat(self) -> Topology:
        """All devices side by side behind the slowest link: allows stages over any number of them, whole hosts or not."""
        return Topology((Level(self.devices, min(level.bandwidth for level in self.levels)),))


def parse_topology(text: str) -> Topology:
    """A topology from text such as 4x4:12GB/s,10Gb/s."""
    counts, colon, inner, outer = split(text)
    numbers, bandwidths = counts.split("x"), [inner, *outer]
    if not colon or not all(number.isascii() and number.isdigit() for number in numbers):
        raise UsageError(f"expected a topology COUNTxCOUNT:RATE,RATE {_EXAMPLE}, got {text!r}")
    if len(numbers) != len(bandwidths):
        raise UsageError(
            f"expected one bandwidth for each level of a topology {_EXAMPLE}, "
            f"got {len(numbers)} counts and {len(bandwidths)} bandwidths in {text!r}"
        )
    rates = [parse_rate(bandwidth, "a bandwidth") for bandwidth in bandwidths]
    return Topology(tuple(Level(int(count), rate) for count, rate in zip(numbers, rates, strict=True)))


#: Sums in another order differ by this much; a plan must be better by more than this to count as better.
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class PlannedStage:
    """Layers first..last (both included) on `replicas` devices. Times are seconds for each minibatch of the whole job."""

    first: int
    last: int
    replicas: int
    time: float
    memory: float  #: bytes on each device
    compute: float  #: the part of `time` that is forward and backward
    exchange: float  #: seconds in which replicas exchange their updates
    send: float  #: seconds of sending to the next stage and back, beside `time`


@dataclass(frozen=True)
class StagePlan:
    """Stages in order, and their predicted times."""

    stages: tuple[PlannedStage, ...]
    seconds: float  #: between two minibatches, once the pipeline is full
    data_parallel_seconds: float  #: the same with all layers on every device
    data_parallel_memory: float
    config: str  #: replicas of the stages, such as 15-1
    limit: float | None  #: the bytes of memory of a device, where given

    @property
    def devices(self) -> int:
        """The number of devices in use."""
        return sum(stage.replicas for stage in self.stages)


def plan(
    profile: Profile,
    topology: Topology,
    memory: float | None = None,
    *,
    straight: bool = False,
    use_all: bool = True,
    whole_hosts: bool = False,
    formula: str = "released",
) -> StagePlan:
    """The fastest stages for these devices, `memory` bytes each; `straight` gives every stage one device."""
    if formula not in FORMULAS:
        raise UsageError(f"there is no formula {formula!r}{nearest(formula, FORMULAS)}; there are: {', '.join(FORMULAS)}")
    if memory is not None and not 0 < memory < math.inf:
        raise UsageError(f"expected memory in bytes above 0, or None for no limit, got {memory!r}")
    views = [topology] if whole_hosts or len(topology.levels) == 1 else [topology, topology.flat()]
    choices = _choices(profile, views, straight, use_all)
    search = _Search(profile, FORMULAS[formula](memory), straight)
    seconds, levels = _best(search, choices)
    if seconds == math.inf:
        search = _Search(profile, LeastMemory(), straight)
        least, levels = _best(search, choices)
        config = "-".join(str(stage.replicas) for stage in search.stages(levels))
        raise UsageError(
            f"no plan for {profile.model} fits into memory={memory or 0.0:.0f} bytes a device; the least that any needs is "
            f"{math.ceil(least)} (stages {config}, say); give that much, or profile smaller minibatches"
        )
    data_parallel = min(_data_parallel(search.layers, view, FORMULAS[formula]()) for view in views)
    stages = _described(search.layers, search.stages(levels), FORMULAS[formula]())
    needed = search.layers.memory(0, search.layers.count - 1, 1)
    return StagePlan(stages, seconds, data_parallel, needed, "-".join(str(stage.replicas) for stage in stages), memory)


def _choices(profile: Profile, views: list[Topology], straight: bool, use_all: bool) -> list[tuple[Level, ...]]:
    """The levels to search: those of each view of the topology, or also all with fewer components."""
    topology, choices = views[0], [view.levels for view in views]
    if not use_all:  # these levels and all that have fewer components in some, the most components first
        choices = [
            tuple(replace(level, count=n) for level, n in zip(levels, counts, strict=True))
            for levels in choices
            for counts in product(*(range(level.count, 0, -1) for level in levels))
        ]
    possible = [levels for levels in choices if not straight or Topology(levels).devices <= len(profile.layers)]
    if not possible:
        raise UsageError(
            f"a straight pipeline on {topology.devices} devices needs as many layers, and {profile.model} has "
            f"{len(profile.layers)}; take at most {len(profile.layers)} devices, or straight=False"
        )
    return possible


def _best(search: _Search, choices: list[tuple[Level, ...]]) -> tuple[float, tuple[Level, ...]]:
    """The best value and its levels; of equally good ones those with fewer stages, then the first."""
    values = [search.value(levels) for levels in choices]
    best = min(values)
    equal = [levels for value, levels in zip(values, choices, strict=True) if best < math.inf and value <= best * _ROUNDING]
    return best, min(equal, key=lambda levels: len(search.stages(levels)), default=choices[0])


@dataclass(frozen=True)
class _Part:
    """A stage while replicas are put around it: the values of levels so far."""

    first: int
    last: int
    replicas: int = 1
    exchange: float = 0.0
    send: float = 0.0


class _Search:
    """Tables of values, made on first use."""

    def __init__(self, profile: Profile, formula: Formula, straight: bool) -> None:
        self.layers = Layers(profile)
        self.formula = formula
        self.straight = straight
        self._tables: dict[tuple[tuple[Level, ...], Fraction, bool], _Table] = {}

    def table(self, levels: tuple[Level, ...], behind: Fraction, whole: bool) -> _Table:
        """The table of a component of these levels; `whole`: only pipelines that begin at the first layer are needed."""
        key = (levels, behind if self.formula.limited else Fraction(0), whole)
        if key not in self._tables:
            self._tables[key] = _Table(self, *key)
        return self._tables[key]

    def value(self, levels: tuple[Level, ...]) -> float:
        """The value of the best plan for all layers on these levels."""
        return self.table(levels, Fraction(0), True).best(0, self.layers.count - 1)

    def stages(self, levels: tuple[Level, ...]) -> list[_Part]:
        """The stages of the best plan."""
        return self.table(levels, Fraction(0), True).parts(0, self.layers.count - 1, levels[-1].count)


class _Table:
    """A and T of one level, for one number of devices behind it."""

    def __init__(self, search: _Search, levels: tuple[Level, ...], behind: Fraction, whole: bool) -> None:
        self._search, self._level, self._below, self._behind = search, levels[-1], levels[:-1], behind
        self._size = math.prod(level.count for level in self._below)
        self._stages: dict[tuple[int, int], list[list[float]]] = {}
        cuts = [search.formula.cut(passed, self._level.bandwidth) for passed in search.layers.passed]
        self._rows = [self._row(first, cuts) for first in range(1 if whole else search.layers.count)]

    def best(self, first: int, last: int) -> float:
        """A of these layers on all components."""
        return self._rows[first][0][self._level.count][last - first]

    def parts(self, first: int, last: int, components: int) -> list[_Part]:
        """The stages of A of these layers on the first `components` components."""
        whole = self._rows[first][0][components][last - first]
        if self._single(components) and self._stage(components, components)[last][first] <= whole * _ROUNDING:
            return self._replicated(first, last, components, self._level.count - components)
        ahead = self._rows[first][1]
        for cut, replicas in product(range(first, last), self._shares(components)):
            behind = self._stage(replicas, components)[last][cut + 1]
            if max(ahead[components - replicas][cut - first], behind) <= whole * _ROUNDING:
                break
        parts = self.parts(first, cut, components - replicas)
        send = self._search.formula.cut(self._search.layers.passed[cut], self._level.bandwidth)
        parts[-1] = replace(parts[-1], send=send)
        return parts + self._replicated(cut + 1, last, replicas, self._level.count - components)

    def _row(self, first: int, cuts: list[float]) -> tuple[list[list[float]], list[list[float]]]:
        """A by components and last layer, for pipelines that begin here; and the larger of A and the cut behind it."""
        count, layers = self._level.count, self._search.layers.count
        values: list[list[float]] = [[] for _ in range(count + 1)]
        ahead: list[list[float]] = [[] for _ in range(count + 1)]
        for last in range(first, layers):
            for m in range(1, count + 1):
                best = self._stage(m, m)[last][first] if self._single(m) else math.inf
                for replicas in self._shares(m):
                    behind = self._stage(replicas, m)[last][first + 1 : last + 1]
                    best = min(best, min(map(max, ahead[m - replicas], behind), default=math.inf))
                values[m].append(best)
            for m in range(1, count + 1):
                ahead[m].append(max(values[m][-1], cuts[last]))
        return values, ahead

    def _single(self, components: int) -> bool:
        return components == 1 or not self._search.straight

    def _shares(self, components: int) -> range:
        """How many of these components the last of several stages may have."""
        return range(1, min(components, 2) if self._search.straight else components)

    def _stage(self, replicas: int, components: int) -> list[list[float]]:
        """T by last and first layer, of the stage on the last `replicas` of the first `components` components."""
        behind = self._level.count - components if self._search.formula.limited else 0
        key = (replicas, behind)
        if key in self._stages:
            return self._stages[key]
        layers, formula, bandwidth = self._search.layers, self._search.formula, self._level.bandwidth
        if self._below:
            inside = self._inside(replicas, behind).best
        else:
            inside = partial(formula.alone, layers, minibatches=minibatches_in_flight(replicas, behind + self._behind))
        self._stages[key] = [
            [
                formula.replicated(inside(first, last), layers.weights(first, last), replicas, bandwidth)
                for first in range(last + 1)
            ]
            for last in range(layers.count)
        ]
        return self._stages[key]

    def _inside(self, replicas: int, behind: int) -> _Table:
        """The table of the level below, for components of a stage with `behind` components of this level behind it."""
        return self._search.table(self._below, (behind * self._size + self._behind) / replicas, False)

    def _replicated(self, first: int, last: int, replicas: int, behind: int) -> list[_Part]:
        if self._below:
            parts = self._inside(replicas, behind).parts(first, last, self._below[-1].count)
        else:
            parts = [_Part(first, last)]
        weights = self._search.layers.weights(first, last)
        return [_shared(part, weights, replicas, self._level.bandwidth, self._search.formula) for part in parts]


def _shared(part: _Part, weights: float, replicas: int, bandwidth: float, formula: Formula) -> _Part:
    """A part of a stage with `replicas` replicas, which exchange `weights` bytes of weights."""
    exchange = formula.replicated(part.exchange, weights, replicas, bandwidth)
    return replace(part, replicas=part.replicas * replicas, exchange=exchange, send=part.send / replicas)


def _described(layers: Layers, parts: list[_Part], formula: Paper) -> tuple[PlannedStage, ...]:
    stages, behind = [], 0
    for part in reversed(parts):
        compute = layers.seconds(part.first, part.last) / part.replicas
        memory = layers.memory(part.first, part.last, minibatches_in_flight(part.replicas, behind))
        time = formula.together(compute, part.exchange)
        stages.append(PlannedStage(part.first, part.last, part.replicas, time, memory, compute, part.exchange, part.send))
        behind += part.replicas
    return tuple(reversed(stages))


def _data_parallel(layers: Layers, topology: Topology, formula: Paper) -> float:
    """Seconds for each minibatch with all layers on every device."""
    whole = _Part(0, layers.count - 1)
    for level in topology.levels:
        whole = _shared(whole, layers.weights(0, layers.count - 1), level.count, level.bandwidth, formula)
    return formula.together(layers.seconds(0, layers.count - 1) / whole.replicas, whole.exchange)


# Costs.


class Layers:
    """Sums over layers first..last, both included, in constant time."""

    def __init__(self, profile: Profile) -> None:
        self.count = len(profile.layers)
        self._seconds = _sums(layer.seconds for layer in profile.layers)
        self._weights = _sums(layer.weight_bytes for layer in profile.layers)
        self._kept = _sums(layer.kept_bytes for layer in profile.layers)
        self.passed = [layer.activation_bytes for layer in profile.layers]

    def seconds(self, first: int, last: int) -> float:
        """Forward and backward of these layers for one minibatch."""
        return self._seconds[last + 1] - self._seconds[first]

    def weights(self, first: int, last: int) -> float:
        """Bytes of their weights."""
        return self._weights[last + 1] - self._weights[first]

    def memory(self, first: int, last: int, minibatches_in_flight: int) -> float:
        """Bytes on a device with these layers while `in_flight` minibatches are in flight."""
        entering = self.passed[first - 1] if first else 0.0
        return minibatches_in_flight * (self.weights(first, last) + entering + self._kept[last + 1] - self._kept[first])


def _sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def minibatches_in_flight(replicas: int, behind: Fraction | int) -> int:
    """Minibatches in flight on each replica of a stage with `behind` devices behind it."""
    return math.ceil((replicas + behind) / Fraction(replicas))


class Formula(Protocol):
    """What the search minimises: the largest of the values of stages and cuts."""

    limited: bool  #: whether the value of a stage depends on how many devices are behind it

    def alone(self, layers: Layers, first: int, last: int, minibatches: int) -> float:
        """A device with these layers; infinite where they do not fit."""

    def replicated(self, inside: float, weights: float, replicas: int, bandwidth: float) -> float:
        """Replicas of a stage whose value on one device is `inside`."""

    def cut(self, passed: float, bandwidth: float) -> float:
        """A cut through which `passed` bytes pass."""


class Paper:
    """The formulas of the paper, and a limit of memory."""

    def __init__(self, memory: float | None = None) -> None:
        self.limited = memory is not None
        self._memory = math.inf if memory is None else memory

    def alone(self, layers: Layers, first: int, last: int, minibatches: int) -> float:
        fits = not self.limited or layers.memory(first, last, minibatches) <= self._memory
        return layers.seconds(first, last) if fits else math.inf

    def exchange(self, weights: float, replicas: int, bandwidth: float) -> float:
        """Seconds in which replicas exchange their updates."""
        return 2 * (replicas - 1) * weights / bandwidth

    def together(self, inside: float, exchange: float) -> float:
        """Seconds of work and exchange."""
        return max(inside, exchange)

    def replicated(self, inside: float, weights: float, replicas: int, bandwidth: float) -> float:
        return self.together(inside, self.exchange(weights, replicas, bandwidth)) / replicas

    def cut(self, passed: float, bandwidth: float) -> float:
        return 2 * passed / bandwidth


class Released(Paper):
    """The formulas of the code that came with the paper."""

    def exchange(self, weights: float, replicas: int, bandwidth: float) -> float:
        return 4 * (replicas - 1) / replicas * weights / bandwidth

    def together(self, inside: float, exchange: float) -> float:
        return inside + exchange


class LeastMemory:
    """Not time but the memory of the fullest device: the least that any plan needs."""

    limited = True

    def alone(self, layers: Layers, first: int, last: int, minibatches: int) -> float:
        return layers.memory(first, last, minibatches)

    def replicated(self, inside: float, weights: float, replicas: int, bandwidth: float) -> float:
        return inside

    def cut(self, passed: float, bandwidth: float) -> float:
        return 0.0


FORMULAS = {"paper": Paper, "released": Released}
