"""A live job that diverges says so once, with the cause that can be named; a healthy one never does."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import loss_of, small_batches, small_model
from local_blocks import HostsJob
from torch import nn

from polytempo.checkpoints import whole_checkpoints
from polytempo.errors import JobEnded
from polytempo.launcher.job_facts import JobFacts
from polytempo.protocol.push import Measures
from polytempo.protocol.values import VitalSigns
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session, as_current
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.driver import StepRequest
from polytempo.train.observers import StepSigns
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

STEPS = 60
WAYS: dict[str, Callable[..., Any]] = {
    "servers": lambda sync, **options: ThreadJob(4, 1, sync, **options),
    "shared memory": lambda sync, **options: ThreadJob(4, 1, sync, via="allreduce", **options),
    "hosts": lambda sync, **options: HostsJob(4, sync),
    "collectives": lambda sync, **options: GroupJob(4),
}
CASES = [
    *(("servers", sync) for sync in ("bsp", "asp", "asp,momentum=server", "ssp:1", "delay:1", "local:3", "diloco:3")),
    *(("servers", sync) for sync in ("downpour:push=2,fetch=2", "bsp+backup:1", "gossip:ring", "adpsgd:ring")),
    *(("shared memory", sync) for sync in ("bsp", "local:2")),
    *(("hosts", sync) for sync in ("bsp", "local:2")),
    *(("collectives", sync) for sync in ("bsp", "local:2")),
]


def train(job: ThreadJob | GroupJob, sync: str, rate: float, steps: int = STEPS) -> list[str]:
    """What is said of a job of 4 workers that step side by side, by SGD with momentum 0.9, on a small regression."""
    batches, together = small_batches(steps, (16,) * 4), threading.Barrier(4)

    def work(session: Session) -> None:
        model = small_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), model, sync=sync)
        try:
            for step in batches:
                optimizer.zero_grad()
                loss_of(model, step[session.rank]).backward()
                together.wait(20)  # so that gradients are stale where the mode lets them be
                optimizer.step()
        except threading.BrokenBarrierError:
            return
        except BaseException:
            together.abort()
            raise

    with job:
        job.run(work)
    return [notice for notice in getattr(job, "notices", []) if "diverged" in notice or "not finite" in notice]


def said(captured: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in captured.readouterr().err.splitlines() if "diverged" in line or "not finite" in line]


@pytest.mark.parametrize(("way", "sync"), CASES)
def test_a_job_that_diverges_says_so_once(way: str, sync: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = WAYS[way](sync)
    (line,) = train(job, sync, rate=4.0) or said(capsys)
    assert line.removeprefix("polytempo: ").startswith("warning: diverged at update ")
    assert f"in {sync}" in line
    assert "likely cause: " in line
    if isinstance(job, ThreadJob):
        assert not job.summary["diverged"]["recovered"]


@pytest.mark.parametrize(("way", "sync"), CASES)
def test_a_healthy_job_does_not(way: str, sync: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = WAYS[way](sync)
    assert train(job, sync, rate=0.05) == said(capsys) == []
    if isinstance(job, ThreadJob):
        assert job.summary["diverged"] == {}


def test_momentum_on_the_servers_is_named_with_the_staleness_that_it_multiplies() -> None:
    """The rate is right for bsp, and for a look-ahead."""
    job = ThreadJob(4, 1, "asp,momentum=server")
    (line,) = train(job, "asp,momentum=server", rate=0.4, steps=120)
    assert "momentum 0.9 on the servers" in line
    assert re.search(
        r"gradients that are [0-9.]+ updates stale on average \(in asp,momentum=server, at the rate 0.4\)", line
    )
    assert "momentum=lookahead" in line
    assert job.summary["diverged"]["update"] < 120
    for sync in ("asp,momentum=lookahead", "bsp"):
        assert train(ThreadJob(4, 1, sync), sync, rate=0.4, steps=120) == []


def test_a_job_may_end_by_it() -> None:
    job = ThreadJob(4, 1, "bsp", on_divergence="stop")
    with pytest.raises(JobEnded, match=r"diverged at update [0-9]+: .*, and the job ends \(--on-divergence stop\); likely"):
        train(job, "bsp", rate=4.0)
    assert len([notice for notice in job.notices if "diverged" in notice]) == 1


def test_of_several_optimizers_the_first_is_told_of() -> None:
    job = ThreadJob(2, 1, "bsp")

    def work(session: Session) -> None:
        models = [small_model(), small_model()]
        optimizers = [DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model) for model in models]
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                for param in model.parameters():
                    param.grad = torch.full_like(param, float("nan") if step == 2 else 0.1 * (1 + session.rank))
                optimizer.step()

    with job:
        job.run(work)
    (line,) = [notice for notice in job.notices if "not finite" in notice]
    assert ", step 2: its gradient is not finite (NaN or infinite), and the job goes on with it; likely cause: " in line
    assert job.summary["diverged"]["trouble"] in line


def test_what_weighs_nothing_is_no_divergence() -> None:
    job = ThreadJob(2, 1, "bsp")

    def work(session: Session) -> None:
        model = small_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.full_like(param, float("nan") if session.rank else 0.1 * step)
            optimizer.step(samples=1 - session.rank)

    with job:
        job.run(work)
    assert job.notices == []
    assert job.summary["diverged"] == {}
    assert job.summary["nonfinite"] == 3


def test_the_checkpoint_that_is_named_is_not_removed(tmp_path: Path) -> None:
    job = ThreadJob(4, 1, "asp,momentum=server", checkpoint=tmp_path, checkpoint_every=1)
    (line,) = train(job, "asp,momentum=server", rate=0.4, steps=120)
    named = re.search(r"; the last checkpoint is (.+)$", line)
    assert named is not None
    there = [str(path) for path in whole_checkpoints(tmp_path)]
    assert len(there) == 4, "three as ever, and that one"
    assert there[0] == named[1]


# What a worker sees of a step.


def signs_of(params: list[nn.Parameter]) -> tuple[Session, StepSigns]:
    session = Session(None, JobFacts(1, ()), 0)
    return session, StepSigns(session, params)


def request(samples: float = 1.0, **fields: Any) -> StepRequest:
    return StepRequest(**{"measures": Measures(samples=samples), "skip": False, "agreed": False, **fields})


def test_the_loss_is_what_backward_was_called_on() -> None:
    param = nn.Parameter(torch.full((300,), 2.0))
    session, signs = signs_of([param])

    def look(**fields: Any) -> VitalSigns | None:
        with torch.no_grad():
            return signs.look(request(**fields))

    with as_current(session):
        (param.sum() * 0.5).backward()
        first = look()
        assert first is not None
        assert (first.loss, first.change) == (300.0, 0.0)
        with torch.no_grad():
            param.add_(1.0)
        for _ in range(2):
            (param.sum() * 0.5).backward()
        second = look()
        assert second is not None
        assert second.loss == 900.0, "of two micro-batches"
        assert second.change == pytest.approx(1 / 3)
        assert second.gradient == pytest.approx(3 * first.gradient), "they add up"
        assert second.size == pytest.approx(1.5 * first.size)
        (param.sum() * 0.5).backward()
        assert look(skip=True) is look(samples=0.0) is None
        third = look()
        assert third is not None
        assert (third.loss, third.change) == (None, pytest.approx(1 / 3)), "values have not changed since"
        for given in (torch.tensor([7.0]), 7):
            fourth = look(loss=given)
            assert fourth is not None
            assert fourth.loss == 7.0
        param.sum().mul(1024.0).backward()
        fifth = look(scale=torch.tensor(1024.0))
        assert fifth is not None
        assert fifth.loss == 900.0
        (param.sum() * 1024.0).backward()
        sixth = look(unscaled=True, loss=("what", "a closure", "returned"))
        assert sixth is not None
        assert sixth.loss is None
        other = StepSigns(session, [param])
        param.sum().backward()
        seventh = look()
        assert seventh is not None
        assert seventh.loss is None, "of two optimizers"
        del other
        param.sum().backward()
        eighth = look()
        assert eighth is not None
        assert eighth.loss == 900.0
    for close in session.leaving.of[LeavingStep.UNDO]:
        close()


def test_samples_are_like_the_whole_in_every_form() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 1024, generator=generator) * torch.linspace(0.1, 3, 96).view(96, 1)
    forms = [
        weight,
        weight.t().contiguous().t(),
        weight.view(96, 64, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.cat([weight, weight], 1)[:, ::2],
        weight.half(),
        weight.double(),
    ]
    for form in forms:
        param = nn.Parameter(form)
        param.grad = torch.ones_like(form)
        _, signs = signs_of([param, *[nn.Parameter(torch.zeros(3)) for _ in range(20)]])
        with torch.no_grad():
            found = signs.look(request())
        assert found is not None
        share = found.gradient / form.numel() ** 0.5  # of a gradient of ones
        assert 0.01 < share < 0.1
        assert found.size == pytest.approx(share * float(weight.norm()), rel=0.25)


def test_gradients_that_are_not_dense_are_left_out() -> None:
    table, param = nn.Embedding(10, 3, sparse=True), nn.Parameter(torch.ones(5))
    session, signs = signs_of([table.weight, param])
    with as_current(session):
        table(torch.tensor([1, 2])).sum().backward()
        assert signs.look(request()) is None
        (table(torch.tensor([1, 2])).sum() + param.sum()).backward()
        with torch.no_grad():
            found = signs.look(request())
    assert found is not None
    assert found.gradient == pytest.approx(5**0.5)
    for close in session.leaving.of[LeavingStep.UNDO]:
        close()
