"""Runs one replica's line of a schedule, whatever the schedule: what travels follows from the actions.

F m takes the activation of m from the stage before and hands its own on; B m takes the gradient from the stage behind
and hands its own back; U adds up what replicas and tied copies have, and updates. What a backward owes is done while there
is nothing else to do, where its activations are in the way, or before U.
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
from polytempo.stages.stage import Stage, drawing_apart

#: So many of the last actions are remembered.
REMEMBERED = 100_000


class Done(NamedTuple):
    """An action that was done. `version`: of the weights it used, or made; `waited`: seconds before `start`, for others.
    What was owed for a backward and done later has its own entry, with the kind W."""

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
        self._start = self._waited = 0.0  # of what is done now

    def run(self, actions: Sequence[Action], base: int) -> None:
        """Do these, one after another. Numbers of microbatches that travel count from `base`."""
        with drawing_apart(self.stage.device):
            self._run(actions, base)
        self.doing = None

    def _run(self, actions: Sequence[Action], base: int) -> None:
        for index, action in enumerate(actions):
            self.doing = action
            self._start, self._waited = time.perf_counter(), 0.0
            if action.kind == "F":
                follows = actions[index + 1] if index + 1 < len(actions) else None
                again = self._recompute and follows != Action("B", action.microbatch)
                version = self._forward(action.microbatch, base, again)
            elif action.kind == "B":
                version = self._backward(action.microbatch, base)
            else:
                version = self._update(base)
            self.log.append(Done(action, version, self._start, time.perf_counter(), self._waited))

    def _forward(self, microbatch: int, base: int, again: bool) -> int:
        stage, number = self.stage, base + microbatch
        while stage.full and not again:
            self._catch_up(base)
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
        while stage.full and stage.kept[number].outputs is None:  # it is about to be made again
            self._catch_up(base)
        back = stage.backward(number, gradients)
        if stage.number:
            self.carrier.send(self._neighbour(stage.number - 1, microbatch), BACKWARD, back)
        return back.version

    def _update(self, base: int) -> int:
        while self.stage.owed:
            self._catch_up(base)
        waits = time.perf_counter()
        self.exchange.add_up(self.stage.collect(), self.stage.backwards, self.stage.share)
        self._start = time.perf_counter()
        self._waited += self._start - waits
        self.stage.update()
        return self.stage.version

    def _neighbour(self, stage: int, microbatch: int) -> int:
        return self.places.rank(stage, microbatch % self.places.replicas[stage])

    def _take(self, stage: int, microbatch: int, kind: int, base: int) -> Parcel:
        """What comes from another stage. Meanwhile, what is owed is done."""
        waits = time.perf_counter()

        def meanwhile() -> bool:
            nonlocal waits
            if self.stage.owed:
                self._waited += time.perf_counter() - waits
                self._catch_up(base)
                waits = time.perf_counter()
                return True
            return False

        parcel = self.carrier.take(self._neighbour(stage, microbatch), kind, base + microbatch, meanwhile)
        self._start = time.perf_counter()
        self._waited += self._start - waits
        return parcel

    def _catch_up(self, base: int) -> None:
        """Do a piece of what is owed, which is not part of the action that comes next."""
        start = time.perf_counter()
        number, version = self.stage.catch_up()
        self._start = time.perf_counter()
        action = Action("W", number - base)
        if self.log and self.log[-1].action == action:
            start = self.log.pop().start
        self.log.append(Done(action, version, start, self._start, 0.0))
