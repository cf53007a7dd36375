"""A schedule without flushes, minibatch by minibatch: the same lines as when it is written down for as many."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.errors import BrokenInvariant
from polytempo.pipeline.actions import UPDATE, Schedule, ScheduleAction
from polytempo.pipeline.schedules import SteadyState, in_flight, make


def steady_state(stage: int, replica: int, replicas: tuple[int, ...]) -> SteadyState:
    return SteadyState(lambda count: make("pipedream", len(replicas), count, replicas), stage, replica, replicas)


counts = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(replicas=counts, minibatches=st.integers(3, 70))
def test_calls_and_the_rest_are_the_line(replicas: tuple[int, ...], minibatches: int) -> None:
    written = make("pipedream", len(replicas), minibatches, replicas)
    for stage, replica, line in written.each_replica():
        made = steady_state(stage, replica, replicas)
        actions = [action for number in range(minibatches) for action in made.call(number)]
        assert (*actions, *made.rest(minibatches)) == line


@settings(max_examples=50, deadline=None)
@given(replicas=counts, minibatches=st.integers(1, 2))
def test_few_minibatches_reach_only_some_replicas(replicas: tuple[int, ...], minibatches: int) -> None:
    """They all make as many updates; who had none of the minibatches makes nothing else."""
    for stage, count in enumerate(replicas):
        updates = set()
        for replica in range(count):
            made = steady_state(stage, replica, replicas)
            line = [a for number in range(minibatches) for a in made.call(number)] + made.rest(minibatches)
            updates.add(line.count(UPDATE))
            mine = [*range(replica, minibatches, count)]
            assert [action.microbatch for action in line if action.kind == "F"] == mine
            assert [action.microbatch for action in line if action.kind == "B"] == mine
        assert len(updates) == 1


@given(replicas=counts)
def test_the_lag_is_what_is_under_way(replicas: tuple[int, ...]) -> None:
    assert steady_state(0, 0, replicas).lag() == (in_flight(replicas, 0) - 1) * replicas[0]


def test_a_line_that_does_not_repeat_itself_is_refused() -> None:
    def odd(count: int) -> Schedule:
        late = [ScheduleAction(kind, number) for number in range(count // 2, count) for kind in "FB"]  # type: ignore[arg-type]
        early = [ScheduleAction("F", 0), ScheduleAction("F", 1), ScheduleAction("B", 0), ScheduleAction("B", 1), UPDATE]
        rest = [ScheduleAction(kind, number) for number in range(2, count // 2) for kind in "FB"]  # type: ignore[arg-type]
        line = (*early, *rest, *[x for a in late for x in ((a, UPDATE) if a.kind == "B" else (a,))])
        return Schedule("odd", count, ((line,),), flushes=False)

    with pytest.raises(BrokenInvariant, match="must be periodic"):
        SteadyState(odd, 0, 0, (1,))
