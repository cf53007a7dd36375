"""A cluster as data: how fast workers are, when they stall, come and go, and what joins them.

All times are seconds, all sizes bytes, all rates bytes a second. Everything random comes from the seed of the run: a
`Duration` gives the seconds of a worker's next steps, a block at a time, so that the n-th step of a rank takes the same time
in every mode, and thousands of workers need no generator each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from random import Random
from typing import Annotated, Any, Protocol

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


@dataclass(frozen=True)
class Stall:
    """From `at` on a worker computes nothing for `seconds`."""

    worker: int
    at: TimeQuantity
    seconds: TimeQuantity


@dataclass(frozen=True)
class Hiccup:
    """Random stalls: each step of each worker takes longer with a probability.

    Args:
        probability: Of a stall, from 0 to 1.
        seconds: By how much the step is longer.
    """

    probability: float
    seconds: TimeQuantity


@dataclass(frozen=True)
class Arrival:
    """A worker joins at `at`: a new rank, or one that left or crashed before."""

    worker: int
    at: TimeQuantity


@dataclass(frozen=True)
class Departure:
    """From `at` on a worker finishes the step it is in, and leaves."""

    worker: int
    at: TimeQuantity


@dataclass(frozen=True)
class Crash:
    """A worker vanishes at `at`; the job notices `noticed_after` seconds later, or never (None)."""

    worker: int
    at: TimeQuantity
    noticed_after: TimeQuantity | None = 0.0


@dataclass(frozen=True)
class Link:
    """The network link of a worker: full duplex and its own, or one medium `shared` by all workers.

    Args:
        latency: Seconds.
        bandwidth: Bytes a second; None for no limit.
        shared: Whether all workers share one medium.
    """

    latency: TimeQuantity = 0.0
    bandwidth: RateQuantity | None = None  #: None: without limit
    shared: bool = False


@dataclass(frozen=True)
class Servers:
    """Parameter-server shards, each with a link of its own and a rate at which it applies updates."""

    shards: int = 1
    bandwidth: RateQuantity | None = None  #: of each shard's link; None: that of the workers' link
    update_rate: RateQuantity | None = None  #: bytes of updates a shard applies in a second; None: without limit


@dataclass(frozen=True)
class Hosts:
    """The grouping of workers into hosts, for hierarchical all-reduce.

    Args:
        size: Workers a host.
        latency: Seconds, inside a host.
        bandwidth: Bytes a second, inside a host; None for no limit.
    """

    size: int
    latency: TimeQuantity = 0.0
    bandwidth: RateQuantity | None = None


@dataclass(frozen=True)
class Cluster:
    """The cluster of a simulation. Times are seconds, sizes bytes, rates bytes a second.

    Args:
        workers: The number of workers at the start.
        step_time: Seconds a step, or a distribution of them such as `Lognormal`.
        slow: Rank to the factor by which its steps take longer.
        step_times: Rank to a step time of its own.
        batch: Samples a step.
        batches: Rank to a batch of its own.
        fixed_time: Of the step time, the seconds that a (micro-)step takes whatever its samples: a share of half a batch
            takes these and half of the rest.
        fixed_times: Rank to a fixed time of its own.
        hiccup: Random stalls of all workers.
        stalls: Stalls of single workers at given times.
        joins: Workers that join later.
        leaves: Workers that leave.
        crashes: Workers that crash, and when that is noticed.
        link: The link of every worker.
        links: Rank to a link of its own.
        servers: The shards of the parameter server.
        hosts: The grouping of workers into hosts.
        reduce_rate: Bytes a second that a worker adds up in all-reduce; None for no limit.
        model_bytes: The size of a gradient.

    Raises:
        ClusterError: A value is out of range, or names a rank that does not exist.
    """

    workers: int = 4
    step_time: Duration | float = 1.0
    slow: Mapping[int, float] = field(default_factory=dict)  #: rank to factor
    step_times: Mapping[int, Duration | float] = field(default_factory=dict)  #: rank to a step time of its own
    batch: int = 32  #: samples a step
    batches: Mapping[int, int] = field(default_factory=dict)  #: rank to a batch of its own
    fixed_time: TimeQuantity = 0.0  #: seconds of a (micro-)step whatever its samples, part of the step time
    fixed_times: Mapping[int, TimeQuantity] = field(default_factory=dict)  #: rank to a fixed time of its own
    hiccup: Hiccup | None = None
    stalls: tuple[Stall, ...] = ()
    joins: tuple[Arrival, ...] = ()
    leaves: tuple[Departure, ...] = ()
    crashes: tuple[Crash, ...] = ()
    link: Link = Link()
    links: Mapping[int, Link] = field(default_factory=dict)  #: rank to a link of its own
    servers: Servers = Servers()
    hosts: Hosts | None = None
    reduce_rate: RateQuantity | None = None  #: bytes a worker adds up in a second, in all-reduce; None: without limit
    model_bytes: SizeQuantity = 0.0

    def __post_init__(self) -> None:
        require(self.workers >= 1, f"expected at least 1 worker, got {self.workers}")
        require(self.servers.shards >= 1, f"expected at least 1 server shard, got {self.servers.shards}")
        whole, fixed = as_duration(self.step_time), [self.fixed_time, *self.fixed_times.values()]
        require(min(fixed) >= 0, "expected a fixed time of a step of at least 0 seconds")
        if isinstance(whole, Constant) and not self.step_times and max(fixed) > whole.seconds:
            raise ClusterError(
                f"the fixed time of a step is part of its step time; expected at most {whole.seconds:g} s, "
                f"got {max(fixed):g} s"
            )
        for rank, factor in self.slow.items():
            require(factor > 0, f"expected a slow-down above 0 for worker {rank}, got {factor}")
        bandwidths = [link.bandwidth for link in (self.link, *self.links.values())]
        bandwidths += [self.servers.bandwidth, self.servers.update_rate, self.reduce_rate]
        for bandwidth in (*bandwidths, self.hosts.bandwidth if self.hosts else None):
            require(bandwidth is None or bandwidth > 0, f"expected a bandwidth above 0, got {bandwidth}")
        if self.hiccup:
            probability = self.hiccup.probability
            require(0 <= probability <= 1, f"expected a hiccup probability from 0 to 1, got {probability}")
        if self.hosts:
            require(self.hosts.size >= 1, f"expected at least 1 worker a host, got {self.hosts.size}")
        smallest = min([self.batch, *self.batches.values()])
        require(smallest >= 1, f"expected a batch of at least 1 sample, got {smallest}")
        self._check_ranks()

    def ranks(self) -> range:
        """All ranks that ever take part."""
        return range(max([self.workers - 1, *(join.worker for join in self.joins)]) + 1)

    def duration(self, rank: int) -> Duration:
        """The step time of a rank, before its slow-down."""
        return as_duration(self.step_times.get(rank, self.step_time))

    def _check_ranks(self) -> None:
        known = self.ranks()
        for place in (one.name for one in fields(self) if one.name != "joins"):
            for rank in _ranks_in(getattr(self, place)):
                require(rank in known, f"{place} names worker {rank}; the ranks are 0 to {known[-1]}")
        joining = [join.worker for join in self.joins]
        returning = {*_ranks_in(self.leaves), *_ranks_in(self.crashes)}
        for rank in joining:
            stays = rank < self.workers and rank not in returning
            require(not stays, f"joins names worker {rank}, which is there from the start and never leaves")
        missing = set(known) - set(range(self.workers)) - set(joining)
        if missing:
            raise ClusterError(f"joins must use the next free ranks; no worker has rank {min(missing)}")


def _ranks_in(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, tuple):
        return [event.worker for event in value]
    return []
