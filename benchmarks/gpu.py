"""`make bench-gpu`: training on one GPU, plain and ours and DDP, in one run of five minutes. Results: out/bench-gpu/.

make bench-gpu                                   everything
make bench-gpu ARGS="--quick"                    a minute and a half: one turn each, without the ways through the host
make bench-gpu ARGS="--only asp2 --only mlp"     some rows (names below)
make bench-gpu ARGS="--write"                    then put the table into docs/gpu.md

one     one worker and one server, ResNet-50, batch 128, beside the plain loop
mlp     the same with 10 layers of 32 x 32: milliseconds a step
large   the same with 10 layers of 3200 x 3200, 410 MB of parameters: milliseconds a step
asp2    two workers x 64 under asp, beside two processes without communication
bsp2    two workers x 64 under bsp, over a server
all2    two workers x 64 under bsp, by all-reduce
bsp128  two workers x 128 under bsp, over a server
ddp2    two ranks x 64 by DistributedDataParallel over our back end, beside gloo
asp4    four workers x 64 under asp, beside four processes without communication

All processes of a stage (one, two or four workers) are alive at once and take turns of a few seconds, several times over.
Images are counted while all ranks of a group are at work (`examples/resnet50.py`). Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_groups import Group, GroupFailed, Way
from measure import fill_in, save
from polytempo.report.table import TextTable

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from resnet50 import common_rate

OUT, PAGE = Path("out/bench-gpu"), Path(__file__).parents[1] / "docs" / "gpu.md"
NAME = "bench-gpu"
#: Seconds of a turn and its repeats, normally and with --quick.
SECONDS, REPEATS = (2.5, 1.2), (3, 1)
#: Steps at the start of a turn that do not count, and steps of the turn before all, which also says how long a step takes.
WARM_UP, FIRST = {"resnet50": 6, "mlp": 50, "large": 5}, {"resnet50": 12, "mlp": 150, "large": 12}


def ways() -> dict[str, Way]:
    """All groups. Where `polytempo run` has no --server-device, there is one way through the host."""
    from polytempo.cli.run import run

    knows = "server_device" in inspect.signature(run).parameters
    device = ("--server-device", "cuda") if knows else ()
    host = ("--server-device", "cpu") if knows else ()
    found = [*(Way(f"plain{count}", "plain", count) for count in (1, 2, 4))]
    for count, sync in ((1, "bsp"), (2, "asp"), (2, "bsp"), (4, "asp")):
        flags = ("--sync", sync, "--via", "ps")
        found.append(Way(f"device-{sync}{count}", "ours", count, (*flags, *device)))
        if knows and count < 4:
            found.append(Way(f"host-{sync}{count}", "ours", count, (*flags, *host)))
    found.append(Way("allreduce2", "ours", 2, ("--sync", "bsp", "--via", "allreduce")))
    found += [Way(f"ddp-{backend}2", "ddp", 2, backend=backend) for backend in ("polytempo", "gloo")]
    return {way.name: way for way in found}


@dataclass(frozen=True)
class Bar:
    """What must hold between ours and another: a ratio of rates (least), of step times, or a difference in ms (most)."""

    kind: str  # "rate", "time" or "more"
    limit: float
    beside: str = "plain"

    def value(self, ours: float, other: float) -> float:
        """Of seconds a step."""
        return {"rate": other / ours, "time": ours / other, "more": 1e3 * (ours - other)}[self.kind]

    def met(self, value: float) -> bool:
        return value >= self.limit if self.kind == "rate" else value <= self.limit

    def __str__(self) -> str:
        return {
            "rate": f"≥ {self.limit:g} of {self.beside}",
            "time": f"≤ {self.limit:g} x {self.beside}",
            "more": f"≤ {self.limit:g} ms more than {self.beside}",
        }[self.kind]


@dataclass(frozen=True)
class Row:
    """A line of the table: a model and batch, and the way of each column."""

    name: str
    title: str
    model: str
    batch: int
    columns: dict[str, str]  # "plain", "host", "device", "peer": a way
    bars: tuple[Bar, ...]

    def turn(self, column: str) -> Turn:
        return Turn(self.columns[column], self.model, self.batch)


@dataclass(frozen=True, order=True)
class Turn:
    """What a group is asked for."""

    way: str
    model: str
    batch: int


ROWS = tuple(
    Row(name, title, model, batch, dict(zip(("plain", "host", "device", "peer"), columns.split(), strict=False)), bars)
    for name, title, model, batch, columns, bars in (
        ("one", "1 worker x 128, one server", "resnet50", 128, "plain1 host-bsp1 device-bsp1", (Bar("rate", 0.95),)),
        ("mlp", "MLP, 10 layers of 4 KB, 1 worker", "mlp", 64, "plain1 host-bsp1 device-bsp1", (Bar("more", 0.3),)),
        ("large", "MLP, 10 layers of 41 MB, 1 worker", "large", 1024, "plain1 host-bsp1 device-bsp1", (Bar("time", 1.1),)),
        ("asp2", "2 workers x 64, `asp`", "resnet50", 64, "plain2 host-asp2 device-asp2 ddp-gloo2", (Bar("rate", 0.95),)),
        (
            "bsp2",
            "2 workers x 64, `bsp`, server",
            "resnet50",
            64,
            "plain2 host-bsp2 device-bsp2 ddp-gloo2",
            (Bar("rate", 0.9),),
        ),
        ("all2", "2 workers x 64, `bsp`, all-reduce", "resnet50", 64, "plain2 - allreduce2 ddp-gloo2", (Bar("rate", 0.9),)),
        ("bsp128", "2 workers x 128, `bsp`, server", "resnet50", 128, "plain2 - device-bsp2", (Bar("rate", 0.9),)),
        (
            *("ddp2", "2 ranks x 64, DDP on our back end", "resnet50", 64, "plain2 - ddp-polytempo2 ddp-gloo2"),
            (Bar("rate", 0.85), Bar("rate", 1.0, "peer")),
        ),
        ("asp4", "4 workers x 64, `asp`", "resnet50", 64, "plain4 - device-asp4", (Bar("rate", 0.9),)),
    )
)


@dataclass
class Results:
    """Seconds a step of one rank, turn by turn: the interval in which all ranks are at work, over the steps in it, times the
    number of ranks."""

    seconds: dict[Turn, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of ways

    def median(self, turn: Turn) -> float | None:
        return statistics.median(self.seconds[turn]) if self.seconds.get(turn) else None

    def spread(self, turn: Turn) -> float:
        """Half the range between the best and the worst repeat, over the median."""
        values = self.seconds[turn]
        return (max(values) - min(values)) / 2 / statistics.median(values)


class Stage:
    """The groups of one number of workers: alive together, measured in turn."""

    def __init__(self, of: Sequence[Way], cpu: bool, results: Results) -> None:
        self._results = results
        self._groups = {way.name: Group(way, cpu) for way in of}
        self._steps: dict[Turn, int] = {}
        for name in list(self._groups):
            self._try(name, lambda group: group.wait_until_ready())

    def _try(self, name: str, work: Any) -> None:
        try:
            if name in self._groups:
                work(self._groups[name])
        except GroupFailed as error:
            self._results.reasons[name] = str(error)
            self._groups.pop(name).close()

    def prepare(self, turn: Turn, seconds: float) -> None:
        """The first turn: makes the model, and finds out how many steps a turn needs."""

        def work(group: Group) -> None:
            times = group.turn(turn.model, turn.batch, FIRST[turn.model], seconds)
            paces = [statistics.median(b - a for a, b in itertools.pairwise(of[len(of) // 2 :])) for of in times]
            self._steps[turn] = WARM_UP[turn.model] + max(10, int(seconds / max(paces)))

        self._try(turn.way, work)

    def measure(self, turn: Turn, seconds: float) -> None:
        def work(group: Group) -> None:
            times = group.turn(turn.model, turn.batch, self._steps[turn], seconds)
            rate = common_rate(times, WARM_UP[turn.model])
            self._results.seconds.setdefault(turn, []).append(len(times) / rate)

        if turn in self._steps:
            self._try(turn.way, work)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def measure(rows: Sequence[Row], results: Results, quick: bool, cpu: bool) -> None:
    """All turns of these rows."""
    known = ways()
    wanted = {row.turn(column) for row in rows for column in row.columns if row.columns[column] in known}
    if quick:
        wanted = {turn for turn in wanted if not turn.way.startswith("host")}
    seconds, repeats = (0.3, 2) if cpu else (SECONDS[quick], REPEATS[quick])
    for count in sorted({known[turn.way].workers for turn in wanted}):
        turns = sorted(turn for turn in wanted if known[turn.way].workers == count)
        began = time.monotonic()
        stage = Stage([known[name] for name in dict.fromkeys(turn.way for turn in turns)], cpu, results)
        try:
            said(f"{count} workers: {len(turns)} turns, started after {time.monotonic() - began:.0f} s")
            for turn in turns:
                stage.prepare(turn, seconds)
            for _ in range(repeats):
                for turn in turns:
                    stage.measure(turn, seconds)
            said(f"{count} workers: measured after {time.monotonic() - began:.0f} s")
        finally:
            stage.close()


def said(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The table.

HEADS = ("", "plain", "through the host", "on the device", "DDP on gloo", "device / plain", "bar", "met")


def table(rows: Iterable[Row], results: Results, machine: str) -> TextTable:
    lines = [line(row, results) for row in rows]
    return TextTable(f"Images a second, or milliseconds a step, on {machine}", HEADS, tuple(lines))


def line(row: Row, results: Results) -> tuple[str, ...]:
    figures = [figure(row, column, results) for column in ("plain", "host", "device", "peer")]
    ours, plain = (value_of(row, column, results) for column in ("device", "plain"))
    ratio = "-"
    if ours and plain:
        ratio = f"{Bar('rate', 0).value(ours, plain):.3f}"
    verdicts = [verdict(row, bar, results) for bar in row.bars]
    return (row.title, *figures, ratio, "; ".join(map(str, row.bars)), ", ".join(verdicts))


def verdict(row: Row, bar: Bar, results: Results) -> str:
    ours, other = value_of(row, "device", results), value_of(row, bar.beside, results)
    if ours is None or other is None:
        return "not measured"
    value = bar.value(ours, other)
    return f"{'yes' if bar.met(value) else 'NO'} ({value:.2f}{' ms' if bar.kind == 'more' else ''})"


def value_of(row: Row, column: str, results: Results) -> float | None:
    return results.median(row.turn(column)) if row.columns.get(column, "-") != "-" else None


def figure(row: Row, column: str, results: Results) -> str:
    way = row.columns.get(column, "-")
    if way in results.reasons:
        return " ".join(results.reasons[way].replace("|", "/").split())[:80]
    seconds = value_of(row, column, results)
    if seconds is None:
        return "-"
    shown = f"{int(way[-1]) * row.batch / seconds:.0f}" if row.model == "resnet50" else f"{1e3 * seconds:.2f} ms"
    return f"{shown} ±{100 * results.spread(row.turn(column)):.0f} %"


def as_data(rows: Iterable[Row], results: Results) -> dict[str, Any]:
    """For the JSON file: every repeat."""
    turns = [
        {"way": turn.way, "model": turn.model, "batch": turn.batch, "seconds_a_step": seconds}
        for turn, seconds in sorted(results.seconds.items())
    ]
    bars = [{"row": row.name, "bar": str(bar), "verdict": verdict(row, bar, results)} for row in rows for bar in row.bars]
    return {"turns": turns, "failed": results.reasons, "bars": bars}


def machine(cpu: bool) -> str:
    import torch

    if cpu:
        return f"the CPU, torch {torch.__version__}: a try, no figures"
    cores = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    return f"one {torch.cuda.get_device_name(0)}, {cores}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[row.name for row in ROWS], action="append", help="this row; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one short turn each, without the ways through the host")
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU: tries the benchmark itself")
    given = parser.parse_args()
    import torch

    if not given.cpu and not torch.cuda.is_available():
        print("bench-gpu: skipped: there is no CUDA device here (torch.cuda.is_available() is False)")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started is ended
    rows = [row for row in ROWS if not given.only or row.name in given.only]
    began = time.monotonic()
    results = Results()
    try:
        measure(rows, results, given.quick, given.cpu)
    finally:  # also when it is ended early: what there is
        show(rows, results, given, time.monotonic() - began)


def show(rows: Sequence[Row], results: Results, given: argparse.Namespace, seconds: float) -> None:
    """Print the table, write it and all figures to files, and the table into the page if that is asked for."""
    data = {
        **as_data(rows, results),
        "quick": given.quick,
        "machine": machine(given.cpu),
        "seconds": seconds,
    }
    save(OUT, NAME, [table(rows, results, machine(given.cpu))], data)
    print(f"{seconds:.0f} s; figures in {OUT}/{NAME}.json")
    if given.write:
        fill_in(PAGE, OUT, [NAME])


if __name__ == "__main__":
    main()
