"""The sequencer and members: who takes part, with what, and what is left when somebody dies or comes back."""

from __future__ import annotations

from typing import Any

import pytest
from sequencing import TENSORS, Bench, entries_in, only, optimizer_spec, replies_in, told_in

from polytempo.protocol.log import Drop, ForgetWorker, Reply, Seed, Setup, Update
from polytempo.protocol.messages import Departed, Held, Refused, SendSeed
from polytempo.protocol.values import PushId, TensorInfo, UpdatePart
from polytempo.sync.spec import MODES, parse_spec

every_mode = pytest.mark.parametrize("sync", [mode.example for mode in MODES.values()])


# The start.


@every_mode
def test_the_first_optimizer_makes_the_stores_and_asks_the_lowest_rank_for_values(sync: str) -> None:
    bench = Bench(sync, size=2)
    assert entries_in(bench.register(0)) == [Setup(optimizer_id="0", optimizer_spec=optimizer_spec(sync), resume=False)]
    assert told_in(bench.sequencer.register(1, 0, "1", optimizer_spec(sync), 0.0)) == [], "the lowest rank may still come"
    assert entries_in(bench.register(1)) == []
    assert [reply.worker for reply in replies_in(bench.seed(0))] == [0, 1]


def test_only_the_lowest_rank_is_asked_for_values() -> None:
    bench = Bench("bsp", size=3)
    told = [message for worker in (2, 1, 0) for message in told_in(bench.register(worker))]
    assert told == [(0, SendSeed(optimizer_id="0"))]


def test_whoever_waits_for_the_start_is_told_for_whom() -> None:
    bench = Bench("bsp", size=3)
    bench.register(0)
    bench.seed(0)
    ((worker, held),) = told_in(bench.register(2))
    assert worker == 2
    assert isinstance(held, Held)
    assert (held.exchange, held.waiting_for, held.waiting_count) == (-1, (1,), 1)


@pytest.mark.parametrize("present", [True, False], ids=["registered", "never came"])
def test_no_answer_comes_before_somebodys_first_values(present: bool) -> None:
    """The one that should have given them is lost: the next is asked."""
    bench = Bench("bsp", size=2)
    if present:
        bench.register(0)
    bench.register(1)
    assert told_in(bench.leave(0)) == [(1, SendSeed(optimizer_id="0"))]
    bench.seed(1)
    assert [type(entry) for entry in bench.entries if isinstance(entry, Seed | Reply)] == [Seed, Reply]


def test_one_that_dies_before_it_registers_is_not_waited_for_in_any_track() -> None:
    bench = Bench("bsp", size=2)
    bench.leave(1)
    bench.register(0)
    assert [reply.worker for reply in replies_in(bench.seed(0))] == [0]
    bench.register(0, "1")
    assert [reply.worker for reply in replies_in(bench.seed(0, "1"))] == [0]


def test_a_job_that_goes_on_needs_no_values_and_starts_where_it_was() -> None:
    bench = Bench("bsp", size=2, resumed={"step": 40, "tracks": {"0": {}}})
    (setup,) = entries_in(bench.register(0))
    assert isinstance(setup, Setup)
    assert setup.resume
    replies = replies_in(bench.register(1))
    assert [(reply.worker, reply.exchange, reply.step) for reply in replies] == [(0, 39, 40), (1, 39, 40)]
    bench.round()
    assert [reply.step for reply in bench.replies.values()] == [41, 41]


@pytest.mark.parametrize("again", ["register", "come back", "seed"])
def test_one_that_comes_twice_does_not_end_the_job(again: str) -> None:
    """A new life may be heard of before the death of the old one; a mistaken worker may say anything."""
    bench = Bench("bsp", size=2).start()
    if again == "register":
        bench.register(1)
    elif again == "come back":
        bench.come_back(1)
    else:
        bench.seed(1)
    bench.push(0)
    assert len(only(Seed, bench.entries)) == 1


