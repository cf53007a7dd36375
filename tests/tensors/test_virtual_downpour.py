"""Downpour in virtual training: against a plain simulation of one weight, and where it must be plain SGD."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from scalar import SPEEDS, START, Downpour, gradients, train
from torch import nn

from polytempo.simulate.cluster import Arrival, Cluster, Crash, Departure, Link, Lognormal
from polytempo.simulate.replicas import Shards, SteppedReplica
from polytempo.simulate.virtual_model import VirtualModel
from polytempo.simulate.virtual_training import train_virtually
from polytempo.tasks import digits

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are small: several threads are slower, much so where others use them, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("latency", [0.0, 0.0917, 1.6133])
@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (3, 2), (2, 5), (4, 4)])
@pytest.mark.parametrize("workers", [2, 3])
def test_against_a_plain_simulation(workers: int, push: int, fetch: int, latency: float) -> None:
    speeds = SPEEDS[:workers]
    run, weight = train(f"downpour:push={push},fetch={fetch}", SGD, *speeds, latency=latency, seconds=60.0)
    expected = Downpour(speeds, push, fetch, 0.1 / workers, 0.1, latency).run(60.0)
    assert weight == pytest.approx(expected, abs=1e-12)
    assert run.outcome.updates > 15
    assert abs(weight - START) > 0.1


def test_local_rate_and_scale() -> None:
    _, weight = train("downpour:push=2,fetch=3,alpha=0.02,scale=0.5", SGD, *SPEEDS, latency=0.3331, seconds=40.0)
    assert weight == pytest.approx(Downpour(SPEEDS, 2, 3, 0.05, 0.02, 0.3331).run(40.0), abs=1e-12)
    assert weight != pytest.approx(Downpour(SPEEDS, 2, 3, 0.05, 0.1, 0.3331).run(40.0), abs=1e-6)


def plain(steps: int, rate: float) -> float:
    gradient, weight = gradients(1), START
    for step in range(steps):
        weight -= rate * gradient(0, step, weight)
    return weight


@pytest.mark.parametrize("latency", [0.0, 0.2, 2.7])
@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (3, 2), (2, 7), (5, 1)])
def test_one_worker_is_plain_sgd_whatever_the_network_does(push: int, fetch: int, latency: float) -> None:
    _, weight = train(f"downpour:push={push},fetch={fetch}", SGD, 1.0, latency=latency, steps_each=43)
    assert weight == pytest.approx(plain(43, 0.1), abs=1e-13)


@pytest.mark.parametrize("link", [Link(), Link(0.4, 1e5), Link(2.3, 1e6)])
def test_one_worker_with_push_and_fetch_of_one_is_plain_sgd_to_the_bit(link: Link) -> None:
    task = digits()
    cluster = Cluster(workers=1, batch=16, link=link, model_bytes=1e5, step_time=Lognormal(1.0, 0.5))
    run = train_virtually(task.model, task.data, task.loss, sync="downpour", cluster=cluster, optimizer=SGD, steps_each=30)
    model, (inputs, targets) = copy.deepcopy(task.model), task.data[0]
    stepper, shards = SGD(model.parameters()), Shards(len(inputs), 1, [16], seed=0)
    for step in range(30):
        stepper.zero_grad()
        task.loss(model(inputs[shards.batch(0, step)]), targets[shards.batch(0, step)]).backward()
        stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), model.parameters(), strict=True))


def test_a_warm_start_trains_one_worker_first() -> None:
    run, weight = train("downpour:push=2,fetch=2,warm=10", SGD, 1.0, 1.0, steps=10)
    assert [worker.steps for worker in run.outcome.workers] == [10, 0]
    assert weight == pytest.approx(lagging(10), abs=1e-13)


def lagging(steps: int) -> float:
    """The first of two workers alone: the master goes at half the rate, the worker's own weights at the whole."""
    gradient, master, local, log, fetched = gradients(2), START, START, [], None
    for step in range(steps):
        if fetched is not None:
            local, fetched = fetched, None
            for g in log[step - 1 :]:
                local -= 0.1 * g
        if step and step % 2 == 0:
            fetched = master
        log.append(gradient(0, step, local))
        local -= 0.1 * log[-1]
        if step % 2:
            master -= 0.05 * (log[-2] + log[-1])
    return master


EVENTFUL = Cluster(
    workers=4,
    batch=16,
    step_time=Lognormal(1.0, 0.4),
    slow={3: 3.0},
    joins=(Arrival(4, 12.0), Arrival(2, 40.0)),
    leaves=(Departure(0, 60.0),),
    crashes=(Crash(2, 20.0, 1.0), Crash(1, 33.3, 2.0)),
    link=Link(0.3, 1e6),
    model_bytes=1e5,
)


@pytest.mark.parametrize("sync", ["downpour", "downpour:push=3,fetch=4,warm=7", "downpour:push=2,fetch=2,drop=2,dca=1"])
def test_nothing_is_kept_that_nobody_needs(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, trainees = [0], []
    settle = SteppedReplica.settle

    def watch(self: SteppedReplica) -> None:
        settle(self)
        longest[0] = max(longest[0], len(self.kept))
        assert len(self.under_way) <= 1  # beside the one that was settled just now
        assert len(self.kept) >= sum(self.under_way)

    begin = VirtualModel.begin
    monkeypatch.setattr(SteppedReplica, "settle", watch)
    monkeypatch.setattr(VirtualModel, "begin", lambda self, *given: (trainees.append(self), begin(self, *given)))
    task = digits()
    run = train_virtually(task.model, task.data, task.loss, sync=sync, cluster=EVENTFUL, optimizer=SGD, steps_each=40)
    assert 0 < longest[0] <= 12
    assert not trainees[0].replicas  # everybody is gone
    assert not trainees[0].versions.copies
    assert bool(run.outcome.discarded) == ("drop" in sync)


def test_it_learns() -> None:
    task = digits()
    run = train_virtually(
        task.model,
        task.data,
        task.loss,
        sync="downpour:push=5,fetch=5",
        cluster=Cluster(workers=4, slow={3: 3.0}),
        optimizer=partial(torch.optim.SGD, lr=0.2),
        steps=960,
        evaluate_every=20.0,
    )
    assert run.accuracy > 0.9


def test_an_unused_parameter_stays_as_it_is() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 10), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    task = digits()
    run = train_virtually(Idle(), task.data, task.loss, sync="downpour:push=2,fetch=2,dc=1", steps=40)
    assert torch.equal(run.model.unused, torch.ones(3))
