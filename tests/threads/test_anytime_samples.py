"""`anytime`: every sample is trained on once an epoch, whatever is abandoned or discarded, however uneven workers are."""

from __future__ import annotations

import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import check_record, small_model, until
from paced import LONG, PacedWorker
from torch.utils.data import DataLoader, TensorDataset

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.communication import all_reduce
from polytempo.train.kv import KV, Array
from polytempo.train.sampler import DistributedBatchSampler, DistributedSampler

pytestmark = pytest.mark.timeout(60)

LENGTH, BATCH = 103, 4


def dataset(length: int = LENGTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(length, size, generator=generator, dtype=torch.float64) for size in (5, 3)]
    return TensorDataset(torch.arange(length), *values)


def loader_of(kind: str, data: TensorDataset) -> tuple[Any, DataLoader]:
    if kind == "batch_sampler":
        sampler: Any = DistributedBatchSampler(data, 8 * BATCH, seed=3)  # cut in eight micro-batches
        return sampler, DataLoader(data, batch_sampler=sampler)
    sampler = DistributedSampler(data, seed=3, batch_size=BATCH if kind == "sampler with batch_size" else None)
    return sampler, DataLoader(data, BATCH, sampler=sampler)


def done(job: ThreadJob) -> list[tuple[int, list[list[int]]]]:
    """What a checkpoint would say: each sampler's last epoch, and those before it that are not done."""
    return [(part["epoch"], part["done"]) for part in job.sequencer.checkpoints.manifest(0, 0)["positions"]]


@pytest.mark.parametrize("kind", ["batch_sampler", "sampler with batch_size", "sampler"])
@pytest.mark.parametrize("late", ["drop", "keep"])
def test_every_sample_counts_once_an_epoch(tmp_path: Path, kind: str, late: str) -> None:
    """Worker 1 stalls now and then, until the round has ended: what it abandons is used again."""
    used: list[tuple[int, list[int]]] = []

    def work(session: Session) -> dict[str, Any]:
        worker = PacedWorker(session, small_model(), lambda params: torch.optim.SGD(params, lr=0.1))
        sampler, loader = loader_of(kind, dataset())
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for number, (indices, *batch) in enumerate(loader):
                stalls = session.rank == 1 and number % 3 == 1 and epoch < 2  # what is abandoned last needs another epoch
                if stalls:
                    before = worker.optimizer.stats
                    worker.stall(tuple(batch), 1, late)
                    dropped = worker.optimizer.stats["abandoned"] > before["abandoned"]
                    assert dropped == (late == "drop")
                else:
                    worker.micro_batch(tuple(batch), (0.2, 0.45, 0.3)[session.rank] * LONG)
                if not stalls or late == "keep":
                    used.append((epoch, indices.tolist()))
        return worker.optimizer.stats

    with ThreadJob(3, 1, f"anytime:{LONG},late={late}", record=tmp_path) as job:
        stats = job.run(work)
    check_record(tmp_path)
    assert sum(one["abandoned"] for one in stats) > 2 if late == "drop" else sum(one["late"] for one in stats) > 2
    assert done(job) == [(2, [[0, LENGTH]])]
    assert job.summary["samples"] == 3 * LENGTH
    assert Counter(index for _, indices in used for index in indices) == Counter(dict.fromkeys(range(LENGTH), 3))
    shares = [one["step"] for one in stats]
    assert shares[0] > shares[1]  # fast workers take more


def test_a_job_goes_on_with_what_is_not_done(tmp_path: Path) -> None:
    """A job is ended in its first epoch; the one that goes on from its checkpoint takes the samples that are left of it."""
    used: list[int] = []

    def work(stop_after: int, epochs: int) -> Any:
        def run(session: Session) -> None:
            worker = PacedWorker(session, small_model(), lambda params: torch.optim.SGD(params, lr=0.1))
            sampler, loader = loader_of("batch_sampler", dataset())
            pending: list[int] = []
            for epoch in range(sampler.epoch, epochs):
                sampler.set_epoch(epoch)
                for indices, *batch in loader:
                    before = worker.round
                    worker.micro_batch(tuple(batch), (0.2, 0.5)[session.rank] * LONG)
                    pending += indices.tolist()
                    if worker.round > before:
                        used.extend(pending)
                        pending.clear()
                        if worker.round >= stop_after:
                            return
            used.extend(pending)  # what is left is sent when the worker leaves

        return run

    with ThreadJob(2, 1, f"anytime:{LONG}", checkpoint=tmp_path / "saved") as job:
        job.run(work(2, 2))
    assert len(used) == 2 * 7 * BATCH
    with ThreadJob(2, 1, f"anytime:{LONG}", resume=tmp_path / "saved") as job:
        job.run(work(1000, 1))
    assert sorted(used) == list(range(LENGTH))


