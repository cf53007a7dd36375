"""Training with dealt samples in virtual time against one plain loop on the same samples, weights and divisor."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polytempo.simulate.cluster import Arrival, Cluster, Crash, Departure, Hiccup, Link, Lognormal, Stall, Trace
from polytempo.simulate.replicas import Shards
from polytempo.simulate.run import simulate_job
from polytempo.simulate.virtual_model import VirtualModel
from polytempo.simulate.virtual_training import train_virtually
from polytempo.simulate.worker import MicroBatch
from polytempo.sync.actions import Apply
from polytempo.sync.spec import parse_spec
from polytempo.tasks import TensorPair, digits

SEED = 3
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

EVEN = Cluster(workers=4, batch=24)
#: One worker changes its speed for good, others stall.
CHANGING = replace(EVEN, step_times={0: Trace((1.0,) * 8 + (3.0,) * 1000)}, slow={1: 1.4}, hiccup=Hiccup(0.05, 4.0))
#: Workers leave, crash and come back, in the middle of rounds, and messages take time.
COMING_AND_GOING = Cluster(
    workers=4,
    batch=24,
    step_time=Lognormal(1.0, 0.2),
    slow={3: 2.0},
    stalls=(Stall(1, 6.2, 9.0),),
    joins=(Arrival(4, 9.3), Arrival(2, 14.1)),
    leaves=(Departure(0, 11.7),),
    crashes=(Crash(2, 5.4, noticed_after=0.7),),
    link=Link(0.01, 1e7),
    model_bytes=1e4,
)
UNEVEN = ("bsp+balance", "bsp+balance,micro=3", "anytime:auto", "anytime:auto,divide=actual", "anytime:auto,late=keep")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Watched(VirtualModel):
    """Remembers what each update was made of."""

    def __init__(self, model: nn.Module, train: TensorPair, shards: Shards, sync: str) -> None:
        super().__init__(model, train, shards, cross_entropy, sgd, parse_spec(sync))
        self.rounds: list[tuple[list[MicroBatch], float]] = []

    def apply(self, apply: Apply, versions: Sequence[int], contents: Sequence[list[MicroBatch]], part: int) -> None:
        newest = self.versions.newest
        batches = [batch._replace(version=batch.version if batch.late else newest) for one in contents for batch in one]
        self.rounds.append((batches, apply.divisor))
        super().apply(apply, versions, contents, part)


def trained(sync: str, cluster: Cluster, rounds: int = 45, one_pass: bool = False) -> tuple[Watched, nn.Module, TensorPair]:
    """A run in virtual time in float64; the trainer, the model it started with, and the data."""
    task = digits(SEED)
    model, (inputs, targets) = task.model.double(), task.data[0]
    train = inputs.double(), targets
    ranks = cluster.ranks()
    trainer = Watched(model, train, Shards(len(inputs), len(ranks), [cluster.batch] * len(ranks), SEED), sync)
    trainer.one_pass = one_pass
    simulate_job(cluster, sync, seed=SEED, trainer=trainer, steps_each=rounds)
    return trainer, model, train


def plain_loop(model: nn.Module, train: TensorPair, rounds: list[tuple[list[MicroBatch], float]]) -> nn.Module:
    """One process: the sum of the losses of a round's samples over the divisor, or over their number; one step."""
    model, (inputs, targets) = copy.deepcopy(model), train
    order = Shards(len(inputs), 1, [1], SEED).order
    optimizer, history = sgd(model.parameters()), [copy.deepcopy(model)]
    for batches, divisor in rounds:
        model.zero_grad()
        total = divisor or sum(batch.samples for batch in batches)
        for version in {batch.version for batch in batches}:
            places = [place for batch in batches if batch.version == version for place in batch.places]
            index = torch.cat([order(epoch)[start:stop] for epoch, start, stop in places])
            at = history[version]
            at.zero_grad()
            (cross_entropy(at(inputs[index]), targets[index], reduction="sum") / total).backward()
            for parameter, old in zip(model.parameters(), at.parameters(), strict=True):
                assert old.grad is not None
                parameter.grad = old.grad if parameter.grad is None else parameter.grad + old.grad
        if batches:
            optimizer.step()
        history.append(copy.deepcopy(model))
    return model


