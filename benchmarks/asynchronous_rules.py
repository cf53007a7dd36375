"""Rules for asynchronous training side by side: what the defaults of `sync/momentum.py` were chosen from, and what lost.

Digits, a perceptron with one hidden layer, 4 and 16 workers with 32 samples a step, each with one push in flight: in turn
(staleness n - 1), or with one worker 3 times slower. By hand in one process, in the order of a queue of events; what a
worker pushes is made by `optim/worker_momentum.py`, all else is written out here. All runs of a cell have as many samples.

The rate of each optimizer is that of a grid which is right for `bsp` with 4 workers: the smallest within a quarter of a
point of the best accuracy, on seeds from 100 on, which are not measured. It is not touched: each way is measured at half,
once and twice that rate. Differences are means over paired seeds with a 95 % interval. Seven questions:

    scale     is a push of one of n workers scaled by 1/n, 1/sqrt(n) or 1?
    moments   squares of gradients: of each worker, or shared by the servers? `pushed`: these see what is pushed, and no
              further bytes travel; `gradients`: they are sent each gradient, too, at twice the bytes
    gap       is a push damped by how far the values have moved since they were read (Barkai et al. 2020)? The gap is the
              root mean square of that, over the running mean of the root mean squares of all changes pushed. `paper`: scale
              1, divided by 1 + gap, which servers know exactly. `above`: divided by gap / n, or gap / 2n, where that is
              above 1; the gap is what the worker's answer before brought of others, so no server keeps a copy
    drop      is a push dropped whose staleness is above R (Ringmaster, Maranjyan et al. 2025)? R = n, 2n, or auto: at least
              n, and as much as the squared deviation of gradients over the square of their mean, both running means
    momentum  at each worker with the look-ahead, at each worker without, or on the servers?
    first     is a worker's first push extrapolated, too, from no change at all? `plain`: it is not
    downpour  the sum of 1 or 5 gradients is pushed, and servers run Adagrad on it; a worker steps by itself in between.
              Which scale?

Each run is a line of out/proof/asynchronous_rules.jsonl, written when it ends; what is there is not run again, so the file
is to be removed when a rule has changed. With `--jobs 16` it takes a few minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn

from measure import fill_in, save
from polytempo.optim.worker_momentum import ChangeMomentum, GradientMomentum
from polytempo.report.table import TextTable
from polytempo.simulate.replicas import Shards
from polytempo.sync.momentum import RULES
from polytempo.tasks import digits

OUT = Path("out/proof")
BATCH, ROUNDS, SLOWER = 32, 160, 3.0
SEEDS, FIRST_TUNED, TUNED = 10, 100, 10
FACTORS = (0.5, 1.0, 2.0)
#: Points of accuracy between which rates are not told apart.
NEAR = 0.25
#: Of running means: gaps, and the noise of gradients.
MEMORY = 0.99

SCALES: dict[str, Callable[[int], float]] = {
    "1/n": lambda workers: 1 / workers,
    "1/sqrt(n)": lambda workers: 1 / math.sqrt(workers),
    "1": lambda workers: 1.0,
}


@dataclass(frozen=True)
class Tuned:
    """An optimizer, and the rates of which one is chosen for it."""

    make: Callable[..., torch.optim.Optimizer]
    rates: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, param: nn.Parameter, rate: float) -> torch.optim.Optimizer:
        return self.make([param], lr=rate, **self.settings)


_ADAPTIVE = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
OPTIMIZERS = {
    "SGD": Tuned(torch.optim.SGD, (0.025, 0.05, 0.1, 0.2, 0.4, 0.8), {"momentum": 0.9}),
    "Adam": Tuned(torch.optim.Adam, _ADAPTIVE),
    "RMSprop": Tuned(torch.optim.RMSprop, _ADAPTIVE),
    "RMSprop, momentum": Tuned(torch.optim.RMSprop, tuple(rate / 16 for rate in _ADAPTIVE), {"momentum": 0.9}),
    "Adagrad": Tuned(torch.optim.Adagrad, (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)),
}


@dataclass(frozen=True)
class Way:
    """One way to make updates of pushes. Its text stands for it in the file of runs."""

    optimizer: str
    momentum: str = "lookahead"  #: or "worker", "server"; "bsp": a step of all
    scale: str = "1/n"
    moments: str = "worker"  #: or "pushed", "gradients": shared by the servers
    gap: str = ""  #: "paper", or "above n", "above 2n"
    drop: str = ""  #: "n", "2n" or "auto"
    plain_first: bool = False  #: is the first push of a worker not extrapolated?
    push: int = 0  #: gradients that are summed up: Downpour

    @property
    def text(self) -> str:
        """What differs from the defaults of this class."""
        usual = asdict(Way(self.optimizer))
        given = (f"{name}={value}" for name, value in asdict(self).items() if value != usual[name])
        return " ".join((self.optimizer, *given))


@dataclass(frozen=True)
class Run:
    """A way on a cluster at a rate."""

    way: Way
    workers: int
    slow: bool  #: is the last worker slower?
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return json.dumps([self.way.text, self.workers, self.slow, self.rate, self.seed])


@dataclass(frozen=True)
class Ending:
    """What a run came to."""

    accuracy: float
    loss: float  #: on the training data; infinite where it is not a number
    dropped: int = 0

    @property
    def log_loss(self) -> float:
        return math.log(min(max(self.loss, 1e-6), 1e6))


# One run.


class FlatModel:
    """A model whose parameters and gradients lie in one vector each."""

    def __init__(self, model: nn.Module) -> None:
        self.model, params = model, list(model.parameters())
        size = sum(param.numel() for param in params)
        self.values, self.gradient = nn.Parameter(torch.empty(size)), torch.zeros(size)
        start = 0
        for param in params:
            stretch = slice(start, start + param.numel())
            self.values.data[stretch] = param.data.view(-1)
            param.data = self.values.data[stretch].view_as(param)
            param.grad = self.gradient[stretch].view_as(param)
            start += param.numel()
        self.values.grad = self.gradient

    def take_gradient(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.gradient.zero_()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()


class Worker:
    """One worker: its model, its optimizer, and what it makes of a gradient."""

    def __init__(self, way: Way, rate: float, seed: int) -> None:
        self.flat = FlatModel(digits(seed).model)
        self.optimizer = OPTIMIZERS[way.optimizer](self.flat.values, rate)
        looks_ahead = way.momentum == "lookahead"
        self._gradients = GradientMomentum(self.optimizer, looks_ahead) if way.optimizer == "SGD" else None
        self._changes = ChangeMomentum(self.optimizer, looks_ahead) if way.optimizer != "SGD" else None
        self._way, self._rate = way, rate
        self._mean, self._before, self._steps = torch.zeros_like(self.flat.gradient), torch.zeros_like(self.flat.gradient), 0
        self.push = torch.zeros_like(self.flat.gradient)
        self.step = self.version = 0
        self.read = torch.zeros_like(self.flat.gradient)
        self.gap = 0.0  #: between the answer before and the values that it followed, less the own change

    def make_push(self) -> torch.Tensor:
        """The change that is asked for at scale 1, made of the gradient."""
        values = self.flat.values.data
        if self._way.moments != "worker":
            return self._first_moment()
        if self._gradients is not None:
            self._gradients.push(self.flat.values, self.flat.gradient, self.push)
            return self.push.mul_(-self._rate)
        assert self._changes is not None
        self.push.copy_(values)
        self.optimizer.step()
        self._changes.push(self.flat.values, self.push)
        if self._way.plain_first and self.step == 0:  # what was before is 0: it is 1 + b times the change
            self.push /= 1 + RULES[self._way.optimizer].extrapolation(self.optimizer.param_groups[0])
        return self.push

    def _first_moment(self) -> torch.Tensor:
        """The look-ahead of Adam's first moment, for servers that have the second."""
        beta = self.optimizer.param_groups[0]["betas"][0]
        self._steps += 1
        self._mean.lerp_(self.flat.gradient, 1 - beta)
        now = self._mean / (1 - beta**self._steps)
        torch.add(now, now - self._before, alpha=beta, out=self.push)
        self._before.copy_(now)
        return self.push


