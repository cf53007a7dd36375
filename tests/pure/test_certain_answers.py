"""What an answer says of further ones: that this many will not say `stop`. It is never wrong, and costs little."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequencing import Bench, replies_in

from polytempo.protocol.log import Reply
from polytempo.server.job_figures import ALWAYS, KNOWN, certain_answers
from polytempo.server.job_plan import Limits

BUDGETS = st.one_of(
    st.just(Limits()),
    st.builds(Limits, steps=st.integers(1, 40)),
    st.builds(Limits, samples=st.integers(1, 200)),
    st.builds(Limits, seconds=st.floats(0.5, 20)),
    st.builds(Limits, steps=st.integers(1, 40), samples=st.integers(1, 200)),
)
MODES = st.sampled_from(["bsp", "asp", "ssp:2", "bsp+backup:1", "local:2"])


class Run:
    """Pushes with fences, in any order that the mode allows; all answers to each worker."""

    def __init__(self, sync: str, size: int, limits: Limits, fence: int = 1) -> None:
        self.bench = Bench(sync, size=size, shards=1, limits=limits).start()
        self.fence = fence
        self.waiting: set[int] = set()
        self.answers: dict[int, list[Reply]] = {worker: [] for worker in range(size)}

    def push(self, worker: int, **fields: Any) -> None:
        if worker in self.waiting or worker not in self.answers:
            return
        self.waiting.add(worker)
        for reply in replies_in(self.bench.push(worker, fence=self.fence, **fields)):
            self.answers[reply.worker].append(reply)
            self.waiting.discard(reply.worker)


@given(MODES, st.integers(1, 4), BUDGETS, st.data())
def test_an_answer_that_was_said_not_to_stop_does_not(sync: str, size: int, limits: Limits, data: st.DataObject) -> None:
    size = max(size, 2) if sync == "bsp+backup:1" else size
    run = Run(sync, size, limits)
    turns = st.tuples(st.integers(0, size - 1), st.integers(1, 9), st.floats(0, 1.5), st.booleans())
    for worker, samples, seconds, leaves in data.draw(st.lists(turns, max_size=60)):
        run.bench.now += seconds
        if leaves and len(run.answers) > size - 1 > 0:  # one, at most
            run.bench.leave(worker)
            run.answers.pop(worker)
            run.waiting.discard(worker)
        else:
            run.push(worker, samples=float(samples))
    for answers in run.answers.values():
        for index, answer in enumerate(answers):
            promised = answers[index + 1 : index + 1 + answer.certain]
            assert not any(later.stop for later in promised)
        first = next((index for index, answer in enumerate(answers) if answer.stop), len(answers))
        assert all(answer.stop for answer in answers[first:])


@given(st.integers(1, 4), st.integers(1, 60))
def test_rounds_of_steps_end_where_they_end_without_promises(size: int, steps: int) -> None:
    ended = []
    for fence in (0, 1):
        run = Run("bsp", size, Limits(steps=steps), fence)
        while not (run.answers[0] and run.answers[0][-1].stop):
            for worker in range(size):
                run.push(worker)
        ended.append([len(answers) for answers in run.answers.values()])
        assert all(answer.certain == 0 for answer in run.answers[0]) or fence
    assert ended[0] == ended[1]


@given(st.integers(1, 4), st.integers(10, 80), st.sampled_from(["asp", "ssp:2"]), st.data())
def test_a_promise_costs_at_most_one_step_of_each_worker(size: int, steps: int, sync: str, data: st.DataObject) -> None:
    """Whatever the order of pushes: all workers have stopped when each has pushed twice since the budget was used up."""
    run = Run(sync, size, Limits(steps=steps))
    beyond = [0] * size
    for worker in data.draw(st.lists(st.integers(0, size - 1), max_size=200)):
        if run.answers[worker] and run.answers[worker][-1].stop:
            continue
        if run.bench.sequencer.budget.stopping and worker not in run.waiting:
            beyond[worker] += 1
        run.push(worker)
    assert max(beyond) <= 2


def test_without_a_fence_nothing_is_promised_and_without_a_budget_almost_everything() -> None:
    for fence, certain in ((0, 0), (1, ALWAYS)):
        run = Run("asp", 2, Limits(), fence)
        run.push(0)
        assert run.answers[0][-1].certain == certain


@pytest.mark.parametrize(
    ("left", "rounds", "largest", "certain"),
    [
        (Limits(steps=8), True, (1, 16.0), 1),  # of four workers: the next round uses 4, the one after that the rest
        (Limits(steps=9), True, (1, 16.0), 2),
        (Limits(steps=4), True, (1, 16.0), 0),
        (Limits(steps=10_000), True, (1, 16.0), KNOWN),
        (Limits(steps=10_000), True, (4, 16.0), 1),  # pushes of several steps
        (Limits(steps=10_000), False, (1, 16.0), 1),
        (Limits(steps=8), False, (1, 16.0), 0),
        (Limits(samples=16 * 8), True, (1, 16.0), 0),
        (Limits(samples=16 * 8 + 1), True, (1, 16.0), 1),
        (Limits(seconds=3.0), True, (1, 16.0), 1),
        (Limits(), False, (7, 1e9), ALWAYS),
    ],
)
def test_how_many_answers_are_certain(left: Limits, rounds: bool, largest: tuple[int, float], certain: int) -> None:
    assert certain_answers(left, 4, rounds, largest) == certain
