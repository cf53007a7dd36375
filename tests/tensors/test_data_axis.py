"""When gradients of a stage may leave it on the data axis: once, when they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import nn

from polytempo.pipeline.partition import ModelPart
from polytempo.pipeline.stage import DataAxis, Stage
from polytempo.pipeline.stage_message import StageMessage

MICROBATCHES = 3


class Twice(nn.Module):
    """The same linear layer two times, and a norm: two pieces are deferred for one weight, none for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.linear(x)))  # type: ignore[no-any-return]


class Sender:
    """In place of a `DistributedOptimizer`: what leaves."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.sending = True
        self.left: list[tuple[nn.Parameter, torch.Tensor]] = []
        for param in params:
            hook = self._hook()
            param.register_post_accumulate_grad_hook(hook)

    def _hook(self) -> Any:
        def complete(param: nn.Parameter) -> None:
            if self.sending and param.grad is not None:
                self.left.append((param, param.grad.clone()))

        complete.optional = True  # type: ignore[attr-defined]
        return complete

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sending = False
        yield
        self.sending = True


def backwards(alone: bool, early: bool) -> tuple[Stage, Sender]:
    """The backwards of an update, deferred pieces too."""
    torch.manual_seed(0)
    stage = Stage(ModelPart(Twice().double()), 1, lambda p: torch.optim.SGD(p, 0.1), None, alone=alone)
    sender = Sender(stage.params)
    stage.data_axis = DataAxis(cast("Any", sender), defers=not alone)
    stage.data_axis.sends_early = early
    for number in range(MICROBATCHES):
        x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        out = stage.forward(number, StageMessage([x], single=True, figure=2.0))
        gradient = StageMessage([torch.ones_like(out.values[0])])
        stage.backward(number, gradient, last=number == MICROBATCHES - 1)
        assert number == MICROBATCHES - 1 or not sender.left, "not before the last backward"
    assert bool(stage.deferred) is not alone
    while stage.deferred:
        stage.run_deferred()
    return stage, sender


@pytest.mark.parametrize("alone", [False, True])
def test_each_gradient_leaves_once_and_complete(alone: bool) -> None:
    stage, sender = backwards(alone, early=True)
    assert len(sender.left) == len(stage.params) == len({param for param, _ in sender.left})
    for param, seen in sender.left:
        assert param.grad is not None
        assert torch.equal(seen, param.grad)
    assert stage.samples == 2.0 * MICROBATCHES


@pytest.mark.parametrize("alone", [False, True])
def test_none_leaves_where_gradients_still_change_after_the_last_backward(alone: bool) -> None:
    assert backwards(alone, early=False)[1].left == []


def test_hooks_of_the_script_are_autograds_alone() -> None:
    seen = []
    stage = Stage(ModelPart(Twice().double()), 1, lambda p: torch.optim.SGD(p, 0.1), None)
    stage.data_axis = DataAxis(cast("Any", Sender(stage.params)), defers=True)
    norm = next(param for name, param in stage.part.parameters() if name == "norm.weight")
    norm.register_post_accumulate_grad_hook(seen.append)
    out = stage.forward(0, StageMessage([torch.ones(2, 4, dtype=torch.float64)], single=True))
    stage.backward(0, StageMessage([torch.ones_like(out.values[0])]), last=True)
    assert len(seen) == 1