def furthest(a: nn.Module, b: nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("cluster", [CHANGING, COMING_AND_GOING], ids=["changing", "coming and going"])
@pytest.mark.parametrize("sync", UNEVEN)
def test_uneven_training_is_one_process_on_the_same_samples(sync: str, cluster: Cluster) -> None:
    trainer, start, train = trained(sync, cluster)
    assert furthest(trainer.master, plain_loop(start, train, trainer.rounds)) < 1e-9
    sizes = {tuple(batch.samples for batch in batches) for batches, _ in trainer.rounds}
    assert len(sizes) > 1  # shares and counts changed during the run
    if "keep" in sync:
        assert any(batch.late for batches, _ in trainer.rounds for batch in batches)
    assert not trainer.versions.copies  # no weights are kept for readers that are gone


@pytest.mark.parametrize("cluster", [CHANGING, COMING_AND_GOING], ids=["changing", "coming and going"])
@pytest.mark.parametrize("sync", UNEVEN)
def test_every_sample_is_used_once_an_epoch(sync: str, cluster: Cluster) -> None:
    trainer, _, train = trained(sync, cluster, rounds=50)
    used: dict[int, Counter[int]] = {}
    for batches, _ in trainer.rounds:
        for batch in batches:
            assert batch.samples == sum(stop - begin for _, begin, stop in batch.places)
            for epoch, begin, stop in batch.places:
                used.setdefault(epoch, Counter()).update(range(begin, stop))
    assert max(used) >= 2
    assert all(set(places.values()) == {1} for places in used.values())
    assert all(len(used[epoch]) == len(train[0]) for epoch in range(max(used) - 1))  # the last two may be open


@pytest.mark.parametrize("sync", ["bsp+balance", "anytime:auto"])
def test_equal_speeds_train_as_bsp(sync: str) -> None:
    """The same joint batches as `bsp` in the first epoch, and so the same weights, but for the order of additions."""
    task = digits(SEED)
    data = ((task.data[0][0].double(), task.data[0][1]), (task.data[1][0].double(), task.data[1][1]))
    run = partial(
        train_virtually, task.model.double(), data, cross_entropy, cluster=EVEN, optimizer=sgd, steps_each=14, seed=SEED
    )
    assert furthest(run(sync=sync).model, run(sync="bsp").model) < 1e-9


def test_one_pass_is_the_same_sum() -> None:
    by_parts, _, _ = trained("anytime:auto,late=keep", CHANGING)
    at_once, _, _ = trained("anytime:auto,late=keep", CHANGING, one_pass=True)
    assert furthest(by_parts.master, at_once.master) < 1e-9


def test_a_round_without_samples_changes_nothing() -> None:
    """All workers stall at once, for some rounds: no update, and no step of the optimizer's momentum."""
    stuck = replace(EVEN, stalls=tuple(Stall(rank, 5.1, 6.0) for rank in range(4)))
    trainer, start, train = trained("anytime:auto", stuck, rounds=20)
    assert any(not batches for batches, _ in trainer.rounds)
    assert furthest(trainer.master, plain_loop(start, train, trainer.rounds)) < 1e-9


def test_an_update_of_no_pushes_changes_nothing() -> None:
    task = digits(SEED)
    shards, spec = Shards(len(task.data[0][0]), 2, [16] * 2, SEED), parse_spec("anytime:auto")
    beside = VirtualModel(task.model, task.data[0], shards, cross_entropy, sgd, spec)
    beside.apply(Apply((), 1.0), [], [], 0)
    assert beside.versions.newest == 1
    assert furthest(beside.master, task.model) == 0
