"""bsp with n workers over S shards is one process on the joint batch; a job of one is plain training, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import (
    Batch,
    MakeOptimizer,
    assert_close,
    assert_equal,
    copied,
    joined,
    loss_of,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    weights,
)
from sessions import under
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR

from polytempo.launcher.job_facts import JobFacts
from polytempo.server.optimizer_state import ELEMENTWISE, WHOLE
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires]

STEPS = 50
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.8, centered=True),
    "two groups": lambda p: torch.optim.Adam(
        [{"params": p[:2], "lr": 0.02}, {"params": p[2:], "betas": (0.8, 0.95)}], lr=0.005
    ),
}
SCHEDULERS: dict[str, MakeScheduler] = {
    "steps": lambda o: StepLR(o, step_size=10, gamma=0.5),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.05, total_steps=STEPS + 2),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=STEPS),
}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    workers: int
    servers: int
    optimizer: str
    scheduler: str
    scheduler_first: bool = False  # built before wrapping
    apply: str = "server"
    clip: float | None = None
    accumulate: int = 1
    sizes: tuple[int, ...] = ()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return self.sizes or (4,) * self.workers

    def __str__(self) -> str:
        extras = [f"clip {self.clip}"] if self.clip else []
        extras += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        extras += ["unequal samples"] if self.sizes else []
        return " ".join([f"{self.workers}w{self.servers}s", self.optimizer, self.scheduler, self.apply, *extras])


CASES = [
    Case(1, 2, "adam", "one cycle", scheduler_first=True),
    Case(2, 1, "sgd", "steps"),
    Case(2, 2, "momentum", "one cycle"),
    Case(2, 3, "nesterov", "cosine", clip=0.3),
    Case(3, 1, "adamw", "cosine", scheduler_first=True, clip=0.2),
    Case(3, 2, "rmsprop", "one cycle", scheduler_first=True),
    Case(3, 3, "adam", "steps", accumulate=3),
    Case(4, 1, "nesterov", "one cycle", sizes=(1, 5, 2, 7)),
    Case(4, 2, "two groups", "cosine", sizes=(3, 1, 1, 6), clip=0.2),
    Case(4, 3, "rmsprop", "steps", scheduler_first=True, accumulate=2, clip=0.3),
    Case(1, 1, "momentum", "steps", apply="delta"),
    Case(2, 2, "adam", "one cycle", apply="delta", scheduler_first=True),
    Case(3, 3, "adamw", "steps", apply="delta", clip=0.2),
    Case(3, 1, "sgd", "cosine", apply="delta", sizes=(2, 9, 1)),
    Case(2, 3, "rmsprop", "cosine", apply="delta", accumulate=2),
    Case(4, 2, "nesterov", "one cycle", apply="delta", sizes=(1, 2, 3, 4), clip=0.3),
]


def one_process(case: Case, model: nn.Module, data: list[list[Batch]]) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    scheduler = SCHEDULERS[case.scheduler](optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.accumulate):
            loss_of(model, joined(data[step * case.accumulate + part])).backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        scheduler.step()
    return weights(model)


def one_worker(case: Case, model: nn.Module, data: list[list[Batch]], session: Session) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    inner = OPTIMIZERS[case.optimizer](list(model.parameters()))
    scheduler = SCHEDULERS[case.scheduler](inner) if case.scheduler_first else None
    optimizer = DistributedOptimizer(inner, apply=case.apply, clip_norm=case.clip)
    scheduler = scheduler or SCHEDULERS[case.scheduler](optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = [data[step * case.accumulate + part][session.rank] for part in range(case.accumulate)]
        with optimizer.no_sync():
            for batch in own[:-1]:
                loss_of(model, batch).backward()
        loss_of(model, own[-1]).backward()
        optimizer.step(samples=len(own[0][0]) if case.sizes else None)
        scheduler.step()
    return weights(model)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bsp_equals_one_process_on_the_joint_batch(case: Case) -> None:
    model = small_model()
    data = small_batches(STEPS * case.accumulate, case.batch_sizes)
    wanted = one_process(case, model, data)
    with ThreadJob(case.workers, case.servers) as job:
        results = job.run(lambda session: one_worker(case, model, data, session))
    for result in results:
        assert_close(result, wanted)
        assert_equal(result, results[0])  # all workers hold the same weights, to the last bit
    moved = max(float((w - p).abs().max()) for w, p in zip(wanted, weights(model), strict=True))
    assert moved > 0.01


def test_clipping_is_of_the_joint_gradient_not_of_each_workers() -> None:
    """Two gradients that cancel have a small mean: it must not be clipped as if it were large."""
    start = made_params([(3,)])
    one = torch.tensor([100.0, 0.0, 0.0], dtype=torch.float64)
    other = torch.tensor([-100.0, 0.0, 1.0], dtype=torch.float64)

    def work(session: Session) -> torch.Tensor:
        params = copied(start)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=1.0), clip_norm=1.0)
        set_gradients(params, [(one, other)[session.rank]])
        optimizer.step()
        return params[0].detach()

    with ThreadJob(2, 2) as job:
        results = job.run(work)
    assert_close(results, [start[0].detach() - (one + other) / 2] * 2)


# A job of one.

SHAPES = [(3, 5), (), (7,), (2, 3, 5), (1,), (11, 1), (1, 13), (17, 19)]
MATRICES = [(3, 5), (7, 2), (1, 13), (11, 1), (17, 19)]
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.1, "t0": 3},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.05},
}


def made_optimizer(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": SETTINGS[name]["lr"] / 3}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **SETTINGS[name])
    return optimizer


def test_every_class_a_server_runs_is_tried_here() -> None:
    assert set(SETTINGS) == set(ELEMENTWISE + WHOLE)


@pytest.mark.parametrize("where", ["alone", "1 server", "3 servers"])
@pytest.mark.parametrize("name", ELEMENTWISE + WHOLE)
def test_a_job_of_one_is_plain_training_bit_for_bit(name: str, where: str) -> None:
    shapes = MATRICES if name == "Muon" else SHAPES
    start = made_params(shapes, dtype=torch.float32)
    gradients = made_gradients(shapes, 12)

    def train(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = wrap(made_optimizer(name, params))
        for step in gradients:
            set_gradients(params, step)
            optimizer.step()
        return [param.detach().clone() for param in params]

    wanted = train(lambda optimizer: optimizer)
    if where == "alone":
        session = Session(None, JobFacts(1, ()), 0)
        got = train(lambda optimizer: under(session, DistributedOptimizer, optimizer))
    else:
        with ThreadJob(1, int(where[0])) as job:
            (got,) = job.run(lambda session: train(lambda optimizer: DistributedOptimizer(optimizer)))
    assert_equal(got, wanted)
    assert not any(torch.equal(one, other) for one, other in zip(got, start, strict=True))


def test_adagrad_starts_from_its_initial_accumulator_value() -> None:
    start, gradients = made_params([(3, 5)]), made_gradients([(3, 5)], 3)

    def train(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[torch.Tensor]:
        params = copied(start)
        optimizer = wrap(torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5))
        for step in gradients:
            set_gradients(params, step)
            optimizer.step()
        return [param.detach().clone() for param in params]

    with ThreadJob(1) as job:
        (got,) = job.run(lambda session: train(lambda optimizer: DistributedOptimizer(optimizer)))
    assert_equal(got, train(lambda optimizer: optimizer))