class Servers:
    """The values, and what is done with a push."""

    def __init__(self, way: Way, workers: int, rate: float, seed: int) -> None:
        self.flat, self.way, self.workers = FlatModel(digits(seed).model), way, workers
        self.scale = SCALES[way.scale](workers)
        self.optimizer = OPTIMIZERS[way.optimizer](self.flat.values, rate * self.scale)
        self.values = self.flat.values.data
        self.version = self.dropped = 0
        self._rate, self._second = rate, torch.zeros_like(self.values)
        self._usual_change, self._mean_gradient, self._mean_square, self._seen = 0.0, torch.zeros_like(self.values), 0.0, 0

    def step(self, gradient: torch.Tensor) -> None:
        """The optimizer's own step."""
        self.flat.gradient.copy_(gradient)
        self.optimizer.step()

    def take(self, worker: Worker) -> None:
        """Make what is to be made of the worker's gradient."""
        if self.way.drop and self._drops(worker):
            self.dropped += 1
        elif self.way.momentum == "server":
            self.step(worker.flat.gradient)
        else:
            change = worker.make_push()
            if self.way.moments != "worker":
                change = self._divided(change, change if self.way.moments == "pushed" else worker.flat.gradient)
            change = change * self.scale
            if self.way.gap:
                change = self._damped(change, worker)
            self.values.add_(change)
            if self.way.gap:
                worker.read = worker.flat.values.data + change  # what others have done is seen beside it
        self.version += 1

    def _divided(self, first: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        group = self.optimizer.param_groups[0]
        beta = group["betas"][1]
        self._second.mul_(beta).addcmul_(seen, seen, value=1 - beta)
        root = (self._second / (1 - beta ** (self.version + 1))).sqrt_().add_(group["eps"])
        return -self._rate * first / root

    def _damped(self, change: torch.Tensor, worker: Worker) -> torch.Tensor:
        size = _root_mean_square(change)
        self._usual_change += (size - self._usual_change) / min(self.version + 1, 1 / (1 - MEMORY))
        if not self._usual_change:
            return change
        if self.way.gap == "paper":
            gap = _root_mean_square(self.values - worker.flat.values.data) / self._usual_change
            return change / (1 + gap)
        threshold = {"above n": 1, "above 2n": 2}[self.way.gap] * self.workers
        return change / max(1.0, worker.gap / self._usual_change / threshold)

    def _drops(self, worker: Worker) -> bool:
        bound = {"n": 1, "2n": 2, "auto": 1}[self.way.drop] * self.workers
        if self.way.drop == "auto":
            gradient, self._seen = worker.flat.gradient, self._seen + 1
            weight = max(1 - MEMORY, 1 / self._seen)
            self._mean_gradient.lerp_(gradient, weight)
            self._mean_square += weight * (float(gradient.square().sum()) - self._mean_square)
            mean = float(self._mean_gradient.square().sum())
            bound = max(bound, self._mean_square / mean - 1) if mean else bound
        return self.version - worker.version > bound

    def answer(self, worker: Worker) -> None:
        """The worker goes on from the values as they are."""
        if self.way.gap:
            worker.gap = _root_mean_square(self.values - worker.read) if worker.step else 0.0
        worker.flat.values.data.copy_(self.values)
        worker.version, worker.step = self.version, worker.step + 1


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def turns(workers: int, slow: bool) -> Iterator[int]:
    """The workers in the order in which their steps end: in turn, but for the last where it is slower."""
    times = [SLOWER if slow and worker == workers - 1 else 1.0 for worker in range(workers)]
    ends = [(time + worker / workers, worker) for worker, time in enumerate(times)]
    while True:
        now, worker = ends[0]
        yield worker
        heapq.heapreplace(ends, (now + times[worker], worker))


def run(job: Run, rounds: int) -> Ending:
    """Make one run."""
    torch.set_num_threads(1)
    (inputs, targets), test = digits(job.seed).data
    shards = Shards(len(inputs), job.workers, [BATCH] * job.workers, job.seed)
    servers = Servers(job.way, job.workers, job.rate, job.seed)
    if job.way.momentum == "bsp":
        _in_rounds(servers, shards, inputs, targets, rounds)
    elif job.way.push:
        _in_sums(servers, job, shards, inputs, targets, rounds)
    else:
        _asynchronously(servers, job, shards, inputs, targets, rounds)
    with torch.no_grad():
        right = float((servers.flat.model(test[0]).argmax(1) == test[1]).float().mean())
        loss = float(nn.functional.cross_entropy(servers.flat.model(inputs), targets))
    return Ending(100 * right, loss if math.isfinite(loss) else math.inf, servers.dropped)


def _in_rounds(servers: Servers, shards: Shards, inputs: torch.Tensor, targets: torch.Tensor, rounds: int) -> None:
    servers.optimizer.param_groups[0]["lr"] /= servers.scale
    for step in range(rounds):
        index = torch.cat([shards.batch(worker, step) for worker in range(servers.workers)])
        servers.flat.take_gradient(inputs[index], targets[index])
        servers.optimizer.step()


def _asynchronously(
    servers: Servers, job: Run, shards: Shards, inputs: torch.Tensor, targets: torch.Tensor, rounds: int
) -> None:
    workers = [Worker(job.way, job.rate, job.seed) for _ in range(job.workers)]
    for _, number in zip(range(rounds * job.workers), turns(job.workers, job.slow), strict=False):
        worker = workers[number]
        index = shards.batch(number, worker.step)
        worker.flat.take_gradient(inputs[index], targets[index])
        servers.take(worker)
        servers.answer(worker)


def _in_sums(servers: Servers, job: Run, shards: Shards, inputs: torch.Tensor, targets: torch.Tensor, rounds: int) -> None:
    workers = [Worker(job.way, job.rate, job.seed) for _ in range(job.workers)]
    sums = [torch.zeros_like(servers.values) for _ in workers]
    for _, number in zip(range(rounds * job.workers), turns(job.workers, job.slow), strict=False):
        worker = workers[number]
        index = shards.batch(number, worker.step)
        worker.flat.take_gradient(inputs[index], targets[index])
        sums[number].add_(worker.flat.gradient)
        if (worker.step + 1) % job.way.push == 0:
            servers.step(sums[number])
            sums[number].zero_()
            servers.answer(worker)
        else:
            worker.flat.values.data.add_(worker.flat.gradient, alpha=-job.rate)
            worker.step += 1


# The questions.


def default(optimizer: str) -> Way:
    """As `sync/momentum.py` has it."""
    momentum = "server" if optimizer in ("RMSprop", "Adagrad") else "lookahead"
    return Way(optimizer, momentum, "1/n" if optimizer == "SGD" else "1/sqrt(n)")


def questions() -> dict[str, dict[str, list[tuple[str, Way]]]]:
    """The ways of each question by optimizer, with their names; the first is the default."""
    scales = {name: [(s, replace(default(name), scale=s)) for s in SCALES] for name in OPTIMIZERS}
    for name, ways in scales.items():
        ways.sort(key=lambda named: named[1] != default(name))
    moments = {"Adam": [(m, replace(default("Adam"), moments=m)) for m in ("worker", "pushed", "gradients")]}
    moments |= {
        name: [("servers", default(name)), ("worker", replace(default(name), momentum="worker"))]
        for name in ("RMSprop", "Adagrad")
    }
    gap = {
        name: [
            ("none", default(name)),
            ("paper", replace(default(name), scale="1", gap="paper")),
            *((how, replace(default(name), gap=how)) for how in ("above n", "above 2n")),
        ]
        for name in ("SGD", "Adam")
    }
    drop = {
        name: [("none", default(name)), *((f"R = {r}", replace(default(name), drop=r)) for r in ("n", "2n", "auto"))]
        for name in ("SGD", "Adam")
    }
    momentum = {
        name: [(m, replace(default(name), momentum=m)) for m in ("lookahead", "worker", "server")]
        for name in ("SGD", "Adam", "RMSprop, momentum")
    }
    first = {"Adam": [("extrapolated", default("Adam")), ("plain", replace(default("Adam"), plain_first=True))]}
    downpour = {
        f"Adagrad, push={push}": [(s, Way("Adagrad", "server", s, push=push)) for s in ("1/sqrt(n)", "1/n", "1")]
        for push in (1, 5)
    }
    return {
        "scale": scales,
        "moments": moments,
        "gap": gap,
        "drop": drop,
        "momentum": momentum,
        "first": first,
        "downpour": downpour,
    }


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    workers: tuple[int, ...] = (4, 16)
    seeds: int = SEEDS
    factors: tuple[float, ...] = FACTORS
    rounds: int = ROUNDS
    tuned: int = TUNED

    def cells(self) -> Iterator[tuple[int, bool, float]]:
        """Workers, is one of them slow, the factor on the rate."""
        for workers in self.workers:
            for slow in (False, True):
                for factor in self.factors:
                    yield workers, slow, factor


QUICK = Plan(workers=(4,), seeds=2, factors=(1.0,), rounds=60, tuned=1)


def bsp(optimizer: str) -> Way:
    return Way(optimizer, "bsp")


def grid(plan: Plan) -> list[Run]:
    """The runs that say which rate is the best for `bsp` with 4 workers."""
    seeds = range(FIRST_TUNED, FIRST_TUNED + plan.tuned)
    return [Run(bsp(name), 4, False, rate, seed) for name, of in OPTIMIZERS.items() for rate in of.rates for seed in seeds]


def best_rates(plan: Plan, runs: dict[str, Ending]) -> dict[str, float]:
    found: dict[str, dict[float, list[float]]] = {name: {} for name in OPTIMIZERS}
    for one in grid(plan):
        found[one.way.optimizer].setdefault(one.rate, []).append(runs[one.key].accuracy)
    return {name: min(rate for rate in of if _near_best(of, rate)) for name, of in found.items()}


def _near_best(of: dict[float, list[float]], rate: float) -> bool:
    return statistics.mean(of[rate]) >= max(map(statistics.mean, of.values())) - NEAR


def asked(plan: Plan, rates: dict[str, float]) -> list[Run]:
    """The runs of all questions, each once."""
    ways = {way: way for of in questions().values() for named in of.values() for _, way in named}
    ways |= {bsp(name): bsp(name) for name in OPTIMIZERS}
    all_runs = [run_of(way, cell, rates, seed) for way in ways for cell in plan.cells() for seed in range(plan.seeds)]
    return list({one.key: one for one in all_runs}.values())


def run_of(way: Way, cell: tuple[int, bool, float], rates: dict[str, float], seed: int) -> Run:
    workers, slow, factor = cell
    return Run(way, workers, slow and way.momentum != "bsp", rates[way.optimizer] * factor, seed)


def make_runs(wanted: list[Run], rounds: int, file: Path, jobs: int) -> dict[str, Ending]:
    """Make the runs that are not there; one line each, as they end."""
    runs = kept_runs(file)
    missing = [one for one in wanted if one.key not in runs]
    missing.sort(key=lambda one: -one.workers)  # the long ones first
    file.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool, file.open("a", encoding="utf-8") as lines:
        running = {pool.submit(run, one, rounds): one.key for one in missing}
        for done in track(as_completed(running), "runs", len(missing)):
            ending = runs[running[done]] = done.result()
            lines.write(json.dumps({"run": running[done], **asdict(ending)}) + "\n")
            lines.flush()
    return runs


def kept_runs(file: Path) -> dict[str, Ending]:
    """The runs that have been made before."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {one.pop("run"): Ending(**one) for one in lines}


# What they come to.


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and half its 95 % interval."""

    mean: float
    half: float

    @property
    def text(self) -> str:
        return f"{self.mean:+.2f} ±{self.half:.2f}"


#: Student's t for a two-sided 95 % interval, by degrees of freedom, and for more of them.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05}


def difference(ours: list[float], others: list[float]) -> Difference:
    paired = [mine - theirs for mine, theirs in zip(ours, others, strict=True)]
    if len(paired) < 2:
        return Difference(statistics.mean(paired), math.inf)
    t = STUDENT[max(n for n in STUDENT if n <= len(paired) - 1)]
    return Difference(statistics.mean(paired), t * statistics.stdev(paired) / math.sqrt(len(paired)))


def summary(data: dict[str, Any]) -> TextTable:
    """Of each question and optimizer: what each way is beside the first, over all cells."""
    rows = [
        (f"{question}: {name}", cells[0]["ways"][0]["name"], *_others(cells))
        for question, of in data.items()
        for name, cells in of.items()
    ]
    widest = max(map(len, rows))
    heads = ("", "beside", *("" for _ in range(widest - 2)))
    return TextTable("Ways beside the first one", heads, tuple((*row, *[""] * (widest - len(row))) for row in rows))


def _others(cells: list[dict[str, Any]]) -> list[str]:
    """Each way but the first: its name, and what it is over all cells."""
    names = [way["name"] for way in cells[0]["ways"]]
    return [f"{name}: {text}" for name, text in list(zip(names, _over_all(cells)[2:], strict=True))[1:]]


def tables(plan: Plan, rates: dict[str, float], runs: dict[str, Ending]) -> tuple[list[TextTable], dict[str, Any]]:
    """One table for each question and optimizer, and everything as data."""
    made: list[TextTable] = []
    data: dict[str, Any] = {}
    for question, of in questions().items():
        for name, ways in of.items():
            cells = [_row(cell, ways, rates, runs, plan.seeds) for cell in plan.cells()]
            rows = (*((_place(one), _pair(*one["bsp"]), *map(_cell, one["ways"])) for one in cells), _over_all(cells))
            rate = rates[ways[0][1].optimizer]
            title = f"{question}: {name} at {rate:g} x; accuracy / loss (points to the first way, {plan.seeds} paired seeds)"
            made.append(TextTable(title, ("workers, rate", "bsp", *(way for way, _ in ways)), rows))
            data.setdefault(question, {})[name] = cells
    return made, data


def _row(
    cell: tuple[int, bool, float], named: list[tuple[str, Way]], rates: dict[str, float], runs: dict[str, Ending], seeds: int
) -> dict[str, Any]:
    def endings(way: Way) -> list[Ending]:
        return [runs[run_of(way, cell, rates, seed).key] for seed in range(seeds)]

    first, joint = endings(named[0][1]), endings(bsp(named[0][1].optimizer))
    workers, slow, factor = cell
    ways = []
    for name, way in named:
        mine = endings(way)
        accuracies = [one.accuracy for one in mine]
        ways.append(
            {
                "name": name,
                "way": way.text,
                "accuracies": accuracies,
                "losses": [min(one.loss, 1e6) for one in mine],
                "accuracy": statistics.mean(accuracies),
                "loss": math.exp(statistics.mean(one.log_loss for one in mine)),
                "to default": asdict(difference(accuracies, [one.accuracy for one in first])),
                "log loss to default": asdict(difference([one.log_loss for one in mine], [one.log_loss for one in first])),
                "to bsp": asdict(difference(accuracies, [one.accuracy for one in joint])),
                "dropped": statistics.mean(one.dropped for one in mine),
            }
        )
    of_bsp = statistics.mean(one.accuracy for one in joint), math.exp(statistics.mean(one.log_loss for one in joint))
    return {"workers": workers, "slow": slow, "factor": factor, "bsp": of_bsp, "ways": ways}


def _place(cell: dict[str, Any]) -> str:
    return f"{cell['workers']}{', one 3x slower' * cell['slow']}, rate x{cell['factor']:g}"


def _pair(accuracy: float, loss: float) -> str:
    return f"{accuracy:.1f} / {loss:.4f}"


def _cell(way: dict[str, Any]) -> str:
    text = _pair(way["accuracy"], way["loss"])
    return text if way["to default"]["half"] == 0 else f"{text} ({Difference(**way['to default']).text})"


def _over_all(cells: list[dict[str, Any]]) -> tuple[str, ...]:
    """Of each way: points to the default, the ratio of the losses, and how often it is far behind `bsp`."""
    texts = []
    for ways in zip(*(one["ways"] for one in cells), strict=True):
        points = statistics.mean(way["to default"]["mean"] for way in ways)
        ratio = math.exp(statistics.mean(way["log loss to default"]["mean"] for way in ways))
        behind = sum(way["to bsp"]["mean"] < -5 for way in ways)
        texts.append(f"{points:+.2f}, loss x{ratio:.2f}" + f", {behind} of {len(cells)} below bsp - 5" * bool(behind))
    return "all", "", *texts


def asynchronous_rules(jobs: int, plan: Plan, file: Path, name: str) -> None:
    """Make the runs that are missing, and the tables."""
    found = make_runs(grid(plan), plan.rounds, file, jobs)
    rates = best_rates(plan, found)
    runs = make_runs(asked(plan, rates), plan.rounds, file, jobs)
    made, data = tables(plan, rates, runs)
    settings = {**asdict(plan), "batch": BATCH, "slower": SLOWER, "rates": rates}
    save(OUT, f"{name}_short", [summary(data)], settings)
    save(OUT, name, made, {"settings": settings, "questions": data})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, 4 workers, one rate, half as long; a minute")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--out", type=Path, help="file of runs, one line each; added to (out/proof/asynchronous_rules.jsonl)"
    )
    parser.add_argument("--page", type=Path, help="put the summary into this page, where it asks for it")
    given = parser.parse_args()
    name = f"asynchronous_rules{'_quick' * given.quick}"
    plan = QUICK if given.quick else Plan(seeds=given.seeds)
    asynchronous_rules(given.jobs, plan, given.out or OUT / f"{name}.jsonl", name)
    if given.page:
        fill_in(given.page, OUT, [f"{name}_short"])


if __name__ == "__main__":
    main()