# Everybody must make the same.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync": "ssp:2"}, "sync is 'ssp:2' at worker 1 and 'bsp' at worker 0"),
        ({"apply": "delta"}, "apply is 'delta' at worker 1 and 'server' at worker 0"),
        ({"optimizer": "Adam"}, "the optimizer is 'Adam' at worker 1 and 'SGD' at worker 0"),
        ({"clip_norm": 1.0}, "clip_norm is 1.0 at worker 1 and None at worker 0"),
        (
            {"tensors": (TENSORS[0], TensorInfo("bias", (5,), "float32", 0))},
            "the models of workers 1 (here) and 0 (there) differ: parameter 1 is bias [5] float32 in group 0 here and "
            "bias [4] float32 in group 0 there",
        ),
        (
            {"tensors": TENSORS[:1]},
            "the models of workers 1 (here) and 0 (there) differ: 1 parameters here and 2 there",
        ),
        ({"groups": ({"lr": 0.2},)}, "hyper-parameters differ: lr is 0.2 at worker 1 and 0.1 at worker 0"),
        (
            {"groups": ({"lr": 0.1, "momentum": 0.9},)},
            "hyper-parameters differ: momentum is 0.9 at worker 1 and not given at worker 0",
        ),
        ({"groups": ({},)}, "hyper-parameters differ: lr is not given at worker 1 and 0.1 at worker 0"),
    ],
)
def test_another_optimizer_is_refused_with_the_first_difference(changes: dict[str, Any], words: str) -> None:
    bench = Bench("bsp", size=2)
    bench.register(0)
    orders = bench.register(1, **changes)
    assert told_in(orders) == [(1, Refused(reason=f"{words}; all workers must make the same optimizer"))]
    assert len(orders) == 1
    bench.register(1)
    assert [reply.worker for reply in replies_in(bench.seed(0))] == [0, 1], "the right one is still taken"


def test_without_a_barrier_hyperparameters_may_differ() -> None:
    bench = Bench("asp", size=2)
    bench.register(0)
    bench.register(1, groups=({"lr": 0.2},))
    assert [reply.worker for reply in replies_in(bench.seed(0))] == [0, 1]


@pytest.mark.parametrize("sync", ["bps", "ssp", "bsp+backup:2"])
def test_a_mode_that_cannot_be_is_refused_and_leaves_nothing(sync: str) -> None:
    bench = Bench("bsp", size=2)
    ((worker, message),) = told_in(bench.register(0, sync=sync))
    assert (worker, type(message)) == (0, Refused)
    assert bench.sequencer.clocks == {}
    assert bench.entries == []


# Several optimizers.


def test_each_optimizer_has_a_clock_of_its_own() -> None:
    bench = Bench("bsp", size=2).start().start("1", sync="asp")
    bench.push(0, optimizer_id="1")
    bench.push(0, optimizer_id="1")
    bench.push(0)
    clocks = bench.sequencer.clocks
    assert (clocks["0"].version, clocks["1"].version) == (0, 2)
    assert [line.get("optimizer", "0") for line in bench.lines_of("push")] == ["1", "1", "0"]
    assert bench.replies["1", 0].step == 2
    assert bench.replies["0", 0].step == 0


def test_only_the_first_optimizers_steps_are_counted() -> None:
    bench = Bench("bsp+backup:1", size=3).start().start("1")
    for worker in (0, 1, 2):
        bench.push(worker, optimizer_id="1", computed=1.0)
    account = bench.sequencer.statistics[2]
    assert bench.lines_of("discard")[0]["optimizer"] == "1"
    assert (account.steps, account.discarded, account.computing_s) == (0, 0, 0.0)


def test_a_side_track_needs_no_values() -> None:
    bench = Bench("bsp", size=2, resumed={"step": 7, "tracks": {"0": {}}}).start("0/mean", apply="mean", optimizer="")
    assert only(Seed, bench.entries) == []
    assert [reply.step for reply in only(Reply, bench.entries)] == [0, 0], "it numbers its own steps"


