"""Fields: what a mode that users bring tells its workers, and what its workers measure. Names and types are declared.

    tells = {"pull": float}      Release(worker, step, slowest, fields(pull=0.3))     the policy tells a worker
    measures = {"drift": int}    PushStep(fields(drift=2))                            a machine tells the policy

On the wire both are this one type. What arrives is looked at before it is read: names, types and sizes are as the mode has
declared them, or the message is refused. Tensors are no fields: they are moved by orders (`machine.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import msgspec

Scalar = bool | int | float | str

#: Fields of one release or push, and characters of a name or a text, at most.
MOST_FIELDS, MOST_CHARACTERS = 64, 1024

#: The types that a field may be declared with, by what a message calls them.
TYPES: dict[type, str] = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}


class Fields(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Names and values, in the order given. `told["pull"]` reads one."""

    pairs: tuple[tuple[str, Scalar], ...] = ()

    def __getitem__(self, name: str) -> Scalar:
        return dict(self.pairs)[name]

    def get(self, name: str, default: Scalar) -> Scalar:
        """The value of this name, or `default`."""
        return dict(self.pairs).get(name, default)

    def number(self, name: str) -> float:
        """The value of a field that is declared as a number."""
        return float(cast(float, self[name]))


def fields(**values: Scalar) -> Fields:
    """Fields of these names and values."""
    return Fields(tuple(values.items()))


def trouble(told: Fields | None, declared: Mapping[str, type]) -> str:
    """What is wrong with fields, given what their mode declares; empty where nothing is."""
    if told is None:
        return ""
    if len(told.pairs) > MOST_FIELDS:
        return f"{len(told.pairs)} fields, at most {MOST_FIELDS} are allowed"
    for name, value in told.pairs:
        kind = declared.get(name)
        if kind is None:
            return f"a field {name[:40]!r} that it does not declare (declared: {', '.join(declared) or 'none'})"
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            return f"{name}={str(value)[:40]!r}, and declares {name} as {TYPES[kind]}"
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            return f"a text of {len(value)} characters in {name}, at most {MOST_CHARACTERS} are allowed"
    if len({name for name, _ in told.pairs}) < len(told.pairs):
        return "a field twice"
    return ""
