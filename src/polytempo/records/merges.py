"""Checks the merges of decoupled DiLoCo in a record, without asking the policy.

A record that passes shows: a merge takes all pushes that are pending, each once; it is made with pushes of a quorum, or with
those of all active workers; it is made as soon as all of them are in, and at the latest when the grace is over; a worker is
released after its push only when that is merged or dropped; a push is dropped only when its anchor is too old, and always
then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from polytempo.records.lines import RecordLine
from polytempo.sync.decoupled_diloco import AUTO, SLACK
from polytempo.sync.spec import Spec

#: Raises with the line and a text, unless the condition holds.
RequireLine = Callable[[RecordLine, bool, str], None]


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
        self._grace: float | str = spec.options.get("grace", AUTO)
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
                self._leave(line["worker"])
            elif line["kind"] == "discard" and known:
                self._discard(line)
                new = None
            elif line["kind"] == "apply" and line["server"] == 0:
                new = self._merge(line, new)
            elif line["kind"] == "release":
                self._release(line, new)
        if new is not None:
            self._add(new)
        if known:
            self._none_overdue(event)

    def _leave(self, worker: int) -> None:
        self._active.discard(worker)
        self._pending.inside.discard(worker)
        for state in (self._anchors, self._since):
            state.pop(worker, None)

    def _discard(self, line: RecordLine) -> None:
        staleness = self._merges - self._anchors[line["worker"]]
        self._require(line, staleness > self._drop, f"dropped, although it is {staleness} merges old")
        self._since[line["worker"]] = line["t"]

    def _add(self, push: RecordLine) -> None:
        """A push is kept for the next merge."""
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

    def _none_overdue(self, event: RecordLine) -> None:
        """After an event no merge is left out that is due."""
        pending = self._pending
        every = self._active <= pending.inside
        self._require(event, not (pending.workers and every), "all active workers have pushed, and there is no merge")
        self._require(
            event, event["t"] < self._deadline(), f"no merge, although the grace was over at {self._deadline():g} s"
        )