def test_a_death_frees_those_who_wait_in_every_track() -> None:
    bench = Bench("bsp", size=2).start().start("1")
    bench.push(0)
    bench.push(0, optimizer_id="1")
    assert [(reply.optimizer_id, reply.worker) for reply in replies_in(bench.leave(1))] == [("0", 0), ("1", 0)]


# Deaths.


def test_a_push_that_is_at_some_shards_dies_with_its_worker() -> None:
    bench = Bench("bsp", size=2, shards=3).start()
    bench.push(0)
    bench.arrive(1, shards=[0, 2])
    entries = entries_in(bench.leave(1))
    assert entries[0] == ForgetWorker(worker=1, incarnation=0, counted=())
    (update,) = only(Update, entries)
    assert [part.id.worker for part in update.parts] == [0]
    assert [reply.worker for reply in only(Reply, entries)] == [0]
    late = entries_in(bench.arrive(1, shards=[1]))
    assert all(isinstance(entry, Drop) for entry in late)
    assert not bench.lines_of("push")[1:]


def test_what_arrives_in_full_after_the_death_is_dropped() -> None:
    bench = Bench("asp", size=2).start()
    push = bench.head(1)
    bench.leave(1)
    assert entries_in(bench.send(push)) == [Drop(id=push.id)] * 2, "whichever shard has got it"


def test_a_push_that_was_counted_survives_its_worker() -> None:
    bench = Bench("bsp", size=2).start()
    mine = PushId("0", 1, 0, 0)
    bench.push(1, samples=3.0)
    assert entries_in(bench.leave(1)) == [ForgetWorker(worker=1, incarnation=0, counted=(mine,))]
    (update, reply) = entries_in(bench.push(0))
    assert UpdatePart(mine, 3.0) in update.parts
    assert reply.worker == 0


def test_a_worker_that_comes_back_may_push_a_step_again_while_its_first_push_of_it_waits() -> None:
    """Each is found by its own, though worker and step are the same."""
    bench = Bench("bsp", size=2).start()
    bench.push(1, samples=3.0)
    bench.leave(1)
    bench.come_back(1)
    bench.push(1, samples=5.0)
    (update, *_) = entries_in(bench.push(0))
    first, again = PushId("0", 1, 0, 0), PushId("0", 1, 1, 0)
    assert [(part.id, part.samples) for part in update.parts[1:]] == [(first, 3.0), (again, 5.0)]
    assert bench.sequencer.clocks["0"].pending() == []


@every_mode
def test_said_twice_a_death_is_one(sync: str) -> None:
    bench = Bench(sync, size=2).start()
    assert bench.leave(1)
    assert bench.leave(1) == []
    assert len(bench.lines_of("leave")) == 1


def test_the_exit_status_has_the_last_word_on_who_has_finished() -> None:
    """`raise SystemExit(3)`: a worker says goodbye before its status is known."""
    bench = Bench("asp", size=3).start()
    for worker, status in ((0, "finished"), (1, "failed"), (2, "lost")):
        bench.sequencer.left(worker, 0, "finished", 1.0)
        assert bench.sequencer.left(worker, 0, status, 2.0) == []
    summary = bench.sequencer.figures.summary(3.0)
    assert [worker["state"] for worker in summary["workers"]] == ["finished", "failed", "lost"]
    bench.sequencer.left(1, 0, "finished", 4.0)
    assert bench.sequencer.statistics[1].state == "failed"


def test_a_push_of_an_earlier_life_or_of_an_unknown_optimizer_is_dropped() -> None:
    bench = Bench("asp", size=2).start()
    old = bench.head(1)
    bench.leave(1)
    bench.come_back(1)
    assert entries_in(bench.send(old)) == [Drop(id=old.id)]
    unknown = bench.head(0, 0, optimizer_id="7")
    assert entries_in(bench.send(unknown)) == [Drop(id=unknown.id)]
    assert bench.lines_of("push") == []


