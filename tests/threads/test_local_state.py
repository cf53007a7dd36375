"""What an average does to optimizer state and module buffers, and what the script writes to parameters between averages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import Batch, assert_close, assert_equal, loss_of, made_from_seed, small_batches, small_model, weights
from local_blocks import WAYS, Blocks, job_by, sgd, train_in_blocks
from torch import nn

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

EXACT = 1e-9


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1)


def average_state(plain: Blocks) -> None:
    """Every tensor of the optimizers' state becomes the mean, weighted by samples."""
    total, states = sum(plain.samples), [list(optimizer.state.values()) for optimizer in plain.optimizers]
    for entries in zip(*states, strict=True):
        for name in entries[0]:
            parts = [entry[name] * samples / total for entry, samples in zip(entries, plain.samples, strict=True)]
            mean = torch.stack(parts).sum(0)
            for entry in entries:
                entry[name].copy_(mean)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", ["keep", "mean", "reset"])
def test_optimizer_state_at_an_average_is_kept_averaged_or_dropped(way: str, state: str) -> None:
    batches = small_batches(8, [4, 2])
    for make in (momentum, adam, adagrad) if state != "mean" else (momentum, adam):
        plain = Blocks(2, make)

        def end(plain: Blocks = plain, make: Any = make) -> None:
            if state == "mean":
                average_state(plain)
            plain.average()
            if state == "reset":
                plain.optimizers = [make(list(model.parameters())) for model in plain.models]

        wanted = plain.run(batches, 2, end)
        sync = f"local:2,state={state}"
        found = train_in_blocks(job_by(way, 2, sync), sync, batches, make)
        assert_close(found[0], wanted, EXACT)


def test_these_three_differ_so_that_the_test_above_can_fail() -> None:
    batches = small_batches(8, [4, 2])
    found = [
        train_in_blocks(job_by("shared memory", 2, f"local:2,state={state}"), f"local:2,state={state}", batches, momentum)[
            0
        ][0]
        for state in ("keep", "mean", "reset")
    ]
    assert not torch.allclose(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    assert not torch.allclose(found[1], found[2])


def test_state_that_is_averaged_is_the_same_on_all_workers() -> None:
    def moments(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> list[torch.Tensor]:
        return [value.clone() for entry in optimizer.state.values() for value in entry.values()]

    sync = "local:2,state=mean"
    found = train_in_blocks(job_by("collectives", 3, sync), sync, small_batches(4, [4, 2, 3]), adam, moments)
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


def normed() -> nn.Module:
    return made_from_seed(0, lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))).double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["local:2", "diloco:2"])
def test_module_buffers_are_each_workers_own_or_the_mean(way: str, sync: str) -> None:
    def statistics(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in model.buffers()]

    batches = small_batches(4, [4, 8])
    own = train_in_blocks(job_by(way, 2, sync), sync, batches, sgd, statistics, model=normed)
    mean = train_in_blocks(job_by(way, 2, sync), sync, batches, sgd, statistics, model=normed, buffers="mean")
    plain = Blocks(2, sgd, normed)

    def end() -> None:
        shares = [samples / sum(plain.samples) for samples in plain.samples]
        for one, other in zip(plain.models[0].buffers(), plain.models[1].buffers(), strict=True):
            if one.is_floating_point():
                value = shares[0] * one + shares[1] * other
                one.copy_(value)
                other.copy_(value)
        plain.average() if sync == "local:2" else plain.diloco()

    plain.run(batches, 2, end)
    assert not torch.allclose(own[0][0], own[1][0])
    assert_equal(mean[0], mean[1])
    assert_close(mean[0], [buffer.detach() for buffer in plain.models[0].buffers()], EXACT)


def test_averaged_buffers_need_the_model() -> None:
    with pytest.raises(UsageError, match="buffers='mean' needs the model"), job_by("shared memory", 1, "local:2") as job:
        job.run(lambda session: DistributedOptimizer(sgd(list(small_model().parameters())), buffers="mean"))


def test_lbfgs_makes_local_steps_and_its_history_cannot_be_averaged() -> None:
    def lbfgs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    batches, models = small_batches(4, [4, 4]), [small_model(), small_model()]

    def train(session: Session) -> list[torch.Tensor]:
        model = models[session.rank]
        optimizer = DistributedOptimizer(lbfgs(list(model.parameters())), model, sync="local:2")
        for batch in batches:
            assert optimizer.step(closure_of(optimizer, model, batch[session.rank])) is not None
        return weights(model)

    with job_by("shared memory", 2, "local:2") as job:
        found = job.run(train)
    assert_equal(found[0], found[1])
    plain = Blocks(2, lbfgs)
    for number, step in enumerate(batches, start=1):
        for model, optimizer, batch in zip(plain.models, plain.optimizers, step, strict=True):
            optimizer.step(closure_of(optimizer, model, batch))
        plain.samples = [1.0, 1.0]
        if number % 2 == 0:
            plain.average()
    assert_close(found[0], plain.anchor, EXACT)
    with pytest.raises(UsageError, match="state=mean cannot average the history of LBFGS"):
        train_in_blocks(job_by("shared memory", 1, "local:2"), "local:2,state=mean", [[batches[0][0]]], lbfgs)