def test_samples_of_a_discarded_push_are_used_by_others() -> None:
    """Worker 1 holds a micro-batch while rounds close without it: its push is discarded, and its samples return."""
    data, used = dataset(40), []

    def work(session: Session) -> None:
        worker = PacedWorker(session, small_model(), lambda params: torch.optim.SGD(params, lr=0.1))
        policy = job.sequencer.clocks["0"].policy
        _, loader = loader_of("batch_sampler", data)
        for number, (indices, *batch) in enumerate(loader):
            late = session.rank == 1 and number == 0
            worker.compute(tuple(batch), 0.05)
            if late:
                until(lambda: policy.round >= 2, "rounds to close without worker 1")
            worker.optimizer.step(samples=len(indices))
            used.extend([] if late else indices.tolist())
            if session.rank == 0 and number == 4:
                until(lambda: job.sequencer.statistics[1].discarded > 0, "the push of worker 1 to be discarded")

    with ThreadJob(2, 1, "anytime:0.05") as job:
        job.run(work)
    assert job.summary["discarded"] >= 1
    assert done(job) == [(0, [[0, 40]])]
    assert Counter(used) == Counter(range(40))


def test_a_loader_without_a_known_batch_size_needs_samples() -> None:
    def work(session: Session) -> None:
        worker = PacedWorker(session, small_model(), lambda params: torch.optim.SGD(params, lr=0.1))
        for _, *batch in loader_of("sampler", dataset())[1]:
            worker.compute(tuple(batch), 1.0)
            with pytest.raises(UsageError, match="batch_size="):
                worker.optimizer.step()
            return

    with ThreadJob(1, 1, f"anytime:{LONG}") as job:
        job.run(work)


def test_data_that_is_evaluated_is_not_trained_on() -> None:
    """Gradients are enabled while it is drawn: an evaluation of all workers sees each sample once, each time."""
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(3)}

    def work(session: Session) -> None:
        worker = PacedWorker(session, small_model(), lambda params: torch.optim.SGD(params, lr=0.1))
        sampler, loader = loader_of("batch_sampler", dataset(48))
        held_out = dataset(20)
        evaluated = DataLoader(held_out, BATCH, sampler=DistributedSampler(held_out, shuffle=False))
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for _, *batch in loader:
                worker.micro_batch(tuple(batch), 0.3 * LONG)
            for indices, *_ in evaluated:
                seen[epoch].update(indices.tolist())

    with ThreadJob(2, 1, f"anytime:{LONG}") as job:
        job.run(work)
    assert job.summary["samples"] == 3 * 48
    assert all(seen[epoch] == Counter(range(20)) for epoch in range(3))
    assert done(job) == [(2, [[0, 48]])], "of what is evaluated there is nothing in a checkpoint"


def test_a_loader_that_reads_ahead_loses_nothing() -> None:
    """What is abandoned when the loader has read to the end of the pass is used in the next epoch."""
    data, used = dataset(64), Counter[int]()

    def work(session: Session) -> int:
        worker = PacedWorker(session, small_model(), lambda params: torch.optim.SGD(params, lr=0.1))
        sampler = DistributedBatchSampler(data, BATCH, seed=3)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            stream, ahead, ended = iter(sampler), deque[list[int]](), False
            while True:
                while len(ahead) < 3 and not ended:  # as a loader whose workers are two batches ahead
                    indices = next(stream, None)
                    ended = indices is None
                    ahead += [indices] if indices else []
                if not ahead:
                    break
                now = ahead.popleft()
                batch = tuple(part[now] for part in data.tensors[1:])
                if session.rank == 1 and ended and epoch < 3:
                    worker.stall(batch, 1, "drop")
                else:
                    worker.micro_batch(batch, 0.3 * LONG)
                    used.update(now)
        return int(worker.optimizer.stats["abandoned"])

    with ThreadJob(2, 1, f"anytime:{LONG}") as job:
        dropped = job.run(work)
    assert dropped[1] > 0
    assert done(job) == [(3, [[0, 64]])]
    assert used == Counter(dict.fromkeys(range(64), 4))


@pytest.mark.parametrize("after", ["collective", "table", "consolidate"])
def test_rounds_go_on_whatever_a_script_waits_for_after_its_loop(after: str) -> None:
    """Worker 0 is through with its data and waits for worker 1; meanwhile its part of the open round is handed over."""
    has_waited, workers = threading.Event(), {}

    def wait_for_the_other(session: Session) -> None:
        if after == "collective":
            all_reduce(torch.ones(1))  # the first of the job: the ranks meet
        elif after == "table":
            KV({"counts": Array(2)}, sync="bsp")
        else:
            workers[session.rank].optimizer.consolidate()

    def work(session: Session) -> None:
        worker = workers[session.rank] = PacedWorker(session, small_model(), lambda params: torch.optim.SGD(params, lr=0.1))
        _, *batch = dataset(BATCH).tensors
        worker.micro_batch(tuple(batch), 0.3 * LONG)  # another one fits into the round
        counted = job.sequencer.statistics
        if session.rank == 0:
            assert counted[0].pushes == 0
            has_waited.set()
            wait_for_the_other(session)
            return
        assert has_waited.wait(20)
        if after == "collective":
            until(workers[0].session._opening.locked, "worker 0 to wait for its first collective")
        elif after == "table":
            until(lambda: "1" in job.sequencer.clocks, "worker 0 to make its table")
        workers[0].clock.advance(LONG)
        until(lambda: counted[0].pushes == 1, "the communication thread of worker 0 to hand over its part")
        worker.clock.advance(LONG)
        until(lambda: job.sequencer.clocks["0"].policy.round == 1, "the round to end")
        wait_for_the_other(session)

    with ThreadJob(2, 1, f"anytime:{LONG}") as job:
        job.run(work)
    assert job.summary["samples"] == 2 * BATCH
    assert job.summary["discarded"] == 0
