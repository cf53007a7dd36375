"""Time to a target accuracy of all modes on four clusters, in virtual time, at the rate that is best for `bsp`.

Fashion-MNIST, a perceptron with one hidden layer, SGD with momentum 0.9, 4 workers with 64 samples a step, real gradients
on a simulated clock:

    uniform     every step takes 1
    slow        one worker is 3 times slower
    stalls      5 % of all steps take 10 more
    both

The rate is chosen once, for `bsp` on the uniform cluster: the soonest of three, by the median over five seeds from 100
on, which are not measured, of the time to 87 %. All modes on all clusters have that one; asynchronous modes divide it by
the number of workers, as always. A run that has not reached the target by the horizon counts as the horizon. The accuracy
is that of all 10,000 test pictures, every 10 units of time once it is within three points of the target, and every 100
before.

In virtual time `bsp` leaves out the pictures at the end of an epoch that fill no joint batch, 96 of 60,000; `bsp+balance`
and `anytime` do not. With `--whole` no mode has them: then on the uniform cluster all rounds of the three have the same
samples, and only rounding differs. (The option came after the first measurement, to tell noise from a difference between
modes.)

Bars: on the uniform cluster `anytime` takes at most 1.05 times as long as `bsp`, `asp` and `dssp:3..15` at most 1.1
times; with one slow worker `asp` takes at most 1.15 times as long as the better of `bsp+balance` and `anytime`.

Each run is a line of out/proof/uneven.jsonl, written when it ends, its mode written out as the optimizer settles it
(`asp,momentum=lookahead`); what is there is not run again, so the file is to be removed when a mode has changed. What
they sum up to goes to docs/figures/uneven.json, from which `docs/figures/uneven.py` draws. The 155 runs take about ten
minutes on two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from kept_runs import make_runs
from measure import as_text, save
from polytempo.errors import UsageError
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Hiccup
from polytempo.sync.spec import parse_spec

OUT = Path("out/proof")
FIGURES = Path(__file__).parents[1] / "docs" / "figures" / "uneven.json"

EVEN = Cluster(workers=4, batch=64)
STALLS = Hiccup(0.05, 10.0)
CLUSTERS = {
    "uniform": EVEN,
    "slow": replace(EVEN, slow={3: 3.0}),
    "stalls": replace(EVEN, hiccup=STALLS),
    "both": replace(EVEN, slow={3: 3.0}, hiccup=STALLS),
}
NAMES = {
    "uniform": "all equal",
    "slow": "one worker 3x slower",
    "stalls": "passing stalls",
    "both": "both",
}
OTHERS = ("bsp", "ssp:3", "ssp:10", "dssp:3..15", "asp")
OURS = ("bsp+balance", "anytime:auto")
MODES = (*OTHERS, *OURS)
RATES, MOMENTUM = (0.02, 0.05, 0.1), 0.9
TUNING = range(100, 105)  #: seeds
TARGET, HORIZON = 0.87, 2400.0
OFTEN, SELDOM, NEAR = 10.0, 100.0, 0.03
#: Cluster, mode, modes of which the soonest is what it is compared with, and how much longer it may take.
BARS = (
    ("uniform", "anytime:auto", ("bsp",), 1.05),
    ("uniform", "asp", ("bsp",), 1.1),
    ("uniform", "dssp:3..15", ("bsp",), 1.1),
    ("slow", "asp", OURS, 1.15),
)

#: Virtual time and accuracy.
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Job:
    """All settings of a run; the key of its line."""

    cluster: str
    sync: str  #: with what it leaves to the optimizer written out
    rate: float
    seed: int


def settled(mode: str) -> str:
    """A mode as the optimizer settles it."""
    return parse_spec(mode).settled("SGD", [{"momentum": MOMENTUM}], workers=EVEN.workers).text


class Reached(Exception):
    """The target was seen."""


class Looks:
    """Looks at the accuracy: seldom while it is far below the target."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self._inputs, self._targets = inputs, targets
        self._next = SELDOM
        self.curve: Curve = []

    def look(self, model: Any, now: float) -> None:
        import torch

        if now < self._next and now < HORIZON:
            return
        with torch.no_grad():
            right = float((model.eval()(self._inputs).argmax(1) == self._targets).float().mean())
        model.train()
        self.curve.append((now, round(right, 4)))
        self._next = now + (OFTEN if right > TARGET - NEAR else SELDOM)
        if right >= TARGET:
            raise Reached


