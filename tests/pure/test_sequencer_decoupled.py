"""Decoupled DiLoCo in front of the sequencer: several fragments' clocks, pushes that wait for a merge, what is counted."""

from __future__ import annotations

import pytest
from sequencing import Bench, entries_in, only, replies_in, told_in

from polytempo.protocol.log import Drop, ForgetWorker, Update
from polytempo.protocol.messages import Held
from polytempo.protocol.values import Position, PushId
from polytempo.server.effects import Effect
from polytempo.server.job_plan import Limits

GRACE = "diloco:4,quorum=2,grace=1"


def updates(orders: list[Effect]) -> list[list[tuple[int, float]]]:
    """The workers and weights of each update."""
    return [[(part.id.worker, part.samples) for part in update.parts] for update in only(Update, entries_in(orders))]


def block(bench: Bench, worker: int, count: int = 4, samples: float = 8.0, **fields: object) -> list[Effect]:
    return bench.push(worker, count=count, samples=samples, **fields)


def test_a_merge_is_made_by_the_clock_and_answers_all_of_it() -> None:
    bench = Bench(GRACE, size=3).start()
    assert entries_in(block(bench, 0)) == []
    bench.now = 2.0
    assert entries_in(block(bench, 1)) == []
    assert bench.wakes == [3.0]
    bench.now = 3.0
    orders = bench.take(bench.sequencer.tick(3.0))
    assert updates(orders) == [[(0, 8.0), (1, 8.0)]]
    assert [(reply.worker, reply.step, reply.directive.period, reply.version) for reply in replies_in(orders)] == [
        (0, 1, 4, 1),
        (1, 1, 4, 1),
    ]


def test_weights_are_samples_squared_by_steps() -> None:
    bench = Bench("diloco:4,quorum=2,grace=0", size=2).start()
    block(bench, 0, count=4, samples=32.0)
    assert updates(block(bench, 1, count=8, samples=32.0)) == [[(0, 32.0), (1, 16.0)]]


def test_a_worker_that_asks_is_told_for_which_ranks_its_push_waits() -> None:
    bench = Bench(GRACE, size=3).start()
    block(bench, 2)
    ((worker, held),) = told_in(bench.sequencer.ask(PushId("0", 2, 0, 0)))
    assert worker == 2
    assert isinstance(held, Held)
    assert (held.waiting_for, held.waiting_count) == ((0, 1), 2)
    assert held.reason == "the merge has pushes of 1 worker, its quorum is 2"


def test_a_repeated_push_is_in_one_merge_and_a_lost_answer_is_given_again() -> None:
    bench = Bench("diloco:4,quorum=2,grace=0", size=3).start()
    block(bench, 0)
    assert entries_in(bench.send(bench.head(0, 0, count=4))) == []  # it is pending
    orders = block(bench, 1)
    assert updates(orders) == [[(0, 8.0), (1, 8.0)]]
    again = bench.send(bench.head(0, 0, count=4))
    assert updates(again) == []
    assert [reply.worker for reply in replies_in(again)] == [0]


def test_a_push_of_a_worker_that_dies_is_kept_for_its_merge() -> None:
    bench = Bench("diloco:4,quorum=2,grace=0", size=3).start()
    block(bench, 0)
    (forget,) = only(ForgetWorker, entries_in(bench.leave(0)))
    assert forget.counted == (PushId("0", 0, 0, 0),)
    assert updates(block(bench, 1)) == [[(0, 8.0), (1, 8.0)]]


def test_a_part_of_a_push_dies_with_its_worker() -> None:
    bench = Bench("diloco:4,quorum=2,grace=0", size=3).start()
    bench.arrive(0, shards=[0], count=4)
    bench.leave(0)
    assert updates(block(bench, 1)) == []


def test_one_that_comes_back_answers_for_its_new_life_alone() -> None:
    bench = Bench("diloco:4,quorum=3,grace=0", size=3).start()
    block(bench, 0)
    bench.come_back(0)
    block(bench, 0)
    block(bench, 1)
    orders = block(bench, 2)
    assert updates(orders) == [[(0, 8.0), (0, 8.0), (1, 8.0), (2, 8.0)]]
    assert [(reply.worker, reply.incarnation) for reply in replies_in(orders)] == [(0, 1), (1, 0), (2, 0)]


