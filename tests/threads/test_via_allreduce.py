"""BSP without parameters on a server: n workers that average among themselves are one process on the joint batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from by_hand import Gradients, assert_same_state, mean_of, plain
from helpers import (
    Batch,
    MakeOptimizer,
    assert_close,
    assert_equal,
    joined,
    loss_of,
    made_from_seed,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained_alone,
    weights,
)
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from polytempo.reducer.exchange import READERS
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

STEPS = 12


class Way:
    """How the jobs of this file average: with a sequencer, or among themselves alone."""

    sequencer = True


@pytest.fixture(params=[True, False], ids=["sequencer", "alone"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "sequencer", request.param)


def job_of(workers: int) -> ThreadJob | GroupJob:
    return ThreadJob(workers, via="allreduce") if Way.sequencer else GroupJob(workers)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "foreach adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.8, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "foreach nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),  # writes to grads
    "two groups": lambda p: torch.optim.Adam([{"params": p[:2], "lr": 0.02}, {"params": p[2:]}], lr=0.005),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "steps": lambda o: StepLR(o, step_size=4, gamma=0.5),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.05, total_steps=STEPS + 2),
}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    workers: int
    optimizer: str
    scheduler: str = "steps"
    clip: float | None = None
    accumulate: int = 1
    sizes: tuple[int, ...] = ()
    synchronize: bool = False

    def __str__(self) -> str:
        extras = [f"clip {self.clip}"] if self.clip else []
        extras += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        extras += ["unequal samples"] if self.sizes else []
        extras += ["synchronize"] if self.synchronize else []
        return " ".join([f"{self.workers}w", self.optimizer, self.scheduler, *extras])


CASES = [Case(1 + index % 4, name, ("steps", "one cycle")[index % 2]) for index, name in enumerate(OPTIMIZERS)]
CASES += [
    Case(4, "foreach nesterov"),
    Case(3, "momentum", clip=0.2),
    Case(2, "foreach adam", "one cycle", clip=0.2),
    Case(2, "adam", accumulate=3),
    Case(4, "sgd", "one cycle", sizes=(1, 5, 2, 7)),
    Case(3, "adamw", sizes=(3, 1, 6), accumulate=2, clip=0.3),
    Case(3, "nesterov", synchronize=True, clip=0.2),
    Case(2, "fused adam", "one cycle", synchronize=True, sizes=(2, 6)),
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
    optimizer = DistributedOptimizer(inner, clip_norm=None if case.synchronize else case.clip)
    on_workers = optimizer._reducer is not None and optimizer._reducer.mean is not None
    assert on_workers or (session.size == 1 and not Way.sequencer)
    scheduler = SCHEDULERS[case.scheduler](optimizer)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        own = [data[step * case.accumulate + part][session.rank] for part in range(case.accumulate)]
        with optimizer.no_sync():
            for batch in own[:-1]:
                loss_of(model, batch).backward()
        loss_of(model, own[-1]).backward()
        samples = len(own[0][0]) if case.sizes else None
        if case.synchronize:
            optimizer.synchronize(samples)
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step(samples=samples)
        scheduler.step()
    return weights(model)


@pytest.mark.both_wires
@pytest.mark.parametrize("case", CASES, ids=str)
def test_workers_that_average_are_one_process_on_the_joint_batch(case: Case) -> None:
    model = small_model()
    data = small_batches(STEPS * case.accumulate, case.sizes or (4,) * case.workers)
    wanted = one_process(case, model, data)
    with job_of(case.workers) as job:
        results = job.run(lambda session: one_worker(case, model, data, session))
    for result in results:
        assert_close(result, wanted, rtol=1e-9)
        assert_equal(result, results[0])  # to the last bit
    assert max(float((w - p).abs().max()) for w, p in zip(wanted, weights(model), strict=True)) > 0.01


# Gradients by hand.

SHAPES = [(4, 3), (5,), (3, 3)]


def stepping(
    start: Sequence[nn.Parameter], make: MakeOptimizer, workers: Sequence[Gradients], **options: Any
) -> list[tuple[list[torch.Tensor], dict]]:
    """Workers that step on gradients set by hand; the values and states they end with."""

    def work(session: Session) -> tuple[list[torch.Tensor], dict]:
        params = [nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in start]
        optimizer = DistributedOptimizer(make(params), **options)
        for step in workers[session.rank]:
            set_gradients(params, step)
            optimizer.step()
        return [param.detach().clone() for param in params], optimizer.state_dict()

    with job_of(len(workers)) as job:
        return job.run(work)


@pytest.mark.parametrize("name", ["momentum", "foreach", "fused", "adam", "foreach adam"])
def test_parameters_without_a_gradient_are_as_in_the_joint_batch(name: str) -> None:
    """Some are missing at one worker, some at both, one always."""
    workers: list[Gradients] = [[list(step) for step in made_gradients([*SHAPES, (2,)], 6, seed)] for seed in (5, 6)]
    for worker, step, index in [(0, 1, 0), (1, 2, 0), (0, 4, 0), (1, 4, 0), (0, 3, 1), (1, 0, 2), (0, 5, 2), (1, 5, 2)]:
        workers[worker][step][index] = None
    for own in workers:
        for step in own:
            step[3] = None
    start = made_params([*SHAPES, (2,)])
    values, state = plain(start, OPTIMIZERS[name], mean_of(workers))
    for got, got_state in stepping(start, OPTIMIZERS[name], workers):
        assert_close(got, values, rtol=1e-9)
        assert_same_state(got_state, state)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_other_dtypes_and_layouts_are_averaged_too(name: str) -> None:
    shapes = [(3, 5), (7,), (4, 3, 2, 2), (9,), (6, 5)]
    start = made_params(shapes)
    start[1], start[3] = (nn.Parameter(start[index].detach().float()) for index in (1, 3))
    start[2] = nn.Parameter(start[2].detach().to(memory_format=torch.channels_last))
    start[4] = nn.Parameter(start[4].detach().t())
    shapes[4] = (5, 6)
    workers: list[Gradients] = [[list(step) for step in made_gradients(shapes, 5, seed)] for seed in (5, 6, 7)]
    wanted, _ = plain(start, OPTIMIZERS[name], mean_of(workers))
    for got, _ in stepping(start, OPTIMIZERS[name], workers):
        for one, other in zip(got, wanted, strict=True):
            exact = one.dtype == torch.float64
            torch.testing.assert_close(one, other, rtol=1e-9 if exact else 1e-5, atol=1e-12 if exact else 1e-6)


def test_a_model_of_nothing_but_empty_parameters_steps() -> None:
    for got, _ in stepping(made_params([(0, 3)]), OPTIMIZERS["sgd"], [[[torch.zeros(0, 3)]] * 2] * 2):
        assert got[0].shape == (0, 3)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "in place": ("momentum", {}),
    "fused": ("fused", {}),
    "foreach": ("foreach nesterov", {}),
    "another class": ("nadam", {}),
    "clipped": ("momentum", {"clip_norm": 0.1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_after_a_step_grad_is_the_workers_own(way: str) -> None:
    name, options = WAYS[way]
    model, data = small_model(), small_batches(3, (4, 3))

    def work(session: Session) -> None:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(OPTIMIZERS[name](list(mine.parameters())), **options)
        for step in data:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            before = [param.grad.clone() for param in mine.parameters()]
            optimizer.step()
            assert_equal([param.grad for param in mine.parameters()], before)

    with job_of(2) as job:
        job.run(work)


READING: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{cls.__name__: cls for cls in READERS},
    "SGD momentum": lambda p, **form: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1, nesterov=True, **form),
    "SGD dampening": lambda p, **form: torch.optim.SGD(p, momentum=0.9, dampening=0.5, maximize=True, **form),
    "Adam amsgrad": lambda p, **form: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True, **form),
    "AdamW amsgrad": lambda p, **form: torch.optim.AdamW(p, amsgrad=True, maximize=True, **form),
    "RMSprop centered": lambda p, **form: torch.optim.RMSprop(p, centered=True, momentum=0.9, weight_decay=0.1, **form),
    "Adagrad decay": lambda p, **form: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.1, maximize=True, **form),
}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", READING)
def test_classes_that_step_on_the_shared_mean_do_not_write_to_it(name: str, fused: bool) -> None:
    if fused and name.startswith("RMSprop"):
        pytest.skip("torch has no fused form of it")
    params = made_params([(257,), (3, 5)], dtype=torch.float32)
    optimizer = READING[name](params, fused=True) if fused else READING[name](params)
    for step in made_gradients([(257,), (3, 5)], 4):
        set_gradients(params, step)
        before = [(param.grad, param.grad.clone()) for param in params]
        optimizer.step()
        for param, (grad, bits) in zip(params, before, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, bits)


# Rounds that are skipped, and what is agreed on otherwise.


def test_a_step_that_one_workers_scaler_skips_is_skipped_by_all() -> None:
    model, data = small_model(), small_batches(5, (4, 4))

    def work(session: Session) -> tuple[list[torch.Tensor], int, float]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(OPTIMIZERS["momentum"](list(mine.parameters())))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, step in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(loss_of(mine, step[session.rank])).backward()
            if (number, session.rank) == (2, 1):
                mine[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        return weights(mine), optimizer.stats["step"], scaler.get_scale()

    with job_of(2) as job:
        results = job.run(work)
    wanted = trained_alone(model, OPTIMIZERS["momentum"], data[:2] + data[3:])
    assert [result[1:] for result in results] == [(5, 1024.0), (5, 512.0)]
    for got, _, _ in results:
        assert_close(got, wanted, rtol=1e-9)


def test_buffers_are_averaged_by_consolidate() -> None:
    make = lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))  # noqa: E731
    model, data = made_from_seed(5, make).double(), small_batches(3, (6, 6))

    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        mine = copy.deepcopy(model)
        inner = OPTIMIZERS["sgd"](list(mine.parameters()))
        optimizer = DistributedOptimizer(inner, mine, buffers="mean")
        for step in data:
            optimizer.zero_grad()
            loss_of(mine, step[session.rank]).backward()
            optimizer.step()
        before = mine[1].running_mean.clone()
        optimizer.consolidate()
        return before, mine[1].running_mean.clone()

    with job_of(2) as job:
        (one, one_after), (other, other_after) = job.run(work)
    assert not torch.allclose(one, other)
    assert_close([one_after, other_after], [(one + other) / 2] * 2, rtol=1e-9)


def test_numbers_that_are_none_are_counted_where_they_are() -> None:
    def work(session: Session) -> int:
        params = made_params(SHAPES)
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](params))
        for number, step in enumerate(made_gradients(SHAPES, 3)):
            set_gradients(params, step)
            if (number, session.rank) == (1, 1):
                params[1].grad[0] = torch.nan
            optimizer.step()
        return int(optimizer.stats["nonfinite"])

    with job_of(2) as job:
        assert job.run(work) == [0, 1]
