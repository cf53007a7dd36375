"""The one syntax of everything that is chosen by a text: `name[:argument][,option=value]...`.

    ssp:3,lr=staleness      a synchronisation mode (`sync/spec.py`)
    topk:0.01+bf16          compression: two such texts with a plus between them (`compression/chain.py`)
    gpipe,recompute=0       a pipeline schedule (`pipeline/schedules.py`)
    uniform:0.1             initial values of a table (`tables/initializers.py`)
    4x4:12GB/s,10Gb/s       a topology: counts, then a bandwidth for each (`pipeline/topology.py`); split here, read there

Each of them is a table from names to a `Syntax`; `parse` reads a text by such a table. A name without an argument may have
its options behind the colon: `downpour:push=5,fetch=5` is `downpour,push=5,fetch=5`. A refusal is one line: expected,
got, what to write, the known names and the nearest of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polytempo.errors import UsageError, closest, nearest

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class ArgumentReader:
    """Reads one argument or value: `read` raises `ValueError` for a text that is not what is `expected`."""

    expected: str
    read: Callable[[str], Any]
    example: str = "2"


@dataclass(frozen=True)
class Syntax:
    """What may follow one name; `example` is a whole text with that name."""

    example: str
    argument: ArgumentReader | None = None
    argument_required: bool = True
    options: Mapping[str, ArgumentReader] = field(default_factory=dict)


class ParsedText(NamedTuple):
    """A text that was read: `argument` is None where none was given."""

    name: str
    argument: Any
    options: dict[str, Any]


class SplitText(NamedTuple):
    """A text cut at its first colon and its commas, not interpreted."""

    name: str
    colon: str
    argument: str
    items: list[str]


def split(text: str) -> SplitText:
    """Cut a text at the colon behind its name and at its commas."""
    head, *items = (part.strip() for part in text.strip().split(","))
    name, colon, argument = head.partition(":")
    return SplitText(name, colon, argument, items)


def parse(
    text: str,
    what: str,
    known: Mapping[str, Syntax],
    *,
    error: type[UsageError] = UsageError,
) -> ParsedText:
    """Read a text by a table of names.

    Args:
        text: what the user wrote.
        what: the noun for errors, such as "pipeline schedule".
        known: the table.
        error: the class of errors to raise.

    Raises:
        UsageError: (or `error`) the text cannot be read; one line says why and what to write.
    """
    name, colon, argument, _ = split(text)
    if name not in known:
        raise error(_unknown(text, name, colon + argument, what, known))
    return read_after(name, text.strip()[len(name) :], known[name], error)


def read_after(name: str, rest: str, syntax: Syntax, error: type[UsageError] = UsageError) -> ParsedText:
    """Read what follows a name, which may have a colon in it: the argument and the options.

    Raises:
        UsageError: (or `error`) it cannot be read; one line says why and what to write.
    """
    _, colon, argument, items = split(rest)
    if syntax.argument is None and "=" in argument:
        items, colon, argument = [argument, *items], "", ""
    return ParsedText(name, _argument(name, colon, argument, syntax, error), _options(name, items, syntax.options, error))


def _argument(name: str, colon: str, argument: str, syntax: Syntax, error: type[UsageError]) -> Any:
    head = f"{name}{colon}{argument}"
    if syntax.argument is None:
        if colon:
            raise error(f"{name} takes no argument, got {head!r}; write {syntax.example}")
        return None
    if not colon and not syntax.argument_required:
        return None
    if not argument:
        raise error(f"{name} needs {syntax.argument.expected}; write for example {syntax.example}")
    return _read(syntax.argument, argument, f"in {head!r}", syntax.example, error)


def _options(name: str, items: list[str], known: Mapping[str, ArgumentReader], error: type[UsageError]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in items:
        option, equals, value = item.partition("=")
        reader = known.get(option)
        if reader is None:
            raise error(f"{name} has no option {option!r}; known: {', '.join(known) or 'none'}{nearest(option, known)}")
        if not equals or option in options:
            raise error(f"option {option!r} of {name} must be given once, as {option}=VALUE; got {item!r}")
        options[option] = _read(reader, value, f"for option {option!r} of {name}", f"{option}={reader.example}", error)
    return options


def _read(reader: ArgumentReader, text: str, where: str, example: str, error: type[UsageError]) -> Any:
    try:
        return reader.read(text)
    except UsageError as problem:  # the reader knows better than `expected` what is wrong
        raise error(f"{where}: {problem}") from None
    except ValueError:
        raise error(f"expected {reader.expected} {where}, got {text!r}; write for example {example}") from None


def _unknown(text: str, name: str, rest: str, what: str, known: Mapping[str, Syntax]) -> str:
    examples = ", ".join(syntax.example for syntax in known.values())
    meant = closest(name.lower(), known)
    fix = f"; nearest: {_readable(meant, rest, known[meant])}" if meant else ""
    return f"unknown {what} {text!r}{fix}; known: {examples}"


def _readable(name: str, rest: str, syntax: Syntax) -> str:
    """The name with what was written behind it, if it can be read; else its example."""
    try:
        parse(name + rest, "", {name: syntax})
    except UsageError:
        return syntax.example
    return name + rest


# Readers of single values.


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
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
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


def choice(name: str, known: tuple[str, ...]) -> ArgumentReader:
    """One of these words."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(text)
        return text

    return ArgumentReader(f"{name} to be {' or '.join(known)}", read, known[0])


def switch(example: str = "1") -> ArgumentReader:
    """0 or 1, for off and on."""

    def read(text: str) -> bool:
        if text not in ("0", "1"):
            raise ValueError(text)
        return text == "1"

    return ArgumentReader("0 or 1", read, example)
