"""`anytime` together with what else a script may use: compression, several optimizers, groups, a GPU, reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_equal, loss_of, small_batches, small_model, weights
from paced import LONG, PacedWorker

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.communication import new_group
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("compression", ["bf16", {"push": "topk:0.5", "pull": "bf16"}])
def test_compressed_pushes_and_answers(compression: Any) -> None:
    data = small_batches(40, (4, 3))

    def work(session: Session) -> list[torch.Tensor]:
        options = {"compression": compression}
        worker = PacedWorker(session, small_model(dtype=torch.float32), momentum, options)
        for step in data[:12]:
            batch = tuple(part.float() for part in step[session.rank])
            worker.micro_batch(batch, 0.3 * LONG)  # type: ignore[arg-type]
        assert worker.round == 4
        worker.optimizer.consolidate()
        return weights(worker.model)

    with ThreadJob(2, 2, f"anytime:{LONG}") as job:
        first, second = job.run(work)
    assert_equal(first, second)
    assert all(
        not torch.equal(one, other) for one, other in zip(first, weights(small_model(dtype=torch.float32)), strict=True)
    )


@pytest.mark.parametrize("device", [None, "stand-in"])
def test_values_and_state_are_read_between_rounds(device: str | None) -> None:
    """With servers whose values are on a GPU, pushes and answers pass through the host."""
    data = small_batches(40, (4, 3))

    def work(session: Session) -> tuple[list[torch.Tensor], Any]:
        worker = PacedWorker(session, small_model(), momentum)
        for number, step in enumerate(data[:9]):
            worker.micro_batch(step[session.rank], 0.3 * LONG)
            if number == 4:  # in the middle of a round
                before = weights(worker.model)
                assert len(worker.optimizer.state_dict()["state"]) == 4
                worker.optimizer.load_state_dict(worker.optimizer.state_dict())
                assert_equal(weights(worker.model), before)
        return weights(worker.model), worker.optimizer.state_dict()["state"]

    with ThreadJob(2, 1, f"anytime:{LONG}", device=device) as job:
        first, second = job.run(work)
    assert_equal(first[0], second[0])
    assert_equal(
        [one["momentum_buffer"] for one in first[1].values()], [one["momentum_buffer"] for one in second[1].values()]
    )


def test_two_optimizers_have_rounds_of_their_own() -> None:
    data = small_batches(40, (4, 3))

    def work(session: Session) -> list[list[torch.Tensor]]:
        worker, other = PacedWorker(session, small_model(1), momentum), small_model(2)
        second = DistributedOptimizer(momentum(list(other.parameters())), other)
        for step in data[:9]:
            second.zero_grad()
            loss_of(other, step[session.rank]).backward()
            second.step(samples=len(step[session.rank][0]))
            worker.micro_batch(step[session.rank], 0.3 * LONG)
        assert (worker.round, second.stats["rounds"]) == (3, 2)  # the other's are ended by what comes after its step
        return [weights(worker.model), weights(other)]

    with ThreadJob(2, 1, f"anytime:{LONG}") as job:
        first, second = job.run(work)
    assert_equal(first[0], second[0])
    assert_equal(first[1], second[1])


def test_groups_have_rounds_of_their_own() -> None:
    data = small_batches(12, (4, 3, 5, 2))

    def work(session: Session) -> list[torch.Tensor]:
        pairs = [new_group([0, 1]), new_group([2, 3])]
        worker = PacedWorker(session, small_model(), momentum, {"group": pairs[session.rank // 2]})
        for step in data[: 6 + 3 * (session.rank // 2)]:
            worker.micro_batch(step[session.rank], 0.3 * LONG)
        assert worker.round == 2 + session.rank // 2
        return weights(worker.model)

    with ThreadJob(4, 1, f"anytime:{LONG}") as job:
        results = job.run(work)
    assert_equal(results[0], results[1])
    assert_equal(results[2], results[3])
    assert not torch.equal(results[0][0], results[2][0])


def test_tables_are_refused() -> None:
    def work(session: Session) -> None:
        model = torch.nn.Sequential(ServerEmbedding(10, 3), torch.nn.Linear(3, 2))
        with pytest.raises(UsageError, match="rows of tables"):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    with ThreadJob(1, 1, "anytime:auto") as job:
        job.run(work)


def test_an_error_of_the_job_ends_a_step() -> None:
    """What the communication thread hears is raised in the script's thread."""

    def work(session: Session) -> None:
        if session.rank == 1:
            raise ArithmeticError("a script fails")
        worker = PacedWorker(session, small_model(), momentum)
        for step in small_batches(8, (4, 3)):
            worker.micro_batch(step[0], 0.3 * LONG)

    with pytest.raises(ArithmeticError), ThreadJob(2, 1, f"anytime:{LONG}") as job:
        job.run(work)
