"""`anytime` over servers: workers train what one process trains on the same samples with the same divisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_equal, check_record, small_batches, small_model, until, weights
from paced import LONG, Made, PacedWorker, alone

from polytempo.errors import UsageError
from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
#: Seconds of a micro-batch of each of three workers, round by round: the number of those that fit changes.
PACES = [(0.2, 0.35, 0.5), (0.2, 0.35, 0.5), (0.5, 0.2, 0.34), (0.26, 0.9, 0.2), (0.26, 0.9, 0.2)]


def divisors_of(lines: list[dict[str, Any]]) -> list[float]:
    return [line.get("divisor", 0.0) for line in lines if line["kind"] == "apply" and line["server"] == 0]


def assert_equals_one_process(
    model: Any, make: Any, workers: list[PacedWorker], record: Path
) -> tuple[list[float], list[Made]]:
    """All workers saw the same values at the start of each round, and these are those of one process."""
    lines = check_record(record)
    divisors = divisors_of(lines)
    made = [one for worker in workers for one in worker.made]
    values, seen = alone(model, make, made, divisors)
    seen.append(values)
    for worker in workers:
        assert len(worker.values) > 1
        for number, found in worker.values.items():
            assert_close(found, seen[number], rtol=1e-9)
    return divisors, made


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("sync", [f"anytime:{LONG}", "anytime:auto,micro=3", f"anytime:{LONG},divide=actual"])
def test_rounds_are_those_of_one_process(tmp_path: Path, sync: str, make: Any) -> None:
    """Paces change from round to round, and with them the numbers of micro-batches; so does the deadline of `auto`."""
    model, data = small_model(), small_batches(400, (4, 3, 5))

    def work(session: Session) -> PacedWorker:
        worker = PacedWorker(session, model, make)
        batches = iter(data)
        while worker.round < len(PACES):
            worker.micro_batch(next(batches)[session.rank], LONG * PACES[worker.round][session.rank])
        return worker

    with ThreadJob(3, 2, sync, record=tmp_path) as job:
        workers = job.run(work)
    _, made = assert_equals_one_process(model, make, workers, tmp_path)
    counts = {tuple(sum(one.counted == number for one in worker.made) for worker in workers) for number in range(5)}
    assert len(counts) > 2
    assert all(worker.optimizer.stats["abandoned"] == 0 for worker in workers)
    assert job.summary["steps"] == len(made)
    assert job.summary["samples"] == sum(len(one.batch[0]) for one in made)


@pytest.mark.parametrize("late", ["drop", "keep"])
def test_a_worker_that_stalls_delays_no_other(tmp_path: Path, late: str) -> None:
    """Worker 1 is in the middle of a micro-batch while three rounds end: it contributes what it has finished, then nothing
    twice. Its late micro-batch is left out, or counts once, in the round that is open when it comes."""
    model, data, make = small_model(), small_batches(100, (4, 3)), OPTIMIZERS["momentum"]

    def work(session: Session) -> PacedWorker:
        worker = PacedWorker(session, model, make)
        batches = iter(data)
        if session.rank == 1:
            worker.micro_batch(next(batches)[1], 0.3 * LONG)
            worker.stall(next(batches)[1], 3, late)
        while worker.round < 6:
            worker.micro_batch(next(batches)[session.rank], 0.3 * LONG)
        return worker

    with ThreadJob(2, 1, f"anytime:{LONG},late={late}", record=tmp_path) as job:
        workers = job.run(work)
    _, made = assert_equals_one_process(model, make, workers, tmp_path)
    stats = workers[1].optimizer.stats
    assert (stats["abandoned"], stats["late"]) == ((1, 0) if late == "drop" else (0, 1))
    assert [sum(one.counted == number for one in workers[1].made) for number in range(4)] == [1, 0, 0, 3 + (late == "keep")]
    assert [sum(one.counted == number for one in workers[0].made) for number in range(4)] == [3, 3, 3, 3]
    assert job.summary["steps"] == sum(one.counted is not None for one in made)


def test_a_round_without_any_micro_batch_changes_nothing(tmp_path: Path) -> None:
    model, data, make = small_model(), small_batches(20, (4, 3)), OPTIMIZERS["adam"]

    def work(session: Session) -> PacedWorker:
        worker = PacedWorker(session, model, make)
        worker.stall(data[0][session.rank], 2, "drop")
        assert_equal(weights(worker.model), weights(model))
        for step in data[1:7]:
            worker.micro_batch(step[session.rank], 0.3 * LONG)
        return worker

    with ThreadJob(2, 1, f"anytime:{LONG}", record=tmp_path) as job:
        workers = job.run(work)
    assert_equals_one_process(model, make, workers, tmp_path)
    assert workers[0].round == 4
    assert job.summary["updates"] == 4


def test_schedulers_may_be_stepped_by_micro_batch(tmp_path: Path) -> None:
    """Workers take different numbers, so their learning rates differ: the round's is that of its lowest rank."""
    model, data = small_model(), small_batches(40, (4, 3))
    rates: dict[int, float] = {}

    def work(session: Session) -> PacedWorker:
        worker = PacedWorker(session, model, lambda params: torch.optim.SGD(params, lr=0.1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(worker.optimizer, 0.9)
        batches = iter(data)
        while worker.round < 3:
            number, rate = worker.round, worker.optimizer.param_groups[0]["lr"]
            worker.micro_batch(next(batches)[session.rank], (0.2, 0.45)[session.rank] * LONG)
            if session.rank == 0:
                rates[number] = rate
            scheduler.step()
        return worker

    class RoundRates(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["lr"] = rates[self.number]
            self.number += 1
            super().step()

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = RoundRates(params, lr=0.1)
        optimizer.number = 0
        return optimizer

    with ThreadJob(2, 1, f"anytime:{LONG}", record=tmp_path) as job:
        workers = job.run(work)
    assert_equals_one_process(model, make, workers, tmp_path)
    assert rates[2] < rates[1] < rates[0]


def test_clipping_sees_the_mean_of_the_round(tmp_path: Path) -> None:
    model, data = small_model(), small_batches(40, (4, 3))

    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)
            super().step()

    def work(session: Session) -> PacedWorker:
        make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        worker = PacedWorker(session, model, make, {"clip_norm": 0.05})
        batches = iter(data)
        while worker.round < 3:
            worker.micro_batch(next(batches)[session.rank], (0.2, 0.45)[session.rank] * LONG)
        return worker

    with ThreadJob(2, 2, f"anytime:{LONG}", record=tmp_path) as job:
        workers = job.run(work)
    assert_equals_one_process(model, lambda params: Clipped(params, lr=0.1), workers, tmp_path)


def test_a_micro_batch_that_a_scaler_skips_is_left_out(tmp_path: Path) -> None:
    model, data, make = small_model(), small_batches(20, (4, 3)), OPTIMIZERS["momentum"]

    def work(session: Session) -> PacedWorker:
        worker = PacedWorker(session, model, make)
        for number in range(6):
            if session.rank == 0 and number == 1:
                worker.compute(data[number][0], 0.3 * LONG)
                worker.optimizer.found_inf = torch.tensor(1.0)
                worker.optimizer.step(samples=4)
                del worker.optimizer.found_inf
            else:
                worker.micro_batch(data[number][session.rank], 0.3 * LONG)
        return worker

    with ThreadJob(2, 1, f"anytime:{LONG}", record=tmp_path) as job:
        workers = job.run(work)
    assert_equals_one_process(model, make, workers, tmp_path)
    assert job.summary["steps"] == 11


def test_a_push_that_comes_too_late_is_discarded_and_its_worker_goes_on(tmp_path: Path) -> None:
    """Worker 1's clock stands still, as in a process that is stopped: rounds close without it."""
    model, data, make = small_model(), small_batches(400, (4, 3)), OPTIMIZERS["momentum"]
    sync, deadline = "anytime:0.05", 0.05

    def work(session: Session) -> tuple[list[torch.Tensor], int]:
        worker = PacedWorker(session, model, make)
        policy = job.sequencer.clocks["0"].policy
        if session.rank == 1:
            worker.compute(data[0][1], 0.0)
            until(lambda: policy.round >= 3, "rounds to close without worker 1")
            worker._took = deadline
            worker.optimizer.step(samples=3)  # it ends its round, which closed long ago
        while policy.round < 8:
            worker.micro_batch(data[worker.round][session.rank], deadline)
        worker.optimizer.consolidate()
        return weights(worker.model), int(worker.optimizer.stats["step"])

    with ThreadJob(2, 1, sync, record=tmp_path) as job:
        results = job.run(work)
    lines = check_record(tmp_path)
    discarded = [line for line in lines if line["kind"] == "discard"]
    assert discarded
    assert discarded[0]["worker"] == 1
    applied = [line["workers"] for line in lines if line["kind"] == "apply"]
    assert applied[0] == [0]
    assert [0, 1] in applied  # it counts again
    assert job.summary["discarded"] == len(discarded)
    assert results[1][1] > 1


def test_the_budget_counts_micro_batches(tmp_path: Path) -> None:
    model, data = small_model(), small_batches(100, (4, 3))

    def work(session: Session) -> int:
        worker = PacedWorker(session, model, OPTIMIZERS["momentum"])
        batches = iter(data)
        while not session.should_stop():
            worker.micro_batch(next(batches)[session.rank], (0.2, 0.5)[session.rank] * LONG)
        return worker.round

    with ThreadJob(2, 1, f"anytime:{LONG}", limits=Limits(steps=20)) as job:
        rounds = job.run(work)
    assert rounds == [3, 3]  # 5 + 2 in each
    assert job.summary["steps"] == 21


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"apply": "delta"}, "has the servers run the optimizer"),
        ({"buffers": "mean"}, "waits for all workers"),
    ],
)
def test_what_does_not_go_with_deadlines_is_refused(options: dict[str, Any], expected: str) -> None:
    def work(session: Session) -> None:
        model = small_model()
        with pytest.raises(UsageError, match=expected):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)

    with ThreadJob(1, 1, "anytime:auto") as job:
        job.run(work)


def test_calls_that_do_not_go_with_deadlines_are_refused() -> None:
    def work(session: Session) -> None:
        model = small_model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(UsageError, match="clip_norm"):
            optimizer.synchronize()
        with pytest.raises(UsageError, match="before DistributedOptimizer"):
            optimizer.push_parameters()
        with torch.no_grad():
            next(iter(model.parameters())).add_(1.0)
        with pytest.raises(UsageError, match="changed in place"):
            optimizer.step()
        optimizer.consolidate()
        assert_equal(weights(model), weights(small_model()))

    with ThreadJob(1, 1, "anytime:auto") as job:
        job.run(work)
