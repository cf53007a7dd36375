"""Elastic averaging in live jobs: in a fixed order of events it is the paper's rule; the centre is the job's model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from helpers import Batch, assert_close, assert_equal, check_record, loss_of, small_batches, small_model, weights
from torch import nn

from polytempo.checkpoints import find_checkpoint
from polytempo.errors import UsageError
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.both_wires]

RATE, STEPS = 0.1, 11


class Turns:
    """Lets the workers of a job make their steps in this order."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._next, self._changed = list(order), 0, threading.Condition()

    @contextmanager
    def turn_of(self, rank: int) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._order[self._next] == rank, timeout=30)
        yield
        with self._changed:
            self._next += 1
            self._order.append(-1)  # the last has one behind it
            self._changed.notify_all()


def make(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, **options)


def an_order(workers: int, seed: int = 5) -> list[int]:
    """Each worker `STEPS` times, some much faster than others."""
    order = [rank for rank in range(workers) for _ in range(STEPS)]
    dice = Random(seed)
    return sorted(order, key=lambda rank: dice.random() ** (1 + rank))


class Elastic:
    """The plain loop in float64: models with an optimizer each, and a centre."""

    def __init__(self, workers: int, period: int, coupling: float, overlap: int = 0, **options: Any) -> None:
        self.models = [small_model() for _ in range(workers)]
        self.optimizers = [make(list(model.parameters()), **options) for model in self.models]
        self.centre = weights(self.models[0])
        self._period, self._coupling, self._overlap = period, coupling, overlap
        self._made, self._sent_at = [0] * workers, [0] * workers
        self._forces: dict[int, tuple[int, list[torch.Tensor]]] = {}  # by which step a worker feels them

    def step(self, rank: int, batch: Batch) -> None:
        optimizer, model = self.optimizers[rank], self.models[rank]
        self.feel(rank)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        self._made[rank] += 1
        due = self._sent_at[rank] + self._period if self._sent_at[rank] else self._period
        if self._made[rank] == due:
            self.exchange(rank)

    def exchange(self, rank: int) -> None:
        forces = [self._coupling * (x - c) for x, c in zip(weights(self.models[rank]), self.centre, strict=True)]
        self.centre = [c + force for c, force in zip(self.centre, forces, strict=True)]
        self._sent_at[rank] = self._made[rank]
        self._forces[rank] = self._made[rank] + self._overlap, forces
        self.feel(rank)

    def feel(self, rank: int, now: bool = False) -> None:
        when, forces = self._forces.get(rank, (0, []))
        if forces and (now or self._made[rank] >= when):
            del self._forces[rank]
            with torch.no_grad():
                for param, force in zip(self.models[rank].parameters(), forces, strict=True):
                    param.sub_(force)

    def end(self, rank: int) -> None:
        self.feel(rank, now=True)
        if self._made[rank] > self._sent_at[rank]:
            self.exchange(rank)
            self.feel(rank, now=True)


