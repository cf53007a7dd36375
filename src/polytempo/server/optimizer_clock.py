"""One optimizer's clock: its policy, and which exchanges have been counted and answered.

A script may make several optimizers; each has a clock of its own, in which every worker has its own step. The members of a
clock are all workers of the job, or those of a group: what happens to other workers does not concern it then. What
`synchronize()` and `apply="delta"` average beside the optimizer's own steps runs on a side clock, "0/mean" for "0".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from polytempo.errors import UsageError
from polytempo.protocol.layout import first_difference, table_difference
from polytempo.protocol.log import Reply, Update
from polytempo.protocol.messages import Push
from polytempo.protocol.push import NewState, NewValues
from polytempo.protocol.training_troubles import EarlyEnds
from polytempo.protocol.values import ClosedRound, OptimizerSpec, PushId, UpdatePart, beside
from polytempo.records.lines import MAIN, MEAN, RecordLine
from polytempo.server.job_plan import JobPlan
from polytempo.sync.actions import Apply, Discard, Release
from polytempo.sync.capabilities import PushedWork
from polytempo.sync.corrections import MeanStaleness
from polytempo.sync.events import HyperItems
from polytempo.sync.policy import Policy
from polytempo.sync.spec import Spec

#: How many loads a worker may lag behind others and its own are still known to be the same.
REMEMBERED = 64


@dataclass
class WorkerSlot:
    """A worker's state in one optimizer's clock."""

    incarnation: int
    exchange: int = -1  # its last counted push
    answered: int = -2  # its last answered push
    places: dict[int, int] = field(default_factory=dict)  # of the last answer to each push that may be asked about
    release: Release | None = None  # its last
    held_at: float | None = None
    waited: float = 0.0  # for its last push
    staleness: int = 0  # of its last push
    stop: bool = False  # what its last answer said of the budget
    certain: int = 0  # and for how many further ones it has promised that they do not say `stop`
    busy: bool = False  # was its last push sent beside the script, which computes? Then it waits for no other
    fenced: bool = False  # does its last push lie in device memory? Then it need not wait for the answer
    loads: int = 0  # what it has given beside its steps is numbered downwards: the last
    given: dict[type, int] = field(default_factory=dict)  # and by kind, how often
    ahead: dict[int, Push] = field(default_factory=dict)  # came before one that was sent earlier (`delay`)
    checkpoint: str = ""  # was made since its last answer


class StepsMade:
    """Optimizer steps that the workers of a clock have come to. A push holds several where it is of a block of local steps,
    of the micro-batches of a round, or of what was accumulated (`downpour`).

    In rounds these are the steps of the round's slowest worker, of those that had data for it; in other modes each worker's
    own, and one that joins starts with those of the slowest.
    """

    def __init__(self, first: int, in_rounds: bool) -> None:
        self._in_rounds, self._of = in_rounds, dict[int, int]()
        self._slowest = self.fastest = first

    @property
    def slowest(self) -> int:
        """Of the workers that are there."""
        if not self._in_rounds:
            self._slowest = min(self._of.values(), default=self._slowest)
        return self._slowest

    def enter(self, worker: int) -> None:
        self._of[worker] = self.slowest

    def leave(self, worker: int) -> None:
        _ = self.slowest  # of a job whose last worker leaves it stays
        self._of.pop(worker, None)

    def count(self, worker: int, steps: int) -> None:
        """A push was counted, or refused after all (`steps` is below 0 then)."""
        if not self._in_rounds and worker in self._of:
            self._of[worker] += steps
            self.fastest = max(self.fastest, self._of[worker])

    def close(self, heads: Sequence[Push]) -> None:
        if self._in_rounds and heads:
            measures = [head.measures for head in heads]
            self._slowest += min(one.count for one in [one for one in measures if one.samples] or measures)
            self.fastest = self._slowest


@dataclass
class OptimizerClock:
    """The state of one optimizer's clock."""

    name: str
    optimizer_spec: OptimizerSpec
    spec: Spec
    policy: Policy
    first: int  #: the worker that registered it first
    seeded: bool
    first_step: int  #: of the job: steps that an earlier one has made
    version: int = field(default=0, init=False)
    place: int = field(default=0, init=False)  # of the last answer in the log
    slots: dict[int, WorkerSlot] = field(default_factory=dict, init=False)
    restored: dict[str, float] = field(default_factory=dict, init=False)  # what its policy has learned in an earlier job
    early: list[int] = field(default_factory=list, init=False)  # registered before there were values to start from
    wakes: list[float] = field(default_factory=list, init=False)
    early_ends: EarlyEnds = field(default_factory=EarlyEnds, init=False)

    def __post_init__(self) -> None:
        self._loaded: dict[tuple[type, int], bytes] = {}  # what the first to give it gave as its n-th
        self._mean = MeanStaleness()
        self._hyper: tuple[Sequence[dict[str, Any]], HyperItems] = ((), ())  # of the last push: they seldom change
        self._closed: ClosedRound | None = None  # the last round, in modes with deadlines
        self._groups: dict[tuple[int, ...], int] = {}  # numbers of the sets of workers that made rounds
        self._counted: dict[int, Push] = {}  # handed to the policy and not yet given back, by `Pushed.number`
        self._numbers = count(1)
        #: Is it the first of its workers, the main one or one beside it? Its steps are what these workers are seen to do.
        self.is_first = beside(self.name) == MAIN
        self.made = StepsMade(self.first_step, self.spec.capabilities.rounds)
        self.corrections = self.spec.corrections
        self._corrects = self.corrections.any
        #: Is it a trouble when workers have no more data while others go on? Not in modes that deal batches out by speed,
        #: nor where no worker waits for another.
        self.ends_together = self.is_first and self.spec.capabilities.common and not self.spec.capabilities.by_speed
        #: Does every member push one step before each answer?
        self.in_step = self.spec.capabilities.common and self.spec.capabilities.work is PushedWork.BATCH

    @property
    def is_main(self) -> bool:
        """Does the budget count its steps?"""
        return self.name == MAIN

    @property
    def has_values(self) -> bool:
        """Are there values of which steps are made, and not steps alone?"""
        return bool(self.optimizer_spec.tensors or self.optimizer_spec.tables)

    @property
    def on_servers(self) -> bool:
        """Do servers hold these values, and not the workers alone?"""
        return self.has_values and self.optimizer_spec.apply not in ("peers", "mean")

    def includes(self, worker: int) -> bool:
        return not self.optimizer_spec.members or worker in self.optimizer_spec.members

    def has_loaded(self, push: PushId, given: NewValues | NewState) -> bool:
        """Is what a worker gives beside its steps (optimizer state, values) there already?

        A script that loads does so on every worker, and without a barrier a slow one does when others have made steps: what
        several workers give as their n-th, and is the same, is one thing, taken when the first gives it. Values in rounds
        are taken from all: they are compared.
        """
        slot, kind = self.slots[push.worker], type(given)
        if push.step >= slot.loads:
            return True
        slot.loads = push.step
        if kind is NewValues and self.spec.capabilities.common:
            return False
        nth = slot.given[kind] = slot.given.get(kind, 0) + 1
        if (kind, nth) in self._loaded:
            return self._loaded[kind, nth] == given.digest
        self._loaded[kind, nth] = given.digest
        self._loaded.pop((kind, nth - REMEMBERED), None)
        return False

    def mark(self, line: RecordLine) -> RecordLine:
        """A line of the record names its optimizer, unless that is the first."""
        return line if self.is_main else {**line, "optimizer": self.name}

    def corrected(self, action: Apply) -> Apply | Discard:
        """An update, given how stale its push is. Modes with corrections apply single pushes."""
        if not self._corrects:
            return action
        head = self._counted[action.pushes[0].number]
        return self.corrections.corrected(action, max(self.version - head.version - head.own, 0))

    def update(self, action: Apply) -> tuple[Update, list[int]]:
        """The log's entry for an update, and how stale each part of it is."""
        parts, staleness, hypers = [], [], []
        for index, push in enumerate(action.pushes):
            head = self._counted.pop(push.number)
            samples = head.measures.samples
            parts.append(UpdatePart(head.id, action.weights[index] if action.weights else samples))
            hypers.append(head.made.hyper if samples else ())
            own = self.spec.capabilities.neighbours  # a worker's steps are made on its own model, which is never stale
            staleness.append(0 if own else max(self.version - head.version - head.own, 0))
            if push.worker in self.slots:
                self.slots[push.worker].staleness = staleness[-1]
        self.version += 1
        if self.spec.capabilities.work is PushedWork.DEADLINE:
            given = [hyper for hyper in hypers if hyper]
            workers = tuple(push.worker for push in action.pushes)
            group = self._groups.setdefault(workers, len(self._groups))
            self._closed = ClosedRound(action.divisor, tuple(given[0]) if given else (), group)
        update = Update(
            optimizer_id=self.name,
            version=self.version,
            parts=tuple(parts),
            rate=action.rate,
            barrier=self.spec.capabilities.rounds,
            divisor=action.divisor,
        )
        if self.corrections.adapts_momentum:
            update.mean_staleness = self._mean.add(staleness[0])
        return update, staleness

    def reply(self, release: Release, now: float, stopping: bool, certain: int) -> Reply:
        """The log's entry for a release: the answer to the worker's last push. What earlier answers promised is kept."""
        slot = self.slots[release.worker]
        slot.waited, slot.held_at = (now - slot.held_at if slot.held_at is not None else 0.0), None
        slot.answered, slot.release, slot.stop = slot.exchange, release, stopping and not slot.certain
        slot.certain = max(slot.certain - 1, certain)
        reply = self.answer(release.worker, slot.exchange)
        if self.spec.capabilities.early:
            answered = PushId(self.name, release.worker, slot.incarnation, slot.exchange)
            reply.early = any(push.id == answered for push in self.pending())
        slot.checkpoint = ""
        return reply

    def next_place(self, worker: int, exchange: int) -> int:
        """Where in the log a push is answered: all shards answer with this number."""
        slot = self.slots[worker]
        self.place += 1
        slot.places[exchange] = self.place
        oldest = exchange - self.spec.capabilities.ahead if exchange >= 0 else 0
        slot.places = {known: at for known, at in slot.places.items() if known >= oldest or known == exchange}
        return self.place

    def answer(self, worker: int, exchange: int) -> Reply:
        """An answer to one of a worker's pushes; given again it says the same of the budget."""
        slot = self.slots[worker]
        release = slot.release or Release(worker, -1, -1)
        return Reply(
            optimizer_id=self.name,
            worker=worker,
            incarnation=slot.incarnation,
            exchange=exchange,
            place=self.next_place(worker, exchange),
            step=release.step,
            version=self.version,
            stop=slot.stop,
            waited=slot.waited,
            staleness=slot.staleness,
            members=tuple(sorted(self.slots)) if self.optimizer_spec.apply == "peers" else (),
            checkpoint=slot.checkpoint,
            directive=release.directive,
            certain=slot.certain,
            closed=self._closed,
        )

    def saving(self, name: str, replies: Iterable[Reply]) -> None:
        """A checkpoint is made: workers whose filters hold something back, or whose scripts have state that belongs to it,
        will be told, with these answers or their next."""
        if not self.optimizer_spec.push_filter and not self.is_first:
            return
        for slot in self.slots.values():
            slot.checkpoint = name
        for reply in replies:
            reply.checkpoint, self.slots[reply.worker].checkpoint = name, ""

    def hyper(self, groups: Sequence[dict[str, Any]]) -> HyperItems:
        if groups != self._hyper[0]:
            self._hyper = groups, hyper_of(groups)
        return self._hyper[1]

    def count(self, push: Push) -> int:
        """A push will be handed to the policy: its number there."""
        number = next(self._numbers)
        self._counted[number] = push
        return number

    def drop(self, worker: int, step: int) -> Push:
        """Forget a push that was discarded or refused: the one of the worker's present life."""
        incarnation = self.slots[worker].incarnation
        wanted = PushId(self.name, worker, incarnation, step)
        return self._counted.pop(next(number for number, push in self._counted.items() if push.id == wanted))

    def heads(self, action: Apply) -> list[Push]:
        return [self._counted[push.number] for push in action.pushes]

    def pending(self) -> list[Push]:
        """Pushes that are counted and still to be applied: of a round that is not complete."""
        return list(self._counted.values())

    def counted_of(self, worker: int) -> list[PushId]:
        return [push.id for push in self._counted.values() if push.id.worker == worker]


