"""The clock: published numbers, a formula, and a second opinion on random times."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import BrokenInvariant, UsageError
from polytempo.pipeline.actions import UPDATE, Schedule, ScheduleAction, from_text
from polytempo.pipeline.schedules import gpipe, make, one_f_one_b, pipedream, sequential
from polytempo.pipeline.timeline import Span, Timeline, computations, run, stage_ends

moderately = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def even(schedule: Schedule, forward: float = 1, backward: float = 2) -> Timeline:
    return run(schedule, [forward] * schedule.stages, [backward] * schedule.stages)


@pytest.mark.parametrize("maker", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    ("stages", "microbatches", "total", "bubble"), [(4, 4, 21, 0.4286), (4, 8, 33, 0.2727), (8, 32, 117, 0.1795)]
)
def test_published_bubbles(maker: type, stages: int, microbatches: int, total: float, bubble: float) -> None:
    timeline = even(maker(stages, microbatches))
    assert timeline.total == total
    assert timeline.bubble() == pytest.approx(bubble, abs=5e-5)


@pytest.mark.parametrize("maker", [gpipe, one_f_one_b])
@pytest.mark.parametrize("stages", range(1, 9))
def test_the_formula_of_the_bubble(maker: type, stages: int) -> None:
    for microbatches in range(1, 17):
        for forward, backward in ((1, 1), (1, 2), (3, 2)):
            timeline = even(maker(stages, microbatches), forward, backward)
            wanted = (stages - 1) / (microbatches + stages - 1)
            assert timeline.bubble() == pytest.approx(wanted, abs=1e-12)
            assert all(timeline.bubble(stage) == pytest.approx(wanted, abs=1e-12) for stage in range(stages))
            assert timeline.total == (microbatches + stages - 1) * (forward + backward)


def test_one_after_the_other() -> None:
    timeline = even(sequential(4, 5))
    assert timeline.total == 4 * 5 * 3
    assert timeline.bubble() == pytest.approx(3 / 4)
    assert run(sequential(2, 1), [1, 5], [2, 4]).bubble(0) == pytest.approx(9 / 12)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("times", [(1, 1), (1, 2), (2, 1)])
def test_pipedream_leaves_no_stage_idle(stages: int, times: tuple[float, float]) -> None:
    timeline = even(pipedream(stages, 5 * stages + 5), *times)
    assert timeline.steady_bubble() == timeline.steady_bubble(skip=3) == 0.0
    assert (timeline.bubble() > 0) == (stages > 1)


def test_updates_on_the_way_cost_no_time() -> None:
    once, again = even(one_f_one_b(4, 40)), even(pipedream(4, 40))
    assert once.total == again.total == 43 * 3


def test_replicas_of_a_slow_stage() -> None:
    """A stage twice as slow with two replicas keeps up."""
    slow, fast = run(pipedream(2, 60), [2, 1], [4, 2]), run(pipedream(2, 60, (2, 1)), [2, 1], [4, 2])
    assert slow.total == 60 * 6 + 1
    assert fast.total <= 60 * 3 + 12
    assert fast.steady_bubble(skip=2) < 0.01


def test_the_steady_state_begins_when_all_replicas_have_begun() -> None:
    """Backwards of the first stage begin at 3 and 5, its last forwards end at 7; at 5 its first replica waits at U."""
    assert even(pipedream(2, 6, (2, 1)), 1, 1).steady_bubble() == pytest.approx(1 / 6)


def test_by_hand() -> None:
    text = "recompute: yes\nstage 0: F0 F1 B1 B0 U\nstage 1: F0 F1 B1 B0 U"
    timeline = run(from_text(text), [1, 2], [2, 3], transfer=[0.5], recompute=[10, 20], update=[7, 8])
    first, second = (line[0] for line in timeline.spans)
    assert [(str(span.action), span.start, span.end) for span in first] == [
        ("F0", 0, 1),
        ("F1", 1, 2),
        ("B1", 9, 11),  # just made: not made again
        ("B0", 32, 44),
        ("U", 44, 51),
    ]
    assert [(str(span.action), span.start, span.end) for span in second] == [
        ("F0", 1.5, 3.5),
        ("F1", 3.5, 5.5),
        ("B1", 5.5, 8.5),
        ("B0", 8.5, 31.5),
        ("U", 31.5, 39.5),
    ]
    assert timeline.total == 51
    assert timeline.bubble(0) == pytest.approx(1 - 23 / 51)
    assert timeline.bubble(1) == pytest.approx(1 - 38 / 51)
    assert timeline.bubble() == pytest.approx(1 - 61 / 102)


def test_replicas_update_together() -> None:
    text = "flushes: no\nstage 0.0: F0 F2 B0 B2 U F4 B4 U\nstage 0.1: F1 B1 U F3 B3 U"
    updates = [
        [(span.start, span.end) for span in line if span.action == UPDATE]
        for line in run(from_text(text), [1], [2], update=[5]).spans[0]
    ]
    assert updates == [[(6, 11), (14, 19)]] * 2


def test_lines_for_a_record() -> None:
    lines = even(gpipe(2, 1)).as_lines()
    assert json.loads(json.dumps(lines)) == lines
    assert [(line["stage"], line["action"], line["start"], line["end"]) for line in lines] == [
        (0, "F0", 0, 1),
        (1, "F0", 1, 2),
        (1, "B0", 2, 4),
        (0, "B0", 4, 6),
        (1, "U", 4, 4),
        (0, "U", 6, 6),
    ]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Schedule, list[list[int]]]:
    stages = draw(st.integers(1, 4))
    replicas = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    spec = draw(st.sampled_from(["sequential", "gpipe", "gpipe,recompute=0", "1f1b", "1f1b,recompute=1", "pipedream"]))
    times = [draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)) for count in (*[stages] * 4, stages - 1)]
    return make(spec, stages, draw(st.integers(max(replicas), 6)), replicas), times


@moderately
@given(jobs())
def test_every_action_starts_as_soon_as_it_can(job: tuple[Schedule, list[list[int]]]) -> None:
    schedule, (forward, backward, recompute, update, transfer) = job
    timeline = run(schedule, forward, backward, transfer, recompute, update)
    ends = {(s, span.action): span.end for s, stage in enumerate(timeline.spans) for line in stage for span in line}
    for stage, replica, line in schedule.each_replica():
        spans = timeline.spans[stage][replica]
        assert [span.action for span in spans] == list(line)
        for at, (before, span) in enumerate(zip((None, *spans), spans, strict=False)):
            number, free = span.action.microbatch, before.end if before else 0.0
            waits = [free]
            if span.action.kind == "F":
                length = forward[stage]
                waits += [ends[stage - 1, span.action] + transfer[stage - 1]] if stage else []
            elif span.action.kind == "B":
                again = schedule.recompute and before is not None and before.action != ScheduleAction("F", number)
                length = backward[stage] + (recompute[stage] if again else 0)
                waits += [ends[stage + 1, span.action] + transfer[stage]] if stage + 1 < schedule.stages else []
            else:
                length = update[stage]
                waits += [nth_update(timeline, stage, other, nth(line, at)) for other in range(schedule.replicas[stage])]
            assert (span.start, span.end) == (max(waits), max(waits) + length)


def nth(line: tuple[ScheduleAction, ...], at: int) -> int:
    return line[:at].count(UPDATE)


def nth_update(timeline: Timeline, stage: int, replica: int, number: int) -> float:
    """When the replica is free for this update: the end of what it does before."""
    spans = timeline.spans[stage][replica]
    at = [index for index, span in enumerate(spans) if span.action == UPDATE][number]
    return spans[at - 1].end if at else 0.0


def test_many_actions() -> None:
    timeline = even(pipedream(10, 400))
    assert sum(len(line) for stage in timeline.spans for line in stage) == 12000
    assert timeline.total == 409 * 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"forward": [1]}, "expected 2 times for forward, got 1"),
        ({"backward": [1, 2, 3]}, "expected 2 times for backward, got 3"),
        ({"transfer": [1, 1]}, "expected 1 times for transfer, got 2"),
        ({"recompute": [1]}, "expected 2 times for recompute, got 1"),
        ({"update": [1]}, "expected 2 times for update, got 1"),
        ({"forward": [1, -1]}, "times for forward must be finite and not negative, got -1"),
        ({"backward": [math.inf, 1]}, "times for backward must be finite and not negative, got inf"),
        ({"update": [0, math.nan]}, "times for update must be finite and not negative, got nan"),
    ],
)
def test_times_that_are_none(arguments: dict[str, list[float]], complaint: str) -> None:
    times: dict[str, list[float]] = {"forward": [1, 1], "backward": [1, 1], **arguments}
    with pytest.raises(UsageError, match=complaint):
        run(gpipe(2, 2), **times)


def test_what_has_no_steady_state_says_so() -> None:
    with pytest.raises(UsageError, match="there is no steady state"):
        even(gpipe(3, 8)).steady_bubble()
    with pytest.raises(UsageError, match="makes a forward after backward 31; give more minibatches or skip fewer"):
        even(pipedream(3, 8)).steady_bubble(skip=30)
    with pytest.raises(UsageError, match="skip must be 0 or more, not -1"):
        even(pipedream(3, 8)).steady_bubble(skip=-1)


def test_nothing_takes_any_time() -> None:
    assert even(gpipe(2, 2), 0, 0).bubble() == 0.0


def test_a_wrong_schedule_has_no_times() -> None:
    with pytest.raises(BrokenInvariant, match="deadlock"):
        even(from_text("stage 0: F0 B0 F1 B1 U\nstage 1: F0 F1 B0 B1 U"))


def test_spans_of_unequal_stages() -> None:
    timeline = run(one_f_one_b(2, 2), [1, 3], [1, 3])
    assert timeline.spans[1][0][1] == Span(ScheduleAction("B", 0), 4, 7)
    assert timeline.total == 14


@moderately
@given(st.data())
def test_durations_of_single_computations_give_the_same_timeline(data: st.DataObject) -> None:
    """Where all of a stage are alike; `test_trace_resimulation.py` has a reference for those that are not."""
    stages, microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    schedule = make(data.draw(st.sampled_from(["1f1b", "gpipe,recompute=0", "sequential"])), stages, microbatches)
    times = st.floats(0, 10)
    forward, backward = (data.draw(st.lists(times, min_size=stages, max_size=stages)) for _ in range(2))
    transfer = data.draw(st.lists(times, min_size=stages - 1, max_size=stages - 1))
    timeline = run(schedule, forward, backward, transfer)
    batch = list(zip(forward, backward, strict=True))
    ends = stage_ends(computations(schedule), [batch] * microbatches, transfer)
    assert ends == [replicas[0][-1].end for replicas in timeline.spans]
