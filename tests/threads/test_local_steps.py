"""`local:k`, `adacomm:k` and `diloco:k` live, against a plain loop: over servers, shared memory, and collectives alone."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_equal, small_batches, small_model, trained_alone, weights
from local_blocks import WAYS, Blocks, job_by, sgd, train_in_blocks
from torch import nn

from polytempo.session.session import Session
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires, pytest.mark.parametrize("way", WAYS)]

EXACT = 1e-9
STEPS = 8


def consolidated(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> list[torch.Tensor]:
    optimizer.consolidate()
    return weights(model)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def test_local_1_with_plain_sgd_is_bsp(way: str) -> None:
    batches = small_batches(STEPS, [4, 4, 4])
    local = train_in_blocks(job_by(way, 3, "local:1"), "local:1", batches)
    bsp = train_in_blocks(job_by(way, 3, "bsp"), "bsp", batches)
    assert_close(local[0], bsp[0], EXACT)
    assert_close(local[0], trained_alone(small_model(), sgd, batches), EXACT)


def test_a_block_of_local_steps_ends_with_the_mean(way: str) -> None:
    batches = small_batches(STEPS, [4, 4])
    found = train_in_blocks(job_by(way, 2, "local:4"), "local:4", batches, momentum)
    plain = Blocks(2, momentum)
    assert_close(found[0], plain.run(batches, 4, plain.average), EXACT)


def test_replicas_are_bitwise_equal_after_an_average(way: str) -> None:
    for sync in ("local:4", "local:4,momentum=0.5", "adacomm:4", "diloco:4", "diloco:4,fragments=2"):
        found = train_in_blocks(job_by(way, 3, sync), sync, small_batches(STEPS + 1, [4, 2, 3]), adamw, consolidated)
        assert_equal(found[0], found[1])
        assert_equal(found[0], found[2])


def test_the_mean_is_weighted_by_samples(way: str) -> None:
    batches = small_batches(STEPS, [1, 7])
    found = train_in_blocks(job_by(way, 2, "local:4"), "local:4", batches)
    plain = Blocks(2)
    assert_close(found[0], plain.run(batches, 4, plain.average), EXACT)


def test_block_momentum_is_that_of_a_plain_loop_and_0_of_it_is_averaging(way: str) -> None:
    batches = small_batches(STEPS, [4, 4])
    sync = "local:2,momentum=0.3"
    found = train_in_blocks(job_by(way, 2, sync), sync, batches, momentum)
    plain = Blocks(2, momentum)
    assert_close(found[0], plain.run(batches, 2, lambda: plain.block_momentum(0.3, 0.1)), EXACT)
    none = train_in_blocks(job_by(way, 2, "local:2,momentum=0"), "local:2,momentum=0", batches, momentum)
    averaged = train_in_blocks(job_by(way, 2, "local:2"), "local:2", batches, momentum)
    assert_close(none[0], averaged[0], EXACT)


def test_diloco_is_that_of_a_plain_loop(way: str) -> None:
    batches = small_batches(STEPS, [4, 2])
    found = train_in_blocks(job_by(way, 2, "diloco:2"), "diloco:2", batches, adamw)
    plain = Blocks(2, adamw)
    assert_close(found[0], plain.run(batches, 2, plain.diloco), EXACT)


def test_diloco_with_outer_rate_1_and_no_momentum_is_local(way: str) -> None:
    batches = small_batches(STEPS, [4, 4])
    sync = "diloco:4,outer_lr=1,outer_momentum=0"
    diloco = train_in_blocks(job_by(way, 2, sync), sync, batches, adamw)
    local = train_in_blocks(job_by(way, 2, "local:4"), "local:4", batches, adamw)
    assert_close(diloco[0], local[0], EXACT)


def test_exchanges_are_as_many_as_blocks(way: str) -> None:
    stats = lambda optimizer, model, session: optimizer.stats  # noqa: E731
    for period, wanted in ((1, 8), (2, 4), (8, 1)):
        found = train_in_blocks(
            job_by(way, 2, f"local:{period}"), f"local:{period}", small_batches(STEPS, [4, 4]), at_end=stats
        )
        assert [(one["averages"], one["period"], one["step"]) for one in found] == [(wanted, period, STEPS)] * 2


def test_an_unfinished_block_is_averaged_at_the_end(way: str) -> None:
    models: dict[int, nn.Module] = {}
    keep = lambda optimizer, model, session: models.setdefault(session.rank, model) and optimizer  # noqa: E731
    batches = small_batches(7, [4, 4])
    optimizers: list[DistributedOptimizer] = train_in_blocks(job_by(way, 2, "local:4"), "local:4", batches, at_end=keep)
    plain = Blocks(2)
    wanted = plain.run(batches, 4, plain.average)
    for rank in range(2):
        assert_close([param.detach() for param in models[rank].parameters()], wanted, EXACT)
        assert optimizers[rank].stats["averages"] == 2


def test_a_worker_may_consolidate_alone(way: str) -> None:
    """As a script does that evaluates on rank 0: its blocks end earlier, those of the others go on to their ends."""

    def alone(optimizer: DistributedOptimizer, model: nn.Module, session: Session) -> int:
        if session.rank == 0:
            optimizer.consolidate()
            optimizer.consolidate()  # without a step since: there is nothing to average
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step(samples=2)
        return int(optimizer.stats["averages"])

    for sync in ("local:4", "diloco:4,fragments=2"):
        found = train_in_blocks(job_by(way, 2, sync), sync, small_batches(STEPS + 1, [2, 2]), sgd, alone)
        assert found == [4, 3]
