"""`adpsgd:ring|exp|full`: AD-PSGD (Lian et al. 2018). Pairs of workers average their models; no worker waits for a slow one.

    step c of worker i    take a snapshot of x_i, compute g on it; meanwhile, if i is active, average with the partner that
                          the release names (`PairAveraging`); then x_i = x_i + the local step, push c
    release of c + 1      at once

The graph is bipartite: active workers ask and wait, passive ones only answer, from a thread of their own, and every edge
joins one of each; so no cycle of waits can exist. Active are the even positions in the sorted members, passive the odd ones.
Edges join positions that are some hops apart, kept where one end is even and the other odd:

    ring    1 hop; with an odd number of workers the edge between the last and the first is dropped: a path
    exp     1, 3, 5, 9, 17, ... hops
    full    every active worker with every passive one

A single worker has no partner. The partner of a step is drawn by a hash of seed, worker and step: the same events give the
same partners.

Members. Roles are those of the members of the moment at which a release is decided, and hold for that step. When a member
leaves or joins, a worker may therefore be asked while it waits itself: it declines, the asker goes on without an average,
and no wait depends on another. A member that is gone takes along its own (x, w); a live worker that
finishes hands them over to another first (`reducer/model_mean.py`). A pair that is averaged keeps its sum unless one of the
two is lost meanwhile. A joiner enters with x = 0 and w = 0 at the slowest worker's step (`enters`): its releases name a
partner, whichever its role, whose half of (x, w) it has after that, and it computes once it has a model. While it has none
it pushes with 0 samples. Should no member have a model, it starts from the values it has, with weight 1.

Where this departs from the paper: partners are drawn where the job decides, not by each worker; joins, and the weights w
that keep the mean of all models true across them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from polytempo.errors import OrderError
from polytempo.options import choice, whole_number
from polytempo.sync.actions import Action, Apply, Release
from polytempo.sync.capabilities import NEVER, Capabilities, Promises, Pushes, Unsound
from polytempo.sync.directives import Mixing, NextMixing
from polytempo.sync.events import Pushed
from polytempo.sync.gossip import MODELS_DIFFER, GossipSpec, NeighbourPolicy
from polytempo.sync.machine import (
    ADD_STEP,
    COMPUTE,
    FINISHED,
    NO_ORDERS,
    SNAPSHOT,
    AnswerPartner,
    AskPartner,
    Begin,
    Computed,
    Orders,
    Parted,
    Replied,
    Requested,
    SendPush,
    StepHere,
    WorkerEvent,
    WorkerMachine,
    WorkerOrder,
)
from polytempo.sync.mode import Mode

#: The graphs that can be cut into active and passive workers.
BIPARTITE = ("ring", "exp", "full")


def passive_neighbours(topology: str, position: int, count: int) -> list[int]:
    """The positions that an active position may ask, of `count` positions; none for a passive one."""
    if position % 2:
        return []
    if topology == "full":
        return list(range(1, count, 2))
    around = {(position + way * hop) % count for hop in _hops(topology, count) for way in (1, -1)}
    return sorted(other for other in around if other % 2)


def _hops(topology: str, count: int) -> Iterable[int]:
    yield 1
    hop = 2
    while topology == "exp" and 1 + hop < count:
        yield 1 + hop
        hop *= 2


def draw(seed: int, worker: int, step: int, count: int) -> int:
    """A number from 0 to count - 1: the same for the same arguments, evenly spread over workers and steps (splitmix64)."""
    mask = (1 << 64) - 1
    state = (seed * 0xD1342543DE82EF95 + worker * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift)) * factor & mask
    return (state ^ (state >> 31)) % count


class PairPolicy(NeighbourPolicy):
    """Releases every push at once; active workers are told a partner."""

    def __init__(self, workers: int, topology: str, seed: int = 0) -> None:
        super().__init__(workers)
        self.topology = topology
        self.seed = seed
        self._members: list[int] = []  # sorted; empty when they have changed
        self._places: dict[int, int] = {}

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        worker = push.worker
        self.progress.move(worker, push.step + 1)
        if push.samples > 0:
            self._entering.discard(worker)
        return [Apply((push,), 1.0), self._release(worker, push.step + 1)]

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        self._members = []
        return [*super().on_start(worker, step, now), self._release(worker, step)]

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self._members = []
        return super().on_leave(worker, now)

    def _release(self, worker: int, step: int) -> Release:
        enters = self._enters(worker)
        mixing, partners = None, self._partners(worker)
        if partners:
            half = ((partners[draw(self.seed, worker, step, len(partners))], 0.5),)
            mixing = Mixing(0.5, half, half)
        return Release(worker, step, self.progress.slowest, NextMixing(mixing, (), enters))

    def _partners(self, worker: int) -> list[int]:
        """The members that a worker may ask in its next step. One without a model may ask any passive one that has it."""
        if not self._members:
            self._members = sorted(self.progress.pushed)
            self._places = {member: place for place, member in enumerate(self._members)}
        members, entering = self._members, self._entering
        if worker in entering:
            able = [member for member in members if member not in entering]
            return [member for member in able if self._places[member] % 2] or able
        places = passive_neighbours(self.topology, self._places[worker], len(members))
        return [members[place] for place in places if members[place] not in entering]


class PairAveraging:
    """One worker's side of all its averages, without the values: whom it has asked, and when that wait is over.

        asker                                answerer
        begin  -- request, its x -->         grants: x = mean of both, atomically; answers with it
        replied: takes it        <-- reply --

    The asker does not change its x by other averages between `begin` and the reply, so the result is the mean of the two and
    their sum is kept. A worker that waits for a reply of its own answers "not averaged" at once; its asker keeps its x and
    goes on. So every request is answered without waiting for anything, and no order of messages can block a worker, whatever
    the roles. Only active workers ask and only passive ones are asked: there each request is granted, except in the moments
    in which roles change because a member left or joined.

    A partner that is lost ends the wait: the asker keeps its x. What the partner had made of the request goes with it.

    The driver supplies the values: it attaches its x (and push-sum weight w) to a request, and where that is granted it
    averages and attaches the mean to the reply, under the same lock as the call. It delivers each message to the incarnation
    of the worker it was sent to, or not at all.
    """

    __slots__ = ("_asked", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._asked: tuple[int, int] | None = None  # the partner whose reply is awaited, and the step

    @property
    def waiting_for(self) -> int | None:
        """The partner whose reply is awaited."""
        return None if self._asked is None else self._asked[0]

    def begin(self, step: int, partner: int) -> None:
        """Ask a partner to average.

        Raises:
            OrderError: a reply is awaited already, or the partner is this worker.
        """
        if self._asked is not None:
            raise OrderError(
                f"worker {self.rank} began to average with worker {partner} while it waits for worker {self.waiting_for}; "
                f"wait for that first"
            )
        if partner == self.rank:
            raise OrderError(f"worker {self.rank} cannot average with itself; expected another worker")
        self._asked = partner, step

    def grants(self) -> bool:
        """A request has come. Where it is granted, this worker's values become the mean of both and go with the reply."""
        return self._asked is None

    def replied(self, sender: int, step: int) -> bool:
        """A reply has come: is it the one awaited? Then the wait is over; its values are taken where it is averaged."""
        if self._asked != (sender, step):
            return False
        self._asked = None
        return True

    def lost(self, member: int) -> bool:
        """A member is gone: was it the one waited for? Then the wait is over, and this worker keeps its values."""
        if self.waiting_for != member:
            return False
        self._asked = None
        return True


