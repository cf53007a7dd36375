"""Clocks with members: groups of workers side by side, each with its own policy, seed and losses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequencing import Bench, entries_in, only, optimizer_spec, replies_in, told_in

from polytempo.errors import SpecError
from polytempo.protocol.log import Reply, Seed, Update
from polytempo.protocol.messages import Departed, Refused, SendSeed
from polytempo.protocol.values import beside, name_in_group, number_of, number_of_part, part_of
from polytempo.records.check import check_lines
from polytempo.records.lines import of_optimizer
from polytempo.records.replay import replay
from polytempo.server.effects import ToWorker, Write
from polytempo.server.job_plan import Limits
from polytempo.sync.actions import Release
from polytempo.sync.events import Joined, Pushed
from polytempo.sync.spec import parse_spec

GROUPS = {"0": (0, 2), "0@1": (1, 3)}
MODES = ("bsp", "asp", "ssp:1", "dssp:0..2", "every:2", "delay:2", "local:2", "diloco:4", "asp,scale=1,drop=1")


def name_of(worker: int) -> str:
    return next(name for name, members in GROUPS.items() if worker in members)


class Grouped(Bench):
    """Four workers, of which those in `there` make the optimizer of their group."""

    def __init__(self, sync: str, there: tuple[int, ...] = (0, 1, 2, 3), apply: str = "server", **options: Any) -> None:
        super().__init__(sync, 4, shards=1, **options)
        self.there, self.own = there, dict.fromkeys(there, 0)
        self.gone: set[int] = set()
        for worker in there:
            self.register(worker, name_of(worker), members=GROUPS[name_of(worker)], apply=apply)
        for name, members in GROUPS.items():
            if name in self.sequencer.clocks and members[0] in there:
                self.seed(members[0], name)

    def step(self, worker: int, **fields: Any) -> list[Any]:
        """The worker's next push, if it may make one."""
        name, step = name_of(worker), self.own[worker]
        reply = self.replies.get((name, worker))
        if worker in self.gone or reply is None or reply.step < step:
            return []
        self.own[worker] += 1
        return self.push(worker, step, optimizer_id=name, **fields)

    def end(self, worker: int, reason: str) -> list[Any]:
        self.gone.add(worker)
        return self.leave(worker, reason)

    def seen(self, name: str) -> tuple[list[Any], list[Any]]:
        """What one clock has ordered: its entries of the log, and its lines of the record."""
        own = (Update, Reply, Seed)
        entries = [entry for entry in self.entries if isinstance(entry, own) and _clock_of(entry) == name]
        return entries, list(of_optimizer(self.lines, name))


def _clock_of(entry: Any) -> str:
    return str(entry.id.optimizer_id if isinstance(entry, Seed) else entry.optimizer_id)


MOVES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push"] * 9 + ["finished", "lost"])), max_size=60)


@settings(max_examples=60, deadline=None)
@given(sync=st.sampled_from(MODES), moves=MOVES)
def test_what_happens_in_one_group_never_changes_another(sync: str, moves: list[tuple[int, str]]) -> None:
    """Each group's clock orders the same whether the workers of the other group do anything or not."""
    whole = Grouped(sync)
    alone = {name: Grouped(sync, there=members) for name, members in GROUPS.items()}
    for number, (worker, move) in enumerate(moves):
        for bench in (whole, alone[name_of(worker)]):
            bench.now = 0.25 * number
            if move == "push":
                bench.step(worker, samples=worker + 1.0)
            elif worker not in bench.gone:
                bench.end(worker, move)
    for name, bench in alone.items():
        assert whole.seen(name) == bench.seen(name)


