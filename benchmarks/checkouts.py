"""This checkout beside another one: does a step take longer than it did there? Results in out/bench/.

git worktree add ../before REVISION
python benchmarks/checkouts.py ../before            the cases exchange, bsp, backend and alone, some minutes
python benchmarks/checkouts.py ../before --only bsp --pairs 30

Both libraries are measured by the benchmarks of this checkout: a process for each, which starts its rigs with that library,
and is told which subject to measure. A pair is one measurement of each, one right after the other; who is first changes with
every pair. Of the ratios, this checkout over the other, the median is shown, with a 95 % interval of the mean logarithm; the
bar is missed where the whole interval lies above 1.03. Beside it, the same ratio of CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASES = ("exchange", "bsp", "backend", "alone")
PAIRS, MOST = 15, 1.03
#: Of a subject's name in a case: it is made of our code.
OURS = ("ours", "polytempo", "DistributedOptimizer", "on the server", "at each worker")


@dataclass
class Compared:
    """One subject in one cell: what it took, pair by pair, here and there."""

    case: str
    cell: str
    subject: str
    seconds: list[tuple[float, float]] = field(default_factory=list)  #: here, there
    cpu: list[tuple[float, float]] = field(default_factory=list)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, of the ratio of the seconds."""
        logarithms = [math.log(here / there) for here, there in self.seconds]
        mean, error = statistics.fmean(logarithms), statistics.stdev(logarithms) / math.sqrt(len(logarithms))
        return math.exp(mean - 2.1 * error), math.exp(mean + 2.1 * error)

    @property
    def met(self) -> bool:
        return self.interval[0] <= MOST

    def row(self) -> tuple[str, ...]:
        low, high = self.interval
        here, there = (statistics.median(times) for times in zip(*self.seconds, strict=True))
        cpu = [here / there for here, there in self.cpu if there]
        return (
            f"{self.cell}, {self.subject}",
            f"{1e3 * there:.3g}",
            f"{1e3 * here:.3g}",
            f"{statistics.median(here / there for here, there in self.seconds):.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{statistics.median(cpu):.2f}" if cpu else "-",
            "yes" if self.met else "NO",
        )


class Side:
    """The process that measures one checkout."""

    def __init__(self, checkout: Path, case: str) -> None:
        path = os.pathsep.join([str(HERE), str(checkout / "src")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", case],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side has ended: {command}")
        answer = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"{command}: {answer['error']}")
        return answer["said"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(case: str, before: Path, pairs: int) -> list[Compared]:
    """All our subjects in all cells of a case."""
    sides = [Side(HERE.parent, case), Side(before, case)]
    found: list[Compared] = []
    try:
        groups, _ = (side.ask(do="groups") for side in sides)
        for group in groups:
            cells, _ = [side.ask(do="start", group=group) for side in sides]
            for cell, subjects in cells:
                for subject in subjects:
                    found.append(Compared(case, cell, subject))
                    _measure(found[-1], sides, pairs)
    finally:
        for side in sides:
            side.close()
    return found


def _measure(compared: Compared, sides: Sequence[Side], pairs: int) -> None:
    for pair in range(pairs):
        costs = {}
        for side in sides if pair % 2 else sides[::-1]:
            costs[side] = side.ask(do="measure", cell=compared.cell, subject=compared.subject)
        (here, here_cpu), (there, there_cpu) = (costs[side] for side in sides)
        compared.seconds.append((here, there))
        compared.cpu.append((here_cpu, there_cpu))
    print(" | ".join(compared.row()), file=sys.stderr, flush=True)


def measure_side(name: str) -> None:
    """Do what the other process says, until there is nothing more."""
    import exchange  # with the library of this side
    import steps

    known = (exchange.CASE, steps.BSP, steps.BACKEND, steps.JOB_OF_ONE, steps.MOMENTUM)
    (case,) = (case for case in known if case.name == name)
    ours = [subject for subject in case.subjects if any(word in subject.name for word in OURS)]
    rigs: dict[Any, Any] = {}

    def answer(command: dict[str, Any]) -> Any:
        from rigs import Rig

        if command["do"] == "groups":
            return list(dict.fromkeys(cell.group for cell in case.cells))
        if command["do"] == "start":
            for rig in rigs.values():
                rig.close()
            rigs.clear()
            group = tuple(command["group"])
            there = [cell for cell in case.cells if cell.group == group]
            some = [subject for subject in ours if subject.takes_part(there[0])]
            for start in dict.fromkeys(subject.start for subject in some):
                rigs[start] = Rig()
                start(rigs[start], *group)
                rigs[start].pause()
            return [(cell.name, [subject.name for subject in some]) for cell in there]
        cell = next(cell for cell in case.cells if cell.name == command["cell"])
        subject = next(subject for subject in ours if subject.name == command["subject"])
        rig = rigs[subject.start]
        with rig.awake():
            return rig.cost(cell.work, subject.variant)

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        for line in sys.stdin:
            try:
                said = {"said": answer(json.loads(line))}
            except Exception as error:  # noqa: BLE001 - the other process says it, and ends
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(said), file=out, flush=True)
    finally:
        for rig in rigs.values():
            rig.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="the other checkout")
    parser.add_argument(
        "--only", action="append", choices=[*CASES, "momentum"], help="this case; may be given more than once"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        measure_side(given.side)
        return
    if given.before is None or not (given.before / "src/polytempo").is_dir():
        parser.error(f"expected a checkout of this repository, got {given.before}")
    from measure import save
    from polytempo.report.table import TextTable

    found = [one for case in given.only or CASES for one in compare(case, given.before.resolve(), given.pairs)]
    heads = ("what", "before (ms)", "now (ms)", "ratio", "95 % interval", "CPU", "met")
    table = TextTable(f"A step now and before, {given.pairs} pairs", heads, tuple(one.row() for one in found))
    data = [vars(one) for one in found]
    save(Path("out/bench"), "checkouts", [table], data)
    missed = [one for one in found if not one.met]
    print(f"{len(found) - len(missed)} bars met, {len(missed)} missed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
