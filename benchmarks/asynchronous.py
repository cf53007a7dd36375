"""Asynchronous modes at the rate and the momentum that are right for `bsp`: what they end with, at equal samples.

Rate and momentum are tuned once for `bsp` with 4 workers, on a grid and on seeds from 100 on, which are not measured; then
they are not touched. Tuned for: the best mean accuracy (of the GPT: the least loss). The whole grid is printed; what is
measured has momentum 0.9, and the rate that is best there. A difference is that of a run and the run of `bsp` with the same
seed, samples and number of workers, on the test data, at the end; shown are its mean over the seeds and the 95 % interval of
that mean (t).

    digits  perceptron; 4, 8 and 16 workers with 32 samples a step; 30,720 samples, the budget of examples/digits.py
    cnn     Fashion-MNIST, a CNN with BatchNorm; 4, 8 and 16 workers with 32 samples a step; 245,760 samples, four epochs
            bars: asp, ssp:3, dssp:3..15, every:8, and delay:4 on a cluster whose exchange takes four steps, end at most 0.5
            points below bsp, with even workers and with one that is 3 times slower
    twice   digits at twice the rate, 4 workers; bar: no run more than 5 points below bsp
    gpt     examples/gpt.py, AdamW, 2 and 4 workers, 300 steps each, at the best rate of bsp and at the example's own; bar:
            asp and ssp:3 end with at most 0.5 % more loss
    live    digits and cnn in processes, over servers: asp and ssp:3 with 4 workers; the bar of 0.5 points
    tune    the grids (each part makes those that it needs, too)

Rows "before" are what these modes did before momentum moved to the workers: on the servers, pushes at 1/n. They have no bar.
All but `live` is in virtual time (`asynchronous_runs.py`): real gradients on the weights that each worker would hold.

    python benchmarks/asynchronous.py                               everything
    python benchmarks/asynchronous.py --part cnn --jobs 16 --seconds 500 --data FOLDER --out FILE
    python benchmarks/asynchronous.py --seconds 0 --page README.md  no runs; what there is, into the page that asks for it

Each run is a line of out/proof/asynchronous.jsonl, with all its settings; what is there is not run again. So a long part can
be made in several calls, and parts on several machines: put the lines of their files together. (The GPT learns the standard
library of its Python: only runs of one text are summed up, that of which there are most.) The file is to be removed when a
mode has changed. What all lines sum up to goes to out/proof/asynchronous.{md,json}, and, when no run is missing, to
docs/figures/asynchronous.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from asynchronous_runs import GPT_STEPS, WINDOWS, Ended, Run, clothes, run, text_digest
from asynchronous_verdicts import BEFORE, OWN_RATE, Judged, bars_line, short_table, summary, tables
from kept_runs import kept_runs, make_runs
from measure import as_text, fill_in, save
from polytempo.errors import UsageError
from polytempo.report.table import TextTable
from polytempo.sync.spec import parse_spec
from polytempo.tasks import FASHION_MNIST

OUT = Path("out/proof")
FIGURES = Path(__file__).parents[1] / "docs" / "figures" / "asynchronous.json"
PARTS = ("tune", "digits", "twice", "gpt", "cnn", "live")  #: the most telling first
MODES = ("asp", "ssp:3", "dssp:3..15", "every:8", "delay:4")
OLD = tuple(f"{mode}{BEFORE}" for mode in ("asp", "ssp:3", "delay:4"))
EXAMPLE_RATE = 2e-3  #: of examples/gpt.py
TUNING, TUNED_WITH, MOMENTUM = 100, 4, 0.9  #: first seed; workers; what is measured


@dataclass(frozen=True)
class Work:
    """What is trained, and where its rate is looked for."""

    rates: tuple[float, ...]
    momenta: tuple[float, ...]
    tuning_seeds: int
    seeds: int
    samples: int
    live_seeds: int = 0


WORKS = {
    "digits": Work((0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (0.8, 0.9, 0.95), 20, 20, 30_720, live_seeds=20),
    "cnn": Work((0.0125, 0.025, 0.05, 0.1), (0.8, 0.9, 0.95), 3, 5, 245_760, live_seeds=5),
    "gpt": Work((2e-3, 4e-3, 8e-3, 1.6e-2), (0.9,), 2, 3, WINDOWS * GPT_STEPS),
}

#: Rates by work, once they are known.
Rates = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """A mode with so many workers on a cluster."""

    part: str
    work: str
    workers: int
    cluster: str
    mode: str

    @property
    def seeds(self) -> range:
        work = WORKS[self.work]
        return range(work.live_seeds if self.live else work.seeds)

    @property
    def live(self) -> bool:
        return self.part.startswith("live")

    @property
    def base(self) -> Cell:
        """`bsp` makes the same updates on every cluster."""
        return replace(self, mode="bsp", cluster="even")

    def run(self, seed: int, rates: Rates) -> Run:
        rate = EXAMPLE_RATE if self.part == OWN_RATE else rates[self.work] * (2 if self.part == "twice" else 1)
        return run_of(self.work, self.workers, self.cluster, self.mode, rate, MOMENTUM, seed, self.live)


def run_of(
    work: str, workers: int, cluster: str, mode: str, rate: float, momentum: float, seed: int, live: bool = False
) -> Run:
    """A run, its mode written out as its optimizer settles it."""
    gpt = work == "gpt"
    plain = mode.removesuffix(BEFORE)
    if plain != mode:
        plain += ",momentum=server" + (f",scale={1 / workers:g}" if gpt else "")
    kind, group = ("AdamW", {"betas": (momentum, 0.999)}) if gpt else ("SGD", {"momentum": momentum})
    sync = parse_spec(plain).settled(kind, [group], workers=workers).text
    batch = WINDOWS // workers if gpt else 32
    data = text_digest() if gpt else ""
    return Run(work, workers, cluster, sync, rate, momentum, batch, WORKS[work].samples, seed, live, data)


def cells_of(part: str) -> list[Cell]:
    """The cells of a part, those of `bsp` first."""
    if part == "live":
        return [cell for work in ("digits", "cnn") for cell in _cells(f"live {work}", work, (4,), ("asp", "ssp:3"))]
    if part == "gpt":
        modes = ("bsp", "asp", "ssp:3", f"asp{BEFORE}")
        return [Cell(at, "gpt", workers, "even", mode) for at in ("gpt", OWN_RATE) for mode in modes for workers in (2, 4)]
    if part == "cnn":
        old = [Cell("cnn", "cnn", 4, "even", mode) for mode in OLD]
        return [*_cells("cnn", "cnn", (4, 16, 8), MODES), *old]
    return _cells(part, "digits", (4,) if part == "twice" else (4, 16, 8), (*MODES, *OLD))


def _cells(part: str, work: str, sizes: Sequence[int], modes: Sequence[str]) -> list[Cell]:
    base = [Cell(part, work, workers, "even", "bsp") for workers in sizes]
    return [*base, *(Cell(part, work, n, cluster, mode) for n in sizes for mode in modes for cluster in ("even", "slow"))]


def score(ended: Ended) -> float:
    """Accuracy in per cent, or loss."""
    return 100 * ended["accuracy"] if "accuracy" in ended else ended["loss"]


# Tuning.


def grid_of(work: str) -> list[Run]:
    """The runs of `bsp` from which a work takes its rate."""
    of = WORKS[work]
    seeds = range(TUNING, TUNING + of.tuning_seeds)
    return [run_of(work, TUNED_WITH, "even", "bsp", rate, m, s) for s in seeds for m in of.momenta for rate in of.rates]


def grid_means(work: str, runs: dict[Run, Ended]) -> dict[tuple[float, float], float]:
    """Of each momentum and rate the mean of what its runs ended with."""
    ends: dict[tuple[float, float], list[float]] = {}
    for job in grid_of(work):
        ends.setdefault((job.momentum, job.rate), []).append(score(runs[job]))
    return {place: statistics.mean(of) for place, of in ends.items()}


def best_rate(means: dict[tuple[float, float], float], least: bool) -> float:
    """The best at the momentum that is measured; `least`: of losses."""
    of = {rate: mean for (momentum, rate), mean in means.items() if momentum == MOMENTUM}
    return (min if least else max)(of, key=lambda rate: of[rate])


def grid_table(work: str, means: dict[tuple[float, float], float], rate: float) -> TextTable:
    """The grid, with a star at what is taken."""
    of, after = WORKS[work], 4 if work == "gpt" else 2
    rows = [
        (f"{m:g}", *(f"{means[m, r]:.{after}f}" + "*" * ((m, r) == (MOMENTUM, rate)) for r in of.rates)) for m in of.momenta
    ]
    what = "validation loss" if work == "gpt" else "accuracy in %"
    title = f"{work}: {what} of bsp with {TUNED_WITH} workers, mean of {of.tuning_seeds} seeds; * is measured"
    return TextTable(title, ("momentum", *(f"rate {r:g}" for r in of.rates)), tuple(rows))


# All of it.


def of_one_text(runs: dict[Run, Ended]) -> dict[Run, Ended]:
    """Of the GPT those runs that learned the text of which there are most, as if it were this machine's."""
    texts = Counter(job.data for job in runs if job.data)
    most = max(texts, key=lambda text: texts[text], default="")
    here = text_digest() if texts else ""
    return {replace(job, data=here if job.data else ""): ended for job, ended in runs.items() if job.data in ("", most)}