@cache
def _data(folder: Path, whole: bool = False) -> Any:
    from polytempo.tasks import fashion_mnist

    (inputs, targets), test = fashion_mnist(folder=folder).data
    joint = EVEN.workers * EVEN.batch
    length = len(inputs) // joint * joint if whole else len(inputs)
    return (inputs[:length], targets[:length]), test


def run(job: Job, folder: Path, whole: bool = False) -> Curve:
    """The accuracy of a run against virtual time, until the target is reached."""
    import torch

    from polytempo.simulate.replicas import Shards
    from polytempo.simulate.run import simulate_job
    from polytempo.simulate.virtual_model import VirtualModel
    from polytempo.tasks import fashion_mnist_model

    torch.set_num_threads(1)
    cluster, (train, test), spec = CLUSTERS[job.cluster], _data(folder, whole), parse_spec(job.sync)
    shards = Shards(len(train[0]), cluster.workers, [cluster.batch] * cluster.workers, job.seed)
    optimizer = partial(torch.optim.SGD, lr=job.rate, momentum=MOMENTUM)
    loss = torch.nn.functional.cross_entropy
    trainer = VirtualModel(fashion_mnist_model(job.seed), train, shards, loss, optimizer, spec)
    trainer.one_pass = True
    looks = Looks(*test)
    trainer.observers.append(lambda now: looks.look(trainer.master, now))
    with contextlib.suppress(Reached):
        simulate_job(cluster, spec.text, seed=job.seed, trainer=trainer, observe_every=OFTEN, seconds=HORIZON)
    return looks.curve


@dataclass(frozen=True)
class Cell:
    """A mode on a cluster, at one rate."""

    times: list[float | None]  #: of each seed; None: not by the horizon
    accuracies: list[float]  #: the best that was seen, of each seed

    @property
    def median(self) -> float:
        return statistics.median(HORIZON if time is None else time for time in self.times)

    @property
    def text(self) -> str:
        missed = sum(time is None for time in self.times)
        if missed == len(self.times):
            return f"not by {HORIZON:,.0f} ({statistics.median(self.accuracies):.3f})"
        if 2 * missed > len(self.times):
            return f"{missed} of {len(self.times)} not by {HORIZON:,.0f}"
        return f"{self.median:,.0f}" + (f", {missed} not by {HORIZON:,.0f}" if missed else "")


Cells = dict[str, dict[str, Cell]]


def cell_of(curves: Sequence[Curve]) -> Cell:
    """Of runs that differ in their seed."""
    reached = [next((at for at, right in curve if right >= TARGET), None) for curve in curves]
    return Cell(reached, [max(right for _, right in curve) for curve in curves])


def tried(curves: dict[Job, Curve]) -> dict[float, Cell]:
    """`bsp` at each of the rates."""
    return {rate: cell_of([curve for job, curve in curves.items() if job.rate == rate]) for rate in RATES}


def best_rate(cells: dict[float, Cell]) -> float:
    """That at which `bsp` is soonest; of two, that which has come further."""
    return min(cells, key=lambda rate: (cells[rate].median, -statistics.median(cells[rate].accuracies)))


def cells_of(curves: dict[Job, Curve]) -> Cells:
    """All modes on all clusters, at one rate."""

    def runs_of(cluster: str, mode: str) -> list[Curve]:
        return [curve for job, curve in curves.items() if (job.cluster, job.sync) == (cluster, settled(mode))]

    return {cluster: {mode: cell_of(runs_of(cluster, mode)) for mode in MODES} for cluster in CLUSTERS}


@dataclass(frozen=True)
class UnevenBar:
    """One bar and how it was met."""

    cluster: str
    text: str
    ratio: float
    met: bool


def bars(cells: Cells) -> list[UnevenBar]:
    """How much longer modes take, and whether that is not too long."""
    found = []
    for cluster, mode, others, most in BARS:
        of = cells[cluster]
        other = min(others, key=lambda one: of[one].median)
        ratio = of[mode].median / of[other].median
        found.append(UnevenBar(cluster, f"{mode} / {other}, at most {most:g}", ratio, ratio <= most))
    return found


