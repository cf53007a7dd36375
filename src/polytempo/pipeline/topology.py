"""Devices and the links between them, as levels: devices in a host, hosts in a rack, and so on.

Every component of a level is built of as many components of the level below, so the text of a topology is short:

    16:10Gb/s               sixteen devices, each behind a link of 10 Gb/s
    4x4:12GB/s,10Gb/s       four devices to a host with 12 GB/s between them, four hosts with 10 Gb/s between them

The innermost level comes first, in counts and in bandwidths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polytempo.errors import UsageError
from polytempo.options import split
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
