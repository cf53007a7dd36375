"""Runs a case: the processes of all its subjects are alive at once and measured in turn, several times over.

So what disturbs the machine disturbs all of them, and a ratio is worth more than the figures it is made of. A subject that
cannot start, or fails, is left out with its reason; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

from cases import Case, Subject
from rigs import Rig, described
from verdicts import Measured


class Stage:
    """The rigs for one number of workers and servers."""

    def __init__(self, subjects: list[Subject], workers: int, servers: int) -> None:
        self._subjects = subjects
        self._size = workers, servers
        self._rigs: dict[Callable[..., None], Rig] = {}
        self._reasons: dict[Callable[..., None], str] = {}

    def __enter__(self) -> Stage:
        try:
            for start in dict.fromkeys(subject.start for subject in self._subjects):
                self._start(start)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        for rig in self._rigs.values():
            rig.close()

    def _start(self, start: Callable[[Rig, int, int], None]) -> None:
        rig = self._rigs[start] = Rig()
        try:
            start(rig, *self._size)
            rig.pause()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other subjects go on
            self._give_up(start, error)

    def _give_up(self, start: Callable[..., None], error: Exception) -> None:
        self._reasons[start] = described(error)
        self._rigs[start].close()

    def measure(self, row: Measured, repeats: int, tick: Callable[[], None]) -> None:
        """All subjects in turn, `repeats` times."""
        for _ in range(repeats):
            for subject in self._subjects:
                self._once(subject, row)
                tick()

    def _once(self, subject: Subject, row: Measured) -> None:
        if subject.start not in self._reasons:
            try:
                rig = self._rigs[subject.start]
                with rig.awake():
                    cost = subject.meter(rig, row.cell.work, subject.variant)
                row.costs.setdefault(subject.name, []).append(cost)
            except Exception as error:  # noqa: BLE001
                self._give_up(subject.start, error)
        if subject.start in self._reasons:
            row.costs.pop(subject.name, None)
            row.reasons[subject.name] = self._reasons[subject.start]


def run_case(case: Case, quick: bool) -> list[Measured]:
    """Measure every cell."""
    repeats = case.repeats[quick]
    rows = [Measured(cell) for cell in case.cells]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        asked = [subject for row in rows for subject in case.subjects if subject.takes_part(row.cell)]
        task = progress.add_task(case.name, total=repeats * len(asked))
        for group in dict.fromkeys(cell.group for cell in case.cells):
            there = [row for row in rows if row.cell.group == group]
            subjects = [subject for subject in case.subjects if subject.takes_part(there[0].cell)]
            progress.update(task, description=f"{case.name}: starting")
            with Stage(subjects, *group) as stage:
                for row in there:
                    progress.update(task, description=f"{case.name}: {row.cell.name}")
                    stage.measure(row, repeats, lambda: progress.advance(task))
    return rows
