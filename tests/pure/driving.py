"""A job without clock, network or threads: events go in by hand, what the policy orders is carried out and written down.

    job = Job("ssp:1", 2).start()
    job.push(0); job.push(0)         step 0 and step 1 of worker 0
    job.held                         {0: 2}: worker 0 waits to start step 2
    job.leave(1, "lost")             [Release(0, 2, ...)]
    job.lines                        the record of all that, as a job with one server would have written it

What each worker is doing is worked out here from the orders alone, never read from the policy: a worker computes a step from
its release to its push, is held when the policy says so, and is gone when it left. `now` is given, and stays until the next
one. Each push carries its own number as `samples`, so that no two are alike; the driver itself insists that only accepted
pushes are applied, and none twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from polytempo.records.lines import RecordLine, action_line, apply_line, event_line
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.adpsgd import PairPolicy
from polytempo.sync.events import Event, HyperItems, Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.gossip import GossipPolicy
from polytempo.sync.policy import Policy
from polytempo.sync.spec import parse_spec


class Job:
    """Feeds one policy and keeps what came of it. Members are in `steps`, with the number of their next step."""

    def __init__(self, sync: str | Policy, workers: int, recording: bool = True) -> None:
        self.policy = parse_spec(sync).policy(workers) if isinstance(sync, str) else sync
        self.measured = isinstance(sync, str) and parse_spec(sync).capabilities.by_speed
        self.workers = workers
        self.awaited = set(range(workers))  # initial workers of whom nothing was heard yet
        self.steps: dict[int, int] = {}
        self.released: dict[int, int] = {}  # the last step each member may start
        self.held: dict[int, int] = {}  # the step for which each held member waits
        self.pending: dict[
            float, int
        ] = {}  # accepted and not yet applied: the push's number, and the version it was made on
        self.wakes: list[float] = []
        self.now = 0.0
        self.version = 0
        self.recording = recording
        self.history: list[tuple[Event, float, list[Action]]] = []
        self.lines: list[RecordLine] = []
        self._pushes = 0
        self._late: set[int] = set()
        self._began: dict[int, float] = {}  # when each member was last released
        self._read: dict[tuple[int, int], int] = {}  # the version that each released step is computed on

    def computing(self) -> list[int]:
        """Whoever can push now."""
        return [worker for worker, step in sorted(self.steps.items()) if step <= self.released.get(worker, -1)]

    def slowest(self) -> int:
        """The lowest next step of all members."""
        return min(self.steps.values())

    def fork(self) -> Job:
        """The same job once more, to try something out; its record begins anew."""
        return self.frozen()()

    def frozen(self) -> Callable[[], Job]:
        """What makes this job as it is now, as often as wanted."""
        policy = pickle.dumps(self.policy, pickle.HIGHEST_PROTOCOL)  # much faster than deepcopy
        rest = {name: value for name, value in vars(self).items() if name not in ("policy", "history", "lines")}

        def thaw() -> Job:
            twin = Job.__new__(Job)
            copied = {name: value.copy() if type(value) in (dict, set, list) else value for name, value in rest.items()}
            twin.__dict__.update(copied, policy=pickle.loads(policy), history=[], lines=[])
            return twin

        return thaw

    # What can happen.

    def start(self) -> Job:
        """All initial workers join, in order of rank."""
        for worker in sorted(self.awaited):
            self.join(worker)
        return self

    def join(self, worker: int, now: float | None = None) -> list[Action]:
        return self.feed(Joined(worker), now)

    def push(self, worker: int, now: float | None = None, hyper: HyperItems = (), **of_block: Any) -> list[Action]:
        """A member pushes the step it computes; of a block of local steps: their count, loss, lr."""
        self._pushes += 1
        if self.measured and not of_block:
            of_block = self._figures(worker, self.now if now is None else now)
        count, measured = of_block.pop("count", 1), Measured(**of_block)
        return self.feed(Pushed(worker, self.steps[worker], self._pushes, hyper, count, measured), now)

    def _figures(self, worker: int, now: float) -> dict[str, Any]:
        """What a push says of itself where the mode follows the workers' speed: some micro-batches, some read ahead."""
        computed, drawn = now - self._began.get(worker, 0.0), (0, self.steps[worker] + self._pushes % 3)
        return {"count": 1 + self._pushes % 3, "work": float(self._pushes), "computed": computed, "drawn": drawn}

    def leave(self, worker: int, reason: str = "finished", now: float | None = None) -> list[Action]:
        return self.feed(Left(worker, reason), now)

    def tick(self, now: float | None = None) -> list[Action]:
        """Time has come to `now`, or to the earliest `Wake`; those that are due are done with."""
        now = max(self.now, min(self.wakes)) if now is None else now
        self.wakes = [at for at in self.wakes if at > now]
        return self.feed(Ticked(), now)

    def feed(self, event: Event, now: float | None = None) -> list[Action]:
        """Hand an event to the policy and carry out what it orders."""
        self.now = self.now if now is None else now
        actions = self.policy.handle(event, self.now)
        if self.recording:
            self.history.append((event, self.now, actions))
            self._write(event_line(event, self.now))
        self._happened(event, actions)
        for action in actions:
            self._carry_out(action)
        return actions

    # What came of it.

    def _happened(self, event: Event, actions: list[Action]) -> None:
        if isinstance(event, Pushed) and not any(isinstance(action, Discard | Refuse) for action in actions):
            self.steps[event.worker] = event.step + 1
            self.pending[event.samples] = self._read.pop((event.worker, event.step))
        if isinstance(event, Left):
            for state in (self.steps, self.released, self.held):
                state.pop(event.worker, None)
        if isinstance(event, Joined | Left):
            self.awaited.discard(event.worker)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Admit):
            self.steps[action.worker] = action.step
        elif isinstance(action, Hold):
            self._go_on(action.worker, action.step)
            self.held[action.worker] = action.step
        elif isinstance(action, Release):
            self._release(action)
        elif isinstance(action, Apply):
            self._apply(action)
        elif isinstance(action, Discard) and action.worker in self.steps:
            self._late.add(action.worker)
        elif isinstance(action, Wake):
            self.wakes.append(action.at)
        self._write(action_line(action, self.now))

    def _release(self, release: Release) -> None:
        worker, step = release.worker, release.step
        self._go_on(worker, step)
        self.released[worker], self._began[worker] = step, self.now
        self.held.pop(worker, None)
        self._read[worker, step] = self.version

    def _go_on(self, worker: int, step: int) -> None:
        if worker in self._late:  # its push came too late: it goes on wherever the job is
            self._late.discard(worker)
            self.steps[worker] = step

    def _apply(self, apply: Apply) -> None:
        made_on = [self.pending.pop(push.samples) for push in apply.pushes]
        own = isinstance(self.policy, GossipPolicy | PairPolicy)  # steps on a worker's own model are not stale
        staleness = [0 if own else self.version - version for version in made_on]
        self.version += 1
        self._write(apply_line(apply, self.now, 0, self.version, staleness))

    def _write(self, line: RecordLine | None) -> None:
        if self.recording and line is not None:
            self.lines.append(line)