def test_what_is_too_old_is_dropped_counted_as_wasted_and_answered() -> None:
    bench = Bench("diloco:4,quorum=1,grace=0,drop=0", size=2).start()
    block(bench, 0, computed=1.0)
    bench.now = 10.0
    orders = block(bench, 1, computed=3.0)
    assert [entry.id.worker for entry in only(Drop, entries_in(orders))] == [1]
    assert [(reply.worker, reply.step, reply.version) for reply in replies_in(orders)] == [(1, 1, 1)]
    stats = bench.sequencer.statistics[1]
    assert (stats.steps, stats.discarded, stats.samples, stats.wasted_s) == (0, 1, 0, 3.0)
    assert bench.sequencer.budget.steps == 4
    summary = bench.sequencer.figures.summary(10.0)
    assert (summary["steps"], summary["discarded"]) == (4, 1)
    assert summary["efficiency"] == pytest.approx(1.0 / 20.0)  # one useful second of twice ten


def test_the_first_fragment_counts_steps_and_samples_and_the_others_do_not() -> None:
    bench = Bench("diloco:4,quorum=1,grace=0,fragments=2", size=2, limits=Limits(steps=8)).start()
    bench.start("1")
    for optimizer_id in ("0", "1"):
        bench.push(0, optimizer_id=optimizer_id, count=4, samples=8.0, computed=1.0)
    assert bench.sequencer.budget.steps == 4
    assert (bench.sequencer.statistics[0].steps, bench.sequencer.statistics[0].computing_s) == (4, 1.0)
    assert [clock.version for clock in bench.sequencer.clocks.values()] == [1, 1]
    (reply,) = replies_in(bench.push(1, count=4, samples=8.0))
    assert reply.stop
    assert not bench.sequencer.clocks["1"].slots[1].stop  # it learns it with its next answer there


def test_fragments_are_merged_apart_and_one_wake_ticks_the_clock_it_is_for() -> None:
    bench = Bench(f"{GRACE},fragments=2", size=3).start()
    bench.start("1")
    block(bench, 0)
    block(bench, 1)
    bench.now = 0.5
    for worker in (0, 1):
        bench.push(worker, optimizer_id="1", count=4, samples=8.0)
    assert bench.wakes == [1.0, 1.5]
    bench.now = 1.0
    assert [update.optimizer_id for update in only(Update, entries_in(bench.take(bench.sequencer.tick(1.0))))] == ["0"]
    assert [line for line in bench.lines if line["kind"] == "tick"] == [{"t": 1.0, "kind": "tick"}]
    orders = bench.take(bench.sequencer.tick(1.5))
    assert [update.optimizer_id for update in only(Update, entries_in(orders))] == ["1"]


def test_a_checkpoint_counts_what_is_merged_and_a_job_goes_on_from_there() -> None:
    bench = Bench("diloco:4,quorum=2,grace=0", size=3, checkpoint_every=1).start()
    place = lambda taken: (Position(sampler="", epoch=0, taken=taken),)  # noqa: E731
    block(bench, 0, positions=place(32))
    block(bench, 1, positions=place(32))
    block(bench, 0, positions=place(64))  # waits for a merge
    block(bench, 2, positions=place(32))  # merged with it: all workers have made a block
    (saved,) = bench.checkpoints
    assert (saved.manifest["step"], saved.manifest["exchange"]) == (4, 1)
    assert (saved.manifest["steps"], saved.manifest["samples"]) == (16, 32.0)
    block(bench, 1, positions=place(64))
    manifest = bench.sequencer.checkpoints.now()
    assert manifest is not None
    assert manifest.manifest["steps"] == 16  # the last push is in no merge
    assert manifest.manifest["positions"][0]["taken"] == [64, 32, 32]
    again = Bench("diloco:4,quorum=2,grace=0", size=3, resumed=saved.manifest).start()
    assert {reply.step for reply in again.replies.values()} == {1}


def test_when_all_have_left_nothing_is_pending() -> None:
    bench = Bench("diloco:4,quorum=3,grace=100", size=3).start()
    block(bench, 0)
    for worker in (0, 1):
        bench.leave(worker, "finished")
    assert updates(bench.leave(2, "finished")) == [[(0, 8.0)]]
    assert bench.sequencer.clocks["0"].pending() == []