def open_clock(name: str, worker: int, optimizer_spec: OptimizerSpec, plan: JobPlan) -> OptimizerClock:
    """A clock for a worker's optimizer; `UsageError` when its mode cannot be parsed or run, or not with its members."""
    members, size = optimizer_spec.members, plan.size
    if list(members) != sorted(set(members)) or not set(members) <= set(range(size)):
        raise UsageError(f"optimizer {name}: expected some of the ranks 0 to {size - 1} as its group, got {list(members)}")
    spec = optimizer_spec.parsed
    if optimizer_spec.digest != spec.digest:
        raise UsageError(
            f"the file of {spec.text} at worker {worker} is not that of the servers; copy the same one to all hosts"
        )
    policy = spec.policy(size, members)
    if not name.endswith(MEAN):
        policy.begin_at(plan.first_push)
    seeded = optimizer_spec.apply == "mean" or name.endswith(MEAN)
    return OptimizerClock(name, optimizer_spec, spec, policy, worker, seeded, plan.first_step)


def disagreement(clock: OptimizerClock, worker: int, optimizer_spec: OptimizerSpec) -> str:
    """How a worker's optimizer differs from the one the clock was made with; empty when it does not."""
    first = clock.optimizer_spec
    for field_name, meaning in _COMPARED.items():
        ours, theirs = getattr(optimizer_spec, field_name), getattr(first, field_name)
        if ours != theirs:
            return f"{meaning} is {ours!r} at worker {worker} and {theirs!r} at worker {clock.first}"
    difference = first_difference(optimizer_spec.tensors, first.tensors) or table_difference(
        optimizer_spec.tables, first.tables
    )
    if difference:
        return f"the models of workers {worker} (here) and {clock.first} (there) differ: {difference}"
    ours, theirs = hyper_of(optimizer_spec.groups), hyper_of(first.groups)
    if clock.spec.capabilities.rounds and ours != theirs:
        here, there = dict(ours), dict(theirs)
        name = next(n for n in {**there, **here} if here.get(n, "not given") != there.get(n, "not given"))
        values = here.get(name, "not given"), there.get(name, "not given")
        return f"hyper-parameters differ: {name} is {values[0]} at worker {worker} and {values[1]} at worker {clock.first}"
    return ""


_COMPARED = {
    "members": "the group",
    "sync": "sync",
    "digest": "the digest of the mode's file",
    "apply": "apply",
    "optimizer": "the optimizer",
    "clip_norm": "clip_norm",
    "push_filter": "the compression of pushes",
    "pull_filter": "the compression of answers",
}


def hyper_of(groups: Sequence[dict[str, Any]]) -> HyperItems:
    """Hyper-parameters of all groups as pairs; the group is named where there are several."""
    if len(groups) == 1:
        return tuple((name, _plain(value)) for name, value in groups[0].items())
    return tuple(
        (f"group {index} {name}", _plain(value)) for index, group in enumerate(groups) for name, value in group.items()
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
