"""How a mode presents itself to the spec parser: its name, its argument, its options, how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import SpecError
from polytempo.sync.policy import Policy


@dataclass(frozen=True)
class Reader:
    """Reads one argument or option; `expected` is what the error says when it cannot."""

    expected: str
    read: Callable[[str], Any]


@dataclass(frozen=True)
class Mode:
    """One line of the table of modes. `build(workers, *argument, **options)` makes its policy."""

    name: str
    example: str
    meaning: str
    build: Callable[..., Policy]
    argument: Reader | None = None
    options: Mapping[str, Reader] = field(default_factory=dict)
    barrier: bool = False  #: applies rounds, not single pushes
    all_reduce: bool = True  #: a barrier mode that needs no server


def whole_number(name: str, at_least: int) -> Reader:
    """A whole number of at least `at_least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < at_least:
            raise ValueError(text)
        return int(text)

    return Reader(f"a whole number {name} of at least {at_least}", read)


def positive_number(name: str) -> Reader:
    """A finite number above zero."""

    def read(text: str) -> float:
        number = float(text)
        if not 0 < number < float("inf"):
            raise ValueError(text)
        return number

    return Reader(f"a number {name} above 0", read)


def _read_span(text: str) -> tuple[int, int]:
    lower, dots, upper = text.partition("..")
    bound = whole_number("", at_least=0)
    if not dots:
        raise ValueError(text)
    low, high = bound.read(lower), bound.read(upper)
    if low > high:
        raise SpecError(f"the lower bound {low} is above the upper bound {high}; write {high}..{low}")
    return low, high


#: Two whole numbers L..U with L <= U.
SPAN = Reader("two whole numbers L..U", _read_span)

#: The option of every mode that applies single pushes.
SCALE: Mapping[str, Reader] = {"scale": positive_number("scale")}
