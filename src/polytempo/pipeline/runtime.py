"""Runs one replica's actions of any schedule: which messages are sent and received follows from the actions.

F m receives the activation of microbatch m from the stage before and sends its own to the stage behind; B m receives the
gradient from the stage behind and sends its own to the stage before; U sums the gradients of replicas and tied copies, and
updates. Deferred weight gradients are computed when they are due, and while this rank would wait (`deferred_gradients.py`).
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
from polytempo.profile_ranges import profiled

#: The log keeps this many of the last actions.
LOG_LENGTH = 100_000


class CompletedAction(NamedTuple):
    """A completed action. `version`: of the weights it used, or made; `waited`: seconds of waiting for other ranks before
    `start`. Deferred weight gradients have their own entries, of kind W."""

    action: ScheduleAction
    version: int
    start: float
    end: float
    waited: float


@dataclass(frozen=True)
class RankLayout:
    """Which rank of the job is which replica of which stage. `members`: the ranks of the pipeline in this order, those of
    the first stage first."""

    replicas: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.replicas)

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return len(self.replicas) - 1

    def rank(self, stage: int, replica: int) -> int:
        """The rank of a replica of a stage."""
        return self.members[sum(self.replicas[:stage]) + replica]

    def ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks of all replicas of a stage."""
        first = sum(self.replicas[:stage])
        return self.members[first : first + self.replicas[stage]]

    def of(self, rank: int) -> tuple[int, int]:
        """Stage and replica of a rank."""
        place = self.members.index(rank)
        stage = next(stage for stage, end in enumerate(accumulate(self.replicas)) if place < end)
        return stage, place - sum(self.replicas[:stage])

    def name(self, rank: int) -> str:
        """How messages name a rank: `stage 2.1 (rank 5)`; `rank 5` outside the pipeline."""
        if rank not in self.members:
            return f"rank {rank}"
        stage, replica = self.of(rank)
        return f"stage {stage}{f'.{replica}' if self.replicas[stage] > 1 else ''} (rank {rank})"


class Runtime:
    """Runs actions on this rank's stage, with messages from and to its neighbours."""

    def __init__(
        self,
        stage: Stage,
        layout: RankLayout,
        p2p: PointToPoint,
        gradient_sync: GradientSync,
        deferred: DeferredGradients,
        recompute: bool,
        last_backwards: frozenset[int] = frozenset(),
    ) -> None:
        """`last_backwards`: the microbatches whose backwards are the last of this rank before an update."""
        self._last_backwards = last_backwards
        self.stage, self.layout, self.p2p, self.gradient_sync, self.deferred = stage, layout, p2p, gradient_sync, deferred
        self._recompute = recompute
        self.log: deque[CompletedAction] = deque(maxlen=LOG_LENGTH)
        self.inputs: dict[int, StageMessage] = {}  #: of the first stage, by microbatch
        self.targets: dict[int, Any] = {}  #: of the last stage, by microbatch
        self.losses: dict[int, torch.Tensor] = {}  #: of the last stage, by microbatch
        self.examples: dict[int, float] = {}  #: and how many examples it has
        self.current: ScheduleAction | None = None
        self._start = self._waited = 0.0  # of the current action

    def run(self, actions: Sequence[ScheduleAction], base: int) -> None:
        """Run these actions in order. The numbers of microbatches in messages count from `base`."""
        with drawing_apart(self.stage.device):
            for action, follows in pairwise((*actions, None)):
                assert action is not None
                self.current = action
                self._execute(action, base, self._recomputes(action, follows, base))
        self.current = None

    def _recomputes(self, action: ScheduleAction, follows: ScheduleAction | None, base: int) -> bool:
        """Is it a forward that keeps no activations, or the backward that recomputes them?"""
        if action.kind == "B":
            return self.stage.in_flight[base + action.microbatch].outputs is None
        return self._recompute and action.kind == "F" and follows != ScheduleAction("B", action.microbatch)

    def _execute(self, action: ScheduleAction, base: int, recompute: bool) -> None:
        self._start, self._waited, pieces = time.perf_counter(), 0.0, 0
        while self.deferred.due(action, recompute):
            self._run_deferred()
        if action.kind == "F":
            version = self._forward(action.microbatch, base, recompute)
        elif action.kind == "B":
            version = self._backward(action.microbatch, base)
            pieces = self.stage.deferred_pieces(base + action.microbatch)
        else:
            version = self._update()
        self.deferred.completed(action, recompute, pieces)
        self.log.append(CompletedAction(action, version, self._start, time.perf_counter(), self._waited))

    def _forward(self, microbatch: int, base: int, recompute: bool) -> int:
        stage, number = self.stage, base + microbatch
        if stage.number:
            inputs = self._receive(stage.number - 1, microbatch, FORWARD, base)
        else:
            inputs = self.inputs.pop(microbatch)
        out = stage.forward(number, inputs, self.targets.pop(microbatch, None), recompute)
        if stage.loss is not None:
            self.losses[microbatch], self.examples[microbatch] = out.values[0].detach(), out.figure
        else:
            self._send(stage.number + 1, microbatch, FORWARD, out)
        return out.version

    def _backward(self, microbatch: int, base: int) -> int:
        stage, number = self.stage, base + microbatch
        gradients = None if stage.loss is not None else self._receive(stage.number + 1, microbatch, BACKWARD, base)
        back = stage.backward(number, gradients, microbatch in self._last_backwards)
        if stage.number:
            self._send(stage.number - 1, microbatch, BACKWARD, back)
        return back.version

    def _update(self) -> int:
        waits = time.perf_counter()
        self.p2p.confirm()  # of what is lost, nothing may reach the weights
        params, clipping = self.stage.collect(), self.gradient_sync.clipping
        self.gradient_sync.reduce(params, self.stage.backwards, self.stage.divisor)
        if clipping is not None:
            if self.stage.data_axis is not None:
                self.stage.data_axis.average(self.stage.samples)
            clipping.clip(params)
        self._start = time.perf_counter()
        self._waited += self._start - waits
        self.stage.update()
        return self.stage.version

    def _neighbour(self, stage: int, microbatch: int) -> int:
        return self.layout.rank(stage, microbatch % self.layout.replicas[stage])

    def _send(self, stage: int, microbatch: int, kind: int, message: StageMessage) -> None:
        with profiled("send stage", stage):
            self.p2p.send(self._neighbour(stage, microbatch), kind, message)

    def _receive(self, stage: int, microbatch: int, kind: int, base: int) -> StageMessage:
        """A message from another stage; deferred weight gradients are computed while it is not there."""
        waits = time.perf_counter()

        def meanwhile() -> bool:
            nonlocal waits
            if not self.deferred:
                return False
            self._waited += time.perf_counter() - waits
            self._run_deferred()
            waits = time.perf_counter()
            return True

        with profiled("receive stage", stage):
            message = self.p2p.take(self._neighbour(stage, microbatch), kind, base + microbatch, meanwhile)
        self._start = time.perf_counter()
        self._waited += self._start - waits
        return message

    def _run_deferred(self) -> None:
        """Compute a piece of deferred weight gradients; its time is no part of the action that comes next."""
        start = time.perf_counter()
        action, version = ScheduleAction("W", self.deferred.pop()), self.stage.run_deferred()
        self._start = time.perf_counter()
        if self.log and self.log[-1].action == action:
            start = self.log.pop().start
        self.log.append(CompletedAction(action, version, start, self._start, 0.0))