def tables(cells: Cells, at_rates: dict[float, Cell], rate: float) -> list[TextTable]:
    """The choice of the rate, times and bars, for a terminal and for Markdown."""
    choice = tuple(at_rates[one].text + "*" * (one == rate) for one in RATES)
    heads = ("mode", *(f"rate {one:g}" for one in RATES))
    others = len(at_rates[rate].times)
    chosen = TextTable(f"bsp on even workers, median of {others} other seeds; * is taken", heads, (("bsp", *choice),))
    rows = tuple((NAMES[c], *(of[mode].text for mode in MODES)) for c, of in cells.items())
    seeds = len(cells["uniform"]["bsp"].times)
    title = f"Virtual time to {TARGET:.0%} at rate {rate:g}, median of {seeds} seeds; horizon {HORIZON:,.0f}"
    verdicts = [(NAMES[bar.cluster], bar.text, f"{bar.ratio:.2f} {'ok' if bar.met else 'MISSED'}") for bar in bars(cells)]
    times = TextTable(title, ("cluster", *MODES), rows)
    return [chosen, times, TextTable("Bars", ("cluster", "bar", "ratio"), tuple(verdicts))]


def summary(cells: Cells, at_rates: dict[float, Cell], rate: float) -> dict[str, Any]:
    """What the picture is drawn from."""

    def as_dict(mode: str, cell: Cell) -> dict[str, Any]:
        return {"sync": settled(mode), "median": cell.median, **asdict(cell)}

    return {
        "target": TARGET,
        "horizon": HORIZON,
        "seeds": len(cells["uniform"]["bsp"].times),
        "momentum": MOMENTUM,
        "rate": rate,
        "bsp at rates": {f"{one:g}": as_dict("bsp", cell) for one, cell in at_rates.items()},
        "clusters": {c: {mode: as_dict(mode, of[mode]) for mode in MODES} for c, of in cells.items()},
        "bars": [asdict(bar) for bar in bars(cells)],
    }


def uneven(
    seeds: int = 5,
    *,
    quick: bool = False,
    jobs: int = 2,
    folder: Path | None = None,
    file: Path | None = None,
    figures: Path = FIGURES,
    whole: bool = False,
) -> None:
    """The proof; `quick`: one seed each, and nothing is written to docs."""
    from polytempo.tasks import FASHION_MNIST

    folder = folder or FASHION_MNIST
    try:
        _data(folder)
    except UsageError as error:
        print(f"uneven: skipped, {error}")
        return
    file = file or OUT / f"uneven{'-whole' * whole}.jsonl"
    make = partial(make_runs, work=partial(run, folder=folder, whole=whole), file=file, result="curve", jobs=jobs)
    at_rates = tried(make([Job("uniform", "bsp", rate, seed) for seed in TUNING[: 1 if quick else None] for rate in RATES]))
    rate, numbers = best_rate(at_rates), range(1 if quick else seeds)
    cells = cells_of(make([Job(c, settled(mode), rate, seed) for seed in numbers for c in CLUSTERS for mode in MODES]))
    data = summary(cells, at_rates, rate)
    save(OUT, "uneven", tables(cells, at_rates, rate), data)
    if not quick:
        figures.write_text(as_text(data), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed; a few minutes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--data", type=Path, help="folder with the files of Fashion-MNIST (where Debian's package puts them)"
    )
    parser.add_argument("--out", type=Path, help="file of runs, one line each; added to (out/proof/uneven.jsonl)")
    parser.add_argument(
        "--whole", action="store_true", help="whole joint batches only (59,904 pictures): all modes have the same samples"
    )
    parser.add_argument(
        "--summary", type=Path, default=FIGURES, help="file of what they sum up to (docs/figures/uneven.json)"
    )
    given = parser.parse_args()
    uneven(
        given.seeds,
        quick=given.quick,
        jobs=given.jobs,
        folder=given.data,
        file=given.out,
        figures=given.summary,
        whole=given.whole,
    )


if __name__ == "__main__":
    main()
