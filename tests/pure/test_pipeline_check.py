"""`check.py` on schedules with a mistake in them; a second opinion, written from the rules, on random changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import BrokenInvariant, UsageError
from polytempo.pipeline.actions import UPDATE, ReplicaActions, Schedule, ScheduleAction, from_text, to_text
from polytempo.pipeline.check import Facts, check
from polytempo.pipeline.schedules import gpipe, make, one_f_one_b, pipedream

thoroughly = settings(max_examples=400, deadline=None, derandomize=True, database=None)


def complaint(schedule: Schedule | str) -> str:
    with pytest.raises(BrokenInvariant) as caught:
        check(from_text(schedule) if isinstance(schedule, str) else schedule)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stage 0: F0 F1 B0 U", "missing: stage 0 never does B1"),
        ("stage 0: F0 B0 U\nmicrobatches: 2", "missing: stage 0 never does F1"),
        ("stage 0: F0 F0 B0 U", "twice: stage 0, action 1 (F0) was done before"),
        ("stage 0: F0 B0 B0 U", "twice: stage 0, action 2 (B0) was done before"),
        ("stage 0: B0 F0 U", "order: stage 0, action 0 (B0) comes before its forward"),
        ("stage 0: F0 F1 B0 U\nmicrobatches: 1", "impossible: stage 0, action 1 (F1): there are microbatches 0 to 0"),
        (
            "stage 0.0: F0 B0 F1 B1 U\nstage 0.1: U",
            "impossible: stage 0.0, action 2 (F1): microbatch 1 belongs to replica 1",
        ),
        ("stage 0: F0 U B0", "update: stage 0 ends with B0: no update uses its gradient; end with U"),
        ("stage 0: F0 B0 U U\nflushes: no", "update: update 1 of stage 0 has no gradient to use; leave it out"),
        ("stage 0: U F0 B0 U\nflushes: no", "update: update 0 of stage 0 has no gradient to use; leave it out"),
        ("stage 0: F0 B0 U F1 B1 U\nflushes: yes", "update: stage 0 updates 2 times in a step; expected one U, at the end"),
        (
            "stage 0.0: F0 B0 F2 B2 U\nstage 0.1: F1 B1 U F3 B3 U",
            "update: stage 0.0 makes 1 updates and stage 0.1 makes 2; replicas synchronise at every update",
        ),
        (
            "stage 0: F0 F1 B0 B1 U\nstage 1: F1 B1 F0 B0 U\nstage 2: F0 B0 F1 B1 U",
            "deadlock: stage 0 at action 2 (B0) waits for B0 of stage 1; "
            "stage 1 at action 1 (B1) waits for B1 of stage 2; stage 2 at action 0 (F0) waits for F0 of stage 1",
        ),
        (
            "stage 0.0: F0 B0 U F2 B2 U\nstage 0.1: F1 B1 U F3 B3 U\nstage 1: F0 F1 F2 F3 B0 B1 B2 B3 U\nflushes: no",
            "deadlock: stage 0.0 at action 1 (B0) waits for B0 of stage 1; "
            "stage 0.1 at action 1 (B1) waits for B1 of stage 1; stage 1 at action 2 (F2) waits for F2 of stage 0.0",
        ),
        (
            "stage 0.0: F0 B0 U F2 B2 U\nstage 0.1: F1 F3 B1 U B3 U\nstage 1: F0 B0 F2 B2 F1 B1 F3 B3 U\nflushes: no",
            "deadlock: stage 0.0 at action 2 (U) waits for U of stage 0.1; "
            "stage 0.1 at action 2 (B1) waits for B1 of stage 1; stage 1 at action 2 (F2) waits for F2 of stage 0.0",
        ),
        (
            "stage 0: F0 B0 U F1 B1 U\nstage 1: F0 B0 F1 B1 U\nflushes: no\nversions: first",
            "version: update 0 uses microbatches (0,) at stage 0 and (0, 1) at stage 1; "
            "with the versions of the first stage all must use the same",
        ),
        (
            "stage 0: F0 B0 U F1 B1 U\nstage 1: F0 B0 F1 U B1 U\nflushes: no\nversions: first",
            "version: F1 needs version 1 of stage 1, which is at version 0 by then",
        ),
    ],
)
def test_mistakes_by_hand(text: str, expected: str) -> None:
    assert complaint(text) == expected


def test_gradients_of_weights_are_part_of_a_backward() -> None:
    line = (ScheduleAction("F", 0), ScheduleAction("B", 0), ScheduleAction("W", 0), UPDATE)
    with pytest.raises(BrokenInvariant, match=r"impossible: stage 0, action 2 \(W0\): .* part of B0; leave it out"):
        check(Schedule("by hand", 1, ((line,),)))
    with pytest.raises(UsageError, match="'W0' is no action"):
        from_text("stage 0: F0 B0 W0 U")


def test_many_that_wait_are_counted() -> None:
    lines = ["stage 0: F0 B0 F1 B1 U", *[f"stage {stage}: F0 F1 B0 B1 U" for stage in range(1, 7)]]
    assert complaint("\n".join(lines)).endswith("stage 3 at action 1 (F1) waits for F1 of stage 2; and 3 more")


@pytest.mark.parametrize("spec", ["sequential", "gpipe", "1f1b", "pipedream", "pipedream,vertical_sync=1"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 2, 2)])
def test_nothing_can_be_left_out_nor_done_twice(spec: str, replicas: tuple[int, ...]) -> None:
    schedule = make(spec, 3, 5, replicas)
    for stage, replica, line in schedule.each_replica():
        for index, action in enumerate(line):
            merges = spec == "pipedream" and replicas[0] == 1 and action == UPDATE and index < len(line) - 1
            if not merges:  # two gradients in one update, which is as good
                complaint(changed(schedule, stage, replica, line[:index] + line[index + 1 :]))
            complaint(changed(schedule, stage, replica, (*line[:index], action, *line[index:])))


def changed(schedule: Schedule, stage: int, replica: int, line: ReplicaActions) -> Schedule:
    replicas = list(schedule.actions[stage])
    replicas[replica] = line
    return replace(schedule, actions=(*schedule.actions[:stage], tuple(replicas), *schedule.actions[stage + 1 :]))


def test_versions_that_a_reader_still_needs_are_kept() -> None:
    facts = check(from_text("flushes: no\nstage 0: F0 F1 F2 F3 B0 U B1 U F4 B2 U B3 U B4 U"))
    assert facts.used == ((0, 0, 0, 0, 2),)
    assert facts.versions_kept == (3,)  # when 3 is made, B3 will read 0 and B4 will read 2; nobody reads 1
    assert facts.updates == (((0,), (1,), (2,), (3,), (4,)),)


def test_gradients_of_several_backwards_go_into_one_update() -> None:
    facts = check(from_text("flushes: no\nstage 0: F0 F1 B1 B0 U F2 F3 B3 U B2 U"))
    assert facts.updates == (((0, 1), (3,), (2,)),)
    assert facts.used == ((0, 0, 1, 1),)
    assert facts.versions_kept == (2,)


def test_a_replica_without_a_microbatch_takes_part() -> None:
    facts = check(from_text("microbatches: 1\nstage 0.0: F0 B0 U\nstage 0.1: U"))
    assert facts.updates == (((0,),),)


# A second opinion


def second_opinion(schedule: Schedule) -> Facts | None:
    """The facts but for the order, slowly; None when a rule is broken."""
    stages, numbers = range(schedule.stages), range(schedule.microbatches)
    for stage, replica, line in schedule.each_replica():
        mine = [number for number in numbers if number % schedule.replicas[stage] == replica]
        wanted = Counter(ScheduleAction(kind, number) for kind in ("F", "B") for number in mine)
        if Counter(action for action in line if action != UPDATE) != wanted:
            return None
        if any(line.index(ScheduleAction("F", number)) > line.index(ScheduleAction("B", number)) for number in mine):
            return None
        if any(UPDATE not in line[line.index(ScheduleAction("B", number)) :] for number in mine):
            return None
    counts = [{line.count(UPDATE) for line in schedule.actions[stage]} for stage in stages]
    if any(len(count) != 1 for count in counts) or (schedule.flushes and any(count != {1} for count in counts)):
        return None
    updates = tuple(
        tuple(
            tuple(number for number in numbers if version_at(schedule, stage, ScheduleAction("B", number)) == version)
            for version in range(counts[stage].copy().pop())
        )
        for stage in stages
    )
    newest = [[version_at(schedule, stage, ScheduleAction("F", number)) for number in numbers] for stage in stages]
    used = [newest[0] if schedule.versions == "first" else newest[stage] for stage in stages]
    if any(() in made for made in updates) or (schedule.versions == "first" and len(set(updates)) > 1):
        return None
    if any(used[stage][number] > newest[stage][number] for stage in stages for number in numbers):
        return None
    try:
        tuple(TopologicalSorter(edges(schedule)).static_order())
    except CycleError:
        return None
    flight = tuple(max(prefixes(line)) for line in best_lines(schedule, prefixes))
    kept = tuple(max(max(versions(line, used[stage])) for line in schedule.actions[stage]) for stage in stages)
    whole = tuple(1 for _ in stages) if schedule.recompute else flight
    return Facts(flight, whole, kept, tuple(map(tuple, used)), updates, ())


def version_at(schedule: Schedule, stage: int, action: ScheduleAction) -> int:
    line = schedule.actions[stage][action.microbatch % schedule.replicas[stage]]
    return line[: line.index(action)].count(UPDATE)


def prefixes(line: ReplicaActions) -> list[int]:
    kinds = [action.kind for action in line]
    return [kinds[:end].count("F") - kinds[:end].count("B") for end in range(len(line) + 1)]


def best_lines(schedule: Schedule, measure: Any) -> list[ReplicaActions]:
    return [max(replicas, key=lambda line: max(measure(line))) for replicas in schedule.actions]


def versions(line: ReplicaActions, used: list[int]) -> list[int]:
    """How many versions are there after each action: the newest, and the older ones with a backward to come."""
    counts = []
    for end in range(len(line) + 1):
        newest = line[:end].count(UPDATE)
        wanted = {used[action.microbatch] for action in line[end:] if action.kind == "B"}
        counts.append(len({newest} | {version for version in wanted if version < newest}))
    return counts


def edges(schedule: Schedule) -> dict[Any, set[Any]]:
    """What each action waits for; an update is one thing for all replicas of a stage."""
    graph: dict[Any, set[Any]] = {}
    for stage, _, line in schedule.each_replica():
        before, updates = None, 0
        for action in line:
            updates += action == UPDATE
            node = (stage, "U", updates) if action == UPDATE else (stage, action)
            needs = graph.setdefault(node, set())
            needs |= {before} if before else set()
            other = stage - 1 if action.kind == "F" else stage + 1
            needs |= {(other, action)} if action != UPDATE and 0 <= other < schedule.stages else set()
            before = node
    return graph


@st.composite
def mutants(draw: st.DrawFn) -> tuple[Schedule, Schedule]:
    """A schedule that is right, and what a few changes made of it."""
    stages, specs = draw(st.integers(1, 4)), ["sequential", "gpipe", "1f1b", "pipedream", "pipedream,vertical_sync=1"]
    spec = draw(st.sampled_from(specs))
    count = draw(st.integers(1, 3))
    several = st.lists(st.integers(1, 3), min_size=stages, max_size=stages)
    replicas = [count] * stages if "vertical" in spec else draw(several)
    schedule = make(spec, stages, draw(st.integers(max(replicas), 7)), replicas)
    lines = [[list(line) for line in stage] for stage in schedule.actions]
    for _ in range(draw(st.integers(1, 3))):
        replicas_of_one = draw(st.sampled_from(lines))
        line, other = draw(st.sampled_from(replicas_of_one)), draw(st.sampled_from(replicas_of_one))
        change(draw, line, other)
    return schedule, replace(schedule, actions=tuple(tuple(map(tuple, stage)) for stage in lines))


def change(draw: st.DrawFn, line: list[ScheduleAction], other: list[ScheduleAction]) -> None:
    if not line:
        return
    at = draw(st.integers(0, len(line) - 1))
    match draw(st.sampled_from(["next", "swap", "drop", "twice", "move", "move"])):
        case "next":
            line[at : at + 2] = reversed(line[at : at + 2])
        case "swap":
            there = draw(st.integers(0, len(line) - 1))
            line[at], line[there] = line[there], line[at]
        case "drop":
            del line[at]
        case "twice":
            other.insert(draw(st.integers(0, len(other))), line[at])
        case _:
            action = line.pop(at)
            other.insert(draw(st.integers(0, len(other))), action)


@thoroughly
@given(mutants())
def test_a_change_is_refused_or_as_right_as_before(pair: tuple[Schedule, Schedule]) -> None:
    original, mutant = pair
    expected = second_opinion(mutant)
    if expected is None:
        complaint(mutant)
        return
    facts = check(mutant)
    assert replace(facts, order=()) == expected, to_text(mutant)
    if original.flushes:
        assert (facts.updates, facts.used) == (check(original).updates, check(original).used)


def test_some_changes_are_refused_and_some_are_not() -> None:
    """Else the test above says nothing."""
    seen: Counter[str] = Counter()

    @thoroughly
    @given(mutants())
    def count(pair: tuple[Schedule, Schedule]) -> None:
        try:
            check(pair[1])
        except BrokenInvariant as error:
            seen[str(error).partition(":")[0]] += 1
        else:
            seen["different" if pair[0] != pair[1] else "same"] += 1

    count()
    assert min(seen[kind] for kind in ("missing", "twice", "order", "impossible", "update", "deadlock", "different")) >= 3


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), one_f_one_b(4, 6, replicas=(3, 1, 2, 1)), pipedream(3, 7, (2, 3, 1)), pipedream(4, 6, vertical_sync=True)],
)
def test_the_order_respects_everybody(schedule: Schedule) -> None:
    order = check(schedule).order
    assert sorted(order) == [(*place, at) for *place, line in schedule.each_replica() for at in range(len(line))]
    graph, done, updates = edges(schedule), set[Any](), Counter[tuple[int, int]]()
    for stage, replica, at in order:
        action = schedule.actions[stage][replica][at]
        updates[stage, replica] += action == UPDATE
        node = (stage, "U", updates[stage, replica]) if action == UPDATE else (stage, action)
        if node in done:  # an update, of a replica that comes next to the one before
            assert action == UPDATE
        assert graph[node] <= done
        done.add(node)
    assert done == set(graph)
