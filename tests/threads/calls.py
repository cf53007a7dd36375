"""Every collective as data: what a rank hands in, what must come out, and what must stay as it was.

Numbers are chosen so that every dtype holds every result exactly, in whatever order it is computed: so results are compared
bit for bit with those of a serial loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any

import torch

from polytempo.collectives.group import RankGroup
from polytempo.collectives.plans import PLANS
from polytempo.collectives.tasks import Task

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]
OPS = ["sum", "mean", "min", "max", "prod", "band", "bor", "bxor"]
COMBINES = ("all_reduce", "reduce", "reduce_scatter")

_COMBINE: dict[str, Any] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def means_something(op: str, dtype: torch.dtype) -> bool:
    number = dtype.is_floating_point or dtype.is_complex
    if op in ("band", "bor", "bxor"):
        return not number
    if op == "mean":
        return dtype != torch.bool
    return not (op in ("min", "max", "prod") and dtype.is_complex)  # the parts of complex numbers travel apart


def values(dtype: torch.dtype, shape: int | tuple[int, ...], seed: int, op: str = "sum") -> torch.Tensor:
    """Some small numbers."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape,) if isinstance(shape, int) else shape
    if dtype.is_complex:
        few = torch.tensor([1 + 2j, -3 + 4j, 5 - 6j, -7j], dtype=dtype)
        return few[torch.randint(0, len(few), size, generator=generator)]
    if op == "prod" and dtype != torch.bool:
        return torch.randint(1, 3, size, generator=generator).to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (0, 100) if dtype == torch.uint8 else (-8, 8)
    return torch.randint(low, high, size, generator=generator).to(dtype)


def combined(op: str, terms: list[torch.Tensor]) -> torch.Tensor:
    """All terms, one after another."""
    whole: torch.Tensor = fold(_COMBINE[op], terms).clone()
    if op == "mean":
        rounding = "trunc" if whole.dtype in INTEGERS else None
        (torch.view_as_real(whole) if whole.is_complex() else whole).div_(len(terms), rounding_mode=rounding)
    return whole


@dataclass
class Made:
    """A call that a rank has made."""

    task: Task
    wanted: list[torch.Tensor] = field(default_factory=list)
    got: list[torch.Tensor] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    untouched: list[torch.Tensor] = field(default_factory=list)

    def check(self, about: object = "") -> list[torch.Tensor]:
        """Wait, and compare; what came out."""
        self.task.wait()
        for got, wanted in zip(self.got, self.wanted, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted), f"{about}: {got} and not {wanted}"
        for now, before in zip(self.untouched, self.before, strict=True):
            assert torch.equal(now, before), f"{about}: an input was changed from {before} to {now}"
        return self.got


@dataclass(frozen=True)
class Call:
    """One collective, on `size` elements: each rank's, where it hands in one tensor, or of each tensor of a list."""

    collective: str
    algorithm: str = "auto"
    size: int = 5
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    root: int = 0
    seed: int = 0

    def values(self, rank: int, to: int = 0) -> torch.Tensor:
        """What a rank hands in, or has for another."""
        return values(self.dtype, self.size, 1000 * self.seed + 31 * rank + to, self.op)

    def empty(self) -> torch.Tensor:
        """Something that must be overwritten."""
        return torch.ones(self.size, dtype=self.dtype)

    def make(self, group: RankGroup, background: bool = False) -> Made:
        """Make the call; ranks are the group's."""
        made: Made = getattr(self, f"_{self.collective}")(group, background)
        return made

    def _all_reduce(self, group: RankGroup, background: bool) -> Made:
        mine = self.values(group.rank)
        wanted = combined(self.op, [self.values(rank) for rank in range(group.size)])
        return Made(group.all_reduce([mine], self.op, self.algorithm, background), [wanted], [mine])

    def _reduce(self, group: RankGroup, background: bool) -> Made:
        mine = self.values(group.rank)
        made = Made(group.reduce(mine, self.root, self.op, self.algorithm, background))
        if group.rank == self.root:
            made.wanted = [combined(self.op, [self.values(rank) for rank in range(group.size)])]
            made.got = [mine]
        else:
            made.before, made.untouched = [self.values(group.rank)], [mine]
        return made

    def _broadcast(self, group: RankGroup, background: bool) -> Made:
        mine = self.values(group.rank)
        return Made(group.broadcast([mine], self.root, self.algorithm, background), [self.values(self.root)], [mine])

    def _all_gather(self, group: RankGroup, background: bool) -> Made:
        mine, outputs = self.values(group.rank), [self.empty() for _ in range(group.size)]
        wanted = [self.values(rank) for rank in range(group.size)]
        task = group.all_gather(outputs, mine, self.algorithm, background)
        return Made(task, wanted, outputs, [self.values(group.rank)], [mine])

    def _gather(self, group: RankGroup, background: bool) -> Made:
        at_root = group.rank == self.root
        mine, outputs = self.values(group.rank), [self.empty() for _ in range(group.size)] if at_root else None
        task = group.gather(outputs, mine, self.root, self.algorithm, background)
        wanted = [self.values(rank) for rank in range(group.size)] if at_root else []
        return Made(task, wanted, outputs or [], [self.values(group.rank)], [mine])

    def _scatter(self, group: RankGroup, background: bool) -> Made:
        output = self.empty()
        inputs = [self.values(self.root, rank) for rank in range(group.size)] if group.rank == self.root else None
        task = group.scatter(output, inputs, self.root, self.algorithm, background)
        before = [piece.clone() for piece in inputs or ()]
        return Made(task, [self.values(self.root, group.rank)], [output], before, inputs or [])

    def _reduce_scatter(self, group: RankGroup, background: bool) -> Made:
        inputs, output = [self.values(group.rank, to) for to in range(group.size)], self.empty()
        wanted = combined(self.op, [self.values(rank, group.rank) for rank in range(group.size)])
        task = group.reduce_scatter(output, inputs, self.op, self.algorithm, background)
        return Made(task, [wanted], [output], [self.values(group.rank, to) for to in range(group.size)], inputs)

    def _all_to_all(self, group: RankGroup, background: bool) -> Made:
        inputs = [self.values(group.rank, to) for to in range(group.size)]
        outputs = [self.empty() for _ in range(group.size)]
        wanted = [self.values(rank, group.rank) for rank in range(group.size)]
        task = group.all_to_all(outputs, inputs, self.algorithm, background, even=True)
        return Made(task, wanted, outputs, [piece.clone() for piece in inputs], inputs)

    def _barrier(self, group: RankGroup, background: bool) -> Made:
        return Made(group.barrier(background))


def applies(algorithm: str, hosts: int) -> bool:
    """Memory is shared on one host only."""
    return algorithm != "shared-memory" or hosts == 1


def algorithms(hosts: int) -> list[tuple[str, str]]:
    """All collectives by all algorithms that so many hosts can use; `auto`, too. A barrier is made by auto alone."""
    plans = [(name, how) for name, how in PLANS if applies(how, hosts) and name != "barrier"]
    return [*plans, *((name, "auto") for name in dict.fromkeys(name for name, _ in PLANS))]
