"""Which batch a step was made of, and by which weights a joint batch is cut: told by draws, steps and answers."""

from __future__ import annotations

import threading

from polytempo.session.dealing import Dealing, DealtBatch, DealtPass

from polytempo.protocol.values import RoundPlan
from polytempo.sync.shares import ShareWeights, cut

SIZE = 2
EACH = 4  # samples of a joint batch for each worker


class Bench:
    """A worker whose samplers deal joint batches of 8 places of an epoch's order."""

    def __init__(self, length: int = 40) -> None:
        self.dealing, self.length = Dealing(0, SIZE), length

    def begin(self, sampler: str = "train", epoch: int = 0) -> DealtPass:
        return self.dealing.begin(sampler, epoch, self.length)

    def draw(self, one: DealtPass, count: int = 1, trains: bool = True) -> list[tuple[int, int]]:
        drawn = [self.dealing.draw(one, self.share, trains) for _ in range(count)]
        return [batch.places[0] for batch in drawn if batch is not None]

    def share(self, number: int, weights: ShareWeights) -> list[DealtBatch]:
        start = number * EACH * SIZE
        own = cut(EACH * SIZE, weights)[0]
        return [DealtBatch(((start, start + own),), own, own)] if start < self.length else []

    def step(self) -> list[tuple[str, int, int]]:
        return [(place.sampler, *place.done[0]) for place in self.dealing.trained()]


def test_a_step_is_made_of_the_batch_that_was_drawn_first() -> None:
    bench = Bench()
    one = bench.begin()
    assert bench.draw(one, 3) == [(0, 4), (8, 12), (16, 20)]
    assert bench.step() == [("train", 0, 4)]
    assert bench.step() == [("train", 8, 12)]
    bench.draw(one)
    assert bench.step() == [("train", 16, 20)]
    assert bench.dealing.last[0][1].samples == 4


def test_a_pass_that_is_looked_at_between_steps_is_not_trained_on() -> None:
    bench = Bench()
    train = bench.begin()
    bench.draw(train, 2)
    for trains, complete in [(False, True), (True, True), (True, False)]:
        look = bench.begin()
        bench.draw(look, 5 if complete else 2, trains)
        bench.dealing.end(look, complete)
    assert bench.step() == [("train", 0, 4)]
    bench.draw(train, 4)
    bench.dealing.end(train, True)
    look = bench.begin("check")
    bench.draw(look, 5)
    bench.dealing.end(look, True)
    assert [bench.step() for _ in range(4)] == [[("train", start, start + 4)] for start in (8, 16, 24, 32)]


def test_a_loader_that_has_read_a_whole_pass_ahead_trains_on_it() -> None:
    bench = Bench(16)
    for epoch in range(3):
        one = bench.begin(epoch=epoch)
        bench.draw(one, 3)
        bench.dealing.end(one, True)
        assert [bench.step(), bench.step()] == [[("train", 0, 4)], [("train", 8, 12)]]
    assert bench.step() == []


def test_what_a_script_leaves_early_is_not_trained_on_later() -> None:
    bench = Bench()
    one = bench.begin()
    bench.draw(one, 4)
    bench.step()
    bench.dealing.end(one, False)
    two = bench.begin(epoch=1)
    bench.draw(two, 1)
    assert bench.step() == [("train", 0, 4)]
    assert bench.dealing.last[0][0].epoch == 1


def test_new_weights_hold_from_the_first_batch_that_no_worker_has_drawn() -> None:
    bench = Bench()
    one = bench.begin()
    bench.draw(one, 2)
    bench.step()
    assert bench.dealing.freeze() == (0, 1)
    bench.dealing.resume(RoundPlan(((0, 1.5), (1, 0.5)), (0, 3)))  # the other worker has read one further
    assert bench.draw(one, 3) == [(16, 20), (24, 30), (32, 38)]
    bench.dealing.end(one, True)
    two = bench.begin(epoch=1)
    assert bench.draw(two) == [(0, 6)]
    assert bench.dealing.freeze() == (1, 0)


def test_a_worker_that_joins_others_counts_its_passes_from_theirs() -> None:
    bench = Bench()
    bench.dealing.resume(RoundPlan(((0, 1.5), (1, 0.5)), (7, 3)))
    one = bench.begin()
    assert bench.draw(one) == [(0, 6)]
    assert bench.dealing.freeze() == (7, 0)
    bench.dealing.resume(RoundPlan(((0, 0.5), (1, 1.5)), (7, 2)))
    assert bench.draw(one, 2) == [(8, 14), (16, 18)]


def test_passes_that_do_not_train_are_cut_evenly_and_not_numbered() -> None:
    bench = Bench()
    bench.dealing.resume(RoundPlan(((0, 1.5), (1, 0.5)), (0, 0)))
    look = bench.begin()
    assert bench.draw(look, trains=False) == [(0, 4)]
    assert bench.dealing.freeze() is None
    bench.dealing.resume()
    assert bench.draw(bench.begin()) == [(0, 6)]
    assert bench.dealing.freeze() == (0, 0)


def test_what_is_abandoned_is_drawn_again_first_or_given_back() -> None:
    bench = Bench()
    one = bench.begin()
    bench.draw(one, 2)
    bench.step()
    assert bench.dealing.abandoned() == ()
    assert bench.step() == [("train", 8, 12)]
    assert bench.draw(one) == [(0, 4)]
    assert bench.step() == [("train", 0, 4)]
    bench.dealing.end(one, True)
    assert [place.done for place in bench.dealing.abandoned()] == [((0, 4),)]


def test_places_are_leased_where_a_queue_deals_them() -> None:
    bench = Bench()
    asked = []

    def take(sampler: str, epoch: int, length: int, count: int) -> list[tuple[int, int]]:
        asked.append((sampler, epoch, length, count))
        return [(0, 2), (7, 9)] if len(asked) == 1 else []

    bench.dealing.take = take
    one = bench.begin()
    batch = bench.dealing.lease(one, 4, lambda ranges: 1.0)
    assert batch is not None
    assert batch.samples == 4
    assert bench.dealing.lease(one, 4, lambda ranges: 1.0) is None
    assert [place.done for place in bench.dealing.trained()] == [((0, 2), (7, 9))]
    assert asked[0] == ("train", 0, 40, 4)


def test_a_thread_draws_nothing_between_a_push_and_its_answer() -> None:
    bench = Bench()
    one = bench.begin()
    bench.draw(one)
    bench.step()
    bench.dealing.freeze()
    drawn: list[tuple[int, int]] = []
    begun = threading.Event()

    def loader() -> None:
        begun.set()
        drawn.extend(bench.draw(one))

    thread = threading.Thread(target=loader)
    thread.start()
    begun.wait(10)
    bench.dealing.resume(RoundPlan(((0, 1.5), (1, 0.5)), (0, 1)))
    thread.join(10)
    assert drawn == [(8, 14)], "cut by the weights of the answer"


def test_the_table_of_weights_stays_short() -> None:
    bench = Bench(EACH * SIZE * 100)
    one = bench.begin()
    for number in range(100):
        bench.draw(one)
        bench.step()
        bench.dealing.freeze()
        bench.dealing.resume(RoundPlan(((0, 1 + number / 200), (1, 1 - number / 200)), (0, number + 1)))
    assert len(bench.dealing._table) <= 3
