"""A call of several parts: a record of each rank, and then whatever all ranks decide from what they have read.

    exchange(group, record, then)    `then` gets everybody's record, and the group: its collectives are steps of this call

What all ranks decide alike, such as an error for all of them, needs no further message: `Settled` ends the call, and the
calls after it go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from polytempo.collectives.executor import ExecutionStage
from polytempo.collectives.flattening import shape_of
from polytempo.collectives.group import RankGroup
from polytempo.collectives.tasks import Steps, Task

Then = Callable[[list[torch.Tensor], Any], Steps]


class Nested(RankGroup):
    """A group within one of its calls: a collective returns steps, to be taken with `yield from`."""

    def __init__(self, group: RankGroup, stage: ExecutionStage) -> None:
        self.__dict__.update(vars(group))
        self._stage = stage

    def _start(
        self,
        collective: str,
        about: str,
        algorithm: str,
        steps: Callable[[ExecutionStage], Steps],
        background: bool,
        op: str = "sum",
    ) -> Any:
        return steps(replace(self._stage, op=op, buffer=None))


def exchange(group: RankGroup, record: torch.Tensor, then: Then, background: bool) -> Task:
    """Gather everybody's record, all of one size, and go on with it; the result is that of `then`."""

    def steps(stage: ExecutionStage) -> Steps:
        inside: Any = Nested(group, stage)
        rows = [torch.empty_like(record) for _ in range(group.size)]
        yield from inside.all_gather(rows, record)
        return (yield from then(rows, inside))

    return group._start("exchange", shape_of(record), "auto", steps, background)
