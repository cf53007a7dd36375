"""The bar of ASU-P: with one of four workers three times slower, to reach 99 % of what `bsp` ends with 1.5 times sooner, and
to end within half a point of it. `bsp` has the same update rule.

Everything is in virtual time on the digits, for a perceptron and for a small ResNet with batch norm. All runs are of as many
samples. Each method takes its learning rate from one grid, by one criterion, the earliest mean time to the target among
rates that end within half a point of the method's best, on seeds that are not measured later: one for all rates, two more
for the three that are ahead (`bsp` has all). The target is 99 % of the best that `bsp` ends with anywhere on the grid.

What a run ends with is the mean of its looks in the last tenth: a single one, of 360 pictures, jumps by several tenths of a
point from step to step. While training, looks are taken with the merged statistics of batch norm, of which those of the slow
worker are old; at the end they are estimated again: "final" is with those, and decides the bar.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.progress import track
from torch import nn

from measure import save
from polytempo.optim.asup import AsuP
from polytempo.optim.several_workers import norm_layers
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Lognormal
from polytempo.simulate.virtual_training import TrainingRun, accuracy, train_virtually
from polytempo.tasks import digits
from polytempo.train.evaluation_statistics import evaluation_statistics as recalibrated

OUT = Path("out/proof")
CLUSTER = Cluster(step_time=Lognormal(1.0, 0.1), slow={3: 3.0})
GRID = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
#: SGD takes gradients as they are, AsuP brings them to size one: the same grid, in another unit.
SGD_UNIT = 50
TUNING = (1000, 1001, 1002)
SOONER, POINTS = 1.5, 0.5


@dataclass(frozen=True)
class Method:
    """A mode, and an optimizer; `asup` has a rule of its own and takes the rate of the optimizer."""

    sync: str
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    unit: float = 1.0


BASE = "bsp + AsuP"
METHODS = {
    BASE: Method("bsp", AsuP),
    "bsp + AsuP, momentum=0": Method("bsp", partial(AsuP, momentum=0.0)),
    **{
        sync: Method(sync)
        for sync in (
            "asup",
            "asup,bound=3",
            "asup,lr=staleness",
            "asup,dc=0.04",
            "asup,momentum=async",
            "asup,momentum=0",
        )
    },
    "bsp + SGD": Method("bsp", unit=SGD_UNIT),
    "asp + SGD": Method("asp", unit=SGD_UNIT),
}


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(width, width), nn.ReLU(), *convolution(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def convolution(before: int, after: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after)


def resnet(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolution(1, 16, 2), nn.ReLU())
        return nn.Sequential(first, Block(16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


#: For each task: its model, the steps of all workers together, and the simulated seconds between two looks.
TASKS: dict[str, tuple[Callable[[int], nn.Module], int, float]] = {
    "perceptron": (lambda seed: digits(seed).model, 1200, 1.0),
    "ResNet": (resnet, 600, 3.0),
}


def run_of(task: str, method: Method, lr: float, seed: int) -> TrainingRun:
    make, steps, every = TASKS[task]
    known = digits(seed)
    return train_virtually(
        make(seed), known.data, known.loss, sync=method.sync, cluster=CLUSTER, steps=steps, evaluate_every=every,
        optimizer=partial(method.optimizer, lr=lr * method.unit), seed=seed,
    )  # fmt: skip


def last_looks(run: TrainingRun) -> float:
    end = run.curve[-1][0]
    return statistics.mean(share for seconds, share in run.curve if seconds >= 0.9 * end)


def final(run: TrainingRun) -> float:
    """With new statistics, where the model has any."""
    if not norm_layers(run.model):
        return last_looks(run)
    (images, _), (test_images, test_labels) = digits().data
    with recalibrated(run.model, "recalibrated", batches=images.split(128)), torch.no_grad():
        return accuracy(run.model(test_images), test_labels)


def time_to(run: TrainingRun, target: float) -> float:
    return run.time_to(target) or math.inf


Runs = dict[float, list[TrainingRun]]


def by_speed(runs: Runs, target: float) -> list[float]:
    """Rates, the one that is to be measured first."""
    ends = {lr: _mean([final(run) for run in runs[lr]]) for lr in runs}
    enough = max(ends.values()) - POINTS / 100
    return sorted(runs, key=lambda lr: (ends[lr] < enough, _mean([time_to(run, target) for run in runs[lr]]), -ends[lr]))


def best_rate(task: str, method: Method, target: float) -> float:
    first, *others = TUNING
    runs = {lr: [run_of(task, method, lr, first)] for lr in GRID}
    ahead = by_speed(runs, target)[:3]
    return by_speed({lr: [*runs[lr], *(run_of(task, method, lr, seed) for seed in others)] for lr in ahead}, target)[0]


def measured(task: str, seeds: Sequence[int]) -> tuple[float, dict[str, float], dict[str, list[TrainingRun]]]:
    """The target, the rate that each method takes, and its runs at that rate."""
    base = {lr: [run_of(task, METHODS[BASE], lr, seed) for seed in TUNING] for lr in track(GRID, description=f"{task}, bsp")}
    target = 0.99 * max(_mean([last_looks(run) for run in runs]) for runs in base.values())
    rates = {BASE: by_speed(base, target)[0]}
    for name in track([name for name in METHODS if name != BASE], description=f"{task}, rates"):
        rates[name] = best_rate(task, METHODS[name], target)
    found = {
        name: [run_of(task, METHODS[name], lr, seed) for seed in seeds]
        for name, lr in track(list(rates.items()), description=f"{task}, measured")
    }
    return target, rates, found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float], digits_after: int = 0) -> str:
    there = [value for value in values if value < math.inf]
    missed = f", {len(values) - len(there)} never" if len(there) < len(values) else ""
    if len(there) < 2:
        return f"{there[0]:.{digits_after}f}{missed}" if there else "never"
    return f"{_mean(there):.{digits_after}f} ±{statistics.stdev(there):.{digits_after}f}{missed}"


def _row(
    name: str, unit: float, lr: float, ours: list[TrainingRun], base: list[TrainingRun], target: float
) -> tuple[str, ...]:
    times, theirs = [time_to(run, target) for run in ours], [time_to(run, target) for run in base]
    sooner = _mean(theirs) / _mean(times) if max(times) < math.inf else 0.0
    looks, ends = ([100 * of(run) for run in ours] for of in (last_looks, final))
    ahead = _mean(ends) - _mean([100 * final(run) for run in base])
    verdict = "" if not name.startswith("asup") else "ok" if sooner >= SOONER and ahead >= -POINTS else "missed"
    ratio = f"{sooner:.2f}x" if sooner else "-"
    return name, f"{lr * unit:g}", _spread(times), ratio, _spread(looks, 1), _spread(ends, 1), f"{ahead:+.1f}", verdict


def asup(seeds: int) -> None:
    torch.set_num_threads(1)
    tables, data = [], {}
    heads = ("method", "rate", "time to target\n(s)", "sooner", "last looks\n(%)", "final\n(%)", "points", "bar")
    for task in TASKS:
        target, rates, runs = measured(task, range(seeds))
        rows = [_row(name, METHODS[name].unit, lr, runs[name], runs[BASE], target) for name, lr in rates.items()]
        title = f"{task}: simulated seconds to {100 * target:.1f} %, one of four workers 3x slower, {seeds} seeds"
        tables.append(TextTable(title, heads, tuple(rows)))
        data[task] = {name: [{"rate": lr, "curve": run.curve} for run in runs[name]] for name, lr in rates.items()}
    save(OUT, "asup", tables, data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    asup(parser.parse_args().seeds)
