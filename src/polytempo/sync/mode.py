"""How a mode presents itself to the spec parser: its name, its argument, its options, how it is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polytempo.errors import SpecError
from polytempo.sync.policy import Policy


@dataclass(frozen=True)
class ArgumentReader:
    """Reads one argument or option; `expected` is what the error says when it cannot."""

    expected: str
    read: Callable[[str], Any]
    example: str = "2"


@dataclass(frozen=True)
class Mode:
    """One line of the table of modes. `build(workers, *argument, **options)` makes its policy.

    What is in `rule_options` is for the update rule on the servers; the policy does not see it.
    """

    name: str
    example: str
    meaning: str
    build: Callable[..., Policy]
    argument: ArgumentReader | None = None
    options: Mapping[str, ArgumentReader] = field(default_factory=dict)
    barrier: bool = False  #: applies rounds, not single pushes
    all_reduce: bool = True  #: a barrier mode that needs no server
    rule: str = ""  #: the update rule that servers use instead of the given optimizer's
    rule_options: Mapping[str, ArgumentReader] = field(default_factory=dict)


def whole_number(name: str, at_least: int, example: str = "2") -> ArgumentReader:
    """A whole number of at least `at_least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < at_least:
            raise ValueError(text)
        return int(text)

    return ArgumentReader(f"a whole number {name} of at least {at_least}", read, example)


def number(expected: str, fits: Callable[[float], bool], example: str = "2") -> ArgumentReader:
    """A finite number that fits."""

    def read(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and fits(value)):
            raise ValueError(text)
        return value

    return ArgumentReader(expected, read, example)


def positive_number(name: str, example: str = "2") -> ArgumentReader:
    """A finite number above zero."""
    return number(f"a number {name} above 0", lambda value: value > 0, example)


def fraction(name: str, example: str = "0.9") -> ArgumentReader:
    """A number from 0 up to 1, but not 1."""
    return number(f"a number {name} of at least 0 and below 1", lambda value: 0 <= value < 1, example)


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
SPAN = ArgumentReader("two whole numbers L..U", _read_span)

#: The option of every mode that applies single pushes.
SCALE: Mapping[str, ArgumentReader] = {"scale": positive_number("scale")}
