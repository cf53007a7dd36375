"""Runs one replica's line of a schedule, whatever the schedule: what travels follows from the actions.

F m takes the activation of m from the stage before and hands its own on; B m takes the gradient from the stage behind
and hands its own back; U adds up what replicas and tied copies have, and updates. Gradients of weights that a backward owes
are done when they are due, and while this rank would wait (`pipeline/deferred_gradients.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from polytempo.pipeline.actions import ScheduleAction
from polytempo.pipeline.deferred_gradients import DeferredGradients
from polytempo.pipeline.gradient_sync import GradientSync
from polytempo.pipeline.point_to_point import BACKWARD, FORWARD, PointToPoint
from polytempo.pipeline.stage import Stage, drawing_apart
from polytempo.pipeline.stage_message import StageMessage

#: So many of the last actions are remembered.
REMEMBERED = 100_000


class CompletedAction(NamedTuple):
    """An action that was done. `version`: of the weights it used, or made; `waited`: seconds before `start`, for others.
    What was owed for a backward and done later has its own entry, with the kind W."""

    action: ScheduleAction
    version: int
    start: float
    end: float
    waited: float


@dataclass(frozen=True)
class Places:
    """Which rank is which replica of which stage: those of the first stage come first."""

    replicas: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(self.replicas)

    def rank(self, stage: int, replica: int) -> int:
        """Of a replica of a stage."""
        return sum(self.replicas[:stage]) + replica

    def ranks(self, stage: int) -> range:
        """Of all replicas of a stage."""
        return range(self.rank(stage, 0), self.rank(stage, self.replicas[stage]))

    def of(self, rank: int) -> tuple[int, int]:
        """Stage and replica."""
        stage = next(stage for stage, end in enumerate(accumulate(self.replicas)) if rank < end)
        return stage, rank - self.rank(stage, 0)

    def name(self, rank: int) -> str:
        """For texts."""
        stage, replica = self.of(rank)
        return f"stage {stage}{f'.{replica}' if self.replicas[stage] > 1 else ''} (rank {rank})"


class Runtime:
    """This rank's stage, and its neighbours."""

    def __init__(
        self,
        stage: Stage,
        places: Places,
        carrier: PointToPoint,
        exchange: GradientSync,
        debts: DeferredGradients,
        recompute: bool,
    ) -> None:
        self.stage, self.places, self.carrier, self.exchange, self.debts = stage, places, carrier, exchange, debts
        self._recompute = recompute
        self.log: deque[CompletedAction] = deque(maxlen=REMEMBERED)
        self.inputs: dict[int, StageMessage] = {}  #: of the first stage, by microbatch
        self.targets: dict[int, Any] = {}  #: of the last
        self.losses: dict[int, torch.Tensor] = {}  #: that the last stage found
        self.doing: ScheduleAction | None = None
        self._start = self._waited = 0.0  # of what is done now

    def run(self, actions: Sequence[ScheduleAction], base: int) -> None:
        """Do these, one after another. Numbers of microbatches that travel count from `base`."""
        with drawing_apart(self.stage.device):
            for action, follows in pairwise((*actions, None)):
                assert action is not None
                self.doing = action
                self._do(action, base, self._again(action, follows, base))
        self.doing = None

    def _again(self, action: ScheduleAction, follows: ScheduleAction | None, base: int) -> bool:
        """Is it a forward that is to be made again, or a backward that makes it again?"""
        if action.kind == "B":
            return self.stage.kept[base + action.microbatch].outputs is None
        return self._recompute and action.kind == "F" and follows != ScheduleAction("B", action.microbatch)

    def _do(self, action: ScheduleAction, base: int, again: bool) -> None:
        self._start, self._waited, owes = time.perf_counter(), 0.0, 0
        while self.debts.due(action, again):
            self._pay()
        if action.kind == "F":
            version = self._forward(action.microbatch, base, again)
        elif action.kind == "B":
            version = self._backward(action.microbatch, base)
            owes = self.stage.owes(base + action.microbatch)
        else:
            version = self._update()
        self.debts.did(action, again, owes)
        self.log.append(CompletedAction(action, version, self._start, time.perf_counter(), self._waited))

    def _forward(self, microbatch: int, base: int, again: bool) -> int:
        stage, number = self.stage, base + microbatch
        if stage.number:
            inputs = self._take(stage.number - 1, microbatch, FORWARD, base)
        else:
            inputs = self.inputs.pop(microbatch)
        out = stage.forward(number, inputs, self.targets.pop(microbatch, None), again)
        if stage.loss is not None:
            self.losses[microbatch] = out.values[0].detach()
        else:
            self.carrier.send(self._neighbour(stage.number + 1, microbatch), FORWARD, out)
        return out.version

    def _backward(self, microbatch: int, base: int) -> int:
        stage, number = self.stage, base + microbatch
        gradients = None if stage.loss is not None else self._take(stage.number + 1, microbatch, BACKWARD, base)
        back = stage.backward(number, gradients)
        if stage.number:
            self.carrier.send(self._neighbour(stage.number - 1, microbatch), BACKWARD, back)
        return back.version

    def _update(self) -> int:
        waits = time.perf_counter()
        self.exchange.add_up(self.stage.collect(), self.stage.backwards, self.stage.share)
        self._start = time.perf_counter()
        self._waited += self._start - waits
        self.stage.update()
        return self.stage.version

    def _neighbour(self, stage: int, microbatch: int) -> int:
        return self.places.rank(stage, microbatch % self.places.replicas[stage])

    def _take(self, stage: int, microbatch: int, kind: int, base: int) -> StageMessage:
        """What comes from another stage. Meanwhile, what is owed is done."""
        waits = time.perf_counter()

        def meanwhile() -> bool:
            nonlocal waits
            if not self.debts:
                return False
            self._waited += time.perf_counter() - waits
            self._pay()
            waits = time.perf_counter()
            return True

        parcel = self.carrier.take(self._neighbour(stage, microbatch), kind, base + microbatch, meanwhile)
        self._start = time.perf_counter()
        self._waited += self._start - waits
        return parcel

    def _pay(self) -> None:
        """Do a piece of what is owed, which is not part of the action that comes next."""
        start = time.perf_counter()
        action, version = ScheduleAction("W", self.debts.pay()), self.stage.catch_up()
        self._start = time.perf_counter()
        if self.log and self.log[-1].action == action:
            start = self.log.pop().start
        self.log.append(CompletedAction(action, version, start, self._start, 0.0))
