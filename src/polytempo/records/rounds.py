"""The promises of modes in which more counts than the slowest worker, stated without the policies, from a record alone.

rounds of `bsp+balance` and `anytime`
    a round closes as soon as all of its workers have pushed or left; without one of them only in a mode with deadlines, and
    not before it was overdue; its update is made of exactly the pushes that came in time; an overdue worker's push is
    discarded, and it goes on with the next round and is told how many it has missed; a worker that joins while a round is
    under way starts with the next; all workers of a round are told the same deadline, or the same shares. Shares are
    positive, within their bounds, 1 on average, of exactly the members, and hold from a batch on that no worker had drawn.
    The divisor is the same on all servers, and none that the workers could not have been expected to reach
merges of decoupled DiLoCo
    a merge takes all pushes that are pending, each once; it is made with pushes of a quorum, or with those of all active
    workers; it is made as soon as all of them are in, and at the latest when the grace is over; a worker is released after
    its push only when that is merged or dropped; a push is dropped only when its anchor is too old, and always then
neighbours: gossip
    a joiner starts one step after the furthest release; a worker starts step c + 1 when, and only when, each of its
    neighbours in step c, in or out, has pushed c or is gone; `lost` names exactly those of them that were gone without
    pushing it; what one sends in a step is what the other receives; what a worker keeps and sends sums to 1, and so does
    what it keeps and receives
neighbours: adpsgd
    no worker is held once the job has begun; a partner is another member, one of the two has an even place among the members
    and the other an odd one, and the one that asks has the even one, unless it has no model
neighbours: both
    a worker has no model from the moment it joins a job that has begun until a neighbour that has one pushed to it (gossip)
    or until it pushes a step with samples (adpsgd), unless no member has one
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polytempo.records.lines import RecordLine
from polytempo.sync.spec import Spec

#: What `barrier.py`, `balance.py`, `anytime.py` and `decoupled_diloco.py` promise, written down a second time.
LEAST_SHARE, MOST_SHARE, ROUNDED = 0.1, 2.0, 0.001
SOONEST_WITH_HALF, SOONEST_WITH_FEWER = 2.25, 3.5
LATEST, SETTLED = 1.02, 1.05
SLACK = 0.5
#: Moments, and the shares of neighbours, are sums of floats.
CLOSE, ROUNDING = 1e-9, 1e-12

RecordedRow = dict[str, Any]
NO_ROW: RecordedRow = {"keep": 1.0, "send": [], "receive": []}

#: Raises with the line and a text, unless the condition holds.
RequireLine = Callable[[RecordLine, bool, str], None]


@dataclass
class OpenRound:
    """One round: who is in it, and what they were told."""

    number: int
    opened: float = 0.0
    deadline: float | None = None  #: None: no worker was told yet
    computing: set[int] = field(default_factory=set)
    pushed: list[int] = field(default_factory=list)  #: workers that have left since included
    halfway: float = math.inf  #: when half had pushed, or waited for the next


@dataclass
class RoundUpdate:
    """What the update of a round must be made of."""

    workers: list[int]
    deadline: float
    divisor: float | None = None  #: None: no server has shown it yet


class RoundChecker:
    """Takes the lines of one event after another."""

    def __init__(self, spec: Spec, require: RequireLine) -> None:
        self._require = require
        self._timed = spec.mode.name == "anytime"
        self._fixed: float | None = (*spec.arguments, None)[0] if self._timed else 0.0  # None: chosen
        self._by_actual = spec.options.get("divide") == "actual" or not self._timed
        self._most: float = spec.options.get("most", MOST_SHARE)
        self._members: set[int] = set()
        self._started = False
        self._overdue: dict[int, int] = {}  # the step that each computes
        self._missed: dict[int, int] = {}  # workers that wait for the next round: the step of their late push, or -1
        self._round: OpenRound | None = None
        self._closed: list[RoundUpdate] = []
        self._shown: dict[int, int] = {}  # updates that each server has shown
        self._weights: list[list[float]] | None = None
        self._drawn: tuple[int, int] | None = None
        self._most_members, self._fastest, self._largest = 0, 0.0, 0.0  # seen so far

    @property
    def number(self) -> int:
        """Of the open round."""
        return self._round.number if self._round else 0

    def take(self, group: list[RecordLine], missing: bool) -> None:
        """Take an event and all that was decided on it; `missing`: not all initial workers have joined."""
        event, released = group[0], [line for line in group if line["kind"] == "release"]
        if event["kind"] == "join":
            self._join(event, any(line["worker"] == event["worker"] for line in released))
        elif event["kind"] == "leave":
            self._leave(event["worker"])
        elif event["kind"] == "push" and event["worker"] in self._members:
            self._push(event, not any(line["kind"] in ("discard", "refuse") for line in group))
        enters = event["kind"] == "join" and self._round is not None and self._round.number == event["step"]
        if self._started and not enters and (released or self._is_over()):
            self._close(event, released)
        self._started = self._started or not missing
        for line in released:
            self._release(line)
        self._same_plan(event, released)
        here = self._round
        waiting = here is not None and not here.computing and bool(here.pushed or self._missed)
        all_in = self._started and waiting
        self._require(event, not all_in, f"all workers of round {self.number} have pushed, and it is open")
        for line in group:
            if line["kind"] == "apply":
                self._apply(line)
        if here is not None and here.halfway == math.inf:
            in_time = len(here.pushed) + len(self._missed)
            if in_time and in_time >= len(here.computing):
                here.halfway = event["t"]

    def _is_over(self) -> bool:
        """Have all workers of the round left, some after their push? It closes, and there are none to be released."""
        here = self._round
        if here is None or not here.pushed or here.computing or self._missed:
            return False
        return not self._members.intersection(here.pushed)

    # What happened.

    def _join(self, line: RecordLine, starts: bool) -> None:
        worker, step = line["worker"], line["step"]
        if self._round is None:
            self._round = OpenRound(step)
        busy = bool(self._round.computing or self._round.pushed)
        if not self._members:  # what others have drawn is not trained on
            self._drawn = self._weights = None
        self._require(line, step == self._round.number + busy, f"a joiner starts with the first round not under way, {step}")
        self._require(line, starts == (not busy) or not self._started, "a joiner starts when its round does")
        self._members.add(worker)
        if busy:
            self._missed[worker] = -1

    def _leave(self, worker: int) -> None:
        for state in (self._overdue, self._missed):
            state.pop(worker, None)
        self._members.discard(worker)
        if self._round:
            self._round.computing.discard(worker)

    def _push(self, line: RecordLine, accepted: bool) -> None:
        worker, step = line["worker"], line["step"]
        assert self._round is not None
        if worker in self._overdue:
            self._require(line, not accepted, "a push of an overdue worker was accepted")
            self._missed[worker] = self._overdue.pop(worker)
        elif accepted:
            self._require(line, step == self._round.number, f"a push to round {step}, open is {self._round.number}")
            self._round.computing.discard(worker)
            self._round.pushed.append(worker)
        if line.get("drawn"):
            self._drawn = max(self._drawn or (0, 0), (line["drawn"][0], line["drawn"][1]))
        count, samples, computed = line.get("count", 1), line["samples"], line.get("computed") or 0.0
        if (count or line.get("work")) and computed > 0:
            self._fastest = max(self._fastest, max(count, 1) / computed)
        if count and samples:
            self._largest = max(self._largest, samples / count)

    def _close(self, event: RecordLine, released: list[RecordLine]) -> None:
        """The next round has begun: was it time, and is it for all that were in this one?"""
        here = self._round
        assert here is not None
        if here.computing:
            deadline = here.deadline or 0.0
            soonest = here.opened + SOONEST_WITH_FEWER * deadline
            if here.halfway < math.inf:
                soonest = min(soonest, max(here.opened + deadline, here.halfway) + (SOONEST_WITH_HALF - 1) * deadline)
            self._require(
                event, self._timed and deadline > 0, f"round {here.number} closed without {sorted(here.computing)}"
            )
            late = event["kind"] == "tick" and event["t"] >= soonest - CLOSE * max(1.0, abs(soonest))
            self._require(event, late, f"round {here.number} closed before workers were overdue, at {soonest:g} s")
            self._overdue |= dict.fromkeys(here.computing, here.number)
        wanted = {worker for worker in here.pushed if worker in self._members} | self._missed.keys()
        got = {line["worker"] for line in released}
        self._require(event, got == wanted, f"released were {sorted(got)}, expected {sorted(wanted)}")
        self._closed.append(RoundUpdate(sorted(here.pushed), here.deadline or 0.0))
        self._round = OpenRound(here.number + 1, event["t"])

    def _release(self, line: RecordLine) -> None:
        here = self._round
        assert here is not None
        worker = line["worker"]
        self._require(line, line["step"] == here.number, f"released for round {line['step']}, open is {here.number}")
        if not here.computing:
            here.opened = line["t"]
        here.computing.add(worker)
        self._most_members = max(self._most_members, len(self._members))
        deadline = line.get("deadline", 0.0)
        here.deadline = deadline if here.deadline is None else here.deadline
        self._require(line, deadline == here.deadline, f"the deadline of round {here.number} is {here.deadline:g}")
        fixed = self._fixed if self._fixed is not None else deadline
        self._require(line, deadline == fixed >= 0, f"the deadline is {fixed:g} s")
        step = self._missed.pop(worker, None)
        behind = line["step"] - step if step is not None and step >= 0 else 0
        self._require(line, line.get("behind", 0) == behind, f"it has missed {behind} rounds")
        if "weights" in line:
            self._shares(line)

    # What workers are told.

    def _shares(self, line: RecordLine) -> None:
        if self._timed:
            self._require(line, "weights" not in line, "shares in a mode without them")
            return
        weights, since = line.get("weights", []), line.get("since")
        ranks, shares = [rank for rank, _ in weights], [share for _, share in weights]
        self._require(line, ranks == sorted(self._members), f"shares of {ranks}, members are {sorted(self._members)}")
        inside = all(LEAST_SHARE - ROUNDED <= share <= self._most + ROUNDED for share in shares)
        self._require(line, inside, f"a share that is not between {LEAST_SHARE:g} and {self._most:g}")
        average = math.fsum(shares) / len(shares)
        self._require(line, abs(average - 1) <= ROUNDED, f"shares are {average:g} on average")
        new = weights != self._weights
        drawn = self._drawn is None or (since is not None and tuple(since) > self._drawn)
        self._require(line, drawn or not new, f"shares since {since}, and {self._drawn} is drawn")
        self._weights = weights

    def _same_plan(self, event: RecordLine, released: list[RecordLine]) -> None:
        """Releases of one moment are of one round: all say the same of it, and a record has it once."""
        back = sorted(line["worker"] for line in released if line.get("behind"))
        for line in released:
            self._require(line, line.get("catching_up", []) == back, f"catching up are {back}")
        self._require(event, sum("weights" in line for line in released) < 2, "shares are said twice in one round")
        if released and not self._timed and self._weights is not None:
            ranks = [rank for rank, _ in self._weights]
            self._require(released[0], ranks == sorted(self._members), f"shares are those of {ranks}")

    def _apply(self, line: RecordLine) -> None:
        shown = self._shown.get(line["server"], 0)
        self._shown[line["server"]] = shown + 1
        self._require(line, shown < len(self._closed), "an update of a round that is open")
        closed, divisor = self._closed[shown], line.get("divisor", 0.0)
        self._require(line, line["workers"] == closed.workers, f"the round's pushes are those of {closed.workers}")
        self._require(line, not divisor or not self._by_actual, "a divisor in a mode that divides by what came")
        self._require(line, closed.divisor in (None, divisor), f"another server has divided by {closed.divisor}")
        closed.divisor = divisor
        each = LATEST * closed.deadline * self._fastest * self._largest
        self._require(line, 0 <= divisor <= SETTLED * self._most_members * each, f"no workers are as fast as {divisor:g}")


@dataclass
class PendingPushes:
    """What waits for the next merge."""

    workers: list[int] = field(default_factory=list)  # of all pushes
    inside: set[int] = field(default_factory=set)  # of those, workers that are still there
    reached: float = math.inf  # when the quorum was there
    slack: float = math.inf  # until when the first of the pushes leaves time


class MergeChecker:
    """Takes the lines of one event after another."""

    def __init__(self, spec: Spec, require: RequireLine) -> None:
        self._require = require
        self._quorum: int = spec.options["quorum"]
        self._grace: float | str = spec.options.get("grace", "auto")
        self._drop: float = spec.options.get("drop", math.inf)
        self._period: int = spec.arguments[0]
        self._active: set[int] = set()
        self._merges = 0
        self._anchors: dict[int, int] = {}  # merges in the values of each active worker
        self._since: dict[int, float] = {}  # when each active worker started or pushed
        self._pending = PendingPushes()

    def take(self, group: list[RecordLine]) -> None:
        """Take an event and all that was decided on it."""
        event = group[0]
        known = event.get("worker") in self._active or event["kind"] == "tick"
        new = event if event["kind"] == "push" and known else None
        for line in group:
            if line["kind"] == "join":
                self._active.add(line["worker"])
            elif line["kind"] == "leave":
                self._active.discard(line["worker"])
                self._pending.inside.discard(line["worker"])
                for state in (self._anchors, self._since):
                    state.pop(line["worker"], None)
            elif line["kind"] == "discard" and known:
                staleness = self._merges - self._anchors[line["worker"]]
                self._require(line, staleness > self._drop, f"dropped, although it is {staleness} merges old")
                self._since[line["worker"]] = line["t"]
                new = None
            elif line["kind"] == "apply" and line["server"] == 0:
                new = self._merge(line, new)
            elif line["kind"] == "release":
                self._release(line, new)
        if new is not None:
            self._add(new)
        if known:  # no merge is left out that is due
            every = self._active <= self._pending.inside
            awaited = not (self._pending.workers and every)
            self._require(event, awaited, "all active workers have pushed, and there is no merge")
            self._require(
                event, event["t"] < self._deadline(), f"no merge, although the grace was over at {self._deadline():g} s"
            )

    def _add(self, push: RecordLine) -> None:
        worker, now, pending = push["worker"], push["t"], self._pending
        staleness = self._merges - self._anchors[worker]
        self._require(push, staleness <= self._drop, f"accepted, although it is {staleness} merges old")
        took = (now - self._since[worker]) * min(1.0, self._period / max(push.get("count", 1), 1))
        self._since[worker] = now
        pending.workers.append(worker)
        pending.inside.add(worker)
        pending.slack = min(pending.slack, now + SLACK * took)
        if len(set(pending.workers)) >= self._quorum:
            pending.reached = min(pending.reached, now)

    def _merge(self, line: RecordLine, new: RecordLine | None) -> RecordLine | None:
        """An update: of what is pending, with the push that has just come or without it. That push, if it is still new."""
        if new is not None and line["workers"] != sorted(self._pending.workers):
            self._add(new)
            new = None
        pending = self._pending
        self._require(line, line["workers"] == sorted(pending.workers), f"pending are the pushes of {pending.workers}")
        every = self._active <= pending.inside
        distinct = len(set(pending.workers))
        self._require(
            line, every or distinct >= self._quorum, f"merged with {distinct} workers, the quorum is {self._quorum}"
        )
        self._require(
            line, every or line["t"] >= self._deadline(), f"merged before {self._deadline():g} s without all workers"
        )
        self._merges += 1
        self._pending = PendingPushes()
        return new

    def _release(self, line: RecordLine, new: RecordLine | None) -> None:
        worker = line["worker"]
        unmerged = worker in self._pending.inside or (new is not None and new["worker"] == worker)
        self._require(line, not unmerged, "released although its push is not merged")
        self._anchors[worker] = self._merges
        self._since.setdefault(worker, line["t"])

    def _deadline(self) -> float:
        pending = self._pending
        if isinstance(self._grace, str):
            return max(pending.reached, pending.slack) if pending.reached < math.inf else math.inf
        return pending.reached + self._grace


class NeighbourRules:
    """Follows a record line by line; `released` says what is wrong with a release."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous  #: are pairs averaged without a barrier (`adpsgd`)?
        self.next_step: int | None = None  #: a joiner's first, once a worker was released
        self._rows: dict[int, dict[int, RecordedRow]] = defaultdict(dict)  # step: worker: its part of the mixing matrix
        self._pushes: dict[int, dict[int, bool]] = defaultdict(dict)  # step: worker: had it a model?
        self._next: dict[int, int] = {}  # of the members
        self._first: set[int] = set()  # members that were not released yet
        self._without: set[int] = set()  # members without a model

    def joined(self, worker: int, step: int) -> None:
        self._next[worker] = step
        self._first.add(worker)
        if self.next_step is not None:
            self._without.add(worker)

    def left(self, worker: int) -> None:
        self._next.pop(worker, None)
        self._first.discard(worker)
        self._without.discard(worker)

    def pushed(self, worker: int, step: int, samples: float) -> None:
        self._next[worker] = step + 1
        self._pushes[step][worker] = worker not in self._without
        if self.asynchronous and samples > 0:
            self._without.discard(worker)
        for old in [kept for kept in self._pushes if kept < min(self._next.values()) - 1]:
            self._pushes.pop(old)
            self._rows.pop(old, None)

    def awaited(self, worker: int, step: int) -> list[int]:
        """The neighbours of the step before that have not pushed it and are not gone."""
        if self.asynchronous:
            return []
        before = self._rows[step - 1].get(worker, NO_ROW)
        near = dict.fromkeys(other for other, _ in (*before["send"], *before["receive"]))
        return [other for other in near if self._next.get(other, step) < step]

    def released(self, line: RecordLine) -> str:
        """What is wrong with a release; empty when nothing is."""
        worker, step, row = line["worker"], line["step"], line.get("mixing", NO_ROW)
        problem = self._wrong_pair(line, row) if self.asynchronous else self._wrong_row(line, row)
        entering = self._enters(worker, step)
        if not problem and line.get("enters", False) != entering:
            problem = "it has no model yet" if entering else "it has a model"
        if not entering:
            self._without.discard(worker)
        self._first.discard(worker)
        self._rows[step][worker] = row
        self.next_step = max(step + 1, self.next_step or 0)
        return problem

    def _enters(self, worker: int, step: int) -> bool:
        if worker not in self._without or len(self._without) == len(self._next):
            return False
        if self.asynchronous or worker in self._first:
            return True
        before = self._rows[step - 1][worker]
        return not any(self._pushes[step - 1].get(other, False) for other, _ in before["receive"])

    def _wrong_row(self, line: RecordLine, row: RecordedRow) -> str:
        worker, step = line["worker"], line["step"]
        lost: list[int] = []
        if worker not in self._first:
            if awaited := self.awaited(worker, step):
                return f"its neighbours {awaited} have not pushed step {step - 1}"
            before = self._rows[step - 1][worker]
            near = {other for other, _ in (*before["send"], *before["receive"])}
            gone = {other for other in near if self._next.get(other, step) >= step}
            lost = sorted(other for other in gone if other not in self._pushes[step - 1])
        if line.get("lost", []) != lost:
            return f"the neighbours that are gone without pushing step {step - 1} are {lost}"
        for side in ("send", "receive"):
            shares = [row["keep"], *(share for _, share in row[side])]
            total = math.fsum(shares)
            if abs(total - 1) > ROUNDING or min(shares) < -ROUNDING:
                return f"what it keeps and what it may {side} sum to {total}, not to 1"
        sends, receives = dict(row["send"]), dict(row["receive"])
        for other, there in self._rows[step].items():
            if dict(there["receive"]).get(worker) != sends.get(other) or dict(there["send"]).get(worker) != receives.get(
                other
            ):
                return f"workers {worker} and {other} do not agree on what they send each other"
        return ""

    def _wrong_pair(self, line: RecordLine, row: RecordedRow) -> str:
        worker, places = line["worker"], {member: place for place, member in enumerate(sorted(self._next))}
        if row is NO_ROW:
            return ""
        if row["send"] != row["receive"] or [share for _, share in row["send"]] != [0.5] or row["keep"] != 0.5:
            return "a pair is averaged: each keeps, sends and receives a half"
        partner = row["send"][0][0]
        if partner == worker or partner not in places or partner in self._without:
            return f"worker {partner} cannot be its partner"
        if worker in self._without:
            return ""
        return "" if (places[worker] % 2, places[partner] % 2) == (0, 1) else "the one that asks is not the active one"
