"""Runs one replica's line of a schedule, whatever the schedule: what travels follows from the actions.

F m takes the activation of m from the stage before and hands its own on; B m takes the gradient from the stage behind
and hands its own back; U adds up what replicas and tied copies have, and updates.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from polytempo.pipeline.actions import Action
from polytempo.stages.carrying import BACKWARD, FORWARD, Carrier
from polytempo.stages.exchange import Exchange
from polytempo.stages.parcels import Parcel
from polytempo.stages.stage import Stage

#: So many of the last actions are remembered.
REMEMBERED = 100_000


class Done(NamedTuple):
    """An action that was done. `version`: of the weights it used, or made; `waited`: seconds before `start`, for others."""

    action: Action
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

    def __init__(self, stage: Stage, places: Places, carrier: Carrier, exchange: Exchange, recompute: bool) -> None:
        self.stage, self.places, self.carrier, self.exchange = stage, places, carrier, exchange
        self._recompute = recompute
        self.log: deque[Done] = deque(maxlen=REMEMBERED)
        self.inputs: dict[int, Parcel] = {}  #: of the first stage, by microbatch
        self.targets: dict[int, Any] = {}  #: of the last
        self.losses: dict[int, torch.Tensor] = {}  #: that the last stage found
        self.doing: Action | None = None
        self._began = self._waited = 0.0

    def run(self, actions: Sequence[Action], base: int) -> None:
        """Do these, one after another. Numbers of microbatches that travel count from `base`."""
        for index, action in enumerate(actions):
            self.doing = action
            self._began, self._waited = time.perf_counter(), 0.0
            if action.kind == "F":
                follows = actions[index + 1] if index + 1 < len(actions) else None
                again = self._recompute and follows != Action("B", action.microbatch)
                version = self._forward(action.microbatch, base, again)
            elif action.kind == "B":
                version = self._backward(action.microbatch, base)
            else:
                version = self._update()
            start = self._began + self._waited
            self.log.append(Done(action, version, start, time.perf_counter(), self._waited))
        self.doing = None

    def _forward(self, microbatch: int, base: int, again: bool) -> int:
        stage, number = self.stage, base + microbatch
        if stage.number:
            inputs = self._take(stage.number - 1, microbatch, FORWARD, number)
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
        gradients = None if stage.loss is not None else self._take(stage.number + 1, microbatch, BACKWARD, number)
        back = stage.backward(number, gradients)
        if stage.number:
            self.carrier.send(self._neighbour(stage.number - 1, microbatch), BACKWARD, back)
        return back.version

    def _update(self) -> int:
        waited = time.perf_counter()
        self.exchange.add_up(self.stage.collect(), self.stage.backwards)
        self._waited += time.perf_counter() - waited
        self.stage.update()
        return self.stage.version

    def _neighbour(self, stage: int, microbatch: int) -> int:
        return self.places.rank(stage, microbatch % self.places.replicas[stage])

    def _take(self, stage: int, microbatch: int, kind: int, number: int) -> Parcel:
        began = time.perf_counter()
        parcel = self.carrier.take(self._neighbour(stage, microbatch), kind, number)
        self._waited += time.perf_counter() - began
        return parcel
