"""`adpsgd:ring|exp|full`: AD-PSGD (Lian et al. 2018). Pairs of workers average their models; no worker waits for a slow one.

    step c of worker i    take a snapshot of x_i, compute g on it; meanwhile, if i is active, average with the partner that
                          the release names (`pairwise.py`); then x_i = x_i + the local step, push c
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
and no wait depends on another (`pairwise.py`). A member that is gone takes along its own (x, w); a live worker that
finishes hands them over to another first (`reducer/model_mean.py`). A pair that is averaged keeps its sum unless one of the
two is lost meanwhile. A joiner enters with x = 0 and w = 0 at the slowest worker's step (`enters`): its releases name a
partner, whichever its role, whose half of (x, w) it has after that, and it computes once it has a model. While it has none
it pushes with 0 samples. Should no member have a model, it starts from the values it has, with weight 1.

Where this departs from the paper: partners are drawn where the job decides, not by each worker; joins, and the weights w
that keep the mean of all models true across them.
"""

from __future__ import annotations

from collections.abc import Iterable

from polytempo.options import choice, whole_number
from polytempo.sync.actions import Action, Apply, Hold, Mixing, Release
from polytempo.sync.capabilities import Capabilities, Pushes, Unsound
from polytempo.sync.events import Pushed
from polytempo.sync.gossip import MODELS_DIFFER, GossipSpec
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy

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


class PairPolicy(Policy):
    """Releases every push at once; active workers are told a partner."""

    def __init__(self, workers: int, topology: str, seed: int = 0) -> None:
        super().__init__(workers)
        self.topology = topology
        self.seed = seed
        self._begun = False
        self._entering: set[int] = set()  # members without a model
        self._members: list[int] = []  # sorted; empty when they have changed
        self._places: dict[int, int] = {}

    def _pushed(self, push: Pushed, now: float) -> list[Action]:
        worker = push.worker
        self.progress.move(worker, push.step + 1)
        if push.samples > 0:
            self._entering.discard(worker)
        return [Apply((push,), 1.0), self._release(worker, push.step + 1)]

    def _start(self, now: float) -> list[Action]:
        actions = super()._start(now)
        self._begun = True
        return actions

    def _started(self, worker: int, step: int, now: float) -> list[Action]:
        self._members = []
        if self._begun:  # its model is what a partner gives it
            self._entering.add(worker)
        return [self._release(worker, step)]

    def _freed(self, worker: int, now: float) -> list[Action]:
        self._members = []
        self._entering.discard(worker)
        return []

    def _hold(self, worker: int, step: int) -> Hold:
        raise AssertionError(f"worker {worker} is held for step {step}, although this mode holds no worker after the start")

    def _release(self, worker: int, step: int) -> Release:
        if worker in self._entering and len(self._entering) == len(self.progress.pushed):
            self._entering.discard(worker)
        release = Release(worker, step, self.progress.slowest, enters=worker in self._entering)
        partners = self._partners(worker)
        if partners:
            half = ((partners[draw(self.seed, worker, step, len(partners))], 0.5),)
            release.mixing = Mixing(0.5, half, half)
        return release

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


ADPSGD = Mode(
    "adpsgd",
    "adpsgd:ring",
    "local models, averaged with one neighbour at a time, without any barrier",
    lambda workers, topology, seed=0: PairPolicy(workers, topology, seed),
    argument=choice("topology", BIPARTITE),
    options={"seed": whole_number("seed", at_least=0, example="7")},
    gossip=lambda topology, seed=0: GossipSpec(topology, asynchronous=True),
    capabilities=Capabilities(Pushes.NOTHING),
    split=Unsound("stages would choose partners apart, and mix parts of different models", ("local:8",)),
    price=MODELS_DIFFER,
)
