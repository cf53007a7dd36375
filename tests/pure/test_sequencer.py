"""The sequencer and pushes: counted once when all shards have them, answered at one place of the log."""

from __future__ import annotations

from itertools import permutations

import pytest
from sequencing import Bench, entries_in, only, replies_in, told_in

from polytempo.protocol.log import Drop, LoadState, ReadHere, Reply, Seed, Update
from polytempo.protocol.messages import Held, MetricReport, ReadRequest, Refused
from polytempo.protocol.push import NewState, NewValues
from polytempo.protocol.values import PushId, UpdatePart
from polytempo.records.replay import replay
from polytempo.server.effects import ToShards
from polytempo.server.optimizer_clock import REMEMBERED
from polytempo.sync.fields import fields
from polytempo.sync.spec import parse_spec

# When a push counts.


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_push_counts_when_the_last_shard_has_it(order: tuple[int, ...]) -> None:
    bench = Bench("asp", size=1, shards=3).start()
    assert bench.arrive(0, shards=order[:-1]) == []
    assert bench.lines_of("push") == []
    orders = bench.arrive(0, shards=order[-1:])
    assert [type(entry) for entry in entries_in(orders)] == [Update, Reply]
    assert len(bench.lines_of("push")) == 1


def test_an_update_has_one_line_for_each_server() -> None:
    bench = Bench("asp", size=1, shards=3).start()
    bench.push(0)
    assert [line["server"] for line in bench.lines_of("apply")] == [0, 1, 2]


def test_the_same_arrival_said_twice_does_not_stand_in_for_another() -> None:
    bench = Bench("asp", size=1, shards=2).start()
    assert bench.arrive(0, shards=[0, 0, 0]) == []
    assert len(only(Update, entries_in(bench.arrive(0, shards=[1])))) == 1


def test_a_part_that_was_sent_again_completes_the_others() -> None:
    """Only the shard that lost its part gets it again: all sendings of a push have the same content."""
    bench = Bench("asp", size=1, shards=2).start()
    assert bench.arrive(0, shards=[0], attempt=0) == []
    assert only(Update, entries_in(bench.arrive(0, shards=[1], attempt=1)))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_round_is_summed_in_order_of_rank_whoever_came_first(order: tuple[int, ...]) -> None:
    bench = Bench("bsp", size=3).start()
    for worker in order:
        bench.push(worker, samples=worker + 1.0)
    (update,) = only(Update, bench.entries)
    assert update.parts == tuple(UpdatePart(PushId("0", worker, 0, 0), worker + 1.0) for worker in range(3))
    assert (update.version, update.rate, update.barrier) == (1, 1.0, True)


def test_without_a_barrier_each_push_is_an_update_at_its_share_of_the_rate() -> None:
    bench = Bench("asp", size=4).start()
    bench.round()
    updates = only(Update, bench.entries)
    assert [update.version for update in updates] == [1, 2, 3, 4]
    assert {(len(update.parts), update.rate, update.barrier) for update in updates} == {(1, 0.25, False)}


def test_an_answer_stands_behind_the_update_it_shows() -> None:
    bench = Bench("bsp", size=2).start()
    bench.round()
    kinds = [type(entry) for entry in bench.entries]
    assert kinds[-3:] == [Update, Reply, Reply]
    assert [(reply.exchange, reply.step, reply.version) for reply in only(Reply, bench.entries)[-2:]] == [(0, 1, 1)] * 2


def test_staleness_is_the_updates_since_the_values_a_push_was_made_on() -> None:
    bench = Bench("asp", size=3, shards=1).start()
    for worker in (0, 0, 1, 2, 1):
        bench.push(worker)
    assert [line["staleness"] for line in bench.lines_of("apply")] == [[0], [0], [2], [3], [1]]
    assert [reply.staleness for reply in only(Reply, bench.entries)[3:]] == [0, 0, 2, 3, 1]
    statistics = bench.sequencer.statistics
    assert [(a.staleness_sum, a.staleness_max) for a in statistics] == [(0, 0), (3, 2), (3, 3)]


