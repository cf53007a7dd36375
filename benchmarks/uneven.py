"""Time to a target accuracy of all modes on four clusters, in virtual time: the bars of `bsp+balance` and `anytime`.

Fashion-MNIST, a perceptron with one hidden layer, SGD with momentum 0.9, 4 workers with 64 samples a step, real gradients on
a simulated clock:

    uniform     every step takes 1
    slow        one worker is 3 times slower
    stalls      5 % of all steps take 10 more
    both

Each mode takes the best of three learning rates, by the median over the seeds of the time to 87 %; asynchronous modes divide
the rate by the number of workers, as always. A run that has not reached the target by the horizon counts as the horizon. The
accuracy is that of all 10,000 test pictures, every 10 units of time once it is within three points of the target, and
every 100 before.

In virtual time `bsp` leaves out the pictures at the end of an epoch that fill no joint batch, 96 of 60,000; the two modes do
not. With `--whole` no mode has them: then on the uniform cluster all rounds of the three have the same samples, and only
rounding differs. (The option came after the first measurement, to tell noise from a difference between modes.)

Bars: `anytime` takes at most 1.05 times as long as `bsp` on the uniform cluster, and on the others the better of `anytime`
and `bsp+balance` is at least 1.3 times as fast as the best of the others. They are judged at the horizon of the runs and,
from the same runs, at two thirds of it. Settings (momentum, rates, the two modes' own) were chosen on seeds from 100 on,
which are not measured.

Each run is a line of out/proof/uneven.jsonl, written when it ends; what is there is not run again, so the file is to be
removed when a mode has changed. What they sum up to goes to docs/figures/uneven.json, from which `docs/figures/uneven.py`
draws. The 420 runs take about 25 minutes on two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import track

from measure import save
from polytempo.errors import UsageError
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Hiccup

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
RATES, MOMENTUM = (0.02, 0.05, 0.1), 0.9
TARGET, HORIZON, SHORTER = 0.87, 2400.0, 1600.0
OFTEN, SELDOM, NEAR = 10.0, 100.0, 0.03
AT_MOST, AT_LEAST = 1.05, 1.3

#: cluster, mode, rate, seed
Job = tuple[str, str, float, int]
#: Virtual time and accuracy.
Curve = list[tuple[float, float]]


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
    from polytempo.simulate.datasets import fashion_mnist

    (inputs, targets), test = fashion_mnist(folder=folder).data
    joint = EVEN.workers * EVEN.batch
    length = len(inputs) // joint * joint if whole else len(inputs)
    return (inputs[:length], targets[:length]), test


def run(job: Job, folder: Path, whole: bool = False) -> Curve:
    """The accuracy of a run against virtual time, until the target is reached."""
    import torch

    from polytempo.simulate.datasets import Shards, fashion_mnist_model
    from polytempo.simulate.dealt_trainer import VirtualDealtTrainer
    from polytempo.simulate.run import simulate_job
    from polytempo.simulate.virtual_training import settled_spec, trainer_of

    torch.set_num_threads(1)
    name, sync, rate, seed = job
    cluster, (train, test), model = CLUSTERS[name], _data(folder, whole), fashion_mnist_model(seed)
    shards = Shards(len(train[0]), cluster.workers, [cluster.batch] * cluster.workers, seed)
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=MOMENTUM)
    loss, spec = torch.nn.functional.cross_entropy, settled_spec(sync, model, optimizer, cluster.workers)
    trainer = trainer_of(spec)(model, train, shards, loss, optimizer, spec)
    if isinstance(trainer, VirtualDealtTrainer):
        trainer.one_pass = True
    looks = Looks(*test)
    trainer.observers.append(lambda now: looks.look(trainer.master, now))
    with contextlib.suppress(Reached):
        simulate_job(cluster, spec.text, seed=seed, trainer=trainer, observe_every=OFTEN, seconds=HORIZON)
    return looks.curve


def kept_runs(file: Path) -> dict[Job, Curve]:
    """The runs that have been made before."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    runs = {(one["cluster"], one["sync"], one["rate"], one["seed"]): one["curve"] for one in lines}
    return {job: [(at, right) for at, right in curve] for job, curve in runs.items()}


def make_runs(wanted: list[Job], folder: Path, file: Path, jobs: int, whole: bool = False) -> dict[Job, Curve]:
    """Make the runs that are not there; one line each, as they end."""
    curves = kept_runs(file)
    missing = [job for job in wanted if job not in curves]
    file.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool, file.open("a", encoding="utf-8") as lines:
        running = {pool.submit(run, job, folder, whole): job for job in missing}
        for done in track(as_completed(running), "runs", len(missing)):
            job = running[done]
            curves[job] = done.result()
            names = dict(zip(("cluster", "sync", "rate", "seed"), job, strict=True))
            lines.write(json.dumps({**names, "curve": curves[job]}) + "\n")
            lines.flush()
    return {job: curves[job] for job in wanted}


