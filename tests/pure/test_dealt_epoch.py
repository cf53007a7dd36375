"""Workers that cut the same joint batches by the same weights, each with a loader that reads ahead as it likes: every sample
once an epoch, whatever the speeds, the lengths and the costs are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polytempo.session.dealing import Dealing, united
from polytempo.train.dealt_epoch import BatchShape, CostTable, DealtEpoch

from polytempo.errors import UsageError
from polytempo.protocol.values import Position, RoundPlan
from polytempo.sync.balance import SharesBySpeed
from polytempo.sync.events import Pushed
from polytempo.sync.joint_batches import joint_batches, ranges_of


class Worker:
    """Draws some batches ahead of its steps, as a prefetching loader does."""

    def __init__(self, rank: int, size: int, ahead: int, shape: BatchShape, costs: CostTable | None) -> None:
        self.dealing, self.ahead, self.shape, self.costs = Dealing(rank, size), ahead, shape, costs
        self.read: list[list[int]] = []
        self.batches: Iterator[list[int]] = iter(())

    def begin(self, length: int, epoch: int) -> None:
        dealt = DealtEpoch(self.dealing, range(length), self.shape, self.costs)
        self.read, self.batches = [], dealt.batches("train", epoch, lambda: True, lambda epoch, used: None)

    def step(self) -> tuple[list[int], tuple[Position, ...]] | None:
        """What it trains on until its share is done."""
        taken: list[int] = []
        places: list[Position] = []
        while True:
            while len(self.read) <= self.ahead and (batch := next(self.batches, None)) is not None:
                self.read.append(batch)
            if not self.read:
                assert not taken, "a share ends with its pass"
                return None
            places += self.dealing.trained()
            taken += self.read.pop(0)
            if self.dealing.last[0][1].ends_share:
                return taken, united(places)


class Job:
    """Workers in step, and the rule of `bsp+balance`."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers, self.rule, self.round = workers, SharesBySpeed(len(workers)), 0

    def run(self, speeds: list[float]) -> list[list[int]] | None:
        """One round: what each worker took; None where their passes have ended."""
        steps = [worker.step() for worker in self.workers]
        if any(step is None for step in steps):
            assert all(step is None for step in steps), "all passes have equally many joint batches"
            return None
        pushes = []
        for rank, (worker, step) in enumerate(zip(self.workers, steps, strict=True)):
            assert step is not None
            assert step[0]
            assert [tuple(ranges_of(step[0]))] == [position.done for position in step[1]]
            work = float(len(step[0]))
            drawn = worker.dealing.freeze()
            pushes.append(Pushed(rank, self.round, work, work=work, computed=work / speeds[rank], drawn=drawn))
        self.round += 1
        self.rule.close(tuple(pushes), range(len(pushes)), 0.0)
        for worker in self.workers:
            worker.dealing.resume(RoundPlan(self.rule.weights, self.rule.since) if self.rule.changed else RoundPlan())
        return [step[0] for step in steps if step is not None]


@settings(max_examples=80)
@given(data=st.data())
def test_every_sample_once_an_epoch(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5), "workers")
    each, micro = data.draw(st.integers(1, 6), "batch"), data.draw(st.integers(0, 3), "micro")
    length = data.draw(st.integers(size * each, 150), "length")
    by_cost = data.draw(st.booleans(), "by cost")
    drop_last = data.draw(st.booleans(), "drop last")
    costs = CostTable(lambda index: index * index * 7 % 13) if by_cost else None
    shape = BatchShape(each, micro, drop_last)
    aheads = [data.draw(st.integers(0, 4), "ahead") for _ in range(size)]
    job = Job([Worker(rank, size, aheads[rank], shape, costs) for rank in range(size)])
    speed = st.sampled_from([0.2, 1.0, 3.0])
    for epoch in range(3):
        for worker in job.workers:
            worker.begin(length, epoch)
        leave = data.draw(st.integers(0, 6), "leave after") if epoch == 1 else 1000
        seen: Counter[int] = Counter()
        joint = []
        while len(joint) < leave:
            taken = job.run([data.draw(speed) for _ in range(size)])
            if taken is None:
                break
            joint.append(sorted(index for part in taken for index in part))
            seen.update(joint[-1])
        assert set(seen.values()) <= {1}
        expected = shape.joint_batches(length, size)
        if not micro:
            assert joint == [list(range(start, stop)) for start, stop in expected[:leave]]
        if leave == 1000:
            whole = length - (length % (each if micro else each * size) if drop_last else 0)
            assert sorted(seen) == list(range(whole))


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 6), st.booleans())
def test_joint_batches_are_all_of_it_and_none_is_smaller_than_the_workers(
    count: int, each: int, workers: int, drop_last: bool
) -> None:
    found = joint_batches(count, each * workers, workers, drop_last)
    assert all(stop - start >= workers for start, stop in found)
    assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]
    if drop_last:
        assert all(stop - start == each * workers for start, stop in found)
    elif count >= workers:
        assert (found[0][0], found[-1][1]) == (0, count)
    else:
        assert found == ([(0, workers)] if count else [])