@settings(max_examples=40, deadline=None)
@given(sync=st.sampled_from(MODES), moves=MOVES)
def test_the_lines_of_each_group_keep_the_promises_of_the_mode(sync: str, moves: list[tuple[int, str]]) -> None:
    bench = Grouped(sync)
    for number, (worker, move) in enumerate(moves):
        bench.now = 0.25 * number
        if move == "push":
            bench.step(worker)
        elif worker not in bench.gone:
            bench.end(worker, move)
    for name, members in GROUPS.items():
        lines, spec = bench.seen(name)[1], parse_spec(sync)
        assert check_lines(lines, spec, 4, members) == len(lines)
        replay(lines, spec.policy(4, members))


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:1", "dssp:0..2", "every:2", "delay:2", "local:2", "diloco:4"])
def test_a_policy_of_any_worker_numbers_decides_as_one_of_the_first(sync: str) -> None:
    renamed = {0: 1, 1: 3}
    plain, other = parse_spec(sync).policy(2), parse_spec(sync).policy(9, (1, 3))
    said: list[list[Any]] = [[], []]
    events = [Joined(0), Joined(1), *(Pushed(worker, step) for step in range(6) for worker in (0, 1))]
    for number, event in enumerate(events):
        moved = Joined(renamed[event.worker])
        if isinstance(event, Pushed):
            moved = Pushed(renamed[event.worker], event.step)  # type: ignore[assignment]
        said[0].append([(renamed[a.worker], a.step) for a in only(Release, plain.handle(event, 0.5 * number))])
        said[1].append([(a.worker, a.step) for a in only(Release, other.handle(moved, 0.5 * number))])
    assert said[0] == said[1]
    assert any(said[0])


@pytest.mark.parametrize("sync", ["gossip:ring", "adpsgd:ring"])
def test_modes_with_neighbours_need_all_workers(sync: str) -> None:
    with pytest.raises(SpecError, match="among all 4 workers, and a group has 2; leave group= out"):
        parse_spec(sync).policy(4, (0, 2))


# Rates and budgets.


def test_the_rate_is_shared_among_the_members() -> None:
    bench = Grouped("asp")
    assert [entry.rate for entry in only(Update, entries_in(bench.step(1)))] == [0.5]


def test_the_main_group_counts_the_budget_and_all_groups_are_told() -> None:
    bench = Grouped("bsp", limits=Limits(steps=4))
    for _ in range(3):
        bench.step(1)
        bench.step(3)
    assert bench.sequencer.budget.steps == 0
    assert not bench.replies["0@1", 1].stop
    for _ in range(2):
        bench.step(0)
        bench.step(2)
    assert [bench.replies["0", worker].stop for worker in (0, 2)] == [True, True]
    bench.step(1)
    bench.step(3)
    assert bench.replies["0@1", 1].stop
    assert bench.sequencer.budget.steps == 4
    assert [stats.steps for stats in bench.sequencer.statistics] == [2, 0, 2, 0]
    assert [(stats.step, stats.state) for stats in bench.sequencer.statistics] == [
        (2 + 2 * (w % 2), "computing") for w in range(4)
    ]
    assert bench.sequencer.figures.summary(1.0)["members"] == {"0": [0, 2], "0@1": [1, 3]}


def test_a_rank_that_reports_no_steps_has_begun_when_others_have() -> None:
    """Its failure is not one before the first push, which ends a job whatever --min-workers says."""
    bench = Grouped("bsp", there=(0, 2))
    assert [status.accepted for status in bench.sequencer.figures.status(0.0).workers] == [False] * 4
    bench.step(0)
    assert [status.accepted for status in bench.sequencer.figures.status(0.0).workers] == [True, True, False, True]


def test_lines_of_other_groups_name_their_optimizer() -> None:
    bench = Grouped("asp")
    bench.step(0)
    bench.step(3)
    assert [line.get("optimizer") for line in bench.lines_of("push")] == [None, "0@1"]


# The seed.


def test_a_group_starts_from_the_values_of_its_lowest_rank_that_may_still_come() -> None:
    bench = Bench("bsp", 4, 1)
    told = [told_in(bench.register(worker, name_of(worker), members=GROUPS[name_of(worker)])) for worker in range(4)]
    asked = [[worker for worker, message in some if isinstance(message, SendSeed)] for some in told]
    assert asked == [[0], [1], [], []]
    assert [w for w, message in told_in(bench.leave(1, "finished")) if isinstance(message, SendSeed)] == [3]


# Losses.


@pytest.mark.parametrize("apply", ["server", "peers"])
def test_the_other_members_are_told_of_a_lost_one_and_no_other_worker(apply: str) -> None:
    bench = Grouped("bsp", apply=apply)
    told = [(worker, message) for worker, message in told_in(bench.end(3, "lost")) if isinstance(message, Departed)]
    assert told == [(1, Departed(worker=3, group=(1, 3), optimizer_id="0@1"))]