def test_the_time_a_worker_was_held_is_told_with_its_answer() -> None:
    bench = Bench("bsp", size=2).start()
    bench.now = 10.0
    bench.push(0)
    bench.now = 12.5
    waited = {reply.worker: reply.waited for reply in replies_in(bench.push(1))}
    assert waited == {0: 2.5, 1: 0.0}


# Repeats.


def test_a_repeat_of_a_held_push_waits_and_is_answered_once() -> None:
    bench = Bench("bsp", size=2).start()
    bench.push(0)
    assert bench.push(0, attempt=1) == []
    assert bench.push(0, attempt=2) == []
    assert [reply.worker for reply in replies_in(bench.push(1))] == [0, 1]
    assert len(bench.lines_of("push")) == 2
    assert [len(update.parts) for update in only(Update, bench.entries)] == [2]


def test_a_repeat_of_an_answered_push_is_answered_again_and_changes_nothing() -> None:
    bench = Bench("asp", size=2).start()
    first = bench.head(0)
    bench.send(first)
    bench.push(1)
    lines = len(bench.lines)
    orders = bench.push(0, 0, attempt=1)
    (order,) = orders
    assert isinstance(order, ToShards)
    reply = order.entry
    assert isinstance(reply, Reply)
    assert (reply.exchange, reply.step, reply.version) == (0, 1, 2), "at a new place of the log"
    assert reply.place > max(entry.place for entry in only(Reply, bench.entries[:-1]))
    assert len(bench.lines) == lines
    assert bench.sequencer.statistics[0].steps == 1


def test_a_repeat_also_counts_only_with_all_its_parts() -> None:
    bench = Bench("asp", size=1, shards=2).start()
    bench.push(0)
    assert bench.arrive(0, 0, shards=[1], attempt=1) == []
    assert replies_in(bench.arrive(0, 0, shards=[0], attempt=1))


def test_under_delay_a_repeat_of_an_earlier_push_is_answered_as_that_push() -> None:
    """Its worker has several under way and waits for each by its number."""
    bench = Bench("delay:2", size=1).start()
    for step in range(3):
        bench.push(0, step)
    (reply,) = replies_in(bench.push(0, 1, attempt=1))
    assert reply.exchange == 1
    assert reply.step >= 4, "and nothing that was allowed is taken back"


def test_under_delay_a_push_that_overtakes_one_that_was_lost_is_not_refused() -> None:
    bench = Bench("delay:2", size=1, shards=2).start()
    bench.arrive(0, 0, shards=[0])
    assert told_in(bench.push(0, 1)) == []
    bench.push(0, 0, attempt=1)
    bench.push(0, 1, attempt=1)
    assert [[part.id.step for part in update.parts] for update in only(Update, bench.entries)] == [[0], [1]]


def test_a_push_out_of_turn_is_dropped_refused_and_not_counted() -> None:
    bench = Bench("asp", size=1).start()
    orders = bench.push(0, 5)
    assert entries_in(orders) == [Drop(id=PushId("0", 0, 0, 5))]
    ((worker, message),) = told_in(orders)
    assert worker == 0
    assert isinstance(message, Refused)
    assert "worker 0 pushed step 5; its next step is 0" in message.reason
    assert bench.sequencer.statistics[0].steps == 0
    assert bench.lines_of("push") == []
    assert only(Update, entries_in(bench.push(0, 0))), "the step that was its turn still is"


def test_a_push_with_other_hyperparameters_is_dropped_refused_and_not_counted() -> None:
    bench = Bench("bsp", size=2).start()
    bench.push(0)
    orders = bench.push(1, hyper=({"lr": 0.5},))
    assert entries_in(orders) == [Drop(id=PushId("0", 1, 0, 0))]
    assert [type(message) for _, message in told_in(orders)] == [Refused]
    assert [account.steps for account in bench.sequencer.statistics] == [1, 0]
    assert [line["kind"] for line in bench.lines][-2:] == ["push", "refuse"]


