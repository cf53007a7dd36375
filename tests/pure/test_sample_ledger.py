"""The ledger of samples at the sequencer, and those of workers with it: every sample is trained on once an epoch, whatever
is read ahead, abandoned, discarded, lost with its worker, asked twice, or left for a job that goes on."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pushes import push_of

from polytempo.protocol.messages import LeaseSamples, Push, SamplesLeased
from polytempo.protocol.values import Position, PushId
from polytempo.server.sample_ledger import SampleLedger
from polytempo.session.ledger import Ledger, SamplerPass
from polytempo.sync.epoch_parts import epoch_to_go_on_with, remaining
from polytempo.sync.joint_batches import BatchShape, EpochCut

WORKERS = 3
Parts = list[dict[str, Any]]


def ask(request: int, count: int = 4, epoch: int = 0, turn: int = 0, length: int = 20, **more: Any) -> LeaseSamples:
    return LeaseSamples(request=request, sampler="a", epoch=epoch, length=length, turn=turn, count=count, **more)


def made_of(*ranges: tuple[int, int], worker: int = 0, epoch: int = 0, length: int = 20) -> Push:
    place = Position(epoch, sum(stop - start for start, stop in ranges), "a", done=ranges, length=length)
    return push_of(PushId("0", worker, 0, 0), positions=(place,))


def parts_of(ledger: SampleLedger) -> Parts:
    return ledger.parts((), ())


# Leases.


def test_an_answer_that_was_lost_is_given_again() -> None:
    ledger = SampleLedger(WORKERS)
    first = ledger.lease(0, ask(1))
    assert ledger.lease(0, ask(1)) == first
    assert first.ranges == ((0, 4),)
    assert ledger.lease(0, ask(2)).ranges == ((4, 8),)


def test_less_is_given_ahead_near_the_end() -> None:
    ledger = SampleLedger(WORKERS)
    sizes = []
    for request in range(100):
        got = ledger.lease(request % WORKERS, ask(request, length=240, ahead=12)).ranges
        sizes.append(sum(stop - start for start, stop in got))
    given_out = [size for size in sizes if size]
    assert sum(given_out) == 240
    assert given_out[0] == 16
    assert max(given_out[-4:]) == 4


def test_what_a_worker_held_returns_but_not_what_is_still_to_be_applied() -> None:
    ledger = SampleLedger(WORKERS)
    ledger.lease(0, ask(1, 6))
    pending = made_of((0, 2))
    ledger.left(0, [pending])
    assert ledger.lease(1, ask(1, 20)).ranges == ((2, 20),)
    ledger.applied([pending])
    ledger.discarded(made_of((4, 6), worker=1))
    assert ledger.lease(2, ask(1, 20)).ranges == ((4, 6),)


def test_a_place_that_returns_late_is_named_in_the_next_epoch() -> None:
    ledger = SampleLedger(WORKERS)
    ledger.lease(0, ask(1, 20))
    ledger.applied([made_of((0, 18))])
    assert ledger.lease(1, ask(1, 4, epoch=1)).earlier == ()
    ledger.lease(0, ask(2, 0, back=((18, 20),)))
    assert ledger.lease(1, ask(2, 4, epoch=1)).earlier == (0,)
    assert ledger.lease(1, ask(3, 4, epoch=0)).ranges == ((18, 20),)
    assert ledger.lease(1, ask(4, 4, epoch=0, turn=1)).ranges == ((0, 4),)


# Checkpoints.


def test_places_of_several_workers_are_one_part_of_the_epoch() -> None:
    ledger = SampleLedger(WORKERS)
    ledger.applied([made_of((0, 3)), made_of((3, 4), (9, 12), worker=1)])
    ledger.applied([made_of((4, 6))])
    assert parts_of(ledger) == [{"sampler": "a", "epoch": 0, "length": 20, "done": [[0, 6], [9, 12]]}]
    assert list(remaining(range(20), parts_of(ledger))) == [6, 7, 8, *range(12, 20)]


def test_what_earlier_jobs_have_done_of_the_epoch_comes_first() -> None:
    earlier = [{"sampler": name, "epoch": 3, "size": 2, "taken": [2, 1]} for name in ("a", "other")]
    ledger = SampleLedger(WORKERS, earlier)
    ledger.applied([made_of((0, 2), epoch=3, length=17)])
    parts = parts_of(ledger)
    assert [part for part in parts if part["sampler"] == "other"] == earlier[1:]
    own = [part for part in parts if part["sampler"] == "a"]
    assert own[:1] == earlier[:1]
    assert list(remaining(range(20), own)) == list(range(5, 20)), "0, 1 and 2 before, then 3 and 4"


def test_another_time_through_the_epoch_starts_over() -> None:
    ledger = SampleLedger(WORKERS, [{"sampler": "a", "epoch": 0, "size": 1, "taken": [10]}])
    ledger.applied([made_of((0, 10), length=10)])
    ledger.applied([made_of((0, 4))])
    assert parts_of(ledger) == [{"sampler": "a", "epoch": 0, "length": 20, "done": [[0, 4]]}]
    ledger.applied([made_of((4, 20))])
    ledger.applied([made_of((2, 3))])
    assert parts_of(ledger) == [{"sampler": "a", "epoch": 0, "length": 20, "done": [[2, 3]]}]


def test_the_last_epoch_is_kept_and_where_places_are_leased_those_that_are_not_done() -> None:
    for leased, kept in ((False, [6]), (True, [3, 5, 6])):
        ledger = SampleLedger(WORKERS)
        for epoch in range(7):
            length = 20 if epoch == 4 else 2
            if leased:
                ledger.lease(0, ask(epoch, length, epoch))
            ledger.applied([made_of((0, length), epoch=epoch)])
        assert [part["epoch"] for part in parts_of(ledger)] == kept


def test_what_was_only_looked_at_is_in_no_checkpoint() -> None:
    ledger = SampleLedger(WORKERS)
    ledger.lease(0, ask(1, 20))
    ledger.lease(0, ask(2, 0, done=((0, 20),)))
    assert parts_of(ledger) == []
    assert ledger.lease(0, ask(3, 20)).ranges == ()
    assert ledger.lease(0, ask(4, 20, turn=1)).ranges == ((0, 20),)
    ledger.applied([made_of((0, 5))])
    assert parts_of(ledger) == [{"sampler": "a", "epoch": 0, "length": 20, "done": [[0, 5]]}]


def test_one_that_says_nothing_of_its_data_has_not_gone_back() -> None:
    ledger = SampleLedger(1)
    ledger.counted(push_of(PushId("0", 0, 0, 0), positions=(Position(0, 16),)))
    ledger.counted(push_of(PushId("0", 0, 0, 1)))
    assert parts_of(ledger) == [{"sampler": "", "epoch": 0, "size": 1, "taken": [16]}]
    assert ledger.parts({0}, ()) == [], "its last push is not applied"


# Workers that lease, with the sequencer.

LENGTH, EPOCHS, EACH = 24, 3, 2


class Trainee:
    """A worker that goes through the epochs from one on, its loader some micro-batches ahead."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.epoch = job, rank, epoch_to_go_on_with(job.earlier)
        self.ledger, self.ahead = Ledger(rank, WORKERS), job.dice.randrange(4)
        self.ledger.ask = lambda asked: job.asked(rank, asked)
        self.begin()

    def begin(self) -> None:
        self.one, self.read = SamplerPass("a", self.epoch, leased=True, each=EACH, cut=self.job.cut(self.epoch)), 0
        self.one.earlier = {part["epoch"] for part in self.job.earlier if part["epoch"] < self.epoch}
        self.one.order_of = lambda epoch: self.job.cut(epoch).order
        self.ledger.begin(self.one)

    def step(self) -> Push | None:
        """The push of a micro-batch; None at the end of a pass."""
        while self.read <= self.ahead and not self.one.complete:
            drawn = self.ledger.draw(self.one)
            self.one.complete = drawn is None
            self.read += drawn is not None
        if not self.read:
            return None
        self.read -= 1
        positions = self.ledger.trained()
        assert len(positions) == 1
        return push_of(PushId("0", self.rank, 0, 0), positions=positions)

    def turn_over(self) -> None:
        """The pass is over, or left."""
        self.ledger.let_go(self.one)
        self.epoch += 1
        self.begin()


