"""The one parser of sizes, rates and durations: 100MB, 1Gb/s, 0.5ms. Plain numbers are bytes, bytes a second, seconds.

An unknown unit is refused with the nearest known one. `parse_factors`, `parse_hiccup` and `parse_link` read what is built of
them.
"""

from __future__ import annotations

import math
import re

from polytempo.errors import ClusterError, nearest

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_SIZES = {
    f"{prefix}{unit}": value * scale for prefix, value in _PREFIXES.items() for unit, scale in (("B", 1), ("b", 1 / 8))
}
_RATES = {f"{unit}/s": value for unit, value in _SIZES.items()} | {
    f"{prefix}bit/s": value / 8 for prefix, value in _PREFIXES.items()
}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}

#: The slowest link, in bytes a second, and the longest latency, in seconds, that `--link` takes.
SLOWEST_LINK, LONGEST_LATENCY = 1e6 / 8, 1.0

_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def parse_size(value: object, what: str = "a size") -> float:
    """Bytes; `b` is bits."""
    return _parse(value, _SIZES, what, "100MB")


def parse_rate(value: object, what: str = "a rate") -> float:
    """Bytes a second; `b` and `bit` are bits."""
    return _parse(value, _RATES, what, "1Gb/s or 125MB/s")


def parse_seconds(value: object, what: str = "a time") -> float:
    """Seconds."""
    return _parse(value, _TIMES, what, "0.1 or 5ms")


def _parse(value: object, units: dict[str, float], what: str, example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        unit = match[2] if match else ""
        if match is None or (unit and unit not in units):
            raise ClusterError(f"expected {what} such as {example}, got {value!r}{nearest(unit, units)}")
        try:
            number = float(match[1]) * units.get(unit, 1.0)
        except ValueError:
            raise ClusterError(f"expected {what} such as {example}, got {value!r}") from None
    if not 0 <= number < math.inf:
        raise ClusterError(f"expected {what} of at least 0, got {value!r}")
    return number


def parse_factors(text: str) -> dict[int, float]:
    """`3:2.5,7:2` as {3: 2.5, 7: 2.0}: ranks and how many times slower they are."""
    factors: dict[int, float] = {}
    for part in text.split(","):
        rank, _, factor = part.partition(":")
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise ClusterError(f"expected RANK:FACTOR,... such as 3:2.5, got {part!r}") from None
    return factors


def parse_hiccup(text: str) -> tuple[float, float]:
    """PROBABILITY:SECONDS of a passing stall in each step, such as 0.05:10 or 0.05:300ms."""
    probability, _colon, seconds = text.partition(":")
    try:
        share, length = float(probability), parse_seconds(seconds, "--hiccup")
    except (ValueError, ClusterError):
        share, length = -1.0, 0.0
    if not 0 <= share <= 1:
        raise ClusterError(f"expected PROBABILITY:SECONDS such as 0.05:300ms for --hiccup, got {text!r}")
    return share, length


def parse_links(text: str) -> tuple[tuple[float, float], dict[int, float]]:
    """BANDWIDTH[,LATENCY][,RANK:BANDWIDTH,...] such as 1Gb/s,3:20Mb/s: the link of every worker, and the bytes a second of
    those that have another one."""
    parts = text.split(",")
    own: dict[int, float] = {}
    while len(parts) > 1 and ":" in parts[-1]:
        rank, _, rate = parts.pop().partition(":")
        if not rank.isdigit():
            raise ClusterError(f"expected RANK:BANDWIDTH such as 3:20Mb/s for --link, got {rank}:{rate}")
        own[int(rank)] = parse_link(rate)[0]
    return parse_link(",".join(parts)), own


def parse_link(text: str) -> tuple[float, float]:
    """BANDWIDTH[,LATENCY] such as 100Mb/s or 100Mb/s,5ms: bytes a second, and seconds one way."""
    bandwidth, comma, latency = text.partition(",")
    what = "BANDWIDTH[,LATENCY] such as 100Mb/s or 100Mb/s,5ms for --link"
    try:
        rate, seconds = parse_rate(bandwidth), parse_seconds(latency) if comma else 0.0
    except ClusterError as error:
        raise ClusterError(f"expected {what}, got {text!r}: {error}") from None
    if rate < SLOWEST_LINK or seconds > LONGEST_LATENCY:
        limits = f"at least {SLOWEST_LINK * 8 / 1e6:g}Mb/s and at most {LONGEST_LATENCY:g}s"
        raise ClusterError(f"expected {what}, {limits}, got {text!r}")
    return rate, seconds


def plain_number(value: float, figures: int = 4) -> str:
    """Up to this number of figures, without powers of ten up to 1e15: 66070, 512.3, 4, 0.03125, 0.000012."""
    text = f"{value:.{figures}g}"
    if "e" not in text or abs(value) >= 1e15:
        return text
    decimals = 0 if abs(value) >= 1 else figures - 1 - math.floor(math.log10(abs(value)))
    return f"{float(text):.{decimals}f}".rstrip("0") if decimals else f"{value:.0f}"


def written_rate(bytes_a_second: float) -> str:
    """A link's rate in bits, as networks are sold: 1 Gb/s, 100 Mb/s."""
    bits = 8 * bytes_a_second
    unit, scale = next((one for one in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)) if bits >= one[1]), ("b/s", 1.0))
    return f"{plain_number(bits / scale)} {unit}"


def written_bytes(number: float) -> str:
    """Bytes in three digits: 1.25 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f} B"


def written_seconds(seconds: float) -> str:
    """Seconds in three digits: 12.5 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"
