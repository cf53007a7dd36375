"""One optimizer's clock: its policy, and which exchanges have been counted and answered.

A script may make several optimizers; each has a track of its own, in which every worker has its own step. What
`synchronize()` and `apply="delta"` average beside the optimizer's own steps runs in a side track, "0/mean" for "0".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polytempo.protocol.layout import first_difference
from polytempo.protocol.messages import Part, Proposal, Push, PushId, Reply, Update
from polytempo.records.lines import Line, apply_line
from polytempo.sync.actions import Apply, Release
from polytempo.sync.events import Hyper
from polytempo.sync.policy import Policy
from polytempo.sync.spec import Spec, parse_spec

MAIN = "0"  #: the first optimizer, whose steps the budget counts
MEAN = "/mean"  #: ends the name of a side track


@dataclass
class Seat:
    """A member's place in a track."""

    incarnation: int
    exchange: int = -1  # its last counted push
    answered: int = -2  # its last answered push
    attempt: int = 0  # of that push
    released: int = -1  # the last step it may start
    held_at: float | None = None
    waited: float = 0.0  # for its last push
    staleness: int = 0  # of its last push

    def enter(self, step: int) -> None:
        """It will start with this step: the exchange before it counts as made, and is to be answered."""
        self.exchange, self.answered = step - 1, step - 2


@dataclass
class Track:
    """The state of one optimizer's clock."""

    name: str
    proposal: Proposal
    spec: Spec
    policy: Policy
    first: int  #: the worker whose proposal it was
    seeded: bool = False
    version: int = 0
    seats: dict[int, Seat] = field(default_factory=dict)
    heads: dict[PushId, Push] = field(default_factory=dict)  # counted and neither applied nor dropped

    @property
    def is_main(self) -> bool:
        """Does the budget count its steps?"""
        return self.name == MAIN

    def mark(self, line: Line) -> Line:
        """A line of the record names its optimizer, unless that is the first."""
        return line if self.is_main else {**line, "optimizer": self.name}

    def update(self, action: Apply) -> tuple[Update, list[int]]:
        """The log's entry for an update, and how stale each part of it is."""
        parts, staleness = [], []
        for push in action.pushes:
            identity = self._identity(push.worker, push.step)
            head = self.heads.pop(identity)
            parts.append(Part(identity, head.samples))
            staleness.append(max(self.version - head.version, 0))
            if push.worker in self.seats:
                self.seats[push.worker].staleness = staleness[-1]
        self.version += 1
        barrier = self.spec.mode.barrier
        return Update(
            track=self.name, version=self.version, parts=tuple(parts), rate=action.rate, barrier=barrier
        ), staleness

    def update_lines(self, action: Apply, now: float, shards: int, staleness: list[int]) -> list[Line]:
        """An update's lines in the record, one a server."""
        return [self.mark(apply_line(action, now, shard, self.version, staleness)) for shard in range(shards)]

    def reply(self, release: Release, stop: bool, now: float) -> Reply:
        """The log's entry for a release: the answer to the worker's last push."""
        seat = self.seats[release.worker]
        seat.waited, seat.held_at = (now - seat.held_at if seat.held_at is not None else 0.0), None
        seat.answered, seat.released = seat.exchange, release.step
        return self.answer(release.worker, stop)

    def answer(self, worker: int, stop: bool) -> Reply:
        """An answer to a worker's last push, as things stand."""
        seat = self.seats[worker]
        return Reply(
            track=self.name,
            worker=worker,
            incarnation=seat.incarnation,
            exchange=seat.exchange,
            attempt=seat.attempt,
            step=seat.released,
            version=self.version,
            stop=stop,
            waited=seat.waited,
            staleness=seat.staleness,
        )

    def drop(self, worker: int, step: int) -> PushId:
        """Forget a push that was discarded or refused."""
        identity = self._identity(worker, step)
        self.heads.pop(identity, None)
        return identity

    def _identity(self, worker: int, step: int) -> PushId:
        for identity in self.heads:  # those of a round: few
            if identity.worker == worker and identity.step == step:
                return identity
        return PushId(self.name, worker, self.seats[worker].incarnation if worker in self.seats else 0, step)


def open_track(name: str, worker: int, proposal: Proposal, size: int, first_step: int) -> Track:
    """A new track for what a worker proposes; a `UsageError` when it cannot be."""
    spec = parse_spec(proposal.sync)
    policy = spec.policy(size)
    if not name.endswith(MEAN):
        policy.begin_at(first_step)
    return Track(name, proposal, spec, policy, worker, seeded=proposal.apply == "mean")


def disagreement(track: Track, worker: int, proposal: Proposal) -> str:
    """Why a worker's proposal does not fit the one the track was made with; empty when it does."""
    first = track.proposal
    for field_name, meaning in _COMPARED.items():
        ours, theirs = getattr(proposal, field_name), getattr(first, field_name)
        if ours != theirs:
            return f"{meaning} is {ours!r} at worker {worker} and {theirs!r} at worker {track.first}"
    difference = first_difference(proposal.tensors, first.tensors)
    if difference:
        return f"the models of workers {worker} (here) and {track.first} (there) differ: {difference}"
    ours, theirs = hyper_of(proposal.groups), hyper_of(first.groups)
    if track.spec.mode.barrier and ours != theirs:
        theirs_by_name = dict(theirs)
        name, value = next((n, v) for n, v in ours if theirs_by_name.get(n, "not given") != v)
        there = theirs_by_name.get(name, "not given")
        return f"hyper-parameters differ: {name} is {value} at worker {worker} and {there} at worker {track.first}"
    return ""


_COMPARED = {"sync": "sync", "apply": "apply", "optimizer": "the optimizer", "clip_norm": "clip_norm"}


def hyper_of(groups: Sequence[dict[str, Any]]) -> Hyper:
    """Hyper-parameters of all groups as pairs; the group is named where there are several."""
    if len(groups) == 1:
        return tuple((name, _plain(value)) for name, value in groups[0].items())
    return tuple(
        (f"group {index} {name}", _plain(value)) for index, group in enumerate(groups) for name, value in group.items()
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
