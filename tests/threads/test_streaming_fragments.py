"""Fragments sent one after another, with local steps between sending and taking, against a plain loop."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import assert_close, assert_equal, loss_of, small_batches, small_model, weights
from hypothesis import given
from hypothesis import strategies as st
from local_blocks import WAYS, Blocks, job_by, train_in_blocks
from sessions import within

from polytempo.errors import UsageError
from polytempo.optim.outer_step import cut
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(60)

EXACT = 1e-9
RATE, MU = 0.7, 0.9


class Streaming(Blocks):
    """Fragment p is sent after step p k / P of each k and taken `overlap` steps later; at the end all are sent and taken."""

    def stream(self, batches: list, period: int, fragments: int, overlap: int) -> list[list[torch.Tensor]]:  # type: ignore[type-arg]
        sizes = [value.numel() * 8 for value in self.anchor]
        parts = cut(sizes, fragments)
        flights: dict[int, tuple[int, list[list[torch.Tensor]], list[float]]] = {}
        self.fresh = [[0.0] * len(self.models) for _ in parts]
        for number, step in enumerate(batches, start=1):
            self.step(step)
            for fragment in range(fragments):
                for worker, batch in enumerate(step):
                    self.fresh[fragment][worker] += len(batch[0])
            for fragment in list(flights):
                if flights[fragment][0] + overlap == number:
                    self.take(parts[fragment], *flights.pop(fragment)[1:])
            for fragment in range(fragments):
                if number % period == fragment * period // fragments:
                    flights[fragment] = (number, *self.send(parts[fragment], fragment))
                    if not overlap:
                        self.take(parts[fragment], *flights.pop(fragment)[1:])
        for fragment in list(flights):
            self.take(parts[fragment], *flights.pop(fragment)[1:])
        for fragment in sorted(range(fragments), key=lambda p: (p * period // fragments - len(batches) - 1) % period):
            if any(self.fresh[fragment]):
                self.take(parts[fragment], *self.send(parts[fragment], fragment))
        return [weights(model) for model in self.models]

    def send(self, part: range, fragment: int) -> tuple[list[list[torch.Tensor]], list[float]]:
        samples, self.fresh[fragment] = self.fresh[fragment], [0.0] * len(self.models)
        return [[weights(model)[index] for index in part] for model in self.models], samples

    def take(self, part: range, sent: list[list[torch.Tensor]], samples: list[float]) -> None:
        for place, index in enumerate(part):
            mean = sum(own[place] * weight for own, weight in zip(sent, samples, strict=True)) / sum(samples)
            delta = self.anchor[index] - mean
            self.momentum[index] = MU * self.momentum[index] + delta
            self.anchor[index] = self.anchor[index] - RATE * (delta + MU * self.momentum[index])
            for model, own in zip(self.models, sent, strict=True):
                param = list(model.parameters())[index]
                with torch.no_grad():
                    param.copy_(self.anchor[index] + (param - own[place]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fragments", "overlap", "steps"), [(2, 0, 8), (2, 1, 8), (4, 0, 10), (1, 3, 9), (2, 1, 7)])
def test_fragments_are_sent_in_turn_and_taken_later(way: str, fragments: int, overlap: int, steps: int) -> None:
    batches = small_batches(steps, [4, 2])
    sync = f"diloco:4,fragments={fragments},overlap={overlap}"
    models = {}

    def keep(optimizer: DistributedOptimizer, model: torch.nn.Module, session: Session) -> None:
        models[session.rank] = model

    train_in_blocks(job_by(way, 2, sync), sync, batches, at_end=keep)
    wanted = Streaming(2).stream(batches, 4, fragments, overlap)
    for rank in range(2):
        assert_close(weights(models[rank]), wanted[rank], EXACT)


def test_the_budget_counts_every_step_and_sample_once() -> None:
    with job_by("servers", 2, "diloco:4,fragments=2,overlap=1") as job:
        train_in_blocks(_Within(job), "diloco:4,fragments=2,overlap=1", small_batches(10, [4, 2]))
    assert job.summary["steps"] == 20
    assert job.summary["samples"] == 60


class _Within:
    """A job that the test closes itself."""

    def __init__(self, job) -> None:  # type: ignore[no-untyped-def]
        self.run = job.run

    def __enter__(self) -> _Within:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", [(3, 9), (8, 5), (4, 4), (1, 6)])
def test_workers_that_end_at_different_steps_do_not_block_each_other(way: str, counts: tuple[int, int]) -> None:
    models, batches, sync = [small_model(), small_model()], small_batches(9, [4, 4]), "diloco:4,fragments=2,overlap=1"

    def train(session: Session) -> int:
        model = models[session.rank]
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync=sync)
        for step in batches[: counts[session.rank]]:
            optimizer.zero_grad()
            loss_of(model, step[session.rank]).backward()
            optimizer.step()
        return int(optimizer.stats["step"])

    with job_by(way, 2, sync) as job:
        assert job.run(train) == list(counts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("death", [1, 2, 3, 5, 6])
def test_a_worker_that_dies_with_a_fragment_under_way_blocks_no_other(way: str, death: int) -> None:
    """Worker 2 dies before some step: before, while and after fragments travel; the others end with one model."""
    models, batches, sync = [small_model() for _ in range(3)], small_batches(9, [4, 2, 3]), "diloco:4,fragments=2,overlap=1"
    found: dict[int, list[torch.Tensor]] = {}
    all_made = threading.Barrier(3)  # who has no optimizer yet cannot go on without a rank that it needs for that

    def train(session: Session) -> None:
        model = models[session.rank]
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync=sync)
        all_made.wait(30)
        for number, step in enumerate(batches):
            if (session.rank, number) == (2, death):
                session.abandon() if way == "collectives" else session.close("failed")
                return
            optimizer.zero_grad()
            loss_of(model, step[session.rank]).backward()
            optimizer.step()
        optimizer.consolidate()
        found[session.rank] = weights(model)

    job = GroupJob(3, least=2) if way == "collectives" else job_by(way, 3, sync)
    sessions = job.sessions if isinstance(job, GroupJob) else [job.session(rank) for rank in range(3)]
    threads = [threading.Thread(target=within, args=(session, train), daemon=True) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [thread.is_alive() for thread in threads] == [False] * 3
    assert_equal(found[0], found[1])
    for session in sessions[:2]:
        session.abandon() if way == "collectives" else session.close()
    if not isinstance(job, GroupJob):
        job.close()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 20))
def test_fragments_cover_all_parameters_in_order_and_none_is_empty(sizes: list[int], fragments: int) -> None:
    if fragments > len(sizes):
        with pytest.raises(UsageError, match="fragments"):
            cut(sizes, fragments)
        return
    parts = cut(sizes, fragments)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    assert len(parts) == fragments
    assert all(len(part) for part in parts)
    largest = max(sum(sizes[index] for index in part) for part in parts)
    assert largest <= sum(sizes) / fragments + 2 * max(sizes) or fragments == 1
