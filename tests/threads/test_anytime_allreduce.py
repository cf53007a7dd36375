"""`anytime` over all-reduce: replicas are the same at the start of every round, and train what one process trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import STATEFUL
from helpers import assert_close, assert_equal, check_record, small_batches, small_model, until, weights
from paced import LONG, PacedWorker, alone

from polytempo.errors import UsageError
from polytempo.reducer.deadline_peers import DeadlinePeers
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.round_exchange import KEPT

pytestmark = pytest.mark.timeout(60)

#: Seconds of a micro-batch of each of three workers, round by round, in deadlines.
PACES = [(0.2, 0.35, 0.5), (0.5, 0.2, 0.34), (0.26, 0.9, 0.2), (0.26, 0.9, 0.2)]


def assert_equals_one_process(model: Any, make: Any, workers: list[PacedWorker], record: Path) -> None:
    lines = check_record(record)
    divisors = [line.get("divisor", 0.0) for line in lines if line["kind"] == "apply" and line["server"] == 0]
    values, seen = alone(model, make, [one for worker in workers for one in worker.made], divisors)
    seen.append(values)
    for worker in workers:
        assert isinstance(worker.optimizer._reducer, DeadlinePeers)
        assert len(worker.values) > 1
        for number, found in worker.values.items():
            assert_close(found, seen[number], rtol=1e-9)
            assert_equal(found, workers[0].values.get(number, found))


@pytest.mark.parametrize(
    ("sync", "make"),
    [(f"anytime:{LONG}", "momentum"), ("anytime:auto,micro=3", "adam"), (f"anytime:{LONG},divide=actual", "adam")],
)
def test_rounds_are_those_of_one_process(tmp_path: Path, sync: str, make: str) -> None:
    """Paces change from round to round, and with them the numbers of micro-batches."""
    model, data = small_model(), small_batches(200, (4, 3, 5))

    def work(session: Session) -> PacedWorker:
        worker, batches = PacedWorker(session, model, STATEFUL[make]), iter(data)
        while worker.round < len(PACES):
            worker.micro_batch(next(batches)[session.rank], LONG * PACES[worker.round][session.rank])
        return worker

    with ThreadJob(3, 1, sync, record=tmp_path, via="allreduce") as job:
        workers = job.run(work)
    assert_equals_one_process(model, STATEFUL[make], workers, tmp_path)
    assert len({len(worker.made) for worker in workers}) > 1
    assert all(worker.optimizer.stats["bytes_handed"] > 0 for worker in workers)


@pytest.mark.parametrize("late", ["drop", "keep"])
def test_a_worker_that_stalls_applies_the_means_that_it_has_kept(tmp_path: Path, late: str) -> None:
    model, data, make = small_model(), small_batches(60, (4, 3)), STATEFUL["adam"]

    def work(session: Session) -> PacedWorker:
        worker, batches = PacedWorker(session, model, make), iter(data)
        if session.rank == 1:
            worker.micro_batch(next(batches)[1], 0.3 * LONG)
            worker.stall(next(batches)[1], KEPT, late)
        while worker.round < KEPT + 2:
            worker.micro_batch(next(batches)[session.rank], 0.3 * LONG)
        return worker

    with ThreadJob(2, 1, f"anytime:{LONG},late={late}", record=tmp_path, via="allreduce") as job:
        workers = job.run(work)
    assert_equals_one_process(model, make, workers, tmp_path)
    states = [worker.optimizer.inner.state_dict()["state"] for worker in workers]
    for index, entries in states[0].items():
        assert all(torch.equal(states[1][index][name], value) for name, value in entries.items())
    stats = workers[1].optimizer.stats
    assert (stats["abandoned"], stats["late"]) == ((1, 0) if late == "drop" else (0, 1))


def test_a_worker_that_stalls_for_more_rounds_than_it_keeps_catches_up(tmp_path: Path) -> None:
    """Its communication thread lets rounds pass then; they close without it, and it gets values and state from another."""
    model, data, deadline = small_model(), small_batches(200, (4, 3, 5)), 0.2
    seen: list[dict[int, tuple[list[torch.Tensor], dict]]] = [{}, {}, {}]

    def work(session: Session) -> list[int]:
        worker, batches = PacedWorker(session, model, STATEFUL["adam"]), iter(data)
        reducer, policy = worker.optimizer._reducer, job.sequencer.clocks["0"].policy
        assert isinstance(reducer, DeadlinePeers)
        if session.rank == 1:
            worker.compute(data[0][1], 0.0)
            for number in range(KEPT):
                worker.clock.advance(1.1 * deadline)
                until(lambda: worker.round > number, "the communication thread to end a round")  # noqa: B023
            worker.clock.advance(1.1 * deadline)
            until(lambda: policy.round >= KEPT + 3, "rounds to close without worker 1")
            assert worker.round == KEPT
            worker.optimizer.step(samples=3)
        while policy.round < KEPT + 9:
            worker.micro_batch(next(batches)[session.rank], deadline)
            state = copy.deepcopy(worker.optimizer.inner.state_dict()["state"])
            seen[session.rank].setdefault(reducer.step, (weights(worker.model), state))
        return sorted(seen[session.rank])

    with ThreadJob(3, 1, f"anytime:{deadline}", record=tmp_path, via="allreduce") as job:
        steps = job.run(work)
    assert set(steps[1]) & set(steps[0]) & set(steps[2])
    for other in (1, 2):
        for step in set(steps[0]) & set(steps[other]):
            (values, state), (mine, own) = seen[other][step], seen[0][step]
            assert_equal(values, mine)
            for index, entries in own.items():
                assert all(torch.equal(state[index][name], value) for name, value in entries.items())
    lines = check_record(tmp_path)
    assert 1 in {line["worker"] for line in lines if line["kind"] == "discard"}
    applied = [line["workers"] for line in lines if line["kind"] == "apply"]
    assert [0, 2] in applied
    assert [0, 1, 2] in applied[applied.index([0, 2]) :]


def test_schedulers_may_be_stepped_by_micro_batch(tmp_path: Path) -> None:
    """Workers take different numbers, so their learning rates differ: the round's is that of its lowest rank, on all."""
    model, data = small_model(), small_batches(40, (4, 3))
    rates: dict[int, float] = {}

    def work(session: Session) -> PacedWorker:
        worker, batches = PacedWorker(session, model, lambda params: torch.optim.SGD(params, lr=0.1)), iter(data)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.9)
        while worker.round < 3:
            number, rate = worker.round, worker.optimizer.param_groups[0]["lr"]
            worker.micro_batch(next(batches)[session.rank], (0.2, 0.45)[session.rank] * LONG)
            if session.rank == 0:
                rates[number] = rate
            scheduler.step()
        return worker

    class RoundRates(torch.optim.SGD):
        number = 0

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["lr"] = rates[self.number]
            self.number += 1
            super().step()

    with ThreadJob(2, 1, f"anytime:{LONG}", record=tmp_path, via="allreduce") as job:
        workers = job.run(work)
    assert_equals_one_process(model, lambda params: RoundRates(params, lr=0.1), workers, tmp_path)
    assert rates[2] < rates[1] < rates[0]


