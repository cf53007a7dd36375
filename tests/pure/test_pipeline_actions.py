"""Schedules as text, and what a schedule says about itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.pipeline.actions import UPDATE, Schedule, ScheduleAction, from_text, last_backwards, to_text
from polytempo.pipeline.check import check
from polytempo.pipeline.schedules import gpipe, pipedream
from polytempo.pipeline.timeline import run

moderately = settings(max_examples=100, deadline=None, derandomize=True, database=None)

ACTIONS = st.builds(ScheduleAction, st.sampled_from("FB"), st.integers(0, 1000)) | st.just(UPDATE)
LINES = st.lists(
    st.lists(st.lists(ACTIONS, max_size=8).map(tuple), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)
NAMES = st.text(min_size=1).filter(lambda text: text == text.strip() and text.isprintable())
SCHEDULES = st.builds(
    Schedule, NAMES, st.integers(1, 99), LINES.map(tuple), st.booleans(), st.sampled_from(["newest", "first"]), st.booleans()
)

BY_HAND = """
# two stages, the first of which goes ahead
stage 0: F0 F1 F2 B0 B1 B2 U

  stage 1 :  F0 B0  F1 B1 F2 B2 U
"""


@moderately
@given(SCHEDULES)
def test_what_is_written_can_be_read(schedule: Schedule) -> None:
    assert from_text(to_text(schedule)) == schedule


def test_how_it_looks() -> None:
    text = "schedule: pipedream\nmicrobatches: 3\nrecompute: no\nversions: first\nflushes: no\n"
    text += "stage 0: F0 F1 B0 U F2 B1 U B2 U\nstage 1: F0 B0 U F1 B1 U F2 B2 U\n"
    assert to_text(pipedream(2, 3, vertical_sync=True)) == text
    assert to_text(gpipe(1, 3, replicas=[2])).splitlines()[1:] == [
        "microbatches: 3",
        "recompute: yes",
        "versions: newest",
        "flushes: yes",
        "stage 0.0: F0 F2 B2 B0 U",
        "stage 0.1: F1 B1 U",
    ]


def test_a_schedule_by_hand_runs() -> None:
    schedule = from_text(BY_HAND)
    assert (schedule.name, schedule.stages, schedule.microbatches, schedule.replicas) == ("by hand", 2, 3, (1, 1))
    assert schedule.flushes
    assert check(schedule).in_flight == (3, 1)
    assert run(schedule, [1, 1], [2, 2]).total == 12.0
    several = from_text("stage 0: F0 B0 U F1 B1 U")
    assert not several.flushes
    assert check(several).updates == (((0,), (1,)),)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stage 0: F0 X1", "line 1, word 2: 'X1' is no action; write F or B with a number (F0, B12), or U"),
        ("\nstage 0: F0 B0 u", "line 2, word 3: 'u' is no action"),
        ("stage 0: F-1", "line 1, word 1: 'F-1' is no action"),
        ("stage 0: F0 U0", "line 1, word 2: 'U0' is no action"),
        ("stage 0: F٣", "line 1, word 1: 'F٣' is no action"),
        (
            "stages 0: F0",
            "line 1: expected 'stage NUMBER: ACTIONS' or one of schedule, microbatches, recompute, versions, flushes",
        ),
        ("recomputes: yes", "got 'recomputes: yes'; nearest: recompute"),
        ("stage 0 F0 B0 U", "got 'stage 0 F0 B0 U'; nearest: stage"),
        (": F0", "line 1: expected 'stage NUMBER: ACTIONS'"),
        ("stage 0: F0\nstage 0.0: B0", "line 2: stage 0.0 is there twice; leave one of them out"),
        ("flushes: yes\nflushes: no", "line 2: flushes is there twice"),
        ("flushes: maybe", "line 1: flushes must be yes or no, not 'maybe'"),
        ("recompute: yes please", "line 1: recompute must be yes or no, not 'yes please'"),
        ("microbatches: -1", "line 1: microbatches must be a number, not '-1'"),
        ("versions: last", "line 1: versions must be newest or first, not 'last'"),
        ("schedule:", "line 1: schedule must be a name, not ''"),
        ("", "expected a line for each stage, such as 'stage 0: F0 B0 U'; there is none"),
        ("stage 1: F0 B0 U", "there is a line for stage 1.0, but none for stage 0.0; add it"),
        ("stage 0.2: U\nstage 0.0: F0 B0 U", "there is a line for stage 0.2, but none for stage 0.1; add it"),
        ("microbatches: 0\nstage 0: U", "microbatches must be 1 or more, not 0"),
    ],
)
def test_a_mistake_in_the_text_is_named(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)) as caught:
        from_text(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "microbatch"), [("F", -1), ("B", -2), ("U", 0), ("X", 0)])
def test_no_other_actions(kind: str, microbatch: int) -> None:
    with pytest.raises(UsageError, match="expected F or B with a microbatch from 0 on, or U without one"):
        ScheduleAction(kind, microbatch)  # type: ignore[arg-type]


def test_schedules_that_are_none() -> None:
    good = gpipe(2, 2)
    with pytest.raises(UsageError, match="a stage or more"):
        replace(good, actions=())
    with pytest.raises(UsageError, match=re.escape("got replicas (0, 1)")):
        replace(good, actions=((), good.actions[1]))
    with pytest.raises(UsageError, match="versions must be newest or first, not 'old'"):
        replace(good, versions="old")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a name of one line"):
        replace(good, name="two\nlines")


def test_which_forwards_are_made_again() -> None:
    schedule = gpipe(2, 4)
    assert schedule.recomputed(0, 0) == schedule.recomputed(1, 0) == {0, 1, 2}
    assert gpipe(2, 4, recompute=False).recomputed(0, 0) == set()
    late = from_text("recompute: yes\nstage 0: F0 F1 B0 B1 U F2 U B2 U F3 B3 U")
    assert late.recomputed(0, 0) == {0, 1, 2}


def test_replicas_take_turns() -> None:
    schedule = pipedream(3, 12, (3, 1, 2))
    assert schedule.replicas == (3, 1, 2)
    assert [schedule.replica_of(stage, 8) for stage in range(3)] == [2, 0, 0]
    assert [schedule.place(*place) for place in ((0, 2), (1, 0), (2, 1))] == ["stage 0.2", "stage 1", "stage 2.1"]
    assert [(stage, replica) for stage, replica, _ in schedule.each_replica()] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 1),
    ]


def test_the_last_backwards_before_updates() -> None:
    schedule = from_text("stage 0: F0 F1 B0 B1 U F2 F3 B3 B2 U\nstage 1: F0 B0 F1 B1 U F2 F3 B3 B2 U")
    assert [last_backwards(actions) for _, _, actions in schedule.each_replica()] == [{1, 2}, {1, 2}]
