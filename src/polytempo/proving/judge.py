"""What a policy decides in a game, held to what every mode promises and to what this one has declared.

A `Judge` hears of each event and of the actions that answer it, and knows no more: which step each member is at, and which
was released to it, it works out from these alone. The words are those of `sync/capabilities.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.errors import counted
from polytempo.proving.states import Broken
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release
from polytempo.sync.capabilities import NEVER, MadeOf, Pushes
from polytempo.sync.directives import Mixing, NextMixing
from polytempo.sync.events import Event, Joined, Left, Pushed
from polytempo.sync.spec import Spec

#: By their names in a report.
PROMISES = {
    "orders": "what workers are ordered can be carried out, and they go home with everything pushed",
    "start": "no step is released before all initial workers have joined",
    "once": "a step is released once, in turn, and is not held after that",
    "joiner": "a joiner starts at the slowest one's step",
    "slowest": "a release says the slowest worker's step",
    "exactly once": "each push is applied or discarded, once",
    "liveness": "no worker waits for ever, and every job ends",
    "same again": "the same events give the same actions",
    "lead": "a worker is at most this far ahead of the slowest one",
    "waits": "a worker that is at most this far ahead is not held",
    "quorum": "an update has at least this number of pushes",
    "round": "an update has one push of each worker, in order of rank",
    "even": "pushes of all workers move the values as far as one step of the script",
    "rows": "what workers mix sums to what they had",
    "alone": "one worker trains as the script would",
}

#: Sums of shares, and rates, are the same up to this.
NEAR = 1e-9


#: What a mode writes that has another rate on purpose.
UNEVEN = "; if that is meant, declare Promises(even=False)"


def pushes_in(update: Apply) -> str:
    """How many they are, in words."""
    return "a push" if len(update.pushes) == 1 else f"{len(update.pushes)} pushes"


class Judge:
    """Of the policy of one fragment."""

    def __init__(self, spec: Spec, workers: int) -> None:
        self.can, self.promises = spec.capabilities, spec.mode.promises
        self._lead, self._waits = spec.declared(self.promises.lead), spec.declared(self.promises.waits)
        self._quorum: int = spec.declared(self.promises.quorum, workers) or 0
        self._scaled = "scale" in spec.options
        self._missing = set(range(workers))
        self._steps: dict[int, int] = {}  # the next of each member
        self._released: dict[int, int] = {}
        self._farthest = 0  # the last step that was ever a member's next
        self._late: set[int] = set()  # a push was dropped: what is said next is where the worker goes on
        self._shares: dict[tuple[int, int, int], float] = {}  # step, sender, receiver

    def hear(self, event: Event, actions: Sequence[Action]) -> None:
        """An event, and what was answered.

        Raises:
            Broken: A promise is broken.
        """
        others = [step for worker, step in self._steps.items() if worker != getattr(event, "worker", -1)]
        dropped = any(isinstance(action, Discard | Refuse) and action.worker == event.worker for action in actions) if (
            isinstance(event, Pushed)
        ) else False  # fmt: skip
        if isinstance(event, Pushed) and event.worker in self._steps and not dropped:
            self._steps[event.worker] = event.step + 1
            self._farthest = max(self._farthest, event.step + 1)
        elif isinstance(event, Joined | Left):
            self._missing.discard(event.worker)
        if isinstance(event, Left):
            for state in (self._steps, self._released):
                state.pop(event.worker, None)
            self._late.discard(event.worker)
        for action in actions:
            self._hear_action(event, action, others)
        self._look_at_members(actions)

    def _hear_action(self, event: Event, action: Action, others: list[int]) -> None:
        if isinstance(action, Admit):
            self._hear_admission(event, action, others)
        elif isinstance(action, Release):
            self._hear_release(action)
        elif isinstance(action, Hold):
            if action.worker in self._late:
                self._late.discard(action.worker)
                self._steps[action.worker] = action.step
            if self._released.get(action.worker, -1) >= action.step:
                raise Broken(f"worker {action.worker} is held for step {action.step}, which it may start", action, "once")
        elif isinstance(action, Apply):
            self._hear_update(action)
        elif isinstance(action, Discard | Refuse) and action.worker in self._steps:
            self._late.add(action.worker)

    def _hear_admission(self, event: Event, admit: Admit, others: list[int]) -> None:
        worker, step = admit.worker, admit.step
        if not isinstance(event, Joined) or event.worker != worker:
            raise Broken(f"worker {worker} is admitted, and has not joined", admit, "joiner")
        self._steps[worker] = step
        self._released.pop(worker, None)
        if not others:
            return
        low, high = min(others), self._farthest + 1
        if self.can.update is MadeOf.ROUND or self.can.by_speed or self.can.neighbours:  # at a round that is open, or next
            if not low <= step <= high:
                raise Broken(f"worker {worker} starts at step {step}; the others are from {low} on", admit, "joiner")
        elif step != low:
            raise Broken(f"worker {worker} starts at step {step}; the slowest one is at {low}", admit, "joiner")

    def _hear_release(self, release: Release) -> None:
        worker, step = release.worker, release.step
        self._farthest = max(self._farthest, step)
        if self._missing:
            missing = " and ".join(map(str, sorted(self._missing)))
            raise Broken(f"worker {worker} is released before workers {missing} have joined", release, "start")
        if worker in self._late:
            self._late.discard(worker)
            self._steps[worker] = step
        due, before = self._steps.get(worker, -1), self._released.get(worker, -1)
        if step <= before:
            raise Broken(f"worker {worker} is released for step {step}, after step {before}", release, "once")
        if not due <= step <= due + self.can.ahead:
            raise Broken(f"worker {worker} is released for step {step}, its next is {due}", release, "once")
        self._released[worker] = step
        if isinstance(release.directive, NextMixing) and release.directive.mixing is not None:
            self._hear_row(release, release.directive.mixing)

    def _hear_row(self, release: Release, row: Mixing) -> None:
        worker, step = release.worker, release.step
        total = row.keep + sum(share for _, share in row.send)
        if abs(total - 1) > NEAR:
            raise Broken(
                f"worker {worker} keeps {row.keep:g} in step {step}, and with what it sends that is {total:g}, not 1",
                release,
                "rows",
            )
        said = [((step, worker, other), share) for other, share in row.send]
        said += [((step, other, worker), share) for other, share in row.receive]
        for pair, share in said:
            known = self._shares.setdefault(pair, share)
            if abs(known - share) > NEAR:
                raise Broken(
                    f"in step {step} worker {pair[1]} sends {known:g} to worker {pair[2]}, which counts {share:g}",
                    release,
                    "rows",
                )

    def _hear_update(self, update: Apply) -> None:
        if self._quorum and update.pushes:
            last = max(push.step for push in update.pushes)
            there = {worker for worker, step in self._released.items() if step >= last} | {p.worker for p in update.pushes}
            promised = min(self._quorum, len(there))
            if len(update.pushes) < promised:
                raise Broken(f"an update of {pushes_in(update)}, promised are {promised}", update, "quorum")
        if self.can.update is MadeOf.ALL:
            self._look_at_round(update)
        if not self.promises.even:
            return
        if self.can.update is MadeOf.EACH:
            if self.can.pushes is Pushes.GRADIENTS and not self._scaled and self._steps:
                self._look_at_rate(update, len(update.pushes) / len(self._steps))
        else:
            self._look_at_rate(update, 1.0)
            self._look_at_weights(update)

    def _look_at_round(self, update: Apply) -> None:
        ranks = [push.worker for push in update.pushes]
        if not ranks:  # fine where all who were to make it have left, and others wait for the next
            inside = [worker for worker, step in self._steps.items() if step <= self._released.get(worker, -1)]
            if inside:
                raise Broken(f"an update of no pushes, while worker {inside[0]} computes for it", update, "round")
            return
        if ranks != sorted(ranks):
            raise Broken(f"an update in order of arrival, {ranks}, and not of rank", update, "round")
        steps = {push.step for push in update.pushes}
        if len(steps) > 1:
            raise Broken(f"an update of pushes of steps {sorted(steps)}", update, "round")
        step = steps.pop()
        for worker, released in self._released.items():
            if released >= step and (worker not in ranks or self._steps[worker] <= step):
                raise Broken(f"an update of step {step} without worker {worker}, which was released for it", update, "round")

    def _look_at_rate(self, update: Apply, rate: float) -> None:
        if abs(update.rate - rate) > NEAR:
            raise Broken(
                f"an update of {pushes_in(update)} at rate {update.rate:g}, expected {rate:g} with "
                f"{counted(len(self._steps), 'active worker')}{UNEVEN}",
                update,
                "even",
            )

    def _look_at_weights(self, update: Apply) -> None:
        samples = [push.samples for push in update.pushes]
        weights = list(update.weights) or samples
        if not sum(samples):
            return
        pairs, total, whole = zip(weights, samples, strict=True), sum(samples), sum(weights)
        if not all(abs(weight * total - count * whole) <= NEAR * total * max(whole, 1) for weight, count in pairs):
            raise Broken(f"an update with weights {weights}, of pushes of {samples} samples{UNEVEN}", update, "even")
        if self.can.update is MadeOf.ALL and update.divisor and abs(update.divisor - sum(weights)) > NEAR * sum(weights):
            raise Broken(f"a sum of weights {sum(weights):g} is divided by {update.divisor:g}{UNEVEN}", update, "even")

    def _look_at_members(self, actions: Sequence[Action]) -> None:
        if not self._steps:
            return
        slowest = min(self._steps.values())
        for release in actions:
            if not isinstance(release, Release):
                continue
            lead = release.step - slowest
            if release.slowest != slowest:
                raise Broken(
                    f"the release of worker {release.worker} says slowest={release.slowest}, the slowest is at {slowest}",
                    release,
                    "slowest",
                )
            if self._lead is not None and lead > self._lead:
                raise Broken(
                    f"worker {release.worker} is released for step {release.step}, {lead} ahead of the slowest; at most "
                    f"{self._lead} are promised",
                    release,
                    "lead",
                )
        if self._waits is None or self._missing:
            return
        for worker, step in self._steps.items():
            if step > self._released.get(worker, -1) and step - slowest <= self._waits:
                promised = "at any lead" if self._waits >= NEVER else f"up to {self._waits} ahead"
                raise Broken(
                    f"worker {worker} may not start step {step}, {step - slowest} ahead of the slowest; {promised} it is "
                    "not to be held",
                    None,
                    "waits",
                )
