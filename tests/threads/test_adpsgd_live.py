"""Live `adpsgd` jobs: pairs are averaged while workers compute, sums are kept, and no worker waits for a slow one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
from helpers import (
    assert_close,
    assert_equal,
    check_record,
    loss_of,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained_alone,
    until,
    weights,
)
from torch import nn

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.neighbours import PairUpdate
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)


def sgd(params: list[nn.Parameter], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def at_rest(optimizer: DistributedOptimizer) -> None:
    """Take the reply to what this worker has asked; it asks the next only after a step."""
    update = optimizer._update
    assert isinstance(update, PairUpdate)
    assert update._exchange is not None
    update._exchange.finish()


def settled(
    sync: str, starts: Sequence[float], steps: Sequence[int], compression: str | None = None, in_step: bool = False
) -> list[tuple[float, float, float]]:
    """Workers that add these values to zeros, at the rate 0, make so many steps, each its own number; the value, the mean
    and the weight of each."""
    most = max(steps)
    leaving = {rank for rank, count in enumerate(steps) if count < most}
    together = threading.Barrier(steps.count(most), timeout=30)

    def work(session: Session) -> tuple[float, float, float]:
        params = [nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)), nn.Parameter(torch.zeros(5, dtype=torch.float64))]
        optimizer = DistributedOptimizer(sgd(params), compression=compression)
        with torch.no_grad():
            for param in params:
                param.add_(starts[session.rank])  # on top of what it may have got from others already
        for _ in range(steps[session.rank]):
            set_gradients(params, [torch.zeros_like(param) for param in params])
            optimizer.step()
            if in_step:
                together.wait()
        value = float(params[0][0, 0].detach())
        if steps[session.rank] < most:
            return value, 0.0, 0.0
        if session.rank == 0:
            models = optimizer._reducer.models  # type: ignore[union-attr]
            until(lambda: models._givers == leaving, "those that leave have handed over")
        together.wait()
        at_rest(optimizer)
        together.wait()  # no average is under way
        optimizer.consolidate()
        mean, weight = float(params[1][0].detach()), optimizer._reducer.weight  # type: ignore[union-attr]
        together.wait()  # none leaves, and hands its own over, before all have read theirs
        return value, mean, weight

    with ThreadJob(len(starts), sync=sync, via="auto") as job:
        return job.run(work)


@pytest.mark.parametrize(("sync", "n"), [("adpsgd:ring", 2), ("adpsgd:ring", 5), ("adpsgd:full", 4), ("adpsgd:exp", 6)])
def test_with_rate_0_all_reach_the_mean(sync: str, n: int) -> None:
    starts = [float(rank**2 + 1) for rank in range(n)]
    found = settled(sync, starts, [60] * n, in_step=True)
    numpy.testing.assert_allclose([mean for _, mean, _ in found], numpy.mean(starts), rtol=1e-12)  # the sum is kept
    numpy.testing.assert_allclose([value for value, _, _ in found], numpy.mean(starts), rtol=0.01)
    assert [weight for *_, weight in found] == [1.0] * n


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_a_worker_that_finishes_leaves_its_mass(compression: str | None) -> None:
    starts = [0.0, 1.0, 5.0, 7.0, 2.5]
    found = settled("adpsgd:ring", starts, [30, 30, 3, 30, 4], compression)
    rest = [found[rank] for rank in (0, 1, 3)]
    numpy.testing.assert_allclose([mean for _, mean, _ in rest], numpy.mean(starts), rtol=1e-12)


def test_a_cast_moves_no_mass() -> None:
    starts = [0.1234567, 1.7654321, 5.1111111, 7.7777777]
    found = settled("adpsgd:ring", starts, [40] * 4, "bf16")
    numpy.testing.assert_allclose([mean for _, mean, _ in found], numpy.mean(starts), rtol=1e-12)


@pytest.mark.parametrize("sync", ["adpsgd:ring", "adpsgd:full"])
def test_a_job_of_one_is_plain_training(sync: str) -> None:
    model, batches = small_model(dtype=torch.float32), small_batches(10, [3])
    narrow = [[(x.float(), y.float()) for x, y in each] for each in batches]

    def work(session: Session) -> list[torch.Tensor]:
        own = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.Adam(own.parameters(), lr=0.01), own)
        for each in narrow:
            optimizer.zero_grad()
            loss_of(own, each[0]).backward()
            optimizer.step()
        optimizer.consolidate()
        return weights(own)

    with ThreadJob(1, sync=sync, via="auto") as job:
        wanted = trained_alone(model, lambda p: torch.optim.Adam(p, lr=0.01), narrow)
        assert_equal(job.run(work)[0], wanted)


def test_a_passive_worker_is_averaged_while_it_computes_and_its_parameters_stay() -> None:
    """Worker 0 asks in each of its steps; worker 1 computes all the while, and its parameters change in `step()` alone."""
    done, together = threading.Event(), threading.Barrier(2, timeout=30)

    def work(session: Session) -> float:
        params = [nn.Parameter(torch.zeros(4, dtype=torch.float64))]
        optimizer = DistributedOptimizer(sgd(params))
        with torch.no_grad():
            params[0].add_(8.0 * session.rank)
        if session.rank == 1:
            before = params[0].detach().clone()
            until(done.is_set, "worker 0 makes its steps")
            assert_equal([params[0]], [before])
        for _ in range(10 if session.rank == 0 else 1):
            set_gradients(params, [torch.zeros(4)])
            optimizer.step()
        done.set()
        at_rest(optimizer)
        together.wait()
        optimizer.consolidate()
        mean = float(params[0][0].detach())
        together.wait()
        return mean

    with ThreadJob(2, sync="adpsgd:ring", via="auto") as job:
        assert job.run(work) == pytest.approx([4.0, 4.0], rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_training_goes_on_and_consolidate_is_the_mean(tmp_path: Path, n: int) -> None:
    model, batches, together = small_model(), small_batches(40, [8] * n), threading.Barrier(n, timeout=30)

    def work(session: Session) -> tuple[list[torch.Tensor], float, dict[str, float]]:
        own = copy.deepcopy(model) if session.rank == 0 else small_model(seed=session.rank + 9)
        optimizer = DistributedOptimizer(sgd(list(own.parameters()), 0.05), own)
        for each in batches:
            optimizer.zero_grad()
            loss_of(own, each[session.rank]).backward()
            optimizer.step()
        at_rest(optimizer)
        together.wait()
        optimizer.consolidate()
        together.wait()
        whole = torch.cat([x for x, _ in batches[0]]), torch.cat([y for _, y in batches[0]])
        return weights(own), loss_of(own, whole).item(), optimizer.stats

    with ThreadJob(n, sync="adpsgd:ring", via="auto", record=tmp_path) as job:
        found = job.run(work)
    start = loss_of(model, (torch.cat([x for x, _ in batches[0]]), torch.cat([y for _, y in batches[0]]))).item()
    for own, loss, stats in found:
        assert_close(own, found[0][0], rtol=1e-9)
        assert loss < start
        assert stats["step"] == 40
    lines = check_record(tmp_path)
    assert sum(line["kind"] == "push" for line in lines) == 40 * n
    assert not any(line["kind"] == "hold" and line["step"] for line in lines)
    assert not [thread for thread in threading.enumerate() if thread.name == "polytempo-requests"]


def test_a_worker_sends_at_most_two_models_a_step() -> None:
    """Its own question and one answer; in a ring of two the one asks and the other answers."""
    model, steps, together = 1000 * 8, 20, threading.Barrier(2, timeout=30)

    def work(session: Session) -> int:
        params = made_params([(1000,)])
        optimizer = DistributedOptimizer(sgd(params))
        links = session.world().engine.messages.links.values()
        before = sum(link.payload_sent for link in links) if session.rank else model + 16  # the values all start from
        for _ in range(steps):
            set_gradients(params, [torch.ones(1000)])
            optimizer.step()
        sent = sum(link.payload_sent for link in links) - before
        together.wait()
        return sent

    with ThreadJob(2, sync="adpsgd:ring", via="auto") as job:
        asked, answered = job.run(work)
    assert steps * (model + 16) <= asked <= (steps + 1) * (model + 16)
    assert answered <= (steps + 2) * (model + 16)