def judged_of(cell: Cell, runs: dict[Run, Ended], rates: Rates) -> Judged | None:
    """A cell with the seeds that have a run and one of `bsp`; None: there is none."""
    pairs = [(seed, cell.run(seed, rates), cell.base.run(seed, rates)) for seed in cell.seeds]
    pairs = [(seed, ours, base) for seed, ours, base in pairs if ours in runs and base in runs]
    if not pairs:
        return None
    seeds, ours, base = zip(*pairs, strict=True)
    first = ours[0]
    ends, bsp = (tuple(round(score(runs[one]), 4) for one in side) for side in (ours, base))
    settings = first.sync, first.rate, first.momentum, first.samples
    return Judged(cell.part, cell.workers, cell.cluster, cell.mode, *settings, tuple(seeds), ends, bsp)


def asynchronous(
    parts: Sequence[str] = PARTS,
    *,
    jobs: int = 2,
    seconds: float | None = None,
    seeds: int | None = None,
    folder: Path | None = None,
    file: Path | None = None,
    figures: Path = FIGURES,
    pages: Sequence[Path] = (),
) -> None:
    """Make the runs of these parts that are not there, and say what all that are there come to."""
    folder, file = folder or FASHION_MNIST, file or OUT / "asynchronous.jsonl"
    works = tuple(WORKS)
    try:
        clothes(folder)
    except UsageError as error:
        print(f"asynchronous: without the CNN, {error}")
        works = ("digits", "gpt")
    began, work = time.monotonic(), partial(run, folder=folder)

    def make(wanted: Sequence[Run], at_once: int) -> None:
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        make_runs(wanted, work, file, "ended", jobs=at_once, seconds=left)

    cells = {part: [cell for cell in cells_of(part) if cell.work in works] for part in PARTS if part != "tune"}
    needed = works if "tune" in parts else dict.fromkeys(cell.work for part in parts for cell in cells[part])
    make([job for name in needed for job in grid_of(name)], jobs)
    there = of_one_text(kept_runs(file, Run, "ended"))
    grids = {name: grid_means(name, there) for name in works if all(job in there for job in grid_of(name))}
    rates = {name: best_rate(means, least=name == "gpt") for name, means in grids.items()}
    for part in parts:
        of = [cell for cell in cells.get(part, ()) if cell.work in rates]
        most = range(max((len(cell.seeds) for cell in of), default=0) if seeds is None else seeds)
        wanted = [cell.run(seed, rates) for seed in most for cell in of if seed in cell.seeds]
        make(wanted, 1 if part == "live" else jobs)  # a live job has processes of its own

    there = of_one_text(kept_runs(file, Run, "ended"))
    known = [cell for of in cells.values() for cell in of if cell.work in rates]
    judged = [one for cell in known if (one := judged_of(cell, there, rates)) is not None]
    missing = sum(cell.run(seed, rates) not in there for cell in known for seed in cell.seeds)
    missing += sum(job not in there for name in works if name not in rates for job in grid_of(name))
    _publish(judged, grids, rates, missing, figures if works == tuple(WORKS) else None, pages)