class PairMachine(WorkerMachine):
    """Local steps of one worker, with averages of pairs beside them.

    A step is over when its gradient and the reply to its request are there, as far as it has them. A worker without a model
    asks first, and computes when it has one; else its push counts for nothing.
    """

    brings = "nothing"
    asks = True

    def __init__(self, rank: int, last: float = math.inf) -> None:
        super().__init__(last)
        self._pair = PairAveraging(rank)
        self._started = self._has_model = self._computed = False

    @property
    def is_free(self) -> bool:
        return self._pair.waiting_for is None and not self.computes

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        match event:
            case Computed():
                self.computes, self._computed = False, True
                return (StepHere(self.step), *self._complete())
            case Release():
                return self._released(event)
            case Requested(sender, step):
                return (AnswerPartner(sender, step, self._pair.grants() and self._has_model),)
            case Replied(sender, step, averaged):
                return self._wait_is_over(averaged) if self._pair.replied(sender, step) else NO_ORDERS
            case Parted(worker):
                return self._wait_is_over(averaged=False) if self._pair.lost(worker) else NO_ORDERS
        return super().handle(event, now, part)

    def _released(self, release: Release) -> Orders:
        told = release.directive if isinstance(release.directive, NextMixing) else NextMixing()
        orders: list[WorkerOrder] = [] if self._started else [Begin(told.enters)]
        if not told.enters and not self._has_model:
            self._has_model = True
            orders += [Begin()] if self._started else []
        self._started, self.allowed = True, release.step
        return [*orders, *self._go(told.mixing)]

    def _go(self, row: Mixing | None) -> Orders:
        if self.leaving or self.step > self.allowed:
            return NO_ORDERS
        if self.done:
            return FINISHED
        asks: tuple[WorkerOrder, ...] = ()
        if row is not None:
            partner = row.send[0][0]
            self._pair.begin(self.step, partner)
            asks = (AskPartner(partner, self.step),)
        return (*asks, *(self._compute() if self._has_model else self._complete()))

    def _compute(self) -> Orders:
        self.computes = True
        return (SNAPSHOT, COMPUTE)

    def _wait_is_over(self, averaged: bool) -> Orders:
        if averaged and not self._has_model:  # it has half of the partner's now
            self._has_model = True
            return NO_ORDERS if self.leaving else self._compute()
        return self._complete()

    def _complete(self) -> Orders:
        """The push of a step, where nothing is missing any more."""
        if self.computes or self._pair.waiting_for is not None:
            return NO_ORDERS
        computed, step = self._computed, self.step
        self._computed, self.step = False, step + 1
        return (ADD_STEP, SendPush(step)) if computed else (SendPush(step, 0),)


ADPSGD = Mode(
    "adpsgd",
    "adpsgd:ring",
    "local models, averaged with one neighbour at a time, without any barrier",
    lambda workers, topology, seed=0: PairPolicy(workers, topology, seed),
    argument=choice("topology", BIPARTITE),
    options={"seed": whole_number("seed", at_least=0, example="7")},
    machine=lambda worker, last, topology, **_: PairMachine(worker, last),
    gossip=lambda topology, seed=0: GossipSpec(topology, asynchronous=True),
    capabilities=Capabilities(Pushes.NOTHING),
    split=Unsound("stages would choose partners apart, and mix parts of different models", ("local:8",)),
    price=MODELS_DIFFER,
    promises=Promises(waits=NEVER),
)