def test_a_loss_is_told_before_the_answer_of_a_round_that_closes_by_it() -> None:
    bench = Grouped("bsp")
    bench.step(1)
    orders = bench.end(3, "lost")
    kinds = [type(order.message if isinstance(order, ToWorker) else order.entry) for order in orders if not _is_line(order)]
    assert kinds.index(Departed) < kinds.index(Reply)


def _is_line(order: Any) -> bool:
    return isinstance(order, Write)


def test_a_member_that_has_finished_is_not_waited_for() -> None:
    bench = Grouped("bsp")
    assert not replies_in(bench.step(1))
    orders = bench.end(3, "finished")
    assert [reply.worker for reply in replies_in(orders)] == [1]
    assert not only(Departed, [message for _, message in told_in(orders)])


def test_a_worker_that_comes_to_a_group_after_a_loss_is_told() -> None:
    bench = Bench("bsp", 4, 1)
    bench.register(1, "0@1", members=(1, 3))
    bench.leave(3, "failed")
    bench.leave(0, "failed")
    told = told_in(bench.register(2, "0", members=(0, 2)))
    assert (2, Departed(worker=0, group=(0, 2), optimizer_id="0")) in told
    assert Departed(worker=3, group=(1, 3), optimizer_id="0@1") not in [message for _, message in told]


# Refusals.


def refused(bench: Bench, worker: int, name: str, members: tuple[int, ...]) -> str:
    told = told_in(bench.register(worker, name, members=members))
    return " ".join(message.reason for _, message in told if isinstance(message, Refused))


@pytest.mark.parametrize(
    ("worker", "name", "members", "text"),
    [
        (1, "0", (0, 2), "worker 1 is not in the group of ranks 0, 2; give it the group that it is in"),
        (2, "0", (0, 2, 3), "the group is (0, 2, 3) at worker 2 and (0, 2) at worker 0; all workers must make the same"),
        (2, "0", (), "the group is () at worker 2 and (0, 2) at worker 0; all workers must make the same optimizer"),
        (2, "0@2", (2, 3), "rank 2 is in the group of ranks 2, 3 and in that of ranks 0, 2; groups of optimizers made side"),
        (3, "0@3", (3, 5), "optimizer 0@3: expected some of the ranks 0 to 3 as its group, got [3, 5]"),
        (3, "0@3", (3, 3), "optimizer 0@3: expected some of the ranks 0 to 3 as its group, got [3, 3]"),
    ],
)
def test_groups_that_do_not_fit_are_refused(worker: int, name: str, members: tuple[int, ...], text: str) -> None:
    bench = Bench("bsp", 4, 1)
    bench.register(0, "0", members=(0, 2))
    assert text in refused(bench, worker, name, members)


def test_a_group_beside_an_optimizer_of_all_ranks_is_refused() -> None:
    bench = Bench("bsp", 4, 1)
    bench.register(0, "0")
    assert "in that of ranks of the whole job" in refused(bench, 1, "0@1", (1, 3))


def test_a_refused_group_leaves_no_clock_behind() -> None:
    bench = Bench("bsp", 4, 1)
    bench.register(0, "0", members=(0, 2))
    refused(bench, 2, "0@2", (2, 3))
    assert list(bench.sequencer.clocks) == ["0"]
    assert refused(bench, 1, "0@1", (1, 3)) == ""


# Names.


def test_names_tell_groups_parts_and_optimizers_apart() -> None:
    assert [name_in_group("2", (1, 3), main) for main in (True, False)] == ["2", "2@1"]
    assert [part_of(name, 3) for name in ("0", "2@1")] == ["0.3", "2.3@1"]
    assert [beside(name) for name in ("0", "0@1", "2.3@1", "0@1/mean", "0/mean")] == ["0", "0", "2.3", "0/mean", "0/mean"]
    assert [(number_of(name), number_of_part(name)) for name in ("7", "12@1", "2.3@1", "2.3@1/mean")] == [
        (7, 0),
        (12, 0),
        (2, 3),
        (2, 3),
    ]


def test_a_proposal_of_all_workers_has_no_members() -> None:
    assert optimizer_spec("bsp").members == ()
