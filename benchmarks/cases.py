"""What a case of the benchmark is, as data: cells (rows), subjects (columns), and bars on the ratios between them.

A case says nothing about how it is run (`runner.py`) or shown (`verdicts.py`). A subject names the function that starts its
processes; subjects that name the same function share them, and differ in the variant of the work they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rigs import Rig

UNITS = {"KB": 1 << 10, "MB": 1 << 20}


def bytes_of(size: str) -> int:
    """`"10 MB"` as a number of bytes, a multiple of four: all tensors here are of float32."""
    number, unit = size.split()
    return int(float(number) * UNITS[unit]) // 4 * 4


@dataclass(frozen=True)
class Cell:
    """One row: a work, and the number of workers and servers."""

    name: str
    work: str
    workers: int = 1
    servers: int = 0

    @property
    def group(self) -> tuple[int, int]:
        """Cells of one group share their processes."""
        return self.workers, self.servers


@dataclass(frozen=True)
class Subject:
    """One column: the subject that is measured, and how its cost is read (seconds a round unless said)."""

    name: str
    start: Callable[[Rig, int, int], None]  # given the numbers of workers and servers
    variant: str = ""
    groups: tuple[tuple[int, int], ...] | None = None  # only there
    meter: Callable[[Rig, str, str], float] = Rig.measure

    def takes_part(self, cell: Cell) -> bool:
        return self.groups is None or cell.group in self.groups


@dataclass(frozen=True)
class Ratio:
    """The best of some subjects over the best of others; over nothing, the figure itself."""

    label: str
    over: tuple[str, ...]
    under: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """What a ratio must be: in each of these cells, or as their geometric mean."""

    ratio: Ratio
    cells: tuple[str, ...]
    least: float | None = None
    most: float | None = None
    mean: bool = False

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        return f"{self.ratio.label} " + (f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}")


@dataclass(frozen=True)
class Case:
    """Everything about one table. `repeats`: normally, and with --quick."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    subjects: tuple[Subject, ...]
    ratios: tuple[Ratio, ...]
    bars: tuple[Bar, ...]
    unit: str = "ms"
    repeats: tuple[int, int] = (7, 3)