def test_the_death_of_an_earlier_life_is_no_death_of_the_next() -> None:
    bench = Bench("bsp", size=2).start()
    bench.leave(1)
    bench.come_back(1)
    assert bench.sequencer.left(1, 0, "lost", 1.0) == []
    bench.push(0)
    assert len(replies_in(bench.push(1))) == 2


def comes_in(bench: Bench, orders: list[Any]) -> list[Reply]:
    """The answers when one has come back: in modes whose rounds are planned it starts with the next."""
    return replies_in(orders if not parse_spec(bench.sync).capabilities.by_speed else bench.push(0))


@every_mode
def test_one_that_came_back_can_die_again(sync: str) -> None:
    bench = Bench(sync, size=2).start()
    for _ in range(3):
        bench.leave(1)
        assert [r.incarnation for r in comes_in(bench, bench.come_back(1)) if r.worker == 1] == [bench.lives[1]]
        assert bench.sequencer.statistics[1].state == "computing"
    bench.leave(1)
    assert bench.sequencer.statistics[1].state == "lost"
    assert len(bench.lines_of("leave")) == 4
    for step in range(20):
        at = None if parse_spec(sync).capabilities.by_speed else step
        assert replies_in(bench.push(0, at)), "the other goes on alone"


def test_the_refused_push_of_a_new_life_is_not_that_of_the_old_one() -> None:
    bench = Bench("bsp", size=3).start()
    bench.push(1, samples=5.0)
    bench.leave(1)
    bench.come_back(1)
    (drop,) = entries_in(bench.push(1, hyper=({"lr": 0.7},)))
    assert drop == Drop(id=PushId("0", 1, 1, 0))
    bench.leave(1)
    bench.push(0)
    bench.push(2)
    (update,) = only(Update, bench.entries)
    assert UpdatePart(PushId("0", 1, 0, 0), 5.0) in update.parts


@every_mode
def test_a_worker_that_comes_back_before_its_death_was_reported_has_left_first(sync: str) -> None:
    bench = Bench(sync, size=2)
    for worker in (0, 1):
        bench.register(worker)
    bench.seed(0)
    orders = bench.sequencer.register(1, 1, "0", optimizer_spec(sync), 5.0)
    assert only(ForgetWorker, entries_in(orders)) == [ForgetWorker(worker=1, incarnation=0, counted=())]
    assert [r.incarnation for r in comes_in(bench, bench.take(orders)) if r.worker == 1] == [1]
    assert bench.sequencer.left(1, 0, "lost", 6.0) == [], "the late report is about the earlier life"
    assert 1 in bench.sequencer.clocks["0"].policy.members


# Where values stay with the workers.


def with_peers() -> Bench:
    bench = Bench("bsp", size=3)
    for worker in range(3):
        bench.sequencer.register(worker, 0, "0", optimizer_spec("bsp", apply="peers"), 0.0)
    return bench


def test_the_answer_at_the_start_says_who_takes_part() -> None:
    assert [reply.members for reply in replies_in(with_peers().seed(0))] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("reason", ["finished", "lost"])
def test_the_others_are_told_when_a_peer_is_gone(reason: str) -> None:
    bench = with_peers()
    bench.seed(0)
    told = told_in(bench.sequencer.left(1, 0, reason, 1.0))
    assert [item for item in told if isinstance(item[1], Departed)] == [(w, Departed(worker=1)) for w in (0, 2)]


def test_where_servers_hold_the_values_nobody_need_be_told() -> None:
    bench = Bench("asp", size=2)
    for worker in range(2):
        bench.register(worker)
    bench.seed(0)
    assert not [message for _, message in told_in(bench.sequencer.left(1, 0, "lost", 1.0)) if isinstance(message, Departed)]
