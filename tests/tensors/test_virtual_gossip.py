"""Gossip and AD-PSGD in virtual training: against plain loops, and the mass that mixing must keep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from test_virtual_blocks import ADAM, EVENTFUL, MOMENTUM, SGD, TASK, ByHand, load, train, values

from polytempo.simulate.cluster import Arrival, Cluster, Crash, Link, Lognormal
from polytempo.simulate.virtual_model import VirtualModel
from polytempo.sync.topology import mixing_rows


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp", "gossip:full,overlap=1", "adpsgd:ring"])
def test_a_job_of_one_is_plain_training_to_the_bit(sync: str, optimizer: Any) -> None:
    cluster = Cluster(workers=1, batch=16, link=Link(0.4, 1e5), model_bytes=1e5, step_time=Lognormal(1.0, 0.5))
    plain = ByHand(1, optimizer)
    plain.steps(0, 23)
    assert torch.equal(values(train(sync, optimizer, cluster, steps=23).model), values(plain.models[0]))


def test_fully_connected_gossip_is_averaging_at_each_step() -> None:
    mixed, averaged = train("gossip:full", MOMENTUM), train("local:1", MOMENTUM)
    assert torch.allclose(values(mixed.model), values(averaged.model), rtol=0, atol=1e-9)


@pytest.mark.parametrize("topology", ["ring", "exp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_gossip_against_a_plain_loop(topology: str, overlap: bool) -> None:
    hand = ByHand(5, MOMENTUM)
    for step in range(20):
        rows = mixing_rows(topology, (0, 1, 2, 3, 4), step)
        matrix = torch.zeros(5, 5, dtype=torch.float64)
        for worker, row in rows.items():
            matrix[worker, worker] = row.keep
            for other, share in row.receive:
                matrix[worker, other] = share
        before = torch.stack([values(model) for model in hand.models])
        hand.steps(step, 1)
        after = torch.stack([values(model) for model in hand.models])
        mixed = matrix @ before + after - before if overlap else matrix @ after
        for model, own in zip(hand.models, mixed, strict=True):
            load(model, own)
    sync = f"gossip:{topology}{',overlap=1' * overlap}"
    run = train(sync, MOMENTUM, Cluster(workers=5, batch=16), steps=20)
    assert torch.allclose(values(run.model), hand.mean(), rtol=0, atol=1e-12)


def test_a_pair_against_a_plain_loop() -> None:
    """Two workers, one slower: the active one asks when its step begins, and both have the mean at once."""
    hand = ByHand(2, SGD)
    x = [values(TASK.model), values(TASK.model)]
    now = [0.0, 0.0]
    made = [0, 0]
    change: list[torch.Tensor | None] = [None, None]
    while min(made) < 12:
        worker = 0 if now[0] <= now[1] else 1  # the one whose step ends first; worker 0 where both do
        if change[worker] is not None:
            x[worker] = x[worker] + change[worker]
            made[worker] += 1
        start = x[worker]
        if worker == 0:
            mean = (x[0] + x[1]) / 2
        load(hand.models[worker], start)
        hand.steps(made[worker], 1, [worker])
        change[worker] = values(hand.models[worker]) - start
        if worker == 0:
            x = [mean, mean]
        now[worker] += (1.0, 1.7)[worker]
    cluster = Cluster(workers=2, batch=16, slow={1: 1.7})
    assert made[1] == 12
    run = train("adpsgd:ring", SGD, cluster, steps=10**6, seconds=now[1] - 1.7)
    assert run.outcome.workers[1].steps == 12
    assert torch.allclose(values(run.model), (x[0] + x[1]) / 2, rtol=0, atol=1e-12)


REST = partial(torch.optim.SGD, lr=0.0)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp", "adpsgd:exp"])
def test_without_rate_all_models_stay_what_they_were_through_joins_and_crashes(sync: str) -> None:
    run = train(sync, REST, EVENTFUL, 40)
    assert torch.allclose(values(run.model), values(TASK.model), rtol=0, atol=1e-12)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sum of all push-sum weights, whenever the model is looked at."""
    seen: list[float] = []
    look = VirtualModel.observe

    def watch(self: VirtualModel, now: float) -> None:
        seen.append(self.push_sum)
        look(self, now)

    monkeypatch.setattr(VirtualModel, "observe", watch)
    return seen


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp", "gossip:full,overlap=1", "adpsgd:ring"])
def test_joiners_add_no_mass(sync: str, weights: list[float]) -> None:
    train(sync, SGD, Cluster(workers=4, batch=16, joins=(Arrival(4, 6.5), Arrival(5, 9.5)), link=Link(0.01)), 30)
    assert weights[-1] == pytest.approx(4.0, abs=1e-12)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:full", "adpsgd:ring"])
def test_a_worker_that_is_lost_takes_along_its_own_mass_only(sync: str, weights: list[float]) -> None:
    run = train(sync, REST, Cluster(workers=4, batch=16, crashes=(Crash(1, 4.5, 0.5),)), 20)
    assert weights[-1] == pytest.approx(3.0, abs=1e-12)
    assert torch.allclose(values(run.model), values(TASK.model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sync", ["gossip:ring", "gossip:exp", "gossip:ring,overlap=1", "adpsgd:ring"])
def test_members_come_and_go(sync: str) -> None:
    run = train(sync, MOMENTUM, EVENTFUL, 100)
    assert torch.isfinite(values(run.model)).all()
    assert run.accuracy > 0.7
