"""Checks a record against the promises of the contract, without asking the policies.

The rules stand here a second time, in their plainest form, so that a mistake in a policy cannot excuse itself. A record that
passes shows: time never goes back; no worker starts before all initial workers joined; each started step has one release,
and a hold before it only with need; the mode's bound holds at every release; no worker stays held that may start, at any
moment; a joiner starts at the slowest one's step; `slowest` is true; every accepted push is applied exactly once on every
server, in versions 1, 2, 3, ..., unless it was dropped for a staleness that the spec names; barrier modes apply nothing
stale; during a warm start one worker pushes and all others wait for it. Rounds with shares or deadlines, merges of a quorum
and modes with neighbours: `rounds.py`.

Of a mode that was brought in nothing is known by its name: its bound is what it promises (`sync/capabilities.py`), it may
discard what it likes, and its steps are no rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from polytempo.errors import BrokenInvariant
from polytempo.records.files import to_text
from polytempo.records.lines import RecordLine
from polytempo.records.rounds import MergeChecker, NeighbourRules, RoundChecker
from polytempo.sync.corrections import Corrections
from polytempo.sync.spec import Spec

EVENTS = ("join", "push", "leave", "tick")

RecordRule = Callable[[int, int], bool]  # (step, slowest) -> bool


def rules_for(spec: Spec) -> tuple[RecordRule, RecordRule]:
    """The contract's words for each mode, as functions: whether a worker may start `step` while the slowest active worker is
    at `slowest`, and whether it may have to wait."""
    name = spec.mode.name
    argument: Any = spec.arguments[0] if spec.arguments else 0
    if spec.mode.origin is not None:
        return _promised(spec)
    if name == "gossip":  # neighbours, checked apart
        return (lambda c, low: True, lambda c, low: c > low)
    if "quorum" in spec.options:  # merges, checked apart
        return (lambda c, low: True, lambda c, low: spec.capabilities.waits and c > low)
    averages_rounds = spec.capabilities.averages and spec.capabilities.rounds
    if name in ("bsp", "bsp+balance") or averages_rounds:  # rounds, or blocks that end as rounds do
        return (lambda c, low: c <= low, lambda c, low: c > low)
    if name == "asup" and "bound" in spec.options:
        name, argument = "ssp", spec.options["bound"]
    if name == "ssp":
        return (lambda c, low: c - low <= argument, lambda c, low: c - low > argument)
    if name == "dssp":
        lower, upper = argument
        return (lambda c, low: c - low <= upper, lambda c, low: c - low > lower)
    if name == "dssp-paper":
        return (lambda c, low: True, lambda c, low: c - low > argument[0])
    if name == "every":
        soft = "wait" in spec.options
        inside: RecordRule = lambda c, low: c // argument <= low // argument  # noqa: E731
        return (lambda c, low: soft or inside(c, low), lambda c, low: not inside(c, low))
    if name in ("bsp+backup", "anytime"):  # rounds, checked apart
        return (lambda c, low: True, lambda c, low: True)
    if name in ("asp", "delay", "asup", "adpsgd", "downpour"):  # downpour after its warm start
        return (lambda c, low: True, lambda c, low: False)
    return _promised(spec)


def _promised(spec: Spec) -> tuple[RecordRule, RecordRule]:
    """The rules that follow from what a mode promises: where it promises nothing, any lead and any wait."""
    lead, waits = spec.declared(spec.mode.promises.lead), spec.declared(spec.mode.promises.waits)
    return (lambda c, low: lead is None or c - low <= lead, lambda c, low: waits is None or c - low > waits)


class RecordChecker:
    """Takes lines in order; the first broken promise is raised with its line."""

    def __init__(self, spec: Spec, workers: int, members: Sequence[int] = ()) -> None:
        self.spec = spec
        self._is_ours = spec.mode.origin is None
        self._name = spec.mode.name if self._is_ours else ""  # of a brought one it says nothing
        self.workers = len(members) or workers
        self._may_start, self._may_wait = rules_for(spec)
        decoupled = self._is_ours and "quorum" in spec.options
        self._corrections = Corrections(most=spec.options.get("drop")) if decoupled else spec.corrections
        self.lines = 0
        self._t = float("-inf")
        self._missing = set(members or range(workers))
        self._pushed: dict[int, int] = {}  # of the active workers
        self._released: dict[int, int] = {}  # the last step released to each
        self._held: dict[int, int] = {}
        self._discarded: set[int] = set()
        self._arrivals: Counter[int] = Counter()  # accepted pushes by step
        self._accepted: Counter[int] = Counter()  # accepted pushes by worker
        self._applied: dict[int, Counter[int]] = {}  # the same on each server
        self._round = 0
        warm = spec.options.get("warm", 0) if self._is_ours else 0
        self._warm = math.ceil(warm / spec.options.get("push", 1)) if warm else 0  # pushes still to be made alone
        self._alone: int | None = None
        self._begun = False
        self._merges = MergeChecker(spec, self._require) if decoupled else None
        self._neighbours = NeighbourRules(self._name == "adpsgd") if self._is_ours and spec.capabilities.neighbours else None
        self._rounds = RoundChecker(spec, self._require) if self._is_ours and spec.capabilities.by_speed else None
        self._group: list[RecordLine] = []
        self._event: RecordLine = {}  # the first line of the group that is taken

    def feed(self, line: RecordLine) -> None:
        """Take the next line."""
        self.lines += 1
        if line["kind"] in EVENTS:
            self._take_group()
        self._group.append({**line, "#": self.lines})

    def finish(self) -> int:
        """The record has ended; the number of lines checked."""
        self._take_group()
        for server, applied in self._applied.items():
            open_round = (self.spec.capabilities.rounds or self._merges or not self._is_ours) and self._pushed
            del applied[-1]
            if applied != self._accepted and not open_round:
                missing = dict(self._accepted - applied)
                raise BrokenInvariant(f"at the end server {server} has not applied these accepted pushes: {missing}")
        return self.lines

    # One event and what was decided on it.

    def _take_group(self) -> None:
        group, self._group = self._group, []
        if not group:
            return
        self._event = group[0]
        gives = self._corrections.gives
        stale = {line["worker"] for line in group if line["kind"] == "discard" and gives(line["reason"])}
        dropped = {line["worker"] for line in group if line["kind"] in ("discard", "refuse")}
        for line in group:
            self._require(line, line["t"] >= self._t, "time goes back")
            self._t = line["t"]
            handler = getattr(self, f"_{line['kind']}", None)
            if line["kind"] == "push":
                self._push(line, line["worker"] in dropped - stale, line["worker"] in stale)
            elif handler is not None:
                handler(line)
        self._none_forgotten(group[-1])
        if self._rounds is not None and group[0]["kind"] in EVENTS:
            self._rounds.take(group, bool(self._missing))
        if self._merges is not None and group[0]["kind"] in EVENTS:
            self._merges.take(group)

    def _join(self, line: RecordLine) -> None:
        worker = line["worker"]
        self._require(line, worker not in self._pushed, "joined twice")
        self._missing.discard(worker)
        lowest = self._slowest()
        if not self._begun:
            self._begun = True
            self._warm -= line["step"]  # above 0 in a job that goes on from a checkpoint
        if self._name == "gossip" and self._neighbours and self._neighbours.next_step is not None:
            first = self._neighbours.next_step
            self._require(line, line["step"] == first, f"a joiner starts at the first step that none has started, {first}")
        elif lowest is not None and self._name != "bsp+backup" and not self._rounds:
            self._require(line, line["step"] == lowest, f"a joiner starts at the slowest one's step, {lowest}")
        if self._neighbours:
            self._neighbours.joined(worker, line["step"])
        self._pushed[worker] = line["step"]
        self._released.pop(worker, None)

    def _leave(self, line: RecordLine) -> None:
        for state in (self._pushed, self._held, self._released):
            state.pop(line["worker"], None)
        self._missing.discard(line["worker"])
        if self._neighbours:
            self._neighbours.left(line["worker"])
        self._alone = None if line["worker"] == self._alone else self._alone

    def _push(self, line: RecordLine, dropped: bool, stale: bool) -> None:
        worker, step = line["worker"], line["step"]
        if worker not in self._pushed:
            self._require(line, dropped, "a push of a worker that is not a member must be discarded")
            return
        self._require(line, step <= self._released.get(worker, -1), "a push of a step that was not released")
        self._require(line, worker not in self._held, "a push of a worker that is held")
        self._require(line, step == self._pushed[worker], f"expected its step {self._pushed[worker]}")
        if not dropped:
            self._pushed[worker] = step + 1
            self._arrivals[step] += 1
            self._accepted[worker] += not stale
            self._warm -= 1
            if self._neighbours:
                self._neighbours.pushed(worker, step, line.get("samples", 1))

    def _discard(self, line: RecordLine) -> None:
        if line["worker"] in self._pushed and not self._corrections.gives(line["reason"]):
            if not self._is_ours:
                pushed = [self._event.get(name) for name in ("kind", "worker", "step")]
                self._accepted[line["worker"]] -= pushed != ["push", line["worker"], line["step"]]  # it waited until now
                self._discarded.add(line["worker"])
                return
            self._require(line, self.spec.capabilities.rounds, "discarded, although the mode applies every push")
            if self._rounds is not None:  # a worker that was overdue goes on with the next round
                self._require(line, line["step"] < self._rounds.number, "discarded, although its round is open")
                self._pushed[line["worker"]] = self._rounds.number + 1
                return
            self._require(line, self._arrivals[line["step"]] > 0, "discarded, although its round is open")
            self._discarded.add(line["worker"])

    def _hold(self, line: RecordLine) -> None:
        worker, step = line["worker"], line["step"]
        if worker in self._discarded and not self._is_ours:
            self._pushed[worker] = step
        self._require(line, step == self._pushed.get(worker), "a hold for a step that is not the worker's next")
        self._require(
            line, len(line["waiting_for"]) == min(line["waiting_count"], 8), "waiting_for and waiting_count differ"
        )
        if self._missing:
            self._require(line, set(line["waiting_for"]) <= self._missing, "waits for a worker that has joined")
        elif self._warm > 0:
            self._require(line, line["waiting_for"] == [self._alone], "waits for a worker that does not train alone")
        else:
            lowest = self._slowest()
            assert lowest is not None
            self._require(line, self._may_wait(step, lowest), f"held without need: the slowest is at {lowest}")
            behind = all(self._pushed.get(other, step) < step for other in line["waiting_for"])
            named = behind and line["waiting_count"] > 0
            self._require(line, named or not self._is_ours, "waits for a worker that is not behind")
            if self._neighbours:
                awaited = self._neighbours.awaited(worker, step)
                known = set(line["waiting_for"]) <= set(awaited) and line["waiting_count"] == len(awaited)
                self._require(line, known, f"the neighbours it waits for are {awaited}")
        self._held[worker] = step

    def _release(self, line: RecordLine) -> None:
        worker, step = line["worker"], line["step"]
        self._require(line, worker in self._pushed, "a release of a worker that is not a member")
        self._require(line, not self._missing, f"a release before workers {sorted(self._missing)[:8]} joined")
        if worker in self._discarded:
            self._discarded.discard(worker)
            self._pushed[worker] = step
        lowest = self._slowest()
        assert lowest is not None
        self._require(line, line["slowest"] == lowest, f"slowest is {lowest}")
        self._require(line, step > self._released.get(worker, -1), "released twice")
        self._released[worker] = step
        self._held.pop(worker, None)
        self._check_bound(line, lowest)
        if self._neighbours:
            problem = self._neighbours.released(line)
            self._require(line, not problem, problem)
        if self._warm > 0:
            self._require(line, self._alone in (None, worker), f"a release while worker {self._alone} trains alone")
            self._alone = worker

    def _check_bound(self, line: RecordLine, lowest: int) -> None:
        worker, step = line["worker"], line["step"]
        ahead = step - self._pushed[worker]
        allowed = self.spec.capabilities.ahead
        self._require(line, 0 <= ahead <= allowed, f"{ahead} ahead of its own finished exchanges, allowed {allowed}")
        if not allowed:
            self._require(line, self._may_start(step, lowest), f"breaks {self.spec.text}: the slowest is at {lowest}")
        if self._name == "bsp+backup" and step > self._round:  # the first release of a round: the one before has just closed
            self._round = step
            needed = min(self.workers - self.spec.arguments[0], len(self._pushed))
            arrived = self._arrivals[step - 1]
            self._require(line, arrived >= needed, f"round {step - 1} closed with {arrived} pushes, needs {needed}")

    def _apply(self, line: RecordLine) -> None:
        applied = self._applied.setdefault(line["server"], Counter())
        version = applied[-1] = applied[-1] + 1
        self._require(line, line["version"] == version, f"expected version {version}")
        for worker in line["workers"]:
            applied[worker] += 1
            self._require(line, applied[worker] <= self._accepted[worker], f"worker {worker} has no push left to apply")
        self._require(line, len(line["staleness"]) == len(line["workers"]), "one staleness for each worker")
        dropped = next(filter(None, (self._corrections.verdict(stale).drop for stale in line["staleness"])), "")
        self._require(line, not dropped, f"applied, although {dropped}")
        can = self.spec.capabilities
        in_rounds = can.rounds or self._neighbours if self._is_ours else can.common
        at_once = in_rounds and not can.keeps_late  # a late micro-batch may count a round later
        fresh = not at_once or not any(line["staleness"])
        self._require(line, fresh and min(line["staleness"], default=0) >= 0, "a staleness that cannot be")

    def _none_forgotten(self, line: RecordLine) -> None:
        """Between two events no worker may be held that could start."""
        lowest = self._slowest()
        if self._missing or lowest is None:
            return
        if self._warm > 0:
            self._require(line, self._alone is not None, "all workers wait for a warm start that none makes")
            return
        for step in set(self._held.values()):
            self._require(line, self._may_wait(step, lowest), f"a worker is still held for step {step} without need")
        for worker, step in self._held.items() if self._neighbours else ():
            assert self._neighbours is not None
            self._require(line, bool(self._neighbours.awaited(worker, step)), f"worker {worker} is held without need")

    def _slowest(self) -> int | None:
        return min(self._pushed.values(), default=None)

    def _require(self, line: RecordLine, condition: bool, text: str) -> None:
        if not condition:
            shown = to_text({key: value for key, value in line.items() if key != "#"})
            raise BrokenInvariant(f"line {line['#']}: {text}: {shown}")


def check_lines(lines: Iterable[RecordLine], spec: Spec, workers: int, members: Sequence[int] = ()) -> int:
    """Check a whole record, of these members where they are not all workers; the number of its lines."""
    checker = RecordChecker(spec, workers, members)
    for line in lines:
        checker.feed(line)
    return checker.finish()
