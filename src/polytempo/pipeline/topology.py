"""Devices and the links between them, as levels: devices in a host, hosts in a rack, and so on.

Every component of a level is built of as many components of the level below, so the text of a topology is short:

    16:10Gb/s               sixteen devices, each behind a link of 10 Gb/s
    4x4:12GB/s,10Gb/s       four devices to a host with 12 GB/s between them, four hosts with 10 Gb/s between them

The innermost level comes first, in counts and in bandwidths.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from polytempo.errors import UsageError, nearest

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS = {
    f"{prefix}{unit}/s": size * scale
    for prefix, size in _PREFIXES.items()
    for unit, scale in (("B", 1.0), ("b", 1 / 8), ("bit", 1 / 8))
}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)")
_EXAMPLE = "such as 4x4:12GB/s,10Gb/s"


@dataclass(frozen=True)
class Level:
    """So many components of the level below, each with a link of this bandwidth in bytes a second."""

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
    counts, colon, rates = text.partition(":")
    numbers, bandwidths = counts.strip().split("x"), [rate.strip() for rate in rates.split(",")]
    if not colon or not all(number.isascii() and number.isdigit() for number in numbers):
        raise UsageError(f"expected a topology COUNTxCOUNT:RATE,RATE {_EXAMPLE}, got {text!r}")
    if len(numbers) != len(bandwidths):
        raise UsageError(
            f"expected one bandwidth for each level of a topology {_EXAMPLE}, "
            f"got {len(numbers)} counts and {len(bandwidths)} bandwidths in {text!r}"
        )
    return Topology(tuple(Level(int(n), _rate(rate)) for n, rate in zip(numbers, bandwidths, strict=True)))


def _rate(text: str) -> float:
    match = _RATE.fullmatch(text)
    if match is None:
        raise UsageError(f"expected a bandwidth such as 10Gb/s or 12GB/s in a topology, got {text!r}")
    number, unit = match.groups()
    if unit and unit not in _UNITS:
        raise UsageError(f"expected a bandwidth in B/s or b/s such as 12GB/s or 10Gb/s, got {text!r}{nearest(unit, _UNITS)}")
    return float(number) * _UNITS.get(unit, 1.0)