def live(
    workers: int, sync: str, order: Sequence[int], servers: int = 1, record: Path | None = None, **options: Any
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """What each worker's own model is in the end, and the centre."""
    batches, turns = small_batches(STEPS, [4] * workers), Turns([*order, *range(workers), *range(workers)])
    models = [small_model() for _ in range(workers)]
    centres: list[list[torch.Tensor]] = []

    def work(session: Session) -> list[torch.Tensor]:
        model = models[session.rank]
        optimizer = DistributedOptimizer(make(list(model.parameters()), **options), model)
        for step in batches:
            with turns.turn_of(session.rank):
                optimizer.zero_grad()
                loss_of(model, step[session.rank]).backward()
                optimizer.step(samples=4)
        with turns.turn_of(session.rank):
            for flush in session.leaving.of[LeavingStep.FLUSH]:
                flush()
        own = weights(model)
        with turns.turn_of(session.rank):
            optimizer.consolidate()
            centres.append(weights(model))
        return own

    with ThreadJob(workers, servers, sync, record=record) as job:
        found = job.run(work)
    for centre in centres:
        assert_equal(centre, centres[0])
    return found, centres[0]


def by_hand(
    workers: int, order: Sequence[int], period: int, coupling: float, overlap: int = 0, **options: Any
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    batches, reference = small_batches(STEPS, [4] * workers), Elastic(workers, period, coupling, overlap, **options)
    made = [0] * workers
    for rank in order:
        reference.step(rank, batches[made[rank]][rank])
        made[rank] += 1
    for rank in range(workers):
        reference.end(rank)
    return [weights(model) for model in reference.models], reference.centre


NESTEROV = {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize("options", [{}, NESTEROV], ids=["sgd", "momentum form"])
@pytest.mark.parametrize(("workers", "servers", "period"), [(1, 1, 3), (2, 1, 4), (4, 2, 3), (4, 1, 1)])
def test_in_a_fixed_order_it_is_the_papers_rule(workers: int, servers: int, period: int, options: dict[str, Any]) -> None:
    order = an_order(workers)
    found, centre = live(workers, f"easgd:{period}", order, servers, **options)
    wanted, middle = by_hand(workers, order, period, 0.9 / workers, **options)
    assert_close(centre, middle, rtol=1e-9)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, rtol=1e-9)


def test_rho_couples_by_the_rate_and_is_bounded() -> None:
    order = an_order(2)
    for rho, coupling in ((1.5, 1.5 * RATE), (100.0, 0.45)):
        found, centre = live(2, f"easgd:3,rho={rho}", order)
        wanted, middle = by_hand(2, order, 3, coupling)
        assert_close([*centre, *found[0], *found[1]], [*middle, *wanted[0], *wanted[1]], rtol=1e-9)


def test_with_overlap_the_spring_pulls_as_of_the_sending() -> None:
    order = an_order(2)
    found, centre = live(2, "easgd:4,overlap=2", order)
    wanted, middle = by_hand(2, order, 4, 0.45, overlap=2)
    assert_close([*centre, *found[0], *found[1]], [*middle, *wanted[0], *wanted[1]], rtol=1e-9)


def test_an_exchange_keeps_the_sum_of_worker_and_centre() -> None:
    reference = Elastic(1, 3, 0.9)
    for step in small_batches(2, [4]):
        reference.step(0, step[0])
    before = [x + c for x, c in zip(weights(reference.models[0]), reference.centre, strict=True)]
    reference.exchange(0)
    assert_close([x + c for x, c in zip(weights(reference.models[0]), reference.centre, strict=True)], before)


def test_to_look_at_the_centre_changes_nothing(tmp_path: Path) -> None:
    """The worker goes on from its own values, with what the script has written to them."""
    ends = {}
    for looks in (False, True):
        model = small_model()

        def work(session: Session, model: nn.Module = model, looks: bool = looks) -> None:
            optimizer = DistributedOptimizer(make(list(model.parameters())), model)
            for number, step in enumerate(small_batches(STEPS, [4])):
                optimizer.zero_grad()
                loss_of(model, step[0]).backward()
                own = weights(model)
                if looks:
                    optimizer.consolidate()
                    optimizer.consolidate()
                    assert number == 0 or not torch.equal(weights(model)[0], own[0])
                if number == 5:
                    with torch.no_grad():
                        model[0].bias.add_(0.25)
                optimizer.step()

        with ThreadJob(1, sync="easgd:4", record=tmp_path / str(looks)) as job:
            job.run(work)
        check_record(tmp_path / str(looks))
        ends[looks] = weights(model)
    assert_close(ends[True], ends[False], rtol=1e-12)


@pytest.mark.parametrize("sync", ["easgd:4", "gossip:ring", "adpsgd:ring"])
def test_what_consolidate_has_shown_stays_when_the_job_is_left(sync: str) -> None:
    """A script evaluates, calls `pt.shutdown()`, and saves the model that it has evaluated; step 11 is within a block."""
    batches = small_batches(STEPS, [4] * 4)
    looked = threading.Barrier(4)  # what a worker hands over as it leaves is in no mean that comes after it

    def work(session: Session) -> tuple[list[torch.Tensor], list[nn.Parameter]]:
        model = small_model()
        optimizer = DistributedOptimizer(make(list(model.parameters())), model)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch[session.rank]).backward()
            optimizer.step()
        own = weights(model)
        optimizer.consolidate()
        shown = weights(model)
        assert any(not torch.equal(one, other) for one, other in zip(own, shown, strict=True))
        looked.wait(30)
        return shown, list(model.parameters())

    with ThreadJob(4, 1, sync) as job:
        found = job.run(work)
    for shown, params in found:
        assert_equal(params, shown)


def test_the_centre_is_what_is_saved_and_resumed_from(tmp_path: Path) -> None:
    shown: list[list[torch.Tensor]] = []

    def work(session: Session) -> None:
        model = small_model()
        optimizer = DistributedOptimizer(make(list(model.parameters())), model)
        for step in small_batches(8, [4]):
            optimizer.zero_grad()
            loss_of(model, step[0]).backward()
            optimizer.step()
        optimizer.consolidate()
        shown.append(weights(model))

    def look(session: Session) -> None:
        model = small_model(seed=9)
        optimizer = DistributedOptimizer(make(list(model.parameters())), model)
        shown.append(weights(model))
        optimizer.consolidate()
        shown.append(weights(model))

    saved = tmp_path / "saved"
    with ThreadJob(1, sync="easgd:4", checkpoint=saved, checkpoint_every=4) as job:
        job.run(work)
    assert find_checkpoint(saved)[1]["step"] == 8
    with ThreadJob(1, sync="easgd:4", resume=saved) as job:
        job.run(look)
    assert_equal(shown[1], shown[0])
    assert_equal(shown[2], shown[0])


def test_what_does_not_go_with_a_model_of_its_own_is_refused() -> None:
    def work(session: Session) -> str:
        model = small_model()
        with pytest.raises(UsageError, match="goes a part of the way from whole values"):
            DistributedOptimizer(make(list(model.parameters())), model, compression="bf16")
        optimizer = DistributedOptimizer(make(list(model.parameters())), model)
        with pytest.raises(UsageError, match="not possible in easgd:4: values are this worker's own"):
            optimizer.push_parameters()
        return ""

    with ThreadJob(1, sync="easgd:4") as job:
        job.run(work)