def closure_of(optimizer: torch.optim.Optimizer, model: nn.Module, batch: Batch) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


# What the script writes.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["local:4", "diloco:4"])
def test_a_write_inside_a_block_is_this_workers_progress(way: str, sync: str) -> None:
    batches = small_batches(8, [4, 4])

    def shift(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> None:
        if session.rank == 1 and optimizer.stats["step"] in (2, 7):
            with torch.no_grad():
                next(model.parameters()).add_(0.25)

    found = train_in_blocks(job_by(way, 2, sync), sync, batches, after_step=shift)
    plain = Blocks(2)
    for number, step in enumerate(batches, start=1):
        plain.step(step)
        if number in (2, 7):
            with torch.no_grad():
                next(plain.models[1].parameters()).add_(0.25)
        if number % 4 == 0:
            plain.average() if sync == "local:4" else plain.diloco()
    assert_close(found[0], plain.anchor, EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_a_write_at_the_start_of_a_block_is_the_new_anchor(way: str) -> None:
    """As after `model.load_state_dict` on all workers: the outer step starts from the loaded values."""
    batches, loaded = small_batches(4, [4, 4]), small_model(seed=5)

    def load(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> None:
        if optimizer.stats["step"] == 2:
            model.load_state_dict(loaded.state_dict())

    found = train_in_blocks(job_by(way, 2, "diloco:2"), "diloco:2", batches, after_step=load)
    plain = Blocks(2)
    plain.step(batches[0]), plain.step(batches[1]), plain.diloco()
    plain.set_all(weights(loaded))
    plain.step(batches[2]), plain.step(batches[3]), plain.diloco()
    assert_close(found[0], plain.anchor, EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_different_anchors_are_refused(way: str) -> None:
    def write(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> None:
        if optimizer.stats["step"] == 2:
            with torch.no_grad():
                next(model.parameters()).add_(session.rank + 1)

    with pytest.raises(UsageError, match=r"workers 0 and 1 (hold different|have changed)"):
        train_in_blocks(job_by(way, 2, "diloco:2"), "diloco:2", small_batches(4, [4, 4]), after_step=write)


# A job of one, and what the script saves.


@pytest.mark.parametrize("sync", ["local:4", "adacomm:4", "local:3,after=2"])
@pytest.mark.parametrize("way", ["servers", "shared memory", "alone"])
def test_a_job_of_one_is_plain_training_bit_for_bit(way: str, sync: str) -> None:
    batches = small_batches(10, [4])
    for make in (momentum, adam):
        if way == "alone":
            found = train_in_blocks(_Alone(), sync, batches, make)  # type: ignore[arg-type]
        else:
            found = train_in_blocks(job_by(way, 1, sync), sync, batches, make)
        model = small_model()
        optimizer = make(list(model.parameters()))
        for ((x, y),) in batches:
            optimizer.zero_grad()
            loss_of(model, (x, y)).backward()
            optimizer.step()
        assert_equal(found[0], weights(model))


class _Alone:
    """Without a launcher."""

    def __enter__(self) -> _Alone:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, work: Any) -> list[Any]:
        from polytempo.launcher.job_facts import JobFacts
        from polytempo.session.session import as_current

        session = Session(None, JobFacts(1, ()), 0)
        with as_current(session):
            result = work(session)
        session.close()
        return [result]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sync", ["diloco:2", "diloco:4,fragments=2", "local:2,momentum=0.5"])
def test_a_script_saves_and_loads_model_optimizer_and_outer_momentum(way: str, sync: str) -> None:
    batches = small_batches(8, [4, 4])
    saved: dict[int, Any] = {}

    def save(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> None:
        if optimizer.stats["step"] == 4:
            optimizer.consolidate()
            saved[session.rank] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    whole = train_in_blocks(job_by(way, 2, sync), sync, batches, adam, after_step=save)
    models = [small_model(seed=9), small_model(seed=9)]

    def go_on(session: Session) -> list[torch.Tensor]:
        model = models[session.rank]
        optimizer = DistributedOptimizer(adam(list(model.parameters())), model, sync=sync)
        model.load_state_dict(saved[session.rank][0])
        optimizer.load_state_dict(saved[session.rank][1])
        for step in batches[4:]:
            optimizer.zero_grad()
            loss_of(model, step[session.rank]).backward()
            optimizer.step(samples=4)
        return weights(model)

    with job_by(way, 2, sync) as job:
        found = job.run(go_on)
    assert_close(found[0], whole[0], EXACT)