def test_a_late_push_is_dropped_and_its_worker_goes_on_where_the_job_is() -> None:
    bench = Bench("bsp+backup:1", size=3).start()
    for _ in range(2):
        bench.push(0)
        bench.push(1)
    orders = bench.push(2, 0)
    drop, reply = entries_in(orders)
    assert drop == Drop(id=PushId("0", 2, 0, 0))
    assert (reply.exchange, reply.step, reply.version) == (0, 2, 2)
    assert bench.sequencer.statistics[2].discarded == 1


# Other kinds of push.

STATE = NewState(state=b"")


def test_the_optimizers_state_is_loaded_at_one_place_of_the_log() -> None:
    bench = Bench("asp", size=1).start()
    identity = PushId("0", 0, 0, -2)
    assert entries_in(bench.push(0, -2, body=STATE, attempt=2)) == [LoadState(id=identity, place=2)]
    assert entries_in(bench.push(0, -2, body=STATE, attempt=3)) == [LoadState(id=identity, place=3, again=True)]
    assert bench.sequencer.statistics[0].steps == 0


def state_of(digest: bytes) -> NewState:
    return NewState(state=b"", digest=digest)


def values_of(digest: bytes) -> NewValues:
    return NewValues(digest=digest)


def loads_of(bench: Bench, *given: tuple[int, int, NewState | NewValues]) -> list[bool]:
    """Worker, number and what it gives, of each load; was it taken?"""
    entries = [only(LoadState, entries_in(bench.push(worker, number, body=body))) for worker, number, body in given]
    return [not entry.again for (entry,) in entries]


def test_what_several_workers_load_alike_as_their_nth_is_loaded_once() -> None:
    bench = Bench("asp", size=3).start()
    assert loads_of(bench, (0, -2, state_of(b"a"))) == [True]
    bench.push(0, 0)
    assert loads_of(bench, (1, -2, state_of(b"a")), (2, -2, state_of(b"other"))) == [
        False,
        True,
    ]
    assert loads_of(bench, (0, -3, values_of(b"v")), (0, -4, state_of(b"a"))) == [
        True,
        True,
    ]  # back to it, with intent
    assert loads_of(bench, (1, -3, state_of(b"a")), (1, -4, values_of(b"v"))) == [False, False]


def test_in_rounds_the_values_of_all_are_taken() -> None:
    bench = Bench("bsp", size=2).start()
    assert loads_of(bench, (0, -2, values_of(b"v")), (1, -2, values_of(b"v"))) == [True, True]
    assert loads_of(bench, (0, -3, state_of(b"s")), (1, -3, state_of(b"s"))) == [
        True,
        False,
    ]


def test_few_loads_are_remembered() -> None:
    bench = Bench("asp", size=2).start()
    for number in range(-2, -2 * REMEMBERED, -1):
        assert loads_of(bench, (0, number, state_of(b"s"))) == [True]
    assert len(bench.sequencer.clocks["0"]._loaded) == REMEMBERED


def test_the_first_values_come_before_every_answer() -> None:
    bench = Bench("bsp", size=3).start()
    kinds = [type(entry) for entry in bench.entries]
    assert kinds.index(Seed) < kinds.index(Reply)
    assert kinds.count(Seed) == 1
    assert [(r.worker, r.exchange, r.step, r.version) for r in only(Reply, bench.entries)] == [
        (w, -1, 0, 0) for w in range(3)
    ]


# Questions.


def test_whoever_asks_while_it_is_held_hears_for_whom() -> None:
    bench = Bench("bsp", size=3).start()
    bench.push(0)
    bench.push(2)
    (told,) = told_in(bench.sequencer.ask(PushId("0", 0, 0, 0)))
    assert told[0] == 0
    assert isinstance(told[1], Held)
    assert (told[1].optimizer_id, told[1].exchange, told[1].waiting_for, told[1].waiting_count) == ("0", 0, (1,), 1)


def test_whoever_asks_for_what_is_on_its_way_is_never_told_to_send_it_again() -> None:
    bench = Bench("bsp", size=2).start()
    mine = PushId("0", 0, 0, 0)
    bench.arrive(0, shards=[0])
    assert bench.sequencer.ask(mine) == [], "a part is still under way, or the shard that lacks it will say so"
    bench.arrive(0, shards=[1])
    bench.push(1)
    assert bench.sequencer.ask(mine) == [], "the answer is on its way"