def test_all_leave_after_the_same_round_with_the_same_values() -> None:
    model, data = small_model(), small_batches(100, (4, 3))

    def work(session: Session) -> tuple[int, list[torch.Tensor]]:
        worker, batches = PacedWorker(session, model, STATEFUL["momentum"], {"clip_norm": 0.05}), iter(data)
        while not session.should_stop():
            worker.micro_batch(next(batches)[session.rank], (0.2, 0.5)[session.rank] * LONG)
        return worker.round, weights(worker.model)

    with ThreadJob(2, 1, f"anytime:{LONG}", limits=Limits(steps=20), via="allreduce") as job:
        (rounds, values), (other_rounds, others) = job.run(work)
    assert (rounds, other_rounds) == (3, 3)
    assert_equal(values, others)
    assert job.summary["steps"] == 21


def test_a_micro_batch_that_is_late_for_the_last_round_makes_no_round_of_its_own() -> None:
    """All have left by then; the update would be in one replica alone."""
    model, data = small_model(), small_batches(20, (4, 3))

    def work(session: Session) -> tuple[int, list[torch.Tensor]]:
        worker = PacedWorker(session, model, STATEFUL["momentum"])
        if session.rank == 1:
            worker.stall(data[0][1], 1, "keep")
        else:
            worker.micro_batch(data[0][0], 0.9 * LONG)
        assert session.should_stop()
        return worker.round, weights(worker.model)

    with ThreadJob(2, 1, f"anytime:{LONG},late=keep", limits=Limits(steps=1), via="allreduce") as job:
        (rounds, values), (other_rounds, others) = job.run(work)
    assert (rounds, other_rounds) == (1, 1)
    assert job.summary["updates"] == 1
    assert_equal(values, others)


def test_what_a_script_writes_is_compared() -> None:
    """All workers may write the same to their parameters; where one writes something else, they are refused."""
    model, data = small_model(), small_batches(4, (4, 3))

    def work(session: Session, unlike: float) -> None:
        worker = PacedWorker(session, model, STATEFUL["momentum"])
        worker.micro_batch(data[0][session.rank], 0.9 * LONG)
        with torch.no_grad():
            next(iter(worker.model.parameters())).add_(1.0 + unlike * session.rank)
        worker.micro_batch(data[1][session.rank], 0.9 * LONG)
        worker.micro_batch(data[2][session.rank], 0.9 * LONG)

    for unlike in (0.0, 1.0):
        with ThreadJob(2, 1, f"anytime:{LONG}", via="allreduce") as job:
            if not unlike:
                job.run(lambda session: work(session, 0.0))
                continue
            with pytest.raises(UsageError, match="workers 0 and 1 hold different"):
                job.run(lambda session: work(session, 1.0))


def test_synchronize_is_refused() -> None:
    def work(session: Session) -> None:
        model = small_model()
        optimizer = DistributedOptimizer(STATEFUL["adam"](list(model.parameters())), model)
        with pytest.raises(UsageError, match="clip_norm"):
            optimizer.synchronize()

    with ThreadJob(1, 1, "anytime:auto", via="allreduce") as job:
        job.run(work)
