"""Training in virtual time against plain training, written out here by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.simulate.cluster import Arrival, Cluster, Crash, Departure, Link, Lognormal
from polytempo.simulate.replicas import Shards
from polytempo.simulate.virtual_model import VirtualModel, WeightHistory
from polytempo.simulate.virtual_training import as_tensors, model_bytes, train_virtually
from polytempo.tasks import FASHION_MNIST, digits, fashion_mnist, fashion_mnist_cnn, find_task

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parameters(a), parameters(b), strict=True))


def plain_training(workers: int, batches: list[int], rounds: int, optimizer: MakeOptimizer, seed: int) -> nn.Module:
    """Each round: the gradient of every worker's batch, their mean weighted by samples, one step."""
    task = digits()
    model = copy.deepcopy(task.model)
    stepper = optimizer(list(model.parameters()))
    (inputs, targets), _ = task.data
    shards = Shards(len(inputs), workers, batches, seed)
    for step in range(rounds):
        mean = [torch.zeros_like(p) for p in model.parameters()]
        for worker in range(workers):
            index = shards.batch(worker, step)
            model.zero_grad()
            task.loss(model(inputs[index]), targets[index]).backward()
            for total, p in zip(mean, model.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad * (batches[worker] / sum(batches))
        for total, p in zip(mean, model.parameters(), strict=True):
            p.grad = total
        stepper.step()
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bsp_is_plain_training_bit_for_bit(workers: int, optimizer: MakeOptimizer) -> None:
    task = digits()
    cluster = Cluster(workers=workers, batch=16, slow={workers - 1: 2.5})
    run = train_virtually(task.model, task.data, task.loss, cluster=cluster, optimizer=optimizer, steps_each=30, seed=5)
    assert same(run.model, plain_training(workers, [16] * workers, 30, optimizer, seed=5))


def test_bsp_weighs_by_samples() -> None:
    task = digits()
    cluster = Cluster(workers=3, batch=16, batches={1: 48}, step_time=Lognormal(1.0, 0.5))
    run = train_virtually(task.model, task.data, task.loss, cluster=cluster, optimizer=OPTIMIZERS["sgd"], steps_each=20)
    assert same(run.model, plain_training(3, [16, 48, 16], 20, OPTIMIZERS["sgd"], seed=0))


@pytest.mark.parametrize(
    "sync", ["bsp", "asp", "ssp:3", "dssp:3..15", "every:4", "delay:0", "asp,scale=1", "asp,dca=2,drop=0"]
)
def test_one_worker_is_plain_training_in_every_mode(sync: str) -> None:
    task = digits()
    cluster = Cluster(workers=1, batch=16, link=Link(0.1, 1e6), model_bytes=1e5)
    run = train_virtually(
        task.model, task.data, task.loss, sync=sync, cluster=cluster, optimizer=OPTIMIZERS["nesterov"], steps_each=25
    )
    assert same(run.model, plain_training(1, [16], 25, OPTIMIZERS["nesterov"], seed=0))


def asynchronous_reference(cluster: Cluster, sync: str, rate: float, steps: int) -> nn.Module:
    """Every version of the weights is kept; each push is applied to the newest, computed on the one it read."""
    task = digits()
    lines: list[dict[str, object]] = []
    train_virtually(task.model, task.data, task.loss, sync=sync, cluster=cluster, steps=steps, record=lines.append)
    model, (inputs, targets) = copy.deepcopy(task.model), task.data[0]
    shards = Shards(len(inputs), cluster.workers, [cluster.batch] * cluster.workers, seed=0)
    history = [[p.detach().clone() for p in model.parameters()]]
    pushed: dict[object, int] = {}
    for line in lines:
        if line["kind"] == "push":
            pushed[line["worker"]] = line["step"]  # type: ignore[assignment]
        if line["kind"] == "apply":
            (worker,), (stale,) = line["workers"], line["staleness"]  # type: ignore[misc]
            newest, read = history[-1], history[len(history) - 1 - stale]
            with torch.no_grad():
                for p, value in zip(model.parameters(), read, strict=True):
                    p.copy_(value)
            index = shards.batch(worker, pushed[worker])
            grads = torch.autograd.grad(task.loss(model(inputs[index]), targets[index]), list(model.parameters()))
            history.append([value - 0.1 * rate * grad for value, grad in zip(newest, grads, strict=True)])
    with torch.no_grad():
        for p, value in zip(model.parameters(), history[-1], strict=True):
            p.copy_(value)
    return model


@pytest.mark.parametrize("sync", ["asp", "ssp:2", "dssp:1..4", "every:3", "delay:2"])
def test_stale_gradients_are_taken_on_the_weights_that_were_read(sync: str) -> None:
    cluster = Cluster(
        workers=3, batch=16, slow={2: 2.5}, step_time=Lognormal(1.0, 0.3), link=Link(0.2, 1e6), model_bytes=1e5
    )
    task = digits()
    run = train_virtually(task.model, task.data, task.loss, sync=sync, cluster=cluster, steps=120)
    assert run.outcome.staleness_max >= 2
    expected = asynchronous_reference(cluster, sync, 1 / 3, 120)
    for ours, theirs in zip(parameters(run.model), parameters(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_scale_is_the_full_rate() -> None:
    cluster = Cluster(workers=3, batch=16)
    task = digits()
    run = train_virtually(task.model, task.data, task.loss, sync="asp,scale=1", cluster=cluster, steps=60)
    expected = asynchronous_reference(cluster, "asp,scale=1", 1.0, 60)
    for ours, theirs in zip(parameters(run.model), parameters(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize(
    "sync", ["bsp", "bsp+backup:1", "asp", "ssp:3", "dssp:1..6", "every:4", "every:4,wait=1", "delay:3", "asp,drop=1,dc=1"]
)
def test_versions_are_kept_only_while_somebody_can_read_them(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainees: list[VirtualModel] = []
    most = [0]
    make = VirtualModel.__init__

    def remember(self: VirtualModel, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        trainees.append(self)

    def apply(self: VirtualModel, *args: object, original: Callable[..., None] = VirtualModel.apply) -> None:
        original(self, *args)
        most[0] = max(most[0], len(self.versions.copies))

    monkeypatch.setattr(VirtualModel, "__init__", remember)
    monkeypatch.setattr(VirtualModel, "apply", apply)
    task = digits()
    train_virtually(task.model, task.data, task.loss, sync=sync, cluster=EVENTFUL, steps_each=40)
    assert trainees[0].versions.newest >= 40
    assert not trainees[0].versions.copies  # everybody is gone
    workers, ahead = 5, 3 if sync == "delay:3" else 0
    assert most[0] <= workers * (ahead + 2)
    if sync == "bsp":
        assert most[0] == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_steps_ahead_are_trained_where_messages_take_no_time(workers: int) -> None:
    """A push is applied, and the next release is here, before the worker has begun the step that it was allowed earlier."""
    task, cluster = digits(), Cluster(workers=workers)
    run = train_virtually(task.model, task.data, task.loss, sync="delay:3", cluster=cluster, steps_each=20)
    assert run.outcome.steps == 20 * workers
    assert run.outcome.staleness_max <= 3 * workers


def test_versions_alone() -> None:
    tensor = torch.zeros(2)
    versions = WeightHistory([tensor])
    versions.keep(0)
    versions.keep(0)
    versions.advance()
    tensor += 1
    assert versions.read(0)[0].tolist() == [0.0, 0.0]
    assert versions.read(1)[0].tolist() == [1.0, 1.0]
    versions.drop(0)
    assert len(versions.copies) == 1
    versions.drop(0)
    assert len(versions.copies) == 0
    versions.advance()
    tensor += 1
    assert len(versions.copies) == 0  # nobody read version 1


@pytest.mark.parametrize("sync", ["bsp", "dssp:1..6"])
def test_same_seed_same_result(sync: str) -> None:
    task = digits()

    def run(seed: int) -> str:
        lines: list[object] = []
        result = train_virtually(
            task.model, task.data, task.loss, sync=sync, cluster=EVENTFUL, steps_each=15, seed=seed, record=lines.append
        )
        return json.dumps([result.as_dict(), lines])

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_model_given_and_the_global_random_state_stay_as_they_were() -> None:
    task = digits()
    before = copy.deepcopy(task.model)
    state = torch.get_rng_state()
    run = train_virtually(task.model, task.data, task.loss, steps_each=5)
    assert same(task.model, before)
    assert not same(run.model, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_learns_and_modes_differ_as_they_should() -> None:
    task = digits()
    cluster = Cluster(workers=4, slow={3: 3.0})
    runs = {
        sync: train_virtually(
            task.model,
            task.data,
            task.loss,
            sync=sync,
            cluster=cluster,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.4),
            steps=960,
            evaluate_every=5.0,
        )
        for sync in ("bsp", "ssp:3", "asp")
    }
    assert all(run.accuracy > 0.93 for run in runs.values())
    times = {sync: run.time_to(0.93) for sync, run in runs.items()}
    assert times["asp"] is not None
    assert times["bsp"] is not None
    assert times["asp"] < 0.7 * times["bsp"]
    assert runs["asp"].time_to(1.01) is None


class Normed(nn.Module):
    """Small, with BatchNorm, a frozen layer and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.frozen(x))


def test_buffers_stay_with_their_worker_and_are_averaged_for_evaluation() -> None:
    task = digits()
    torch.manual_seed(0)
    model = Normed()
    run = train_virtually(model, task.data, task.loss, sync="asp", cluster=Cluster(workers=2, batch=32), steps=40)
    assert not torch.equal(run.model.net[1].running_mean, model.net[1].running_mean)
    assert torch.equal(run.model.frozen.weight, model.frozen.weight)
    assert torch.equal(run.model.unused, model.unused)
    alone = train_virtually(model, task.data, task.loss, cluster=Cluster(workers=1, batch=32), steps=20)
    again = copy.deepcopy(model)
    stepper = torch.optim.SGD([p for p in again.parameters() if p.requires_grad], lr=0.1)
    (inputs, targets), _ = task.data
    for step in range(20):
        index = Shards(len(inputs), 1, [32], 0).batch(0, step)
        stepper.zero_grad()
        task.loss(again(inputs[index]), targets[index]).backward()
        stepper.step()
    assert same(alone.model, again)
    assert torch.equal(alone.model.net[1].running_mean, again.net[1].running_mean)


def test_data_sets_and_tensors_are_both_taken() -> None:
    task = digits()
    sets = tuple(torch.utils.data.TensorDataset(*pair) for pair in task.data)
    a = train_virtually(task.model, task.data, task.loss, steps_each=3)
    b = train_virtually(task.model, sets, task.loss, steps_each=3)
    assert same(a.model, b.model)
    with pytest.raises(UsageError, match="as \\(inputs, targets\\)"):
        as_tensors(3, "training data")
    with pytest.raises(UsageError, match="as many inputs as targets"):
        as_tensors((torch.zeros(3), torch.zeros(2)), "training data")


def test_shards_are_disjoint_cover_an_epoch_and_change_with_it() -> None:
    shards = Shards(100, 3, [8, 8, 8], seed=1)
    steps = (100 // 3) // 8
    epoch = [shards.batch(worker, step).tolist() for step in range(steps) for worker in range(3)]
    seen = [index for batch in epoch for index in batch]
    assert len(seen) == len(set(seen)) == 96
    assert shards.batch(0, 0).tolist() != shards.batch(0, steps).tolist()
    with pytest.raises(UsageError, match="smaller batch or fewer workers"):
        Shards(100, 13, [8] * 13, seed=1)


def test_tasks(tmp_path: Path) -> None:
    assert digits().data[0][0].shape == (1437, 64)
    assert model_bytes(digits().model) == 4 * (64 * 64 + 64 + 64 * 10 + 10)
    with pytest.raises(UsageError, match="nearest: digits"):
        find_task("digit")
    with pytest.raises(UsageError, match="apt-get install dataset-fashion-mnist"):
        fashion_mnist(folder=tmp_path)
    for name, shape in (("train-images-idx3", (60, 28, 28)), ("train-labels-idx1", (60,))):
        _write_idx(tmp_path / f"{name}-ubyte", shape)
    for name, shape in (("t10k-images-idx3", (10, 28, 28)), ("t10k-labels-idx1", (10,))):
        _write_idx(tmp_path / f"{name}-ubyte", shape)
    task = fashion_mnist(folder=tmp_path)
    assert [part.shape for pair in task.data for part in pair] == [(60, 784), (60,), (10, 784), (10,)]
    small = fashion_mnist_cnn(folder=tmp_path)
    assert small.model(small.data[1][0]).shape == (10, 10)
    assert same(small.model, fashion_mnist_cnn(folder=tmp_path).model)
    assert not same(small.model, fashion_mnist_cnn(1, folder=tmp_path).model)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="not an IDX file"):
        fashion_mnist(folder=tmp_path)


NEEDS_FILES = pytest.mark.skipif(
    not FASHION_MNIST.exists(), reason="Debian's package dataset-fashion-mnist is not installed"
)


@NEEDS_FILES
def test_the_convolutional_network_learns_as_it_is_suggested() -> None:
    task = fashion_mnist_cnn()
    run = train_virtually(
        task.model,
        task.data,
        task.loss,
        sync="asp",
        cluster=Cluster(workers=4, batch=64),
        optimizer=lambda p: torch.optim.SGD(p, lr=task.lr, momentum=task.momentum),
        steps=320,
        evaluate_every=1e9,
    )
    assert run.outcome.sync == "asp,momentum=lookahead,spike=1.5"
    assert run.accuracy > 0.78


@NEEDS_FILES
def test_fashion_mnist_learns() -> None:
    task = fashion_mnist()
    assert [len(part) for pair in task.data for part in pair] == [60_000, 60_000, 10_000, 10_000]
    cluster = Cluster(workers=4, batch=64, slow={3: 3.0})
    optimizer = OPTIMIZERS["sgd"]
    run = train_virtually(task.model, task.data, task.loss, sync="asp", cluster=cluster, optimizer=optimizer, steps=400)
    assert run.accuracy > 0.75


def _write_idx(path: Path, shape: tuple[int, ...]) -> None:
    head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    path.write_bytes(head + (np.arange(np.prod(shape)) % 10).astype(np.uint8).tobytes())