def test_an_answer_that_was_lost_is_given_again_once_from_a_new_place() -> None:
    bench = Bench("asp", size=2).start()
    mine = PushId("0", 0, 0, 0)
    assert bench.sequencer.repeat(mine, 0) == [], "it was not answered yet"
    (first,) = replies_in(bench.push(0))
    bench.push(1)
    (again,) = replies_in(bench.sequencer.repeat(mine, first.place))
    assert (again.exchange, again.step, again.version) == (0, 1, 2)
    assert again.place > first.place
    assert bench.sequencer.repeat(mine, first.place) == [], "that it was lost is said by each shard"
    assert replies_in(bench.sequencer.repeat(mine, again.place))


def test_an_answer_to_a_loaded_state_is_given_again_without_loading_it_again() -> None:
    bench = Bench("asp", size=1).start()
    mine = PushId("0", 0, 0, -2)
    (load,) = entries_in(bench.push(0, -2, body=STATE))
    (again,) = entries_in(bench.sequencer.repeat(mine, load.place))
    assert isinstance(again, LoadState)
    assert again.again
    assert again.place > load.place


def test_under_delay_a_lost_answer_to_an_earlier_push_is_given_again() -> None:
    bench = Bench("delay:2", size=1).start()
    places = {step: replies_in(bench.push(0, step))[-1].place for step in range(3)}
    (again,) = replies_in(bench.sequencer.repeat(PushId("0", 0, 0, 1), places[1]))
    assert again.exchange == 1


def test_a_question_of_nobody_or_about_nothing_has_no_answer() -> None:
    bench = Bench("bsp", size=2).start()
    bench.leave(1)
    assert bench.sequencer.ask(PushId("0", 1, 0, 0)) == []
    assert bench.sequencer.ask(PushId("7", 0, 0, 0)) == []


def test_a_read_is_one_entry_of_the_log() -> None:
    bench = Bench("asp", size=2).start()
    request = ReadRequest(optimizer_id="0", worker=1, request=4, what="state")
    assert entries_in(bench.sequencer.read(request)) == [ReadHere(optimizer_id="0", worker=1, request=4, what="state")]


def test_what_does_not_exist_cannot_be_read() -> None:
    bench = Bench("asp", size=2).start()
    orders = bench.sequencer.read(ReadRequest(optimizer_id="7", worker=1, request=4, what="params"))
    assert told_in(orders) == [(1, Refused(reason="there is no optimizer 7 to read"))]
    assert entries_in(orders) == []


def test_a_figure_cannot_pass_for_anything_else_in_the_record() -> None:
    bench = Bench("asp", size=2).start()
    forged: dict[str, float | int | str] = {"kind": "push", "t": -1.0, "worker": 0, "step": 0, "loss": 0.5}
    bench.take(bench.sequencer.metric(MetricReport(worker=1, values=forged), 5.0))
    line = bench.lines[-1]
    assert (line["t"], line["kind"], line["worker"]) == (5.0, "metric", 1)


def test_a_tick_that_changed_what_is_decided_later_is_in_the_record() -> None:
    bench = Bench("every:2,wait=1", size=3, shards=1).start()
    for moment in (1.0, 2.0):
        bench.now = moment
        bench.push(0)
    bench.leave(0)  # the one that was held is gone; its barrier is opened all the same
    bench.now = max(bench.wakes)
    bench.take(bench.sequencer.tick(bench.now))
    bench.push(1)
    bench.push(1)
    replay(bench.lines, parse_spec(bench.sync).policy(3))


def test_measures_that_the_mode_does_not_declare_are_refused() -> None:
    """They are dropped, and the worker is told; the policy hears nothing of the push."""
    bench = Bench("asp").start()
    lines = len(bench.lines)
    effects = bench.push(0, fields=fields(drift=1.0))
    assert [entry.id.worker for entry in only(Drop, entries_in(effects))] == [0]
    ((worker, told),) = told_in(effects)
    assert (worker, type(told)) == (0, Refused)
    assert told.reason == "a push was refused: it measures a field 'drift' that it does not declare (declared: none)"
    assert len(bench.lines) == lines
