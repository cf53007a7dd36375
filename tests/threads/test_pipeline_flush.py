"""Schedules that flush: a model in stages trains as in one piece, whatever the schedule, the cut and the microbatches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import ADAM, PLAIN, SGD, alone, assert_same, batches, layered, piped
from torch import nn

from polytempo.pipeline.actions import ScheduleAction, to_text
from polytempo.pipeline.schedules import make

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]

SPECS = ["sequential", "gpipe", "gpipe,recompute=0", "1f1b", "1f1b,recompute=1"]


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    each=st.integers(1, 3),
    optimizer=st.sampled_from([PLAIN, SGD, ADAM]),
)
def test_any_schedule_is_the_model_in_one_piece(spec, stages, microbatches, each, optimizer) -> None:  # type: ignore[no-untyped-def]
    model, data = layered(), batches(3, microbatches * each)
    outcomes = piped(model, data, stages, optimizer, stages=stages, schedule=spec, microbatches=microbatches)
    assert_same(outcomes, alone(model, data, optimizer), 1e-10)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_gradients_are_those_of_the_whole_batch(spec: str, stages: int) -> None:
    """With a rate of 1 and no momentum, a step is the gradient."""
    model, data = layered(), batches(1, 8)
    outcomes = piped(model, data, stages, lambda p: torch.optim.SGD(p, lr=1.0), stages=stages, schedule=spec, microbatches=8)
    assert_same(outcomes, alone(model, data, lambda p: torch.optim.SGD(p, lr=1.0)), 1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_each_rank_does_its_line_and_keeps_what_the_checker_says(spec: str) -> None:
    schedule = make(spec, 4, 6)
    outcomes = piped(layered(7), batches(2, 6), 4, stages=4, schedule=spec, microbatches=6)
    for stage, outcome in enumerate(outcomes):
        log = [done for done in outcome.pipe.log if done.action.kind != "W"]
        assert [done.action for done in log] == [*schedule.actions[stage][0]] * 2
        assert all(done.version == step for step in range(2) for done in log[step * 13 : step * 13 + 12])
        assert all(before.end <= after.start for before, after in pairwise(outcome.pipe.log))
        assert all(before.end <= after.start - after.waited for before, after in pairwise(log))
        assert outcome.pipe.stage.peak_in_flight == outcome.pipe.facts.in_flight[stage]
        assert outcome.pipe._built.runtime.deferred.peak_held == outcome.pipe.facts.activations[stage]
        assert outcome.pipe.stage.peak_versions == 1
        assert not outcome.pipe.stage.in_flight


def test_one_forward_one_backward_keeps_few_activations() -> None:
    outcomes = piped(layered(7), batches(1, 8), 4, stages=4, schedule="1f1b", microbatches=8)
    assert [outcome.pipe.stage.peak_in_flight for outcome in outcomes] == [4, 3, 2, 1]
    assert [outcome.pipe._built.runtime.deferred.peak_held for outcome in outcomes] == [4, 3, 2, 1], (
        "what is owed for later is counted, too"
    )


class Counting(nn.Linear):
    """Counts its forwards, and those of them that keep something for a backward."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.forwards = self.kept = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.kept += torch.is_grad_enabled()
        return super().forward(x)


def test_forwards_are_made_again_but_for_those_that_were_just_made() -> None:
    """Of gpipe, the last microbatch of every stage; of 1f1b at the last stage, all."""
    wanted = {
        "gpipe": [(7, 4), (7, 4)],
        "gpipe,recompute=0": [(4, 4), (4, 4)],
        "1f1b": [(4, 4), (4, 4)],
        "1f1b,recompute=1": [(8, 4), (4, 4)],
    }
    for spec, counts in wanted.items():
        outcomes = piped(nn.Sequential(Counting(), Counting()).double(), batches(1, 4), 2, schedule=spec, microbatches=4)
        layers = [outcome.pipe.stage.part.members[0][1] for outcome in outcomes]
        assert [(layer.forwards, layer.kept) for layer in layers] == counts, spec


def test_a_forward_waits_for_the_stage_before_and_a_backward_for_the_one_behind() -> None:
    outcomes = piped(layered(), batches(1, 8), 2, stages=2, schedule="1f1b", microbatches=4)
    first, second = ({done.action: done for done in outcome.pipe.log} for outcome in outcomes)
    for number in range(4):
        forward, backward = ScheduleAction("F", number), ScheduleAction("B", number)
        assert first[forward].start <= second[forward].start <= second[backward].start <= first[backward].start


def test_a_schedule_as_text_is_run() -> None:
    text = "stage 0: F1 F0 B0 B1 U\nstage 1: F1 F0 B0 B1 U"
    model, data = layered(), batches(3, 4)
    outcomes = piped(model, data, 2, schedule=text, stages=2)
    assert_same(outcomes, alone(model, data), 1e-12)
    assert "F1 F0 B0 B1 U" in to_text(outcomes[0].pipe.schedule)
    done = [str(done.action) for done in outcomes[1].pipe.log]
    assert [action for action in done if action[0] != "W"] == ["F1", "F0", "B0", "B1", "U"] * 3


def test_the_stage_behind_may_take_them_in_another_order_than_they_come() -> None:
    text = "stage 0: F0 F1 F2 B2 B1 B0 U\nstage 1: F2 F0 F1 B1 B2 B0 U"
    model, data = layered(), batches(3, 6)
    assert_same(piped(model, data, 2, schedule=text), alone(model, data), 1e-12)


def test_a_schedule_as_data_is_run_and_may_update_several_times_in_a_step() -> None:
    """Then each update is of what came since the last one, and old weights are kept where they are needed."""
    model, data = layered(), batches(2, 4)
    schedule = make("pipedream", 1, 4)
    outcomes = piped(model, data, 1, schedule=schedule)
    pieces = [(a, b) for x, y in data for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    _, wanted = alone(model, pieces)
    assert all(torch.equal(outcomes[0].state[name], value) for name, value in wanted.items())


def test_batches_may_change_their_size() -> None:
    model = layered()
    data = batches(1, 8) + batches(1, 4, seed=2) + batches(2, 12, seed=3) + batches(1, 8, seed=4)
    assert_same(piped(model, data, 3, schedule="1f1b", microbatches=4), alone(model, data), 1e-10)


def test_stages_by_layers_and_by_a_plan() -> None:
    class Planned:
        def __init__(self, first: int, last: int) -> None:
            self.first, self.last, self.replicas = first, last, 1

    class Plan:
        stages = (Planned(0, 3), Planned(4, 4))

    model, data = layered(), batches(2, 4)
    for stages in ([4, 1], Plan()):
        outcomes = piped(model, data, 2, stages=stages, microbatches=2)
        assert_same(outcomes, alone(model, data), 1e-12)
        assert list(outcomes[1].pipe.stage.state()) == ["4.weight", "4.bias"]
