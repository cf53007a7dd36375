"""How long a step takes: a constant, a distribution, a trace; and how stalls stretch it.

A `Duration` is data. `draw` gives the seconds of a worker's next steps, a block at a time: the n-th step of a rank takes the
same time in every mode and in every run of the same seed, and thousands of workers need no generator each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Annotated, Protocol

from polytempo.errors import ClusterError

#: Numbers that a description may give with a unit (`description.py`).
TimeQuantity = Annotated[float, "time"]
SizeQuantity = Annotated[float, "size"]
RateQuantity = Annotated[float, "rate"]


class Duration(Protocol):
    """Data from which the seconds of steps are drawn."""

    def draw(self, random: Random, first: int, count: int) -> list[float]:
        """The seconds of `count` steps from number `first` on."""


def require(condition: bool, text: str) -> None:
    """Refuse a cluster that does not meet this."""
    if not condition:
        raise ClusterError(text)


@dataclass(frozen=True)
class Constant:
    """A constant step time.

    Args:
        seconds: Of every step.
    """

    seconds: TimeQuantity

    def __post_init__(self) -> None:
        require(0 < self.seconds < math.inf, f"expected a step time above 0, got {self.seconds}")

    def draw(self, random: Random, first: int, count: int) -> list[float]:
        return [self.seconds] * count


@dataclass(frozen=True)
class Lognormal:
    """A log-normal step time, skewed to the long side.

    Args:
        mean: Seconds.
        spread: The standard deviation over the mean.
    """

    mean: TimeQuantity
    spread: float

    def __post_init__(self) -> None:
        require(self.mean > 0, f"expected a mean above 0, got {self.mean}")
        require(self.spread >= 0, f"expected a spread of at least 0, got {self.spread}")

    def draw(self, random: Random, first: int, count: int) -> list[float]:
        variance = math.log(1 + self.spread**2)
        mu, sigma = math.log(self.mean) - variance / 2, math.sqrt(variance)
        return [math.exp(random.gauss(mu, sigma)) for _ in range(count)]


@dataclass(frozen=True)
class Uniform:
    """Anything between `low` and `high`."""

    low: TimeQuantity
    high: TimeQuantity

    def __post_init__(self) -> None:
        require(0 < self.low <= self.high, f"expected 0 < low <= high, got {self.low} and {self.high}")

    def draw(self, random: Random, first: int, count: int) -> list[float]:
        return [random.uniform(self.low, self.high) for _ in range(count)]


@dataclass(frozen=True)
class Exponential:
    """At least `base` seconds, and an exponential rest that makes up the mean."""

    mean: TimeQuantity
    base: TimeQuantity = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.base < self.mean, f"expected 0 <= base < mean, got {self.base} and {self.mean}")

    def draw(self, random: Random, first: int, count: int) -> list[float]:
        rate = 1 / (self.mean - self.base)
        return [self.base + random.expovariate(rate) for _ in range(count)]


@dataclass(frozen=True)
class Trace:
    """Measured seconds, step by step; starts again at its end."""

    seconds: tuple[TimeQuantity, ...]

    def __post_init__(self) -> None:
        require(bool(self.seconds) and min(self.seconds) > 0, "expected a trace of numbers above 0")

    def draw(self, random: Random, first: int, count: int) -> list[float]:
        return [self.seconds[(first + step) % len(self.seconds)] for step in range(count)]


def as_duration(value: Duration | float) -> Duration:
    """Plain seconds are constant."""
    return Constant(float(value)) if isinstance(value, int | float) else value


def stretched(start: float, seconds: float, stalls: list[tuple[float, float]]) -> float:
    """When work of `seconds` that begins at `start` is done, if nothing is done during `stalls` (from, to), sorted."""
    end = start + seconds
    for begin, until in stalls:
        if begin >= end:
            break
        if until > start:
            end += until - max(begin, start)
            start = until
    return end
