"""Modes of a user, for tests of the door: they are in no table of the library.

LEAD:2       a copy of ssp:2, with the promises that say so
K_BATCH:2    an update of each two pushes, of whichever workers; a worker waits until its push is in one
"""

from __future__ import annotations

from polytempo.modes import (
    Action,
    Apply,
    AsynchronousPolicy,
    Gate,
    Hold,
    Mode,
    Policy,
    Promises,
    Pushed,
    Release,
    fields,
    whole_number,
)


class Bound(Gate):
    """At most `bound` steps ahead of the slowest."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def required(self, step: int) -> int:
        return step - self.bound


class KBatch(Policy):
    """Applies pushes K at a time, and tells workers of how many the update was."""

    def __init__(self, workers: int, k: int) -> None:
        super().__init__(workers)
        self.k = k
        self.there: list[Pushed] = []

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        self.there.append(push)
        self.progress.move(push.worker, push.step + 1)
        self.room.enter(push.worker, push.step + 1)
        return self.on_leave(push.worker, now) or [self.why_held(push.worker, push.step + 1)]

    def on_leave(self, worker: int, now: float) -> list[Action]:
        active = self.progress.pushed
        if not self.there or len(self.there) < min(self.k, len(active)):
            return []
        made, self.there = self.there, []
        self.room.admit(lambda step: True)
        told = fields(size=len(made))
        released = [Release(p.worker, p.step + 1, self.progress.slowest, told) for p in made if p.worker in active]
        return [Apply(tuple(made), len(made) / max(1, len(active))), *released]

    def why_held(self, worker: int, step: int) -> Hold:
        others = tuple(other for other in self.progress.pushed if other != worker)
        return Hold(worker, step, others[:8], len(others), f"{len(self.there)} of {self.k} pushes are there")


LEAD = Mode(
    "lead",
    "lead:2",
    "at most S steps ahead of the slowest worker",
    lambda workers, bound: AsynchronousPolicy(workers, Bound(bound)),
    argument=whole_number("S", at_least=0),
    promises=Promises(lead=lambda bound, **_: bound, waits=lambda bound, **_: bound),
)
K_BATCH = Mode(
    "kbatch",
    "kbatch:2",
    "an update of each K pushes",
    KBatch,
    argument=whole_number("K", at_least=1),
    tells={"size": int},
)
