"""The traceback of a mistake ends in the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch

import polytempo as pt
from polytempo.launcher.script_error import shown_frames
from polytempo.session.session import init, shutdown


def shown(call: Callable[[], object]) -> list[str]:
    """The functions that the traceback of a call shows."""
    with pytest.raises(Exception, match=r".") as caught:
        call()
    frames = traceback.extract_tb(shown_frames(caught.value, caught.value.__traceback__))
    return [frame.name for frame in frames]


def ours() -> object:
    model = torch.nn.Linear(2, 1)
    return pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, clip_norm=-1)


def through_torch() -> object:
    class Calls(torch.nn.Module):
        def forward(self) -> object:
            return ours()

    return Calls()()


def theirs() -> object:
    return torch.zeros(2) @ torch.zeros(3)


def test_our_frames_below_the_users_are_left_out() -> None:
    init()
    try:
        assert shown(ours) == ["shown", "ours"]
        assert shown(through_torch)[-2:] == ["forward", "ours"]
        assert shown(theirs) == ["shown", "theirs"]
        assert shown(lambda: torch.nn.Linear(2, 1)(torch.zeros(3)))[-1] == "forward", "an error of torch keeps its frames"
    finally:
        shutdown()
