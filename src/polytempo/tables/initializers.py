"""Initial values of a row: numbers that depend on (seed, id, column) and on nothing else.

So a row is the same on any shard of any number of shards, after a restart, and in any batch in which it is first pulled, and
a row without a push needs no memory. The numbers are a hash of the three (the finaliser of splitmix64), made in
blocks. "normal" goes through the machine's log, cos and sin: different kinds of machines may differ in the last bit there.
"""

from __future__ import annotations

import math

import numpy
import numpy.typing
import torch

from polytempo.options import Syntax, number, parse

Words = numpy.typing.NDArray[numpy.uint64]
Numbers = numpy.typing.NDArray[numpy.float64]

#: Numbers that are made at once: they stay in the cache through all the steps of the hash.
BLOCK = 1 << 14
GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


def check_start(text: str) -> None:
    """Refuse a start that cannot be read."""
    _read(text, 1)


def start_values(start: str, seed: int, ids: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The first values of these rows."""
    name, scale = _read(start, dim)
    result = torch.zeros((ids.numel(), dim), dtype=dtype)
    if name == "zeros" or not dim:
        return result
    make = _uniform if name == "uniform" else _normal
    mixed = mix(numpy.array([((seed & WORD) + GOLDEN) & WORD], dtype=numpy.uint64))
    keys = mix(ids.numpy().astype(numpy.uint64) + mixed[0])
    rows = max(1, BLOCK // dim)
    for first in range(0, ids.numel(), rows):
        result[first : first + rows] = torch.from_numpy(make(keys[first : first + rows], dim, scale))
    return result


def mix(words: Words) -> Words:
    """Each word hashed, in place: every bit of it decides about every bit of the result."""
    words ^= words >> numpy.uint64(30)
    words *= numpy.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> numpy.uint64(27)
    words *= numpy.uint64(0x94D049BB133111EB)
    words ^= words >> numpy.uint64(31)
    return words


def _units(keys: Words, columns: int) -> Numbers:
    """From 0 to 1, without 1."""
    words: Words = keys[:, None] + numpy.arange(1, columns + 1, dtype=numpy.uint64) * numpy.uint64(GOLDEN)
    numbers: Numbers = (mix(words) >> numpy.uint64(11)).astype(numpy.float64)
    numbers *= 2.0**-53
    return numbers


def _uniform(keys: Words, dim: int, bound: float) -> Numbers:
    numbers = _units(keys, dim)
    numbers *= 2 * bound
    numbers -= bound
    return numbers


def _normal(keys: Words, dim: int, deviation: float) -> Numbers:
    """Two normal numbers from two uniform ones (Box and Muller)."""
    pairs = (dim + 1) // 2
    units = _units(keys, 2 * pairs)
    radius = numpy.sqrt(-2.0 * numpy.log1p(-units[:, 0::2])) * deviation
    angle = units[:, 1::2] * (2 * math.pi)
    numbers: Numbers = numpy.empty((len(keys), 2 * pairs))
    numbers[:, 0::2] = radius * numpy.cos(angle)
    numbers[:, 1::2] = radius * numpy.sin(angle)
    return numbers[:, :dim]


_SCALE = number("a number above 0", lambda scale: scale > 0, "0.1")
_SYNTAX = {
    "zeros": Syntax("zeros"),
    "uniform": Syntax("uniform:0.1", _SCALE, argument_required=False),
    "normal": Syntax("normal:0.01", _SCALE),
}


def _read(text: str, dim: int) -> tuple[str, float]:
    """The name of the initial values, and their scale: by default 1 / sqrt(dim) for uniform ones."""
    choice = parse(text, "start", _SYNTAX)
    return choice.name, 1 / math.sqrt(max(dim, 1)) if choice.argument is None else choice.argument