def _publish(
    judged: list[Judged], grids: dict[str, Any], rates: Rates, missing: int, figures: Path | None, pages: Sequence[Path]
) -> None:
    named = {**{f"tuned-{name}": grid_table(name, grids[name], rates[name]) for name in rates}, **tables(judged)}
    as_data = {name: [[*place, round(mean, 4)] for place, mean in means.items()] for name, means in grids.items()}
    data = summary(judged, {"momentum, rate, end": as_data, "measured": rates})
    save(OUT, "asynchronous", list(named.values()), data)
    print(bars_line(judged, missing))
    if figures is not None and not missing:
        figures.write_text(as_text(data), encoding="utf-8")
    blocks = {
        f"asynchronous-{name.replace(' ', '-')}": table for name, table in (*named.items(), ("short", short_table(judged)))
    }
    for name, table in blocks.items():
        (OUT / f"{name}.md").write_text(table.markdown(), encoding="utf-8")
    for page in pages:
        fill_in(page, OUT, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="this part; may be repeated (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores); of live jobs one")
    parser.add_argument("--seconds", type=float, help="after these no further run is started")
    parser.add_argument("--seeds", type=int, help="only so many of the seeds")
    parser.add_argument(
        "--data", type=Path, help="folder with the files of Fashion-MNIST (where Debian's package puts them)"
    )
    parser.add_argument("--out", type=Path, help="file of runs, one line each; added to (out/proof/asynchronous.jsonl)")
    parser.add_argument("--summary", type=Path, default=FIGURES, help="file of what they sum up to, when all are there")
    parser.add_argument("--page", type=Path, action="append", default=[], help="put the tables into it; may be repeated")
    given = parser.parse_args()
    asynchronous(
        given.part or PARTS,
        jobs=given.jobs,
        seconds=given.seconds,
        seeds=given.seeds,
        folder=given.data,
        file=given.out,
        figures=given.summary,
        pages=given.page,
    )


if __name__ == "__main__":
    main()
