"""What a stage costs: the two published formulas, and memory.

A stage of m replicas, each of which takes `inside` seconds for a minibatch and has weights of w bytes, behind links of B:

    paper       max(inside, 2 (m - 1) w / B) / m          updates travel while the next minibatch is worked on
    released    (inside + 4 (m - 1) / m w / B) / m        the code that came with the paper: one after the other, in a ring

The paper's first term of m - 1 is that of a server or of an exchange of all with all; a ring sends 2 (m - 1) / m. A cut
costs 2 a / B in both: activations of a bytes forward, and as many bytes of gradients back. The released code divides that
by the replicas behind the cut and counts it only where told to; here it is always counted, and whole, as in the paper.

Memory of a device is what all minibatches under way keep: for each, one version of the weights and one set of activations,
the stage's input among them. By 1F1B with minibatches in turn, as many are under way at each replica as there are devices in
this stage and behind it, divided by the stage's replicas and rounded up. Gradients and optimizer state are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

from polytempo.pipeline.layer_profile import Profile


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

    def memory(self, first: int, last: int, in_flight: int) -> float:
        """Bytes that a device with these layers keeps while so many minibatches are under way."""
        entering = self.passed[first - 1] if first else 0.0
        return in_flight * (self.weights(first, last) + entering + self._kept[last + 1] - self._kept[first])


def _sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def in_flight(replicas: int, behind: Fraction | int) -> int:
    """Minibatches under way at each replica of a stage with so many devices behind it."""
    return math.ceil((replicas + behind) / Fraction(replicas))


class Formula(Protocol):
    """What the search makes least: the largest of the values of stages and cuts."""

    limited: bool  #: whether the value of a stage depends on how many devices are behind it

    def alone(self, layers: Layers, first: int, last: int, minibatches: int) -> float:
        """A device with these layers; infinite where that cannot be."""

    def replicated(self, inside: float, weights: float, replicas: int, bandwidth: float) -> float:
        """Replicas of what alone has the value `inside`."""

    def cut(self, passed: float, bandwidth: float) -> float:
        """A cut through which so many bytes pass."""


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
    """Not time but the memory of the fullest device: says what a plan needs at least."""

    limited = True

    def alone(self, layers: Layers, first: int, last: int, minibatches: int) -> float:
        return layers.memory(first, last, minibatches)

    def replicated(self, inside: float, weights: float, replicas: int, bandwidth: float) -> float:
        return inside

    def cut(self, passed: float, bandwidth: float) -> float:
        return 0.0


FORMULAS = {"paper": Paper, "released": Released}
