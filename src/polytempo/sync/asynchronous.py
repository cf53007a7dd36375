"""Modes without rounds: every push is applied at once, and a gate decides which workers may start their next step.

A gate answers one question: which step must the slowest worker have reached before a worker may start step c?

    asp      none                         no worker is ever held
    ssp:s    at step c - s
    every:k  at the last multiple of k that is not after c
    dssp     at step c - l, unless a forecast grants more

Each push moves the weights by one optimizer step at its worker's learning rate divided by the number of active workers, so
that n pushes go as far as one barrier step and changing the mode needs no new rate; by the root of it where the update rule
divides by the gradient's size (`momentum.py`); `scale=1` is the textbook's full rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from polytempo.sync.actions import Action, Apply, Hold, Release, Wake
from polytempo.sync.capabilities import NEVER, Promises
from polytempo.sync.events import Pushed
from polytempo.sync.mode import SCALE, Mode, Scale, rate_of
from polytempo.sync.policy import Policy
from polytempo.sync.progress import Progress


class Gate(ABC):
    """The rule of a mode without rounds. `timed` gates also see when steps begin and end."""

    timed = False

    @abstractmethod
    def required(self, step: int) -> float:
        """The step that every active worker must have reached before `step` may start."""

    def admits(self, worker: int, step: int, progress: Progress, now: float) -> bool:
        """May this worker, which has just pushed, go on to `step` at once?"""
        return self.required(step) <= progress.slowest

    def reason(self, step: int, slowest: int, first: int) -> str:
        """Why `step` must wait; `first` is the first worker waited for, `slowest` its next step."""
        return f"{step - slowest} ahead of worker {first}"

    # For timed gates alone.

    def observe(self, worker: int, step: int, started: float, now: float) -> None:
        """A worker that was released for `step` at `started` pushed it at `now`."""

    def welcome(self, worker: int) -> None:
        """A worker takes its first step."""

    def forget(self, worker: int) -> None:
        """A worker is gone."""

    def patience(self, worker: int, step: int, now: float) -> float | None:
        """A worker is held from `now` on: the moment at which to reconsider, if there is one."""
        return None

    def expire(self, now: float) -> None:
        """Reconsider."""


class AsynchronousPolicy(Policy):
    """Applies every push at once; the gate decides which workers go on."""

    def __init__(self, workers: int, gate: Gate, scale: Scale = None) -> None:
        super().__init__(workers)
        self.gate = gate
        self.scale = scale
        self._timed = gate.timed
        self._released_at: dict[int, float] = {}

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        worker, step = push.worker, push.step + 1
        progress = self.progress
        moved = progress.move(worker, step)
        actions: list[Action] = [Apply((push,), rate_of(self.scale, len(progress.pushed)))]
        if self._timed:  # before any gate opens: this push may say that the slowest worker is faster than it seemed
            self.gate.observe(worker, push.step, self._released_at[worker], now)
        if moved and self.room.by_step:
            actions += self._open(now)
        if self.gate.admits(worker, step, progress, now):
            if self._timed:
                self._released_at[worker] = now
            actions.append(Release(worker, step, progress.slowest))
            return actions
        self.room.enter(worker, step)
        actions.append(self.hold(worker, step))
        if self._timed:
            at = self.gate.patience(worker, step, now)
            if at is not None:
                actions.append(Wake(at))
        return actions

    def _open(self, now: float) -> list[Action]:
        """Release all workers whose step may start now."""
        slowest, required = self.progress.slowest, self.gate.required
        released = self.room.admit(lambda step: required(step) <= slowest)
        if self._timed:
            self._released_at.update((worker, now) for worker, _ in released)
        return [Release(worker, step, slowest) for worker, step in released]

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        self._released_at[worker] = now
        self.gate.welcome(worker)
        return super().on_start(worker, step, now)

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self._released_at.pop(worker, None)
        self.gate.forget(worker)
        return self._open(now)

    def on_tick(self, now: float) -> list[Action]:
        self.gate.expire(now)
        return self._open(now)

    def why_held(self, worker: int, step: int) -> Hold:
        named, count = self.progress.behind(int(self.gate.required(step)))
        return Hold(worker, step, named, count, self.gate.reason(step, self.progress.slowest, named[0]))


# `asp`: asynchronous parallel. No worker ever waits; staleness is not bounded.


class Unbounded(Gate):
    """A gate that is never closed."""

    def required(self, step: int) -> float:
        return -math.inf


ASP = Mode(
    "asp",
    "asp",
    "no barrier",
    lambda workers, scale=None: AsynchronousPolicy(workers, Unbounded(), scale),
    options=SCALE,
    keeps_momentum=True,
    split=None,
    promises=Promises(waits=NEVER),
)
