"""Gradients of weights that wait: when they are due, what is held meanwhile, and what it gains in virtual time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.pipeline.actions import UPDATE, Schedule, ScheduleAction, from_text, to_text
from polytempo.pipeline.check import check
from polytempo.pipeline.deferred_gradients import DeferredGradients
from polytempo.pipeline.schedules import make
from polytempo.pipeline.timeline import Timeline, run

SPECS = [
    "1f1b,spare=1",
    "gpipe,spare=2",
    "1f1b,recompute=1,spare=3",
    "sequential",
    "gpipe",
    "gpipe,recompute=0",
    "1f1b",
    "1f1b,recompute=1",
    "pipedream",
    "pipedream,vertical_sync=1",
]


def F(number: int) -> ScheduleAction:  # noqa: N802
    return ScheduleAction("F", number)


def B(number: int) -> ScheduleAction:  # noqa: N802
    return ScheduleAction("B", number)


def test_an_update_needs_everything_and_a_forward_needs_room() -> None:
    deferred = DeferredGradients(2)
    for action in (F(0), F(1)):
        assert not deferred.due(action, recompute=False)
        deferred.completed(action, recompute=False)
    deferred.completed(B(0), recompute=False, pieces=2)
    assert deferred.due(UPDATE, recompute=False)
    assert deferred.due(F(2), recompute=False), "1 is kept, 0 is owed for: there is no room"
    assert not deferred.due(F(2), recompute=True), "nothing is kept of it"
    assert not deferred.due(B(1), recompute=False)
    assert [deferred.pop(), deferred.pop()] == [0, 0]
    assert not deferred
    assert not deferred.due(F(2), recompute=False)
    assert not deferred.due(UPDATE, recompute=False)
    assert deferred.peak_held == 2


def test_a_forward_that_is_made_again_needs_room_then() -> None:
    deferred = DeferredGradients(1)
    for number in range(3):
        deferred.completed(F(number), recompute=True)
    assert not deferred.due(B(2), recompute=True)
    deferred.completed(B(2), recompute=True, pieces=1)
    assert deferred.due(B(1), recompute=True)
    assert deferred.pop() == 2
    assert not deferred.due(B(1), recompute=True)
    assert deferred.peak_held == 1


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, list[float], list[float], list[float], int]:
    stages = draw(st.integers(1, 4))
    spec = draw(st.sampled_from(SPECS))
    even = st.integers(1, 2).map(lambda count: [count] * stages)
    replicas = draw(even if "vertical" in spec else st.lists(st.integers(1, 2), min_size=stages, max_size=stages))
    schedule = make(spec, stages, draw(st.integers(1, 4)) * 4, tuple(replicas))
    times = st.lists(st.integers(1, 9).map(float), min_size=stages, max_size=stages)
    return schedule, draw(times), draw(times), draw(times), draw(st.integers(1, 4))


def replayed(timeline: Timeline, stage: int, replica: int) -> int:
    """Every microbatch has its backward, then all its pieces, then its update; the most that have activations at once."""
    schedule, owed, kept, most = timeline.schedule, set[int](), set[int](), 0
    again = schedule.recomputed(stage, replica)
    for span in timeline.spans[stage][replica]:
        kind, number = span.action.kind, span.action.microbatch
        if kind == "F" and number not in again:
            kept.add(number)
        elif kind == "B":
            most = max(most, len(kept | owed | {number}))
            kept.discard(number)
            owed.add(number)
        elif kind == "W":
            assert number in owed
            last = [other for other in timeline.spans[stage][replica] if other.action == span.action][-1] is span
            owed -= {number} if last else set()
        elif kind == "U":
            assert not owed
        most = max(most, len(kept | owed))
    assert not owed
    return most


@settings(max_examples=150, deadline=None)
@given(cases())
def test_whatever_the_times_no_more_is_held_than_the_schedule_says_and_all_is_done(
    case: tuple[Schedule, list[float], list[float], list[float], int],
) -> None:
    schedule, forward, backward, weights, pieces = case
    split = run(schedule, forward, backward, weights=weights, pieces=pieces)
    for stage, replica, _ in schedule.each_replica():
        assert replayed(split, stage, replica) <= check(schedule).activations[stage]
        spans = split.spans[stage][replica]
        assert all(before.end <= after.start for before, after in pairwise(spans))
        work = [span.action for span in spans if span.action.kind != "W"]
        assert work == [*schedule.actions[stage][replica]]
    busy = sum(span.end - span.start for stage in split.spans for line in stage for span in line)
    whole = run(schedule, forward, [b + w for b, w in zip(backward, weights, strict=True)])
    assert busy == pytest.approx(sum(span.end - span.start for stage in whole.spans for line in stage for span in line))


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("spec", ["gpipe,recompute=0", "1f1b"])
def test_the_bubble_shrinks_by_what_others_do_not_wait_for(spec: str, stages: int) -> None:
    """With equal times: what a stage waits for is forwards and backwards, not gradients of weights."""
    count, one = 4 * stages, [1.0] * stages
    schedule = make(spec, stages, count)
    whole = run(schedule, one, [2.0] * stages).total
    split = run(schedule, one, one, weights=one).total
    assert whole == 3 * (count + stages - 1)
    assert split <= whole - (stages - 1)


@pytest.mark.parametrize("stages", [2, 4])
def test_each_spare_microbatch_buys_time(stages: int) -> None:
    """With equal times: that of one stage's gradients of weights, until stages wait for nothing else."""
    count, one = 4 * stages, [1.0] * stages
    totals = [
        run(make(f"1f1b,spare={spare}", stages, count), one, one, weights=one, pieces=4).total for spare in range(stages + 1)
    ]
    assert [totals[0] - total for total in totals[:stages]] == [float(spare) for spare in range(stages)]
    assert totals[stages] == totals[stages - 1]


def test_what_is_spare_is_counted_and_written_down() -> None:
    schedule = make("1f1b,spare=2", 4, 8)
    assert check(schedule).activations == (6, 5, 4, 3)
    assert check(schedule).in_flight == (4, 3, 2, 1)
    assert "spare: 2" in to_text(schedule)
    assert from_text(to_text(schedule)) == schedule
    assert "spare" not in to_text(make("1f1b", 4, 8))
    assert check(make("1f1b,spare=99", 2, 4)).activations == (4, 4), "there are no more microbatches"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("1f1b,spare=x", "expected a whole number of microbatches of at least 0 for option 'spare' of 1f1b, got 'x'"),
        ("1f1b,spare=-1", "a whole number of microbatches"),
        ("pipedream,spare=1", "pipedream has no option 'spare'"),
        ("1f1b,spar=1", "known: recompute, spare"),
    ],
)
def test_what_cannot_be_spare(spec: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(spec, 2, 4)


def test_without_times_of_their_own_there_are_none() -> None:
    spans = run(make("1f1b", 2, 4), [1.0, 1.0], [2.0, 2.0]).spans
    assert not [span for stage in spans for line in stage for span in line if span.action.kind == "W"]
