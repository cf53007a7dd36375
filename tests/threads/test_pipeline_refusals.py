"""Mistakes: one line, what was expected, what came, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from piped import PLAIN, batches, everywhere, layered, mse
from torch import nn

from polytempo.errors import PeerError, UsageError
from polytempo.pipeline.pipeline import Pipeline
from polytempo.session.session import Session

pytestmark = pytest.mark.timeout(120)

X, Y = batches(1, 12)[0]


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else x


def refused(ranks: int, model: Any = None, **options: Any) -> str:
    """What all ranks say, when they build it."""
    chosen = {"loss": mse, "optimizer": PLAIN} | options
    outcomes = everywhere(ranks, lambda session: Pipeline(model or layered(), **chosen))
    assert all(isinstance(outcome, UsageError) for outcome in outcomes), outcomes
    text = str(outcomes[0])
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": 6}, "expected 1 to 5 stages, for the model has 5 layers; got 6; nearest: 5"),
        ({"stages": [2, 2]}, "5 together (0, 1, 2, 3, ...); got [2, 2], which is 4; nearest: [2, 3]"),
        ({"stages": [0, 5]}, "got [0, 5], which is 5; nearest: [1, 4]"),
        ({"stages": 2, "schedule": "1f1c"}, "unknown pipeline schedule '1f1c'; nearest: 1f1b"),
        ({"stages": 2, "microbatches": 0}, "expected 1 of the microbatches or more, got 0; nearest: 1"),
        ({"stages": 2, "replicas": (1, 2, 1)}, "expected a number of replicas for each of 2 stages"),
        ({"stages": 2, "schedule": "pipedream", "microbatches": 4}, "moves whole minibatches, one for each step()"),
        ({"stages": 2, "schedule": "stage 0: F0 B0 U\nstage 1: B0 F0 U"}, "cannot be run: order: stage 1, action 0 (B0)"),
        ({"stages": 3, "schedule": "stage 0: F0 B0 U\nstage 1: F0 B0 U"}, "has stages 2, not 3; leave stages out"),
    ],
)
def test_what_cannot_be_built(options: dict[str, Any], text: str) -> None:
    ranks = 6 if options["stages"] == 6 else 2
    assert text in refused(ranks, **options)


def test_too_few_ranks() -> None:
    assert refused(2, stages=3) == (
        "the schedule needs 3 ranks, one for each replica of a stage (1, 1, 1); the job has 2; start 3, or use other stages "
        "or replicas"
    )


def test_modules_that_cannot_be_cut() -> None:
    assert "Undecided cannot be traced symbolically" in refused(2, Undecided().double())
    assert "give its layers as nn.Sequential or a list" in refused(2, Undecided().double())
    example = refused(2, Undecided().double(), example=(X,))
    assert "can be traced neither symbolically nor with an example" in example
    assert "expected a module or a list of modules" in refused(2, [1, 2])


def test_tied_weights_need_a_flush() -> None:
    shared = nn.Linear(6, 6).double()
    model = nn.Sequential(shared, nn.Tanh(), shared)
    text = refused(2, model, stages=[1, 2], schedule="pipedream")
    assert text.startswith("stages 0, 1 hold the same parameter, and pipedream updates them at different times")


def test_clipping_needs_a_flush_and_a_norm() -> None:
    assert refused(2, layered(), schedule="pipedream", clip_norm=1.0) == (
        "clip_norm needs a point at which all stages have their gradients, and pipedream has none; use a schedule that "
        "flushes (1f1b), or clip in the optimizer that you pass"
    )
    for norm in (0, -1.0, float("nan")):
        assert refused(2, layered(), clip_norm=norm) == f"expected clip_norm above 0, got {norm}"


def stepped(x: Any, y: Any, **options: Any) -> list[Any]:
    chosen = {"loss": mse, "optimizer": PLAIN, "microbatches": 4} | options
    return everywhere(2, lambda session: Pipeline(layered(), **chosen).step(x, y))


def test_a_batch_that_cannot_be_cut_evenly() -> None:
    for error in stepped(X, Y, microbatches=5):  # the first and the last stage look; whoever is first tells
        assert isinstance(error, UsageError | PeerError)
        assert str(error).endswith("a batch of 12 examples cannot be cut into 5 equal microbatches; nearest: microbatches=4")
    first, _ = stepped(torch.tensor(1.0), Y)
    assert "expected a batch of examples, got a tensor of shape ()" in str(first)


def test_the_first_stage_needs_inputs() -> None:
    first, second = stepped(None, Y)
    assert str(first).startswith("the first stage needs the inputs of the batch, got None")
    assert str(second) == f"stage 0 (rank 0) failed: {first}"


def test_a_loss_of_many_numbers() -> None:
    first, second = stepped(X, Y, loss=lambda out, y: (out - y) ** 2)
    assert str(second) == (
        "expected the loss to be one number, the mean over a microbatch; got a tensor of shape (3, 6); use reduction='mean'"
    )
    assert str(first) == f"stage 1 (rank 1) failed in F0: {second}"


class Odd(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result(x)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda x: {"a": x}, "expected tensors between stages (or numbers, or None), got dict; cut elsewhere"),
        (lambda x: x.to_sparse(), "expected dense tensors between stages, got one with layout torch.sparse_coo"),
        (lambda x: tuple(x for _ in range(300)), "bytes to describe, more than 8192; cut where fewer tensors pass"),
    ],
)
def test_what_cannot_pass(result: Any, text: str) -> None:
    model = nn.Sequential(Odd(result), nn.Linear(6, 6).double())
    options: dict[str, Any] = {"loss": mse, "optimizer": PLAIN, "stages": 2, "microbatches": 2}
    first, second = everywhere(2, lambda session: Pipeline(model, **options).step(X, Y))
    assert text in str(first)
    assert text in str(second)


def test_names_and_shapes_of_a_whole_model() -> None:
    state = layered().state_dict()

    def work(session: Any) -> None:
        pipe = Pipeline(layered(), loss=mse, optimizer=PLAIN)
        with pytest.raises(UsageError, match=r"missing: \['0.weight'\], unknown: \['zero'\]"):
            pipe.load_state_dict({"zero" if name == "0.weight" else name: value for name, value in state.items()})
        if session.rank == 0:
            with pytest.raises(UsageError, match=r"0.weight has shape \(6, 6\); got one of shape \(6,\)"):
                pipe.load_state_dict(state | {"0.weight": torch.ones(6)})

    assert everywhere(2, work) == [None, None]


def test_nothing_but_steps_while_minibatches_are_under_way() -> None:
    def work(session: Any) -> None:
        pipe = Pipeline(layered(), loss=mse, optimizer=PLAIN, schedule="pipedream")
        assert pipe.step(X, Y) is None
        for call in (pipe.state_dict, lambda: pipe.save("nowhere"), lambda: pipe.load_state_dict({})):
            with pytest.raises(UsageError, match=r"while 1 minibatches may be in flight; call flush\(\) first"):
                call()
        pipe.flush()
        assert pipe.flush() is None

    assert everywhere(2, work) == [None, None]


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_parameters_that_are_given_other_memory(schedule: str) -> None:
    """Where weights have versions, updates would go to memory that computes nothing; elsewhere they follow."""

    def work(session: Session) -> list[torch.Tensor]:
        model = layered()
        pipe = Pipeline(model, loss=mse, optimizer=PLAIN, schedule=schedule, stages=2)
        pipe.step(X, Y)
        pipe.flush()
        for param in model.parameters():
            param.data = param.data.clone()
        before = [param.detach().clone() for param in pipe.stage.params]
        pipe.step(X, Y)
        return [param - old for param, old in zip(pipe.stage.params, before, strict=True)]

    for outcome in everywhere(2, work):
        if schedule == "pipedream":
            assert isinstance(outcome, UsageError | PeerError), outcome
        else:
            assert all(change.abs().max() > 0 for change in outcome)
    if schedule == "pipedream":
        errors = [str(outcome) for outcome in everywhere(2, work)]
        assert any("weight was moved to other memory after the pipeline was built" in text for text in errors), errors
