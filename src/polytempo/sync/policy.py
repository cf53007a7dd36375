"""The one interface of every synchronisation mode: `handle(event, now) -> actions`.

Rules of this folder: no clock, no dice, no torch, no socket, no thread, no file. The same events at the same moments give
the same actions, in a live job, in a simulation, in a replay of a record and in a proof.

Common to all modes: no worker starts before all initial workers have joined, a joiner starts at the slowest worker's step,
a leaver releases the workers that waited for it. A mode adds what happens on a push.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, KeysView, Mapping
from itertools import islice

from polytempo.errors import OrderError, UsageError
from polytempo.sync.actions import NAMED_AT_MOST, Action, Admit, Discard, Hold, Release
from polytempo.sync.events import Event, Joined, Left, Pushed
from polytempo.sync.progress import HeldWorkers, Progress


class Policy(ABC):
    """Decides which workers may go on. `handle` gets every event of the job, in one order."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise UsageError(f"expected at least 1 worker, got {workers}; start the job with 1 or more")
        self.workers = workers
        self.explains = True  #: False leaves names and reasons out of holds: for vast simulations without a record
        self.progress = Progress()
        self.room = HeldWorkers()
        self._awaited: OrderedDict[int, None] = OrderedDict.fromkeys(range(workers))

    def begin_at(self, step: int) -> None:
        """Number the first step `step`: for a job that goes on from a checkpoint. Before any event."""
        self.progress.slowest = self.progress.fastest = step

    def saved(self) -> dict[str, float]:
        """What a checkpoint must hold of the policy beside its steps; in most modes nothing."""
        return {}

    def restore(self, saved: Mapping[str, float]) -> None:
        """The job goes on from a checkpoint that holds this. Before any event."""

    def expect(self, members: Iterable[int]) -> None:
        """Start with these workers, in place of 0 to n - 1: as many as the policy was made for. Before any event."""
        self._awaited = OrderedDict.fromkeys(sorted(members))

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event that happened at `now`; returns the actions to carry out, in order."""
        if type(event) is Pushed:
            worker, step, held = event.worker, event.step, self.room.by_step
            if self.progress.pushed.get(worker) != step or (step in held and worker in held[step]):
                return self._stray(event)
            return self.on_push(event, now)
        if type(event) is Joined:
            return self._joined(event.worker, now)
        if type(event) is Left:
            return self._left(event.worker, now)
        return self.on_tick(now)

    @property
    def members(self) -> KeysView[int]:
        """The active workers."""
        return self.progress.pushed.keys()

    @property
    def reached(self) -> int:
        """The step that the job has come to: all before it are done, for all workers that it waits for."""
        return self.progress.slowest

    def holds(self) -> list[Hold]:
        """All workers that are held now, with the present reason."""
        why = self._start_hold if self._awaited else self.why_held
        return [why(worker, step) for worker, step in self.room]

    # What a mode decides.

    @abstractmethod
    def on_push(self, push: Pushed, now: float) -> list[Action]:
        """A member has pushed the step that was its turn."""

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        """A member takes its first step."""
        return [Release(worker, step, self.progress.slowest)]

    def on_leave(self, worker: int, now: float) -> list[Action]:
        """A member has left, and is removed here already: which workers does that release?"""
        return []

    def on_tick(self, now: float) -> list[Action]:
        """The time of a `Wake` has come."""
        return []

    def hold(self, worker: int, step: int) -> Hold:
        """The action that holds a worker now, with names and a reason where these are wanted."""
        return self.why_held(worker, step) if self.explains else Hold(worker, step, (), 0, "")

    def why_held(self, worker: int, step: int) -> Hold:
        """Why this worker is held now: here for those whose next step is before its own."""
        named, count = self.progress.behind(step)
        return Hold(worker, step, named, count, f"{step - self.progress.slowest} ahead of the slowest worker")

    def entry_step(self) -> int:
        """The step at which a worker that joins now starts."""
        return self.progress.slowest

    # Membership.

    def _joined(self, worker: int, now: float) -> list[Action]:
        if worker in self.progress.pushed:
            raise OrderError(f"worker {worker} joined twice; a worker that comes back must leave first")
        step = self.entry_step()
        self.progress.enter(worker, step)
        if not self._awaited:
            return [Admit(worker, step), *self.on_start(worker, step, now)]
        self._awaited.pop(worker, None)  # one that was not awaited waits for the others, too
        self.room.enter(worker, step)
        if self._awaited:
            return [Admit(worker, step), self._start_hold(worker, step)]
        return [Admit(worker, step), *self._start(now)]

    def _left(self, worker: int, now: float) -> list[Action]:
        if worker in self._awaited:
            del self._awaited[worker]
            return [] if self._awaited else self._start(now)
        if worker not in self.progress.pushed:
            return []
        self.room.remove(worker, self.progress.pushed[worker])
        self.progress.remove(worker)
        return [] if self._awaited else self.on_leave(worker, now)

    def _start(self, now: float) -> list[Action]:
        """All initial workers have joined or left: release them in order of rank."""
        starters = sorted(self.room.admit(lambda step: True))
        return [action for worker, step in starters for action in self.on_start(worker, step, now)]

    def _start_hold(self, worker: int, step: int) -> Hold:
        missing = tuple(islice(self._awaited, NAMED_AT_MOST))
        count = len(self._awaited)
        return Hold(worker, step, missing, count, f"{count} of {self.workers} workers have not joined yet")

    def _stray(self, push: Pushed) -> list[Action]:
        """A push out of turn: of a worker that is no member it is discarded; of a member it is the driver's mistake."""
        worker = push.worker
        expected = self.progress.pushed.get(worker)
        if expected is None:
            return [Discard(worker, push.step, f"worker {worker} is not a member; it must join first")]
        state = ", which it may not start yet" if self.room.has(worker, expected) else ""
        raise OrderError(f"worker {worker} pushed step {push.step}; its next step is {expected}{state}")
