"""The ledger of a worker: of which pass each step was made, whatever loaders read ahead and scripts look at in between; and
by which weights each joint batch is cut, so that workers of any speed take every sample once an epoch."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.protocol.messages import LeaseSamples, SamplesLeased
from polytempo.protocol.values import Position
from polytempo.session.ledger import Ledger, SamplerPass, united
from polytempo.sync.balance import SharesBySpeed
from polytempo.sync.events import Measured, Pushed
from polytempo.sync.joint_batches import BatchShape, EpochCut, checked_cost
from polytempo.sync.shares import ShareWeights

EACH = 4


class Loader:
    """Goes through a sampler once, some batches of 4 ahead of the script."""

    def __init__(
        self,
        ledger: Ledger,
        sampler: str = "train",
        length: int = 40,
        ahead: int = 0,
        epoch: int = 0,
        dealt: bool = True,
        tells: bool = False,
        trains: bool = True,
    ) -> None:
        self.ledger, self.ahead, self.tells, self.trains = ledger, ahead, tells, trains
        cut = EpochCut(range(length), BatchShape(EACH, 0, False)) if dealt else None
        self.one = SamplerPass(sampler, epoch, iter(range(length)), cut=cut)
        self.read: deque[list[int]] = deque()
        ledger.begin(self.one)

    def draw(self) -> list[int]:
        """What the sampler gives for a batch; nothing at its end."""
        if self.one.complete:
            return []
        if self.one.cut is not None:
            found: Any = self.ledger.draw(self.one, self.trains) or []
            self.one.complete = not found
            return list(found)
        found = []
        while len(found) < EACH and not self.one.complete:
            index = self.ledger.draw(self.one, self.trains)
            self.one.complete = index is None
            found += [] if index is None else [index]
        return found

    def next(self) -> list[int]:
        """The next batch, for the script."""
        while len(self.read) <= self.ahead and (batch := self.draw()):
            self.read.append(batch)
        given = self.read.popleft() if self.read else []
        if self.tells and given:
            self.one.hand_out(len(given))
        return given

    def end(self) -> None:
        """The loop over it has ended, or was left."""
        self.one.over = self.tells
        self.ledger.let_go(self.one)

    def look(self) -> None:
        """Go through it without a step."""
        while self.next():
            pass
        self.end()


def made(ledger: Ledger, samples: float | None = None) -> dict[str, tuple[int, int]]:
    """A step; where it says that the worker is in each sampler: the epoch, and the first place or the samples taken."""
    return {one.sampler: (one.epoch, one.done[0][0] if one.done else one.taken) for one in ledger.trained(samples)}


# Of which pass a step was made.


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_each_step_is_made_of_the_batch_that_the_script_was_given(data: st.DataObject) -> None:
    """Epochs that are gone through or left early, evaluations of the same or of other data between steps with gradients
    enabled, and loaders that read ahead, even to the end. One that tells may be looked at anything beside, at any time; what
    another has read to its end before the first step on it is not known from an evaluation."""
    tells, dealt = data.draw(st.booleans(), "tells"), data.draw(st.booleans(), "dealt")
    ledger, ahead = Ledger(0, 1), data.draw(st.integers(0, 12), "ahead")
    length = EACH * data.draw(st.integers(1, 6), "batches")
    for epoch in range(4):
        train = Loader(ledger, length=length, ahead=ahead, epoch=epoch, dealt=dealt, tells=tells)
        leave = data.draw(st.integers(1, 8), "leave after")
        for number in range(leave):
            batch = train.next()
            if not batch:
                break
            if data.draw(st.booleans(), "look") and (tells or number):
                name = data.draw(st.sampled_from(["train", "check"]), "at")
                Loader(ledger, name, length, ahead, epoch, dealt, tells).look()
            assert made(ledger, len(batch)) == {"train": (epoch, batch[0] if dealt else (number + 1) * EACH)}
        train.end()


def test_a_pass_that_goes_on_trains_and_one_that_has_ended_was_looked_at() -> None:
    ledger = Ledger(0, 1)
    train = Loader(ledger, dealt=False)
    train.next()
    Loader(ledger, "check", dealt=False).look()
    assert made(ledger) == {"train": (0, 4)}
    Loader(ledger, "check", dealt=False).look()
    assert made(ledger) == {"train": (0, 4)}, "a step on what the loader had already"
    train.next()
    assert made(ledger) == {"train": (0, 8)}
    train.end()
    Loader(ledger, epoch=1, dealt=False).next()
    assert made(ledger) == {"train": (1, 4)}


def test_draws_without_gradients_do_not_train() -> None:
    for dealt in (False, True):
        ledger = Ledger(0, 1)
        check, train = Loader(ledger, "check", dealt=dealt, trains=False), Loader(ledger, dealt=dealt)
        check.next()
        train.next()
        assert list(made(ledger, 4)) == ["train"]
        check.next()
        train.next()
        assert list(made(ledger, 4)) == ["train"]


def test_what_is_told_counts_and_never_more_than_was_drawn() -> None:
    ledger = Ledger(0, 1)
    assert ledger.trained(8) == ()
    assert ledger.counted is None
    Loader(ledger, ahead=2, dealt=False).next()
    assert [made(ledger, 4), made(ledger, 4)] == [{"train": (0, 4)}, {"train": (0, 8)}]
    assert made(ledger, 400) == {"train": (0, 12)}, "samples= may count something else, such as tokens"


def test_what_is_not_told_is_what_was_drawn_or_what_the_loader_gave() -> None:
    for tells, taken in ((False, 12), (True, 4)):
        ledger = Ledger(0, 1)
        train = Loader(ledger, ahead=2, dealt=False, tells=tells)
        train.next()
        assert (made(ledger), ledger.counted) == ({"train": (0, taken)}, taken)
        train.next()
        assert (made(ledger), ledger.counted) == ({"train": (0, taken + 4)}, 4)


def test_several_samplers_may_train() -> None:
    ledger = Ledger(0, 1)
    one, two = Loader(ledger, "one", dealt=False, ahead=1), Loader(ledger, "two", 4, dealt=False)
    one.next()
    two.next()
    assert made(ledger, 8) == {"one": (0, 8), "two": (0, 4)}
    one.next()
    one.next()
    assert made(ledger, 8) == {"one": (0, 16), "two": (0, 4)}


def test_what_is_abandoned_is_drawn_again_first_or_given_back() -> None:
    given_back, left = list[tuple[tuple[int, int], ...]](), [((0, 8),)]

    def ask(asked: LeaseSamples) -> SamplesLeased:
        given_back.extend([asked.back] if asked.back else [])
        return SamplesLeased(request=asked.request, ranges=left.pop() if asked.count and left else ())

    ledger = Ledger(0, 1)
    ledger.ask = ask
    train = Loader(ledger, ahead=1)
    train.one.leased, train.one.each = True, EACH
    assert [train.next(), made(ledger)] == [[*range(4)], {"train": (0, 0)}]
    ledger.abandon()
    assert [train.next(), made(ledger)] == [[*range(4, 8)], {"train": (0, 4)}]
    assert [train.next(), made(ledger)] == [[*range(4)], {"train": (0, 0)}]
    train.end()
    ledger.abandon()
    ledger.give_back()
    assert given_back == [((0, 4),)], "nothing more is drawn of its pass"


def test_names_are_the_same_for_the_same_data_and_tell_others_apart() -> None:
    ledger, train, check, other = Ledger(0, 1), list(range(9)), list(range(9)), [0] * 8

    def named(data: list[int], shuffled: bool = True, name: str = "", nameless: bool = False) -> str:
        return ledger.identify(data, len(data), shuffled, name, nameless)

    names = [named(train), named(check), named(other), named(train, shuffled=False), named(train, name="mine")]
    assert len(set(names)) == 5
    assert named(train) == names[0]
    assert Ledger(0, 1).identify(other, 8, True, "", nameless=False) == names[2], "whatever else this worker makes first"
    assert Ledger(0, 1).identify(train, 9, True, "", nameless=True) == ""


# Weights.


def more(rank: int, since: tuple[int, int]) -> tuple[ShareWeights, tuple[int, int]]:
    """Three quarters of each joint batch for this one of two workers, from this draw on."""
    return ((0, 1.5 - rank), (1, 0.5 + rank)), since


def test_new_weights_hold_from_the_first_batch_that_no_worker_has_drawn() -> None:
    ledger = Ledger(0, 2)
    train = Loader(ledger, ahead=1)
    train.next()
    made(ledger)
    assert ledger.freeze() == (0, 1)
    ledger.cut_by(*more(0, (0, 3)))  # the other worker has read one further
    ledger.resume()
    assert [train.next() for _ in range(4)] == [[*range(8, 12)], [*range(16, 20)], [*range(24, 30)], [*range(32, 38)]]
    train.end()
    assert Loader(ledger, epoch=1).next() == [*range(6)]
    assert ledger.freeze() == (1, 0)


def test_a_worker_that_joins_others_counts_its_passes_from_theirs() -> None:
    ledger = Ledger(0, 2)
    ledger.cut_by(*more(0, (7, 3)))
    ledger.resume()
    train = Loader(ledger)
    assert train.next() == [*range(6)]
    assert ledger.freeze() == (7, 0)
    ledger.cut_by(*more(1, (7, 2)))
    ledger.resume()
    assert [train.next(), train.next()] == [[*range(8, 14)], [*range(16, 18)]]


def test_passes_that_do_not_train_are_cut_evenly_and_not_numbered() -> None:
    ledger = Ledger(0, 2)
    ledger.cut_by(*more(0, (0, 0)))
    ledger.resume()
    assert Loader(ledger, trains=False).next() == [*range(4)]
    assert ledger.freeze() is None
    ledger.resume()
    assert Loader(ledger).next() == [*range(6)]
    assert ledger.freeze() == (0, 0)


def test_a_thread_draws_nothing_between_a_push_and_its_answer() -> None:
    ledger, drawn, begun = Ledger(0, 2), list[int](), threading.Event()
    train = Loader(ledger)
    train.next()
    made(ledger)
    ledger.freeze()

    def loader() -> None:
        begun.set()
        drawn.extend(train.next())

    thread = threading.Thread(target=loader)
    thread.start()
    begun.wait(10)
    ledger.cut_by(*more(0, (0, 1)))
    ledger.resume()
    thread.join(10)
    assert drawn == [*range(8, 14)], "cut by the weights of the answer"


class Worker:
    """Draws some batches ahead of its steps, as a prefetching loader does."""

    def __init__(self, rank: int, size: int, ahead: int) -> None:
        self.ledger, self.ahead = Ledger(rank, size), ahead
        self.read: list[Any] = []

    def begin(self, cut: EpochCut, epoch: int) -> None:
        self.one, self.read = SamplerPass("train", epoch, cut=cut), []
        self.ledger.begin(self.one)

    def step(self) -> tuple[list[int], tuple[Position, ...]] | None:
        """What it trains on until its share is done."""
        taken: list[int] = []
        places: list[Position] = []
        while True:
            while len(self.read) <= self.ahead and (batch := self.ledger.draw(self.one)) is not None:
                self.read.append(batch)
            if not self.read:
                assert not taken, "a share ends with its pass"
                return None
            places += self.ledger.trained()
            taken += self.read.pop(0)
            if self.ledger.batches[0].ends_share:
                return taken, united(places)


class Job:
    """Workers in step, and the rule of `bsp+balance`."""

    def __init__(self, aheads: Sequence[int]) -> None:
        self.workers = [Worker(rank, len(aheads), ahead) for rank, ahead in enumerate(aheads)]
        self.rule, self.round = SharesBySpeed(len(aheads)), 0

    def begin(self, cut: EpochCut, epoch: int = 0) -> None:
        for worker in self.workers:
            worker.ledger.let_go(worker.one) if epoch else None
            worker.begin(cut, epoch)

    def run(self, speeds: Sequence[float]) -> list[list[int]] | None:
        """One round: what each worker took; None where their passes have ended."""
        found = [worker.step() for worker in self.workers]
        steps = [step for step in found if step is not None]
        assert len(steps) in (0, len(found)), "all passes have equally many joint batches"
        pushes = []
        for rank, (taken, places) in enumerate(steps):
            assert taken == [place for one in places for span in one.done for place in range(*span)] or len(places) > 1
            assert sorted(taken) == sorted(place for one in places for span in one.done for place in range(*span))
            work, drawn = float(len(taken)), self.workers[rank].ledger.freeze()
            pushes.append(Pushed(rank, self.round, work, measured=Measured(None, None, work, work / speeds[rank], drawn)))
        if not steps:
            return None
        self.round += 1
        self.rule.close(tuple(pushes), range(len(pushes)), 0.0)
        for worker in self.workers:
            if self.rule.changed:
                worker.ledger.cut_by(self.rule.weights, self.rule.since)
            worker.ledger.resume()
        return [taken for taken, _ in steps]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_sample_once_an_epoch(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5), "workers")
    each, micro = data.draw(st.integers(1, 6), "batch"), data.draw(st.integers(0, 3), "micro")
    length = data.draw(st.integers(size * each, 150), "length")
    costs = checked_cost(lambda index: index * index * 7 % 13) if data.draw(st.booleans(), "by cost") else None
    shape = BatchShape(each, micro, data.draw(st.booleans(), "drop last"))
    job = Job([data.draw(st.integers(0, 4), "ahead") for _ in range(size)])
    speed = st.sampled_from([0.2, 1.0, 3.0])
    for epoch in range(3):
        job.begin(EpochCut(range(length), shape, costs), epoch)
        leave = data.draw(st.integers(0, 6), "leave after") if epoch == 1 else 1000
        joint: list[list[int]] = []
        while len(joint) < leave and (taken := job.run([data.draw(speed) for _ in range(size)])) is not None:
            joint.append(sorted(index for part in taken for index in part))
        seen = Counter(index for indices in joint for index in indices)
        assert set(seen.values()) <= {1}
        if not micro:
            assert joint == [list(range(start, stop)) for start, stop in shape.joint_batches(length, size)[:leave]]
        if leave == 1000:
            whole = length - (length % (each if micro else each * size) if shape.drop_last else 0)
            assert sorted(seen) == list(range(whole))


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 6), st.booleans())
def test_joint_batches_are_all_of_it_and_none_is_smaller_than_the_workers(
    count: int, each: int, workers: int, drop_last: bool
) -> None:
    found = BatchShape(each, 0, drop_last).joint_batches(count, workers)
    assert all(stop - start >= workers for start, stop in found)
    assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]
    if drop_last:
        assert all(stop - start == each * workers for start, stop in found)
    elif count >= workers:
        assert (found[0][0], found[-1][1]) == (0, count)
    else:
        assert found == ([(0, workers)] if count else [])


def test_fewer_samples_than_workers_are_used_twice() -> None:
    job = Job([0] * 5)
    job.begin(EpochCut(range(2), BatchShape(2, 0, False)))
    assert job.run([1.0] * 5) == [[0], [1], [0], [1], [0]]
    assert job.run([1.0] * 5) is None


def test_lengths_that_differ_greatly_cost_workers_nearly_the_same() -> None:
    """Log-uniform from 8 to 2048, joint batches of 64 over 4 workers."""
    lengths = [int(8 * 256 ** ((index * 0.618034) % 1)) for index in range(640)]
    waste = []
    for costs in (lambda index: float(lengths[index]), None):
        job = Job([2] * 4)
        job.begin(EpochCut(range(640), BatchShape(16, 0, False), costs))
        rounds = [[sum(lengths[index] for index in part) for part in job.run([1.0] * 4) or []] for _ in range(10)]
        waste.append(sum(max(costs_of) for costs_of in rounds) / sum(sum(costs_of) / 4 for costs_of in rounds))
    assert waste[0] < 1.02
    assert waste[1] > 1.15


def test_a_cost_is_asked_once_and_must_be_a_number_from_0_on() -> None:
    asked: list[int] = []
    costs = checked_cost(lambda index: float(asked.append(index) or 1.0))  # type: ignore[func-returns-value]
    assert [costs(index) for index in (1, 2, 1, 2)] == [1.0] * 4
    assert asked == [1, 2]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected cost"):
            checked_cost(lambda index, wrong=wrong: wrong)(3)  # type: ignore[misc]


# Leases.


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loader_that_fills_its_batches_trains_on_what_it_was_given(ahead: int) -> None:
    """Two places have returned of an earlier epoch, fewer than a batch: the loader fills it with the next samples. Sample
    100 e + p is at place p of epoch e."""
    left = {0: [5, 6], 1: list(range(10))}

    def ask(asked: LeaseSamples) -> SamplesLeased:
        taken, left[asked.epoch] = left[asked.epoch][: asked.count], left[asked.epoch][asked.count :]
        return SamplesLeased(request=asked.request, ranges=tuple((place, place + 1) for place in taken), earlier=(0,))

    ledger = Ledger(0, 2)
    ledger.ask = ask
    one = SamplerPass("train", 1, cut=EpochCut(range(100, 110), BatchShape(4, 8, False)), leased=True, singles=True, each=4)
    one.order_of = lambda epoch: range(100 * epoch, 100 * epoch + 10)
    ledger.begin(one)
    stream = (index for batch in iter(lambda: ledger.draw(one), None) for index in batch)  # type: ignore[union-attr]
    batches: list[list[int]] = []
    trained: list[list[int]] = []
    while True:
        while len(batches) - len(trained) <= ahead and (
            batch := [index for _, index in zip(range(4), stream, strict=False)]
        ):
            batches.append(batch)
        if len(trained) == len(batches):
            break
        positions = ledger.trained()
        trained.append([100 * one.epoch + place for one in positions for span in one.done for place in range(*span)])
    assert trained == batches == [[5, 6, 100, 101], [102, 103, 104, 105], [106, 107, 108, 109]]