@dataclass(frozen=True)
class Cell:
    """A mode on a cluster, at its best rate."""

    rate: float
    times: list[float | None]  #: of each seed; None: never
    accuracies: list[float]  #: the best that was seen, of each seed
    horizon: float

    @property
    def median(self) -> float:
        return statistics.median(self.horizon if time is None else time for time in self.times)

    @property
    def text(self) -> str:
        missed = sum(time is None for time in self.times)
        if missed == len(self.times):
            return f"never ({statistics.median(self.accuracies):.3f})"
        if 2 * missed > len(self.times):
            return f"{missed} of {len(self.times)} never"
        return f"{self.median:,.0f}" + (f", {missed} never" if missed else "")

    def as_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "median": self.median, "times": self.times, "accuracies": self.accuracies}


Cells = dict[str, dict[str, Cell]]


def best_of(curves: dict[Job, Curve], horizon: float = HORIZON) -> Cells:
    """Of each mode on each cluster, the rate at which it is soonest."""
    cells: dict[str, dict[str, list[Cell]]] = {}
    rates = dict.fromkeys((cluster, sync, rate) for cluster, sync, rate, _ in curves)
    for cluster, sync, rate in rates:
        of = [curve for job, curve in sorted(curves.items()) if job[:3] == (cluster, sync, rate)]
        of = [[(at, right) for at, right in curve if at <= horizon] for curve in of]
        reached = [next((at for at, right in curve if right >= TARGET), None) for curve in of]
        cell = Cell(rate, reached, [max(right for _, right in curve) for curve in of], horizon)
        cells.setdefault(cluster, {}).setdefault(sync, []).append(cell)
    return {cluster: {sync: min(of, key=_order) for sync, of in modes.items()} for cluster, modes in cells.items()}


def _order(cell: Cell) -> tuple[float, float]:
    return cell.median, -statistics.median(cell.accuracies)


@dataclass(frozen=True)
class UnevenBar:
    """One bar and how it was met."""

    cluster: str
    text: str
    ratio: float
    met: bool


def bars(cells: Cells) -> list[UnevenBar]:
    """The bars of the two modes."""
    found = []
    for cluster, of in cells.items():
        if cluster == "uniform":
            ratio = of["anytime:auto"].median / of["bsp"].median
            found.append(UnevenBar(cluster, f"anytime:auto / bsp, at most {AT_MOST:g}", ratio, ratio <= AT_MOST))
            continue
        best, other = (min(modes, key=lambda sync: of[sync].median) for modes in (OURS, OTHERS))
        ratio = of[other].median / of[best].median
        found.append(UnevenBar(cluster, f"{other} / {best}, at least {AT_LEAST:g}", ratio, ratio >= AT_LEAST))
    return found


def tables(cells: Cells, shorter: Cells) -> list[TextTable]:
    """Times and bars, for a terminal and for Markdown."""
    modes = (*OTHERS, *OURS)
    rows = [(NAMES[c], *(f"{of[m].text} [{of[m].rate:g}]" for m in modes)) for c, of in cells.items()]
    verdicts = []
    for bar, short in zip(bars(cells), bars(shorter), strict=True):
        results = [f"{one.ratio:.2f} {'ok' if one.met else 'MISSED'}" for one in (bar, short)]
        verdicts.append((NAMES[bar.cluster], bar.text, *results))
    title = (
        f"Virtual time to {TARGET:.0%}, median of {len(cells['uniform']['bsp'].times)} seeds [rate]; horizon {HORIZON:,.0f}"
    )
    heads = ("cluster", "bar", f"ratio, horizon {HORIZON:,.0f}", f"horizon {SHORTER:,.0f}")
    return [TextTable(title, ("cluster", *modes), tuple(rows)), TextTable("Bars", heads, tuple(verdicts))]


def summary(cells: Cells, shorter: Cells, rates: tuple[float, ...]) -> dict[str, Any]:
    """What the picture is drawn from."""
    return {
        "target": TARGET,
        "horizon": HORIZON,
        "seeds": len(cells["uniform"]["bsp"].times),
        "momentum": MOMENTUM,
        "rates": list(rates),
        "clusters": {c: {m: of[m].as_dict() for m in (*OTHERS, *OURS)} for c, of in cells.items()},
        "bars": [asdict(bar) for bar in bars(cells)],
        "bars at a shorter horizon": {"horizon": SHORTER, "bars": [asdict(bar) for bar in bars(shorter)]},
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
    """The proof; `quick`: one seed and one rate, and nothing is written to docs."""
    from polytempo.simulate.datasets import FASHION_MNIST

    folder = folder or FASHION_MNIST
    try:
        _data(folder)
    except UsageError as error:
        print(f"uneven: skipped, {error}")
        return
    rates, numbers = (RATES[1:2], range(1)) if quick else (RATES, range(seeds))
    wanted = [(c, m, r, s) for s in numbers for c in CLUSTERS for m in (*OURS, *OTHERS) for r in rates]
    file = file or OUT / f"uneven{'-whole' * whole}.jsonl"
    curves = make_runs(wanted, folder, file, jobs, whole)
    cells, shorter = best_of(curves), best_of(curves, SHORTER)
    data = summary(cells, shorter, rates)
    save(OUT, "uneven", tables(cells, shorter), data)
    if not quick:
        text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(data, indent=1))
        figures.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and one rate; a few minutes")
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