class Job:
    """Some workers, from what earlier jobs have left on."""

    def __init__(self, dice: random.Random, earlier: Parts, trained: Counter[tuple[int, int]]) -> None:
        self.dice, self.earlier, self.trained = dice, earlier, trained
        self.ledger, self.pending = SampleLedger(WORKERS, earlier), list[Push]()
        self.workers = [Trainee(self, rank) for rank in range(WORKERS)]

    def cut(self, epoch: int) -> EpochCut:
        left = remaining(range(LENGTH), [part for part in self.earlier if part["epoch"] == epoch])
        return EpochCut(list(left), BatchShape(EACH, 8, False))

    def asked(self, rank: int, asked: LeaseSamples) -> SamplesLeased:
        answer = self.ledger.lease(rank, asked)
        assert answer == self.ledger.lease(rank, asked), "asked again, the same"
        return answer

    def apply(self, push: Push) -> None:
        self.ledger.applied([push])
        for place in push.measures.positions:
            order = self.cut(place.epoch).order
            self.trained.update((place.epoch, order[at]) for span in place.done for at in range(*span))

    def settle(self) -> None:
        """What is pending is applied or discarded."""
        for push in self.pending:
            self.apply(push) if self.dice.random() < 0.7 else self.ledger.discarded(push)
        self.pending = []

    def disturb(self, worker: Trainee) -> None:
        """Something happens to a worker before its step."""
        what = self.dice.choice(["settle", "settle", "leave early", "die", "abandon"])
        if what == "settle":
            self.settle()
        elif what == "leave early" and worker.read and not worker.one.earlier and worker.epoch < EPOCHS - 1:
            worker.turn_over()
        elif what == "die":
            self.ledger.left(worker.rank, self.pending)
            self.workers[worker.rank] = Trainee(self, worker.rank)
        elif what == "abandon" and worker.step() is not None:
            worker.ledger.abandon()
            worker.ledger.give_back()

    def run(self, steps: int) -> Parts:
        """Some steps in any order, and the checkpoint then."""
        for _ in range(steps):
            worker = self.dice.choice(self.workers)
            if self.dice.random() < 0.3:
                self.disturb(worker)
                continue
            push = worker.step()
            if push is not None:
                self.pending.append(push)
            elif worker.epoch < EPOCHS - 1:
                worker.turn_over()
        return parts_of(self.ledger)

    def finish(self) -> None:
        """All leave, and one comes back to do what is left."""
        self.settle()
        for worker in self.workers:
            self.ledger.left(worker.rank, [])
        last = Trainee(self, 0)
        for _ in range(10 * LENGTH * EPOCHS):
            push = last.step()
            if push is not None:
                self.apply(push)
            elif last.epoch < EPOCHS - 1:
                last.turn_over()
            elif not self.ledger.lease(0, ask(10**6 + len(self.trained), 0, EPOCHS)).earlier:
                return
            else:
                last.begin()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_every_sample_is_trained_on_once_an_epoch(seed: int, steps: list[int]) -> None:
    """Workers that read ahead, leave epochs early, abandon, have pushes discarded, die and come back, in jobs that go on one
    from the other's checkpoint. What is pending at a checkpoint is lost, and trained on again."""
    dice, trained, earlier = random.Random(seed), Counter[tuple[int, int]](), Parts()
    for number, count in enumerate(steps):
        job = Job(dice, earlier, trained)
        earlier = job.run(count)
        if number == len(steps) - 1:
            job.finish()
    assert trained == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(LENGTH)})
