"""Averaging modes in virtual training: against plain loops, and where they must be something simpler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from polytempo.optim.outer_step import cut
from polytempo.records.check import check_lines
from polytempo.records.lines import RecordLine
from polytempo.records.replay import replay
from polytempo.simulate.cluster import Arrival, Cluster, Crash, Departure, Link, Lognormal
from polytempo.simulate.replicas import Shards
from polytempo.simulate.virtual_training import TrainingRun, train_virtually
from polytempo.sync.spec import parse_spec
from polytempo.tasks import TrainingTask, digits

SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
Loop = Callable[[list[nn.Module], nn.Module], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task64() -> TrainingTask:
    """The digits in float64, with a small model."""
    given = digits()
    (inputs, targets), (test, labels) = given.data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)).double()
    data = ((inputs.double(), targets), (test.double(), labels))
    return TrainingTask(model, data, given.loss, given.lr, given.target, given.steps)


TASK = task64()


def train(sync: str, optimizer: Any = SGD, cluster: Cluster | None = None, steps: int = 24, **more: Any) -> TrainingRun:
    cluster = cluster or Cluster(workers=3, batch=16)
    return train_virtually(
        TASK.model, TASK.data, TASK.loss, sync=sync, cluster=cluster, optimizer=optimizer, steps_each=steps,
        evaluate_every=500.0, **more,
    )  # fmt: skip


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def load(model: nn.Module, flat: torch.Tensor) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(flat.clone(), model.parameters())


class ByHand:
    """Workers of one speed that make local steps."""

    def __init__(self, workers: int, optimizer: Any, batch: int = 16, ranks: int | None = None) -> None:
        self.models = [copy.deepcopy(TASK.model) for _ in range(workers)]
        self.optimizers = [optimizer(list(model.parameters())) for model in self.models]
        self.shards = Shards(len(TASK.data[0][0]), ranks or workers, [batch] * (ranks or workers), seed=0)

    def steps(self, first: int, count: int, workers: list[int] | None = None) -> None:
        inputs, targets = TASK.data[0]
        for worker in workers if workers is not None else range(len(self.models)):
            for step in range(first, first + count):
                index = self.shards.batch(worker, step)
                self.optimizers[worker].zero_grad()
                TASK.loss(self.models[worker](inputs[index]), targets[index]).backward()
                self.optimizers[worker].step()

    def mean(self, workers: list[int] | None = None) -> torch.Tensor:
        chosen = workers if workers is not None else range(len(self.models))
        return torch.stack([values(self.models[worker]) for worker in chosen]).mean(0)

    def load(self, flat: torch.Tensor) -> None:
        for model in self.models:
            load(model, flat)


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("sync", ["local:1", "local:5", "local:4,after=3", "adacomm:3,every=2", "local:3,state=mean"])
def test_a_job_of_one_is_plain_training_to_the_bit(sync: str, optimizer: Any) -> None:
    cluster = Cluster(workers=1, batch=16, link=Link(0.4, 1e5), model_bytes=1e5, step_time=Lognormal(1.0, 0.5))
    plain = ByHand(1, optimizer)
    plain.steps(0, 23)
    for via in ("auto", "ps"):
        run = train(sync, optimizer, cluster, steps=23, via=via)
        assert torch.equal(values(run.model), values(plain.models[0]))


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM], ids=["sgd", "momentum"])
@pytest.mark.parametrize("state", ["keep", "mean", "reset"])
def test_local_steps_against_a_plain_loop(state: str, optimizer: Any) -> None:
    hand = ByHand(3, optimizer)
    for block in range(5):
        hand.steps(5 * block, 5 if block < 4 else 4)
        hand.load(hand.mean())
        kept = [own.state[p] for own in hand.optimizers for p in own.param_groups[0]["params"]]
        if optimizer is MOMENTUM and state == "mean":
            for index in range(4):
                buffers = [own.state[own.param_groups[0]["params"][index]]["momentum_buffer"] for own in hand.optimizers]
                mean = torch.stack(buffers).mean(0)
                for buffer in buffers:
                    buffer.copy_(mean)
        elif state == "reset":
            for one in kept:
                one.clear()
    run = train(f"local:5,state={state}", optimizer)
    assert run.outcome.updates == 5
    assert torch.allclose(values(run.model), hand.mean(), rtol=0, atol=1e-12)


def test_the_treatments_of_state_differ() -> None:
    ends = [values(train(f"local:5,state={state}", MOMENTUM).model) for state in ("keep", "mean", "reset")]
    assert min(float((a - b).abs().max()) for a, b in ((ends[0], ends[1]), (ends[0], ends[2]), (ends[1], ends[2]))) > 1e-4


def test_local_1_with_plain_sgd_is_bsp_with_unequal_batches_too() -> None:
    cluster = Cluster(workers=3, batch=16, batches={1: 8, 2: 24})
    assert torch.allclose(
        values(train("local:1", SGD, cluster).model), values(train("bsp", SGD, cluster).model), rtol=0, atol=1e-9
    )


def test_diloco_with_rate_1_and_no_momentum_is_local() -> None:
    plain = train("diloco:4,outer_lr=1,outer_momentum=0", MOMENTUM)
    assert torch.equal(values(plain.model), values(train("local:4", MOMENTUM).model))


def test_diloco_against_a_plain_loop() -> None:
    hand = ByHand(3, ADAM)
    anchor, velocity = values(TASK.model), torch.zeros_like(values(TASK.model))
    for block in range(6):
        hand.steps(4 * block, 4)
        delta = anchor - hand.mean()
        velocity = 0.9 * velocity + delta
        anchor = anchor - 0.7 * (delta + 0.9 * velocity)
        hand.load(anchor)
    assert torch.allclose(values(train("diloco:4", ADAM).model), anchor, rtol=0, atol=1e-12)


def test_block_momentum_against_a_plain_loop() -> None:
    hand = ByHand(3, MOMENTUM)
    anchor, u = values(TASK.model), torch.zeros_like(values(TASK.model))
    for block in range(6):
        hand.steps(4 * block, 4)
        u = 0.3 * u - (hand.mean() - anchor) / 0.05
        anchor = anchor - 0.05 * u
        hand.load(anchor)
        for own in hand.optimizers:
            own.state.clear()
    assert torch.allclose(values(train("local:4,momentum=0.3", MOMENTUM).model), anchor, rtol=0, atol=1e-12)


def test_overlap_against_a_plain_loop() -> None:
    """The average is taken two steps after the sending: the new anchor, and what these two steps have changed."""
    hand = ByHand(3, ADAM)
    anchor, velocity = values(TASK.model), torch.zeros_like(values(TASK.model))
    hand.steps(0, 5)
    for block in range(1, 5):
        sent = [values(model) for model in hand.models]
        delta = anchor - torch.stack(sent).mean(0)
        velocity = 0.9 * velocity + delta
        anchor = anchor - 0.7 * (delta + 0.9 * velocity)
        if block == 4:
            break
        hand.steps(5 * block, 2)
        for model, own in zip(hand.models, sent, strict=True):
            load(model, anchor + values(model) - own)
        hand.steps(5 * block + 2, 3)
    run = train("diloco:5,overlap=2", ADAM, steps=20)
    assert torch.allclose(values(run.model), anchor, rtol=0, atol=1e-12)


def test_fragments_against_a_plain_loop() -> None:
    """Two fragments, averaged in turn every three steps; each has its own outer step."""
    parts = cut([p.numel() for p in TASK.model.parameters()], 2)
    hand = ByHand(3, SGD)
    anchors = [p.detach().clone() for p in TASK.model.parameters()]
    velocities = [torch.zeros_like(a) for a in anchors]
    for turn in range(5):  # after the last step both are averaged
        hand.steps(3 * turn, 3 if turn < 4 else 0)
        for index in parts[(turn + 1) % 2]:
            own = [list(model.parameters())[index] for model in hand.models]
            delta = anchors[index] - torch.stack([p.detach() for p in own]).mean(0)
            velocities[index] = 0.9 * velocities[index] + delta
            anchors[index] = anchors[index] - 0.7 * (delta + 0.9 * velocities[index])
            with torch.no_grad():
                for parameter in own:
                    parameter.copy_(anchors[index])
    run = train("diloco:6,fragments=2", SGD, steps=12)
    for parameter, anchor in zip(run.model.parameters(), anchors, strict=True):
        assert torch.allclose(parameter.detach(), anchor, rtol=0, atol=1e-12)


def test_the_survivors_are_averaged() -> None:
    hand = ByHand(3, SGD)
    hand.steps(0, 5)
    hand.load(hand.mean())
    for block in (1, 2):
        hand.steps(5 * block, 5, [0, 2])
        hand.load(hand.mean([0, 2]))
    cluster = Cluster(workers=3, batch=16, crashes=(Crash(1, 7.5, 0.5),))
    assert torch.allclose(values(train("local:5", SGD, cluster, 15).model), hand.mean(), rtol=0, atol=1e-12)


def test_a_joiner_starts_from_the_last_average_and_at_the_place_of_the_others() -> None:
    hand = ByHand(3, SGD, ranks=3)
    for block in range(3):
        members = [0, 1] if block == 0 else [0, 1, 2]
        hand.steps(5 * block, 5, members)
        hand.load(hand.mean(members))
    cluster = Cluster(workers=2, batch=16, joins=(Arrival(2, 6.5),))
    assert torch.allclose(values(train("local:5", SGD, cluster, 15).model), hand.mean(), rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("sync", ["local:4,momentum=0.3", "adacomm:6,every=20", "diloco:6,fragments=3,overlap=1"])
@pytest.mark.parametrize("via", ["auto", "ps"])
def test_members_come_and_go(sync: str, via: str) -> None:
    lines: list[RecordLine] = []
    run = train(sync, MOMENTUM, EVENTFUL, 100, via=via, record=lines.append)
    assert torch.isfinite(values(run.model)).all()
    assert run.accuracy > 0.7
    if "fragments" not in sync:
        spec = parse_spec(sync)
        check_lines(lines, spec, 4)
        replay(lines, spec.policy(4))


def test_adacomm_averages_more_often_as_the_loss_falls() -> None:
    lines: list[RecordLine] = []
    train("adacomm:16,every=20", partial(torch.optim.SGD, lr=0.5), steps=200, record=lines.append)
    periods = [line["period"] for line in lines if line["kind"] == "release" and line["worker"] == 0]
    assert periods[0] == 16
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] <= 4
    losses = [line["loss"] for line in lines if line["kind"] == "push"]
    assert losses[0] > 2 * losses[-1] > 0
    assert {line["lr"] for line in lines if line["kind"] == "push"} == {0.5}


def test_statistics_of_batch_norm_are_local_and_merged_for_evaluation() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    task = digits()
    cluster = Cluster(workers=4, batch=16)
    run = train_virtually(
        model, task.data, task.loss, sync="local:8", cluster=cluster, optimizer=partial(torch.optim.SGD, lr=0.3),
        steps_each=240, evaluate_every=40.0,
    )  # fmt: skip
    assert run.accuracy > 0.93
    assert not torch.equal(run.model[1].running_mean, torch.zeros(16))
    assert run.spread > 0


@pytest.mark.parametrize(
    "cluster", [None, Cluster(workers=3, batch=16, slow={1: 2.5}, link=Link(0.1, 1e6), model_bytes=1e5)]
)
def test_decoupled_with_a_quorum_of_all_and_unbounded_grace_is_diloco(cluster: Cluster | None) -> None:
    loose, bound = train("diloco:4,quorum=3,grace=inf", ADAM, cluster), train("diloco:4", ADAM, cluster, via="ps")
    assert torch.allclose(values(loose.model), values(bound.model), rtol=0, atol=1e-9)


def test_decoupled_against_a_plain_loop() -> None:
    """Each push is merged when it comes: the change since the worker's own anchor, however old that is."""
    hand, speeds, period = ByHand(2, MOMENTUM), (1.0, 1.7), 4
    anchor, velocity = values(TASK.model), torch.zeros_like(values(TASK.model))
    bases = [anchor, anchor]
    ends = sorted((period * (block + 1) * speed, worker) for worker, speed in enumerate(speeds) for block in range(20))
    made = [0, 0]
    for at, worker in ends:
        if at > 50:
            break
        hand.steps(made[worker], period, [worker])
        made[worker] += period
        delta = bases[worker] - values(hand.models[worker])
        velocity = 0.9 * velocity + delta
        anchor = anchor - 0.7 * (delta + 0.9 * velocity)
        bases[worker] = anchor
        load(hand.models[worker], anchor)
    cluster = Cluster(workers=2, batch=16, slow={1: 1.7})
    run = train("diloco:4,quorum=1,grace=0", MOMENTUM, cluster, steps=10**6, seconds=50.0)
    assert run.outcome.steps == sum(made)
    assert torch.allclose(values(run.model), anchor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sync", ["diloco:4,quorum=2", "diloco:4,quorum=2,fragments=2", "diloco:4,quorum=2,grace=0,drop=2"])
def test_decoupled_members_come_and_go(sync: str) -> None:
    run = train(f"{sync},outer_lr=1,outer_momentum=0", MOMENTUM, EVENTFUL, 100)
    assert torch.isfinite(values(run.model)).all()
    assert run.accuracy > 0.7


def test_a_decoupled_worker_keeps_what_it_changed_while_the_answer_was_on_its_way() -> None:
    """One worker, and the anchor is what it sent: training is plain, whatever the network does."""
    plain = ByHand(1, SGD)
    plain.steps(0, 32)
    cluster = Cluster(workers=1, batch=16, link=Link(latency=0.7))
    run = train("diloco:4,quorum=1,outer_lr=1,outer_momentum=0", SGD, cluster, steps=32)
    assert torch.allclose(values(run.model), values(plain.models[0]), rtol=0, atol=1e-12)
