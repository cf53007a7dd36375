"""The promises of modes with neighbours, stated without the policies and the topologies, from the lines of a record alone.

gossip    a joiner starts one step after the furthest release; a worker starts step c + 1 when, and only when, each of
          its neighbours in step c, in or out, has pushed c or is gone; `lost` names exactly those of them that were gone
          without pushing it; what one sends in a step is what the other receives; what a worker keeps and sends
          sums to 1, and so does what it keeps and receives
adpsgd    no worker is held once the job has begun; a partner is another member, one of the two has an even place among
          the members and the other an odd one, and the one that asks has the even one, unless it has no model
both      a worker has no model from the moment it joins a job that has begun until a neighbour that has one pushed to
          it (gossip) or until it pushes a step with samples (adpsgd), unless no member has one
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from polytempo.records.lines import RecordLine
from polytempo.sync.gossip import GossipSpec

RecordedRow = dict[str, Any]
NO_ROW: RecordedRow = {"keep": 1.0, "send": [], "receive": []}
ROUNDING = 1e-12


class NeighbourRules:
    """Follows a record line by line; `released` says what is wrong with a release."""

    def __init__(self, gossip: GossipSpec) -> None:
        self.asynchronous = gossip.asynchronous
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
        return _unbalanced(row) or self._one_sided(worker, self._rows[step], row)

    def _one_sided(self, worker: int, others: dict[int, RecordedRow], row: RecordedRow) -> str:
        sends, receives = dict(row["send"]), dict(row["receive"])
        for other, there in others.items():
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


def _unbalanced(row: RecordedRow) -> str:
    for side in ("send", "receive"):
        total = math.fsum([row["keep"], *(share for _, share in row[side])])
        if abs(total - 1) > ROUNDING or min([row["keep"], *(share for _, share in row[side])]) < -ROUNDING:
            return f"what it keeps and what it may {side} sum to {total}, not to 1"
    return ""
