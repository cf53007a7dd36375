"""Which chain pushes and which answers go through.

A cast given as a bare text is for both directions. A selection is for pushes alone: what it leaves out of an answer a worker
would miss, so who wants that must say so with {"push": ..., "pull": ...}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polytempo.errors import UsageError, WrongType, nearest
from polytempo.filters.chain import ChainSpec, parse_chain

DIRECTIONS = ("push", "pull")


@dataclass(frozen=True)
class Compression:
    """The chain of each direction."""

    push: ChainSpec
    pull: ChainSpec

    @property
    def is_lossless(self) -> bool:
        """Does everything arrive as it was, both ways?"""
        return self.push.is_lossless and self.pull.is_lossless

    def __str__(self) -> str:
        return self.push.text if self.push == self.pull else f"push {self.push}, pull {self.pull}"


def parse_compression(given: str | Mapping[str, str] | None) -> Compression:
    """Read `compression=`: a chain, one for each direction, or nothing."""
    if given is None:
        return Compression(parse_chain("none"), parse_chain("none"))
    if isinstance(given, str):
        chain = parse_chain(given)
        return Compression(chain, parse_chain("none") if chain.selects else chain)
    if not isinstance(given, Mapping):
        expected = 'expected a text such as "bf16" or {"push": "topk:0.01", "pull": "bf16"}'
        raise WrongType(f"{expected} as compression, got {type(given).__name__}")
    for direction in given:
        if direction not in DIRECTIONS:
            near = nearest(str(direction).lower(), DIRECTIONS)
            raise UsageError(f"unknown direction {direction!r} of compression{near}; known: {', '.join(DIRECTIONS)}")
    return Compression(*(_of(given, direction) for direction in DIRECTIONS))


def _of(given: Mapping[str, str], direction: str) -> ChainSpec:
    text = given.get(direction, "none")
    if not isinstance(text, str):
        raise WrongType(f'expected a text such as "bf16" as compression of {direction}, got {type(text).__name__}')
    return parse_chain(text)
