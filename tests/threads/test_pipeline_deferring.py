"""Gradients of weights wait until nobody waits for anything else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from piped import PLAIN, alone, assert_same, batches, layered, piped
from torch import nn

from polytempo.pipeline.weight_gradients import WeightGradient

pytestmark = [pytest.mark.timeout(120), pytest.mark.both_wires]

#: Seconds until a wait for another stage has failed: what must not happen takes that long.
PATIENCE = 30.0


class Gate(nn.Module):
    """Calls something at each backward, before it hands the gradient on."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call

    def __deepcopy__(self, memo: Any) -> Gate:
        return self

    def forward(self, x: torch.Tensor) -> Any:
        gate = self

        class Pass(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, value: Any) -> Any:
                return value.clone()

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                gate.call()
                return gradient

        return Pass.apply(x)


def test_what_is_owed_is_done_while_a_stage_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage does not begin its second backward before the first stage has done what it owes for the first."""
    did, calls = threading.Event(), []
    do = WeightGradient.compute

    def noted(job: WeightGradient) -> None:
        do(job)
        if job.weight.shape == (6, 5):
            did.set()

    def second_waits() -> None:
        calls.append(1)
        if len(calls) == 2:
            assert did.wait(PATIENCE)

    monkeypatch.setattr(WeightGradient, "compute", noted)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6), Gate(second_waits), nn.Linear(6, 6)).double()
    piped(model, batches(1, 4, width=5), 2, PLAIN, stages=[1, 3], schedule="gpipe,recompute=0", microbatches=2)
    assert len(calls) == 2


def test_a_gradient_is_sent_before_the_weights_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage does not do what it owes before the first stage has done its backward."""
    came = threading.Event()
    do = WeightGradient.compute

    def later(job: WeightGradient) -> None:
        if job.weight.shape == (6, 6):
            assert came.wait(PATIENCE)
        do(job)

    monkeypatch.setattr(WeightGradient, "compute", later)
    model = nn.Sequential(nn.Linear(6, 5), Gate(came.set), nn.Linear(5, 6), nn.Linear(6, 6)).double()
    data = batches(1, 4)
    outcomes = piped(model, data, 2, PLAIN, stages=[2, 2], schedule="1f1b", microbatches=2)
    assert_same(outcomes, alone(model, data, PLAIN), 1e-12)


@pytest.mark.parametrize("spec", ["1f1b,spare=1", "1f1b,recompute=1,spare=2"])
def test_with_spare_room_it_trains_the_same(spec: str) -> None:
    model, data = layered(5), batches(2, 8)
    outcomes = piped(model, data, 2, schedule=spec, microbatches=8)
    assert_same(outcomes, alone(model, data), 1e-12)
    for stage, outcome in enumerate(outcomes):
        least = 1 if "recompute" in spec else 2 - stage
        assert least <= outcome.pipe._built.runtime.deferred.peak_held <= outcome.pipe.facts.activations[stage]


@pytest.mark.parametrize("spec", ["gpipe,recompute=0", "gpipe", "1f1b", "pipedream"])
def test_each_microbatch_has_its_weights_gradients_once_between_backward_and_update(spec: str) -> None:
    endless = spec == "pipedream"
    outcomes = piped(layered(7), batches(3, 6), 3, PLAIN, schedule=spec, microbatches=None if endless else 6)
    for outcome in outcomes:
        owed, seen = set[int](), 0
        for done in outcome.pipe.log:
            kind, microbatch = done.action.kind, done.action.microbatch
            if kind == "B":
                owed.add(microbatch)
            elif kind == "W":
                seen += microbatch in owed
                owed.discard(microbatch)
            elif kind == "U":
                assert not owed
        assert seen == (3 if endless else 3 * 6)


def test_hooks_on_parameters_are_called_for_every_microbatch() -> None:
    seen: list[int] = []
    model = layered(3)

    class Watched(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.weight.register_hook(lambda gradient: seen.append(1))

        def __deepcopy__(self, memo: Any) -> Watched:
            return self

    watched = nn.Sequential(model, Watched().double())
    piped(watched, batches(2, 4), 1, PLAIN, schedule="1f1b", microbatches=4)
    assert len(seen) == 8
