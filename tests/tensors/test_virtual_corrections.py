"""Corrections and ASU-P in virtual training: against one weight in plain Python, and where they must do nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from scalar import SPEEDS, START, asynchronous, gradients, train
from torch import nn

from polytempo.errors import UsageError
from polytempo.optim.asup import AsuP
from polytempo.optim.several_workers import COORDINATES, GradientDivergence
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.virtual_model import VirtualModel
from polytempo.simulate.virtual_training import train_virtually
from polytempo.tasks import digits

RATE = 0.2
EACH = RATE / len(SPEEDS)
SECONDS = 50.0
SGD = partial(torch.optim.SGD, lr=RATE)
MOMENTUM = partial(torch.optim.SGD, lr=RATE, momentum=0.9)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are small: several threads are slower, much so where others use them, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Trajectories.


def slower(by: Callable[[int], float]) -> Callable[[float, float, float, int], float]:
    return lambda weight, g, read, stale: weight - EACH * by(stale) * g


def dropping(weight: float, g: float, read: float, stale: int) -> float | None:
    return None if stale > 1 else weight - EACH * g


def compensating(weight: float, g: float, read: float, stale: int) -> float:
    return weight - EACH * (g + 0.5 * g * g * (weight - read))


class Adaptive:
    """DC-ASGD-a, with a memory of its own."""

    def __init__(self, strength: float, memory: float, combined: bool = False) -> None:
        self.strength, self.memory, self.combined, self.square = strength, memory, combined, 0.0

    def __call__(self, weight: float, g: float, read: float, stale: int) -> float | None:
        if self.combined and stale > 3:
            return None
        rate = EACH / max(1, stale) if self.combined else EACH
        self.square = self.memory * self.square + (1 - self.memory) * g * g
        strength = self.strength / math.sqrt(self.square + 1e-7)
        return weight - rate * (g + strength * g * g * (weight - read))


class Velocity:
    """SGD whose momentum is lowered by the mean staleness so far."""

    def __init__(self) -> None:
        self.total = self.count = 0
        self.velocity = 0.0

    def __call__(self, weight: float, g: float, read: float, stale: int) -> float:
        self.total += stale
        self.count += 1
        momentum = min(max(1 - (1 + self.total / self.count) * 0.1, 0.0), 0.9)
        self.velocity = momentum * self.velocity + g
        return weight - EACH * self.velocity


@pytest.mark.parametrize(
    ("options", "optimizer", "update"),
    [
        ("lr=staleness", SGD, slower(lambda stale: 1 / max(1, stale))),
        ("decay=0.7", SGD, slower(lambda stale: 0.7**stale)),
        ("lr=staleness,decay=0.7", SGD, slower(lambda stale: 0.7**stale / max(1, stale))),
        ("drop=1", SGD, dropping),
        ("dc=0.5", SGD, compensating),
        ("dca=0.8", SGD, Adaptive(0.8, 0.95)),
        ("dca=0.8,dcm=0.5,lr=staleness,drop=3", SGD, Adaptive(0.8, 0.5, combined=True)),
        ("momentum=async", MOMENTUM, Velocity()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trajectories(options: str, optimizer: Callable[..., object], update: Callable[..., float | None]) -> None:
    run, weight = train(f"asp,{options}", optimizer, *SPEEDS, seconds=SECONDS)
    plain, other = train("asp", optimizer, *SPEEDS, seconds=SECONDS)
    assert weight == pytest.approx(asynchronous(SPEEDS, SECONDS, update), abs=1e-12)
    assert abs(weight - other) > 1e-6  # there was something to correct
    assert plain.outcome.staleness_max >= 2
    assert bool(run.outcome.discarded) == ("drop" in options)


def test_momentum_of_equal_workers_is_the_published_one() -> None:
    """Three equal workers have a staleness of 2 from their first round on: 0.9 becomes 0.7, about."""
    _, corrected = train("asp,momentum=async", MOMENTUM, 1.0, 1.0, 1.0, steps=900)
    _, published = train("asp,momentum=server", partial(torch.optim.SGD, lr=RATE, momentum=0.7), 1.0, 1.0, 1.0, steps=900)
    assert corrected == pytest.approx(published, abs=1e-4)


def test_momentum_needs_something_to_correct() -> None:
    with pytest.raises(UsageError, match="momentum=async needs an optimizer with a momentum to correct, got Adam"):
        train("asp,momentum=async", torch.optim.Adam, 1.0, steps=1)


# ASU-P.


class Rule:
    def __init__(self, momentum: float, rho: float, eps: float, initial: float) -> None:
        self.momentum, self.rho, self.eps, self.square, self.velocity = momentum, rho, eps, initial, 0.0

    def __call__(self, weight: float, g: float, read: float, stale: int) -> float:
        self.square = self.rho * self.square + (1 - self.rho) * g * g
        self.velocity = self.momentum * self.velocity + 0.02 / 3 * g / math.sqrt(self.square + self.eps)
        return weight - self.velocity


SLOW = partial(torch.optim.SGD, lr=0.02)


@pytest.mark.parametrize(
    ("sync", "rule"),
    [
        ("asup", Rule(0.9, 0.9, 1e-10, 0.0)),
        ("asup,bound=1000", Rule(0.9, 0.9, 1e-10, 0.0)),
        ("asup:momentum=0.5,rho=0.8,eps=1e-3,initial=1", Rule(0.5, 0.8, 1e-3, 1.0)),
        ("asup,momentum=0,rho=0", Rule(0.0, 0.0, 1e-10, 0.0)),
    ],
)
def test_asup(sync: str, rule: Rule) -> None:
    _, weight = train(sync, SLOW, *SPEEDS, seconds=SECONDS)
    assert weight == pytest.approx(asynchronous(SPEEDS, SECONDS, rule), abs=1e-12)
    assert abs(weight - START) > 0.05


def test_without_momentum_and_memory_asup_goes_by_signs() -> None:
    gradient, weight = gradients(1), START
    for step in range(10):
        weight -= 0.02 * math.copysign(1, gradient(0, step, weight))
    assert train("asup,momentum=0,rho=0", SLOW, 1.0, steps=10)[1] == pytest.approx(weight, abs=1e-9)


def test_asup_takes_rates_and_decays_from_the_optimizer_given_and_leaves_its_own_kind_alone() -> None:
    def wide(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02, weight_decay=0.3)

    own = partial(AsuP, lr=0.02, weight_decay=0.3, momentum=0.1, rho=0.5)
    assert train("asup,momentum=0.1,rho=0.5", wide, 1.0, 2.0, steps=30)[1] == train("asup", own, 1.0, 2.0, steps=30)[1]
    assert train("asup,momentum=0.1,rho=0.5", SLOW, 1.0, 2.0, steps=30)[1] != train("asup", own, 1.0, 2.0, steps=30)[1]


# Nothing.


ALL = "lr=staleness,decay=0.5,drop=0,momentum=async,dc=1"


@pytest.mark.parametrize("sync", ["asp", "ssp:2", "dssp:1..3", "every:2", "delay:0", "asup", "downpour:push=3,fetch=2"])
@pytest.mark.parametrize("options", [ALL, ALL.replace("dc=1", "dca=1")])
def test_one_worker_is_never_stale_and_never_corrected(sync: str, options: str) -> None:
    if sync.startswith("asup"):
        options = options.replace("momentum=async", "momentum=async:0.9")
    plain, corrected = (train(text, MOMENTUM, 1.0, latency=0.3, steps_each=30) for text in (sync, f"{sync},{options}"))
    assert corrected[1] == plain[1]
    assert corrected[0].outcome.discarded == 0


@pytest.mark.parametrize("options", ["decay=1", "dc=0", "dca=0", "drop=1000", "decay=1,dc=0,drop=1000"])
def test_corrections_of_nothing(options: str) -> None:
    assert train(f"asp,{options}", MOMENTUM, *SPEEDS, seconds=20.0)[1] == train("asp", MOMENTUM, *SPEEDS, seconds=20.0)[1]


# Statistics and spread.


def test_statistics_are_merged_as_those_of_one_population(monkeypatch: pytest.MonkeyPatch) -> None:
    trainees: list[VirtualModel] = []
    make = VirtualModel.__init__
    monkeypatch.setattr(VirtualModel, "__init__", lambda self, *args: (trainees.append(self), make(self, *args))[1])
    task = digits()
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))
    run = train_virtually(model, task.data, task.loss, sync="asp", cluster=Cluster(workers=3, batch=8), steps=31)
    means, variances, counts = zip(*trainees[0].gradients.buffers.values(), strict=True)
    mean = sum(means) / 3
    variance = sum(v + m * m for v, m in zip(variances, means, strict=True)) / 3 - mean * mean
    norm = run.model[0]
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, variance)
    assert not torch.allclose(norm.running_var, sum(variances) / 3, rtol=1e-3)
    assert int(norm.num_batches_tracked) == int(sum(int(count) for count in counts) / 3)


def test_spread_is_that_of_the_gradients() -> None:
    run, _ = train("bsp", partial(torch.optim.SGD, lr=0.0), 1.0, 1.0, 1.0, steps_each=2)
    gradient, expected = gradients(3), 0.0
    for step in range(2):
        each = [gradient(worker, step, START) for worker in range(3)]
        mean = sum(each) / 3
        expected += math.sqrt(sum((g - mean) ** 2 for g in each) / 3) / abs(mean) / 2
    assert run.spread == pytest.approx(expected, abs=1e-12)
    assert run.as_dict()["spread"] == run.spread


@pytest.mark.parametrize("sync", ["asp", "downpour:push=2"])
def test_alone_there_is_no_spread(sync: str) -> None:
    assert train(sync, SGD, 1.0, steps=10)[0].spread == 0.0
    assert train(sync, SGD, 1.0, 1.3, steps=20)[0].spread > 0.1


@pytest.mark.parametrize("shapes", [[(3, 4), (5,)], [(7, 11), (1,), (2, 3)], [(64, 64), (3,), (700,), ()]])
def test_spread_looks_at_few_coordinates_evenly(shapes: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.zeros(shape) for shape in shapes]
    spread = GradientDivergence(parameters)
    every = []
    for worker in range(4):
        gradient = [torch.randn(shape, generator=generator) + 1 for shape in shapes]
        spread.take(worker, [*gradient[:-1], None], parameters)
        every.append(torch.cat([g.flatten() for g in (*gradient[:-1], parameters[-1])]))
    stride = math.ceil(len(every[0]) / COORDINATES)
    flat = torch.stack(every)[:, ::stride].double()
    assert flat.shape[1] <= COORDINATES
    spread.look()
    mean = flat.mean(0)
    assert spread.mean == pytest.approx(float(((flat - mean).norm(dim=1) ** 2).mean().sqrt() / mean.norm()), rel=1e-9)
    spread.look()  # nothing new, nothing counted
    spread.take(0, parameters, parameters)
    spread.look()
    assert spread._looks == 1
