"""`clip_norm`: gradients are clipped by the norm of the whole model's, as `clip_grad_norm_` does in one process."""

from __future__ import annotations

import pytest
import torch
from piped import PLAIN, SGD, alone, assert_same, batches, layered, piped
from test_pipeline_models import Tied, seeded_model, words
from torch import nn

from polytempo.pipeline.stage import MakeOptimizer

pytestmark = pytest.mark.timeout(120)


def clipping(optimizer: MakeOptimizer, most: float, norms: list[float] | None = None) -> MakeOptimizer:
    """An optimizer of a whole model that clips first."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer(params)

        def clip(*_: object) -> None:
            norm = nn.utils.clip_grad_norm_(params, most)
            if norms is not None:
                norms.append(norm.item())

        made.register_step_pre_hook(clip)
        return made

    return make


@pytest.mark.parametrize("most", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("spec", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [(1,), (1, 1, 1), (2, 1), (1, 2)])
def test_the_whole_models_norm_is_clipped(spec: str, replicas: tuple[int, ...], most: float) -> None:
    model, data, norms = layered(7), batches(3, 8), list[float]()
    wanted = alone(model, data, clipping(SGD, most, norms))
    outcomes = piped(
        model, data, sum(replicas), schedule=spec, stages=len(replicas), microbatches=4, replicas=replicas, clip_norm=most
    )
    assert_same(outcomes, wanted, 1e-10)
    for outcome in outcomes:
        assert outcome.pipe.gradient_norm == pytest.approx(norms[-1], abs=1e-10)


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_tied_weights_count_once(replicas: tuple[int, ...]) -> None:
    model, data, loss = seeded_model(Tied), words(4, 8), nn.functional.cross_entropy
    outcomes = piped(model, data, sum(replicas), PLAIN, loss=loss, microbatches=4, replicas=replicas, clip_norm=0.1)
    assert_same(outcomes, alone(model, data, clipping(PLAIN, 0.1), loss=loss), 1e-10)


def test_a_stage_without_parameters_and_one_that_is_frozen_take_part() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[2].requires_grad_(False)
    data = batches(2, 4)
    outcomes = piped(model, data, 4, PLAIN, microbatches=2, stages=4, clip_norm=0.1)
    assert_same(outcomes, alone(model, data, clipping(PLAIN, 0.1)), 1e-10)


@pytest.mark.long
def test_half_precision_does_not_overflow() -> None:
    model = nn.Linear(4, 4, bias=False).half()
    data = [(torch.full((2, 4), 2000.0).half(), torch.zeros(2, 4).half())]  # squares of which are no such numbers
    (outcome,) = piped(model, data, 1, PLAIN, microbatches=1, clip_norm=1.0, loss=lambda out, _: out.mean())
    assert outcome.pipe.gradient_norm == pytest.approx(2000.0, rel=0.01)


def test_nothing_is_clipped_unless_told() -> None:
    (outcome,) = piped(layered(3), batches(1, 4), 1, microbatches=2)
    assert outcome.pipe.gradient_norm is None
