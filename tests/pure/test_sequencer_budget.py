"""The sequencer's budget, checkpoints and figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sequencing import Bench, entries_in, only, replies_in

from polytempo.errors import UsageError
from polytempo.protocol.log import Reply, Save, Update
from polytempo.protocol.values import Position
from polytempo.server.effects import Checkpoint
from polytempo.server.job_plan import Limits
from polytempo.sync.epoch_parts import WHOLE, epoch_to_go_on_with
from polytempo.sync.spec import parse_spec

LIMITS = {
    "steps": Limits(steps=7),
    "samples": Limits(samples=7 * 16),
    "seconds": Limits(seconds=2.5),
}


def stops(bench: Bench) -> list[tuple[int, int, bool]]:
    return [(reply.worker, reply.exchange, reply.stop) for reply in only(Reply, bench.entries)]


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_under_bsp_everybody_stops_after_the_same_round(limits: Limits, order: tuple[int, ...]) -> None:
    """The budget is used up within the third round: it ends with that round, for all."""
    bench = Bench("bsp", size=3, limits=limits).start()
    for _ in range(3):
        for worker in order:
            bench.now += 0.32
            bench.push(worker, samples=16.0)
    last: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for worker, exchange, stop in stops(bench):
        last[stop].add((worker, exchange))
    assert last[True] == {(worker, 2) for worker in range(3)}
    assert last[False] == {(worker, exchange) for worker in range(3) for exchange in (-1, 0, 1)}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_without_a_barrier_everybody_stops_at_its_next_answer(limits: Limits) -> None:
    bench = Bench("asp", size=2, limits=limits).start()
    for _ in range(7):
        bench.now += 0.4
        bench.push(0, samples=16.0)
    assert [stop for worker, _, stop in stops(bench) if worker == 0][-1] is True
    assert replies_in(bench.push(1))[0].stop


def test_a_repeat_is_told_what_the_first_answer_told() -> None:
    """Else one worker of a barrier mode would leave a round before the others."""
    bench = Bench("bsp", size=2, limits=Limits(steps=3)).start()
    bench.round()
    bench.push(0)  # the budget is used up; the round is not
    (again,) = replies_in(bench.push(1, 0, attempt=1))
    assert not again.stop
    assert {reply.stop for reply in replies_in(bench.push(1, 1))} == {True}


def test_without_limits_nothing_stops() -> None:
    bench = Bench("bsp", size=2).start()
    for _ in range(50):
        bench.now += 1e6
        bench.round(samples=1e9)
    assert not any(stop for _, _, stop in stops(bench))
    assert bench.sequencer.budget.used(bench.now) == 0.0


def test_the_budget_goes_on_from_a_checkpoint() -> None:
    resumed = {"step": 10, "steps": 20, "samples": 320.0, "tracks": {"0": {}}}
    bench = Bench("bsp", size=2, limits=Limits(steps=24), resumed=resumed).start()
    bench.round()
    assert not bench.replies["0", 0].stop
    bench.round()
    assert bench.replies["0", 0].stop
    assert bench.replies["0", 1].stop


def test_seconds_are_counted_from_the_first_step() -> None:
    bench = Bench("asp", size=1, limits=Limits(seconds=10.0))
    bench.now = 1000.0
    bench.start()
    bench.now = 1005.0
    assert bench.sequencer.budget.used(bench.now) == 0.5
    assert not replies_in(bench.push(0))[0].stop
    bench.now = 1010.0
    assert replies_in(bench.push(0))[0].stop


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"samples": -1}, {"seconds": 0.0}, {"seconds": math.nan}, {"steps": math.nan}]
)
def test_a_budget_of_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected a budget above 0"):
        Limits(**wrong)


def test_steps_of_other_optimizers_use_up_nothing() -> None:
    bench = Bench("asp", size=1, limits=Limits(steps=5)).start().start("1")
    for _ in range(9):
        bench.push(0, optimizer_id="1", samples=100.0)
    assert bench.sequencer.budget.used(0.0) == 0.0


# Checkpoints.


@pytest.mark.parametrize("sync", ["bsp", "ssp:4", "asp"])
def test_a_checkpoint_is_ordered_each_k_steps_of_the_slowest(sync: str) -> None:
    bench = Bench(sync, size=2, checkpoint_every=3).start()
    for _ in range(10):
        bench.round()
    assert [save.name for save in only(Save, bench.entries)] == ["step-00000003", "step-00000006", "step-00000009"]
    assert [checkpoint.name for checkpoint in bench.checkpoints] == [save.name for save in only(Save, bench.entries)]
    assert [line["step"] for line in bench.lines_of("checkpoint")] == [3, 6, 9]


@pytest.mark.parametrize(
    ("sync", "counts", "steps"),
    [
        ("local:4", (4, 4), [12, 20, 32]),
        ("adacomm:4", (4, 4), [12, 20, 32]),
        ("diloco:4", (4, 4), [12, 20, 32]),
        ("diloco:4,quorum=2,grace=0", (4, 4), [12, 20, 32]),
        ("local:4", (4, 3), [12, 21, 30]),
        ("downpour:push=4,fetch=2", (4, 4), [12, 20, 32]),
        ("bsp+balance,micro=4", (5, 3), [12, 21, 30]),
        ("anytime:2", (6, 4), [12, 20, 32]),
        ("bsp+backup:1", (1, 1), [10, 20, 30]),
        ("every:4", (1, 1), [10, 20, 30]),
        ("delay:2", (1, 1), [10, 20, 30]),
        ("gossip:ring", (1, 1), [10, 20, 30]),
        ("adpsgd:ring", (1, 1), [10, 20, 30]),
    ],
)
def test_steps_are_those_of_the_optimizer_in_every_mode(sync: str, counts: tuple[int, int], steps: list[int]) -> None:
    """A push may hold several: a checkpoint is made at the end of the block or round in which its step is."""
    bench = Bench(sync, size=2, checkpoint_every=10).start()
    for number in range(-(-steps[-1] // min(counts))):
        for worker, count in enumerate(counts):
            bench.push(worker, number, count=count, samples=1.0)
    assert [checkpoint.manifest["step"] for checkpoint in bench.checkpoints] == steps
    assert [line["step"] for line in bench.lines_of("checkpoint")] == steps
    each = min(counts)
    assert [checkpoint.manifest["exchange"] * each for checkpoint in bench.checkpoints] == steps
    if parse_spec(sync).gossip is not None:
        return  # models at the workers are in no checkpoint
    resumed: dict[str, Any] = {"sync": sync, "tracks": {"0": {}}, "step": steps[0], "exchange": steps[0] // each}
    again = Bench(sync, size=2, checkpoint_every=10, resumed=resumed).start()
    for number in range(-(-10 // min(counts))):
        for worker, count in enumerate(counts):
            again.push(worker, resumed["exchange"] + number, count=count, samples=1.0)
    assert again.checkpoints[0].manifest["step"] == steps[1]
    assert again.checkpoints[0].manifest["exchange"] == steps[1] // each


def test_in_another_mode_the_numbers_of_pushes_go_on_from_the_step() -> None:
    resumed = {"sync": "local:4", "tracks": {"0": {}}, "step": 12, "exchange": 3}
    bench = Bench("bsp", size=2, checkpoint_every=10, resumed=resumed).start()
    assert [bench.head(worker).id.step for worker in (0, 1)] == [12, 12]


def test_a_worker_that_joins_has_made_the_steps_of_the_slowest() -> None:
    bench = Bench("downpour:push=4,fetch=2", size=2, checkpoint_every=10).start()
    for number in range(2):
        bench.push(0, number, count=4), bench.push(1, number, count=4)
    bench.leave(1)
    bench.push(0, 2, count=4)
    assert [checkpoint.manifest["step"] for checkpoint in bench.checkpoints] == [12]
    bench.come_back(1)
    bench.push(0, 3, count=4), bench.push(0, 4, count=4)
    assert len(bench.checkpoints) == 1, "the other has made none since"
    bench.push(1, 3, count=4), bench.push(1, 4, count=4)
    assert [checkpoint.manifest["step"] for checkpoint in bench.checkpoints] == [12, 20]


def test_the_fast_one_alone_makes_no_checkpoint() -> None:
    bench = Bench("asp", size=2, checkpoint_every=2).start()
    for _ in range(9):
        bench.push(0)
    assert bench.checkpoints == []
    bench.push(1)
    (save,) = only(Save, entries_in(bench.push(1)))
    assert save.name == "step-00000002"


def test_a_checkpoint_stands_behind_the_update_that_completes_its_step() -> None:
    bench = Bench("bsp", size=2, checkpoint_every=2).start()
    bench.round()
    orders = bench.round()
    kinds = [type(entry) for entry in entries_in(orders)]
    assert kinds == [Update, Reply, Reply, Save]
    assert len(only(Checkpoint, orders)) == 1


def test_a_job_that_goes_on_counts_checkpoints_from_where_it_was() -> None:
    bench = Bench("bsp", size=1, checkpoint_every=4, resumed={"step": 6, "tracks": {"0": {}}}).start()
    for _ in range(7):
        bench.round()
    assert [line["step"] for line in bench.lines_of("checkpoint")] == [8, 12]


def test_steps_of_other_optimizers_make_no_checkpoint() -> None:
    bench = Bench("asp", size=1, checkpoint_every=2).start().start("1")
    for _ in range(6):
        bench.push(0, optimizer_id="1")
    assert bench.checkpoints == []


def test_the_manifest_says_what_a_job_needs_to_go_on() -> None:
    bench = Bench("ssp:9", size=2, checkpoint_every=2).start()
    bench.push(0, samples=8.0, positions=(Position(1, 24),))
    bench.push(0, samples=8.0, positions=(Position(1, 32),))
    bench.push(0, samples=8.0, positions=(Position(1, 40),))
    bench.push(1, samples=4.0, positions=(Position(0, 90),))
    bench.push(1, samples=4.0, positions=(Position(1, 4),))
    (checkpoint,) = bench.checkpoints
    manifest = checkpoint.manifest
    assert {key: manifest[key] for key in ("step", "steps", "samples", "size", "sync", "clocks")} == {
        "step": 2,
        "steps": 5,
        "samples": 32.0,
        "size": 2,
        "sync": "ssp:9",
        "clocks": {"0": 3, "1": 2},
    }
    assert manifest["positions"] == [{"sampler": "", "epoch": 1, "size": 2, "taken": [40, 4]}]
    assert manifest["tracks"]["0"]["version"] == 5
    assert manifest["tracks"]["0"]["proposal"]["tensors"][1] == ["bias", [4], "float32", 0]


def test_of_a_worker_that_is_epochs_behind_no_share_is_left_out() -> None:
    bench = Bench("asp", size=2).start()
    bench.push(0, positions=(Position(2, 16),))
    bench.push(1, positions=(Position(0, 48),))
    parts = bench.sequencer.checkpoints.manifest(1, 1)["positions"]
    taken = {0: [WHOLE, 48], 1: [WHOLE, 0], 2: [16, 0]}
    assert parts == [{"sampler": "", "epoch": epoch, "size": 2, "taken": counts} for epoch, counts in taken.items()]
    assert epoch_to_go_on_with(parts) == 0


def test_the_shares_of_a_lost_worker_are_not_made_up_for_but_those_of_an_interrupted_one_are() -> None:
    for interrupted in (False, True):
        bench = Bench("asp", size=2).start()
        bench.push(0, positions=(Position(2, 16),))
        bench.push(1, positions=(Position(1, 48),))
        if interrupted:
            bench.sequencer.ends_early()
            bench.push(0, positions=(Position(2, 32),))  # it came too late
        bench.leave(1, "lost")
        found = [(part["epoch"], part["taken"]) for part in bench.sequencer.checkpoints.manifest(1, 1)["positions"]]
        assert found == ([(1, [WHOLE, 48]), (2, [16, 0])] if interrupted else [(2, [16, 0])])


def test_positions_of_the_jobs_before_stay_while_their_epoch_lasts() -> None:
    before = [{"epoch": 0, "size": 4, "taken": [9, 9, 9, 9]}, {"epoch": 1, "size": 3, "taken": [5, 5, 5]}]
    bench = Bench("asp", size=2, resumed={"positions": before, "tracks": {"0": {}}}).start()
    assert bench.sequencer.checkpoints.manifest(0, 0)["positions"] == before
    bench.push(0, positions=(Position(1, 2),))
    assert bench.sequencer.checkpoints.manifest(0, 0)["positions"] == [
        before[1],
        {"sampler": "", "epoch": 1, "size": 2, "taken": [2, 0]},
    ]
    bench.push(0, positions=(Position(2, 2),))
    assert bench.sequencer.checkpoints.manifest(0, 0)["positions"] == [
        {"sampler": "", "epoch": 2, "size": 2, "taken": [2, 0]}
    ]


def test_side_tracks_are_not_saved() -> None:
    bench = Bench("bsp", size=1).start().start("0/mean", apply="mean", optimizer="")
    assert list(bench.sequencer.checkpoints.manifest(0, 0)["tracks"]) == ["0"]


def test_the_last_checkpoint_is_named_after_the_furthest_step() -> None:
    bench = Bench("asp", size=2).start()
    for worker in (0, 0, 0, 1):
        bench.push(worker)
    assert bench.sequencer.checkpoints.at_the_end().name == "step-00000003"


# Figures.


def test_discarded_computing_is_not_counted_as_useful() -> None:
    bench = Bench("bsp+backup:1", size=3).start()
    bench.now = 10.0
    for worker in (0, 1, 2):
        bench.push(worker, computed=10.0)
    summary = bench.sequencer.figures.summary(10.0)
    assert (summary["steps"], summary["discarded"], summary["updates"]) == (2, 1, 1), "a step is one that was applied"
    assert summary["efficiency"] == pytest.approx(2 / 3)


def test_the_status_shows_who_waits_for_whom_and_since_when() -> None:
    bench = Bench("bsp", size=2, limits=Limits(steps=10)).start()
    bench.now = 4.0
    bench.push(0, samples=16.0)
    status = bench.sequencer.figures.status(6.0)
    assert (status.seconds, status.used) == (6.0, 0.1)
    first, second = status.workers
    assert (first.state, first.waiting_for, first.waited_s, first.present_s, first.samples) == (
        "waiting",
        (1,),
        2.0,
        6.0,
        16.0,
    )
    assert (second.state, second.waiting_for, second.waited_s) == ("computing", (), 0.0)


def test_the_summary_ends_with_the_last_to_leave() -> None:
    bench = Bench("asp", size=2).start()
    bench.now = 2.0
    bench.round(samples=8.0)
    bench.leave(0, "finished")
    bench.now = 4.0
    bench.leave(1, "finished")
    summary = bench.sequencer.figures.summary(99.0)
    assert (summary["seconds"], summary["samples"], summary["samples_per_second"]) == (4.0, 16.0, 4.0)
    assert summary["optimizers"] == {"0": "asp"}


def test_each_sampler_has_positions_of_its_own() -> None:
    before = [
        {"sampler": "a", "epoch": 1, "size": 1, "taken": [9]},
        {"sampler": "b", "epoch": 1, "size": 1, "taken": [7]},
        {"sampler": "c", "epoch": 0, "size": 1, "taken": [5]},
    ]
    bench = Bench("asp", size=2, resumed={"positions": before, "tracks": {"0": {}}}).start()
    bench.push(0, positions=(Position(1, 2, "a"), Position(2, 4, "b")))
    bench.push(1, positions=(Position(2, 6, "b"),))
    assert bench.sequencer.checkpoints.manifest(0, 0)["positions"] == [
        before[2],
        before[0],
        {"sampler": "a", "epoch": 1, "size": 2, "taken": [2, 0]},
        {"sampler": "b", "epoch": 2, "size": 2, "taken": [4, 6]},
    ]


@pytest.mark.parametrize("asks", [True, False])
def test_steps_beyond_the_budget_are_counted_unless_a_worker_asks(asks: bool) -> None:
    bench = Bench("asp", size=2, limits=Limits(steps=4)).start()
    found = []
    for _ in range(4):
        for worker in (0, 1):
            bench.push(worker, asked=asks and worker == 1)
            found.append(bench.sequencer.budget.unheeded())
    assert found == ([0] * 8 if asks else [0, 0, 0, 0, 1, 2, 3, 4])


def test_a_worker_that_is_overdue_keeps_no_checkpoint_back() -> None:
    bench = Bench("anytime:2", size=2, checkpoint_every=2).start()
    for _ in range(5):
        bench.push(0)
        bench.now += 3.0
        bench.take(bench.sequencer.tick(bench.now))
    assert [checkpoint.manifest["step"] for checkpoint in bench.checkpoints] == [2, 4]