def test_an_epoch_that_is_left_after_all_of_it_was_read_ahead_is_not_trained_on_later() -> None:
    """Each epoch is shorter than what the loader reads ahead: both passes have ended when the step is made."""
    worker = Worker(0, 1, 5, BatchShape(2, 0, False), None)
    for epoch in range(3):
        worker.begin(4, epoch)
        step = worker.step()
        assert step is not None
        assert step[0] == [0, 1]
        assert [(place.epoch, place.done) for place in step[1]] == [(epoch, ((0, 2),))]


def test_fewer_samples_than_workers_are_used_twice() -> None:
    job = Job([Worker(rank, 5, 0, BatchShape(2, 0, False), None) for rank in range(5)])
    for worker in job.workers:
        worker.begin(2, 0)
    assert job.run([1.0] * 5) == [[0], [1], [0], [1], [0]]
    assert job.run([1.0] * 5) is None


def test_lengths_that_differ_greatly_cost_workers_nearly_the_same() -> None:
    """Log-uniform from 8 to 2048, joint batches of 64 over 4 workers; and with speeds of 1, 1, 1 and 1/3."""
    lengths = [int(8 * 256 ** ((index * 0.618034) % 1)) for index in range(640)]
    shape, costs = BatchShape(16, 0, False), CostTable(lambda index: float(lengths[index]))
    job = Job([Worker(rank, 4, 2, shape, costs) for rank in range(4)])
    plain = Job([Worker(rank, 4, 2, shape, None) for rank in range(4)])
    waste = {}
    for name, one in (("by cost", job), ("by samples", plain)):
        for worker in one.workers:
            worker.begin(640, 0)
        rounds = [[sum(lengths[index] for index in part) for part in one.run([1.0] * 4) or []] for _ in range(10)]
        waste[name] = sum(max(costs_of) for costs_of in rounds) / sum(sum(costs_of) / 4 for costs_of in rounds)
    assert waste["by cost"] < 1.02
    assert waste["by samples"] > 1.15


def test_a_cost_must_be_a_number_from_0_on() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected cost"):
            CostTable(lambda index, wrong=wrong: wrong).of(3)  # type: ignore[misc]


def test_a_sample_is_asked_for_its_cost_once() -> None:
    asked: list[int] = []
    costs = CostTable(lambda index: float(asked.append(index) or 1.0))  # type: ignore[func-returns-value]
    assert [costs.of(index) for index in (1, 2, 1, 2)] == [1.0] * 4
    assert asked == [1, 2]


class EarlierOrders:
    """Epochs of ten samples whose orders differ: sample 100 e + p is at place p of epoch e."""

    def rest_of(self, epoch: int) -> list[int]:
        return [100 * epoch + place for place in range(10)]

    def unfinished(self) -> list[int]:
        return []

    def drawing(self) -> None:
        """Nothing is registered for checkpoints."""


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loader_that_fills_its_batches_trains_on_what_it_was_given(ahead: int) -> None:
    """Two places have returned of an earlier epoch, fewer than a batch: the loader fills it with the next samples."""
    dealing, left = Dealing(0, 2), {0: [5, 6], 1: list(range(10))}

    def take(sampler: str, epoch: int, length: int, count: int) -> list[tuple[int, int]]:
        taken, left[epoch] = left[epoch][:count], left[epoch][count:]
        return [(place, place + 1) for place in taken]

    dealing.take, dealing.take_returned, dealing.earlier = take, take, lambda sampler, epoch, length: [0]
    orders = EarlierOrders()
    dealt = DealtEpoch(dealing, orders.rest_of(1), BatchShape(4, 0, False), None, orders)  # type: ignore[arg-type]
    stream = (one for some in dealt.batches("train", 1, lambda: True, lambda *_: None, as_stream=True) for one in some)
    batches: list[list[int]] = []
    trained: list[list[int]] = []
    while True:
        while len(batches) - len(trained) <= ahead and (batch := list(islice(stream, 4))):
            batches.append(batch)
        if len(trained) == len(batches):
            break
        positions = dealing.trained()
        trained.append([100 * one.epoch + place for one in positions for span in one.done for place in range(*span)])
    assert trained == batches == [[5, 6, 100, 101], [102, 103, 104, 105], [106, 107, 108, 109]]
