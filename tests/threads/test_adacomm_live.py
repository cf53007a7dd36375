"""`adacomm:k` live: the loss is what backward is called on, the period is the rule's, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal, check_record, loss_of, small_batches, small_model, weights
from local_blocks import WAYS, job_by
from torch import nn
from torch.optim.lr_scheduler import StepLR

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.sync.adacomm import LossPeriod
from polytempo.sync.events import Measured, Pushed
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

EVERY_BLOCK = "every=0.000000001"  # seconds: each block ends an interval
STEPS = 24


def periods(job: ThreadJob | GroupJob, sync: str, loss: Callable[[int, int], float], steps: int = STEPS) -> list[list[int]]:
    """The period that each rank has after each step, when its n-th step has a loss of `loss(rank, n)`."""

    def train(session: Session) -> list[int]:
        param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=0.1), sync=sync)
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            (param.sum() * 0.0 + loss(session.rank, step)).backward()
            optimizer.step()
            found.append(optimizer.stats["period"])
        return found

    with job:
        return job.run(train)


def by_the_rule(first: int, losses: Callable[[int], float], steps: int = STEPS, lr: float = 0.1) -> list[int]:
    rule = LossPeriod(first, every=1e-9)
    rule.start(0.0)
    found, block, now = [], [], 0.0
    for step in range(steps):
        block.append(losses(step))
        if len(block) == rule.period:
            now += 1.0
            rule.close((Pushed(0, 0, 1, measured=Measured(sum(block) / len(block), lr)),), (0,), now)
            block = []
        found.append(rule.period)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_the_period_is_the_rules_and_the_same_on_all_ranks(way: str) -> None:
    falling = lambda rank, step: (2.0 if rank else 1.0) * 0.8**step  # noqa: E731
    sync = f"adacomm:8,{EVERY_BLOCK}"
    one, other = periods(job_by(way, 2, sync), sync, falling)
    assert one == other
    assert one == by_the_rule(8, lambda step: 1.5 * 0.8**step)
    assert (one[0], one[-1]) == (8, 1)
    assert one == sorted(one, reverse=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_flat_loss_halves_the_period(way: str) -> None:
    sync = f"adacomm:8,{EVERY_BLOCK}"
    found = periods(job_by(way, 2, sync), sync, lambda rank, step: 2.0)
    assert found[0] == found[1] == [8] * 7 + [4] * 4 + [2] * 2 + [1] * 11


@pytest.mark.parametrize("way", WAYS)
def test_an_interval_is_on_one_clock(way: str) -> None:
    """With an hour for each interval the first period stays, whatever the loss does."""
    found = periods(job_by(way, 2, "adacomm:8,every=3600"), "adacomm:8,every=3600", lambda rank, step: 0.5**step)
    assert found == [[8] * STEPS] * 2


def train_with(step: Callable[[DistributedOptimizer, torch.Tensor], None], batches: Sequence[Any]) -> list[int]:
    sync = f"adacomm:4,{EVERY_BLOCK}"
    models = [small_model(), small_model()]

    def train(session: Session) -> list[int]:
        model = models[session.rank]
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model, sync=sync)
        found = []
        for batch in batches:
            optimizer.zero_grad()
            step(optimizer, loss_of(model, batch[session.rank]))
            found.append(optimizer.stats["period"])
        return found

    with job_by("shared memory", 2, sync) as job:
        return job.run(train)[0]


def test_the_loss_is_given_seen_returned_or_summed() -> None:
    batches = [[small_batches(1, [4], seed=7)[0][0]] * 2] * 16  # one batch: the loss falls

    def seen(optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    def given(optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        (loss * 1.0).backward(torch.tensor(1.0, dtype=torch.float64))  # a given gradient: this root is no loss
        optimizer.step(loss=loss)

    def in_parts(optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        optimizer.step()

    def returned(optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            loss.backward()
            return loss

        optimizer.step(closure)

    def scaled(optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        (loss * 1024).backward()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)  # as GradScaler.step() sets them
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf

    wanted = train_with(seen, batches)
    assert wanted[-1] < 4
    for how in (given, in_parts, returned, scaled):
        assert train_with(how, batches) == wanted


def test_without_a_loss_the_first_block_is_refused() -> None:
    def silent(optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        loss.backward(torch.tensor(1.0, dtype=torch.float64))
        optimizer.step()

    with pytest.raises(UsageError, match=r"by the loss, and has seen none; call optimizer.step\(loss=loss\)"):
        train_with(silent, small_batches(4, [4, 4]))


def test_a_loss_scaled_by_an_unknown_factor_is_refused() -> None:
    def unscaled(optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()

    with pytest.raises(UsageError, match=r"unscale_\(\) hides by how much; call step\(loss=loss\)"):
        train_with(unscaled, small_batches(4, [4, 4]))


def test_backward_is_torchs_own_again_when_the_job_is_over() -> None:
    before = torch.autograd.backward
    periods(job_by("shared memory", 2, "adacomm:4"), "adacomm:4", lambda rank, step: 1.0, steps=4)
    assert torch.autograd.backward is before
    periods(job_by("shared memory", 2, "local:4"), "local:4", lambda rank, step: 1.0, steps=4)
    assert torch.autograd.backward is before


@pytest.mark.parametrize("hold", [True, False])
def test_a_fall_of_the_rate_is_held_until_the_period_is_1(hold: bool) -> None:
    sync = f"adacomm:4,{EVERY_BLOCK}" + ",hold=1" * hold

    def train(session: Session) -> list[tuple[float, int]]:
        param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), sync=sync)
        scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
        found = []
        for _ in range(9):
            before, period = param.item(), optimizer.stats["period"]
            optimizer.zero_grad()
            param.sum().backward()
            optimizer.step(loss=1.0)
            scheduler.step()
            found.append((round(before - param.item(), 6), period))
        assert scheduler.get_last_lr()[0] == pytest.approx(1e-4)
        return found

    with job_by("shared memory", 2, sync) as job:
        one, other = job.run(train)
    assert one == other
    if not hold:
        assert one[:4] == [(1.0, 4), (1.0, 4), (0.1, 4), (0.1, 4)]
        return
    rates = {period: rate for rate, period in one}
    assert [rate for rate, period in one[:6]] == [1.0] * 6, "the rate of the start, though it has fallen twice"
    assert [period for _, period in one[:7]] == [4] * 4 + [2] * 2 + [1]
    assert one[6][0] == pytest.approx(1e-3), "the period is 1: now it falls"
    assert rates[1] < 1.0


@pytest.mark.parametrize("way", WAYS)
def test_values_are_averaged_as_in_local(way: str) -> None:
    batches = small_batches(8, [4, 4])

    def run(sync: str) -> list[torch.Tensor]:
        models = [small_model(), small_model()]

        def train(session: Session) -> list[torch.Tensor]:
            model = models[session.rank]
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync=sync)
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch[session.rank]).backward()
                optimizer.step()
            return weights(model)

        with job_by(way, 2, sync) as job:
            return job.run(train)[0]

    assert_equal(run("adacomm:4"), run("local:4"))


def test_the_period_goes_on_after_a_resume(tmp_path: Path) -> None:
    """A flat loss halves the period at each average; in the job that goes on it is what it was."""
    sync, flat = f"adacomm:8,{EVERY_BLOCK}", lambda rank, step: 1.0
    first = periods(ThreadJob(2, sync=sync, checkpoint=tmp_path / "saved"), sync, flat, 12)
    assert [found[-1] for found in first] == [2, 2]
    second = periods(ThreadJob(2, sync=sync, resume=tmp_path / "saved", record=tmp_path / "record"), sync, flat, 2)
    assert second == [[2, 1], [2, 1]]
    check_record(tmp_path / "record")
    other = f"adacomm:6,{EVERY_BLOCK}"
    assert periods(ThreadJob(2, sync=other, resume=tmp_path / "saved"), other, flat, 1) == [[6], [6]]
