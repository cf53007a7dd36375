"""Training in which gradients are set by hand, some of them missing, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from helpers import MakeOptimizer, copied, set_gradients
from torch import nn

Gradients = list[list[torch.Tensor | None]]  # by step, by parameter

STATEFUL: dict[str, MakeOptimizer] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
}


def mean_of(workers: Sequence[Gradients]) -> Gradients:
    """The joint gradient: who has none counts as zero, unless nobody has one."""
    result: Gradients = []
    for steps in zip(*workers, strict=True):
        step: list[torch.Tensor | None] = []
        for parts in zip(*steps, strict=True):
            there = [part for part in parts if part is not None]
            step.append(sum(there) / len(workers) if there else None)  # type: ignore[arg-type]
        result.append(step)
    return result


def plain(start: Sequence[nn.Parameter], make: MakeOptimizer, gradients: Gradients) -> tuple[list[torch.Tensor], dict]:
    params = copied(start)
    optimizer = make(params)
    for step in gradients:
        set_gradients(params, step)
        optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict()


def assert_same_state(got: dict, wanted: dict) -> None:
    assert got["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert got["state"][index].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(got["state"][index][name], value, rtol=1e-9, atol=1e-12)
    assert got["param_groups"] == wanted["param_groups"]
