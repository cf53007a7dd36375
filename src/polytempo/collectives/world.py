"""All ranks of a job, as one of them sees them: links to the others, a progress engine, and groups.

A group that has lost a member can be formed again without it: the surviving ranks first agree on the lost ones, by telling
each other which ranks they miss until all miss the same.

Every group has a context, which its messages carry. A new group of the world takes the next number, on all ranks. A subgroup
takes one of its parent's, on the parent's ranks alone, so what one group makes for itself need not be known outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.device_choice import Network
from polytempo.collectives.group import RankGroup
from polytempo.collectives.mailbox import Receipt
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import UsageError
from polytempo.transport.deadline import Deadline, RankWatch
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.link_relay import EmulatedHost
from polytempo.transport.memory_link import MemoryLink
from polytempo.transport.peer_link import DATA, LinkMessage
from polytempo.transport.rendezvous import KeyValueStore, RankLinks, Rendezvous, rendezvous_by_name, rendezvous_by_store

#: Seconds in which all ranks must come to the rendezvous.
JOIN_TIMEOUT = 60.0
#: Contexts from here on belong to groups in which optimizers take their steps: some for each optimizer.
OF_OPTIMIZERS, PARTS = 1 << 19, 4
#: The part in which nothing is called: ranks tell each other there why they cannot go on.
OF_FAILURES = PARTS - 1
#: Contexts from here on belong to groups that were formed again.
AGAIN = 1 << 20
#: Contexts from here on belong to sets of ranks that make rounds with deadlines, this many for each optimizer.
OF_ROUNDS, SETS = 3 << 19, 1 << 14
GENERATIONS = 1 << 12
#: Contexts from here on belong to subgroups, this many for each group.
WITHIN = 1 << 30
SUBGROUPS = 1 << 10


class World:
    """This process among all."""

    def __init__(
        self,
        engine: ProgressEngine,
        size: int,
        links: RankLinks,
        timeout: float | None = None,
        network: Network = Network(),  # noqa: B008  it is frozen
    ) -> None:
        self.engine, self.rank, self.size, self.hosts = engine, engine.rank, size, links.hosts
        self.timeout, self.network = timeout, network
        self._generations: dict[tuple[int, int], int] = {}
        engine.when_closed = links.close
        engine.attach(links.links)
        engine.messages.never_came(links.absent)
        self._groups = 0
        self._subgroups: dict[int, int] = {}  # of each group, by its context
        self.all_ranks = self._group(range(size), 0, "group world")

    def _group(self, ranks: Sequence[int], context: int, name: str = "") -> RankGroup:
        return RankGroup(self.engine, ranks, self.hosts, context, self.timeout, self.network, name)

    def new_group(self, ranks: Sequence[int], timeout: float | None = None) -> RankGroup | None:
        """A group of some ranks; None on other ranks. All ranks must ask for the same groups in the same order.
        `timeout`: of its calls, where it is not the world's; `math.inf` for none."""
        chosen = sorted(set(ranks))
        if len(chosen) != len(ranks) or not chosen or not 0 <= chosen[0] <= chosen[-1] < self.size:
            raise UsageError(f"expected some of the ranks 0 to {self.size - 1}, each once, got {list(ranks)}")
        self._groups += 1
        if self.rank not in chosen:
            return None
        group = self._group(chosen, self._groups)
        if timeout is not None:
            group.timeout = timeout if math.isfinite(timeout) else None
        return group

    def group_of_optimizer(self, ranks: Sequence[int], number: int, part: int = 0) -> RankGroup:
        """A group of some ranks, this one among them, for a part of the optimizer of this number.

        Only its ranks ask for it. Groups of optimizers made side by side are disjoint and have the same context: no rank
        hears of another's.
        """
        return self._group(sorted(ranks), OF_OPTIMIZERS + number * PARTS + part, f"step() of optimizer {number}")

    def group_of_round(self, ranks: Sequence[int], number: int, which: int) -> RankGroup:
        """A group of the ranks in a round of the optimizer of this number, this one among them; `which`: the number of the
        set of these ranks. Only its ranks ask for it."""
        if which >= SETS or number >= (AGAIN - OF_OPTIMIZERS) // SETS:
            raise UsageError(
                f"rounds of optimizer {number} were made by more than {SETS} different sets of ranks, or it is one of too "
                "many; use via='ps'"
            )
        return self._group(sorted(ranks), OF_ROUNDS + number * SETS + which, f"a round of optimizer {number}")

    def subgroup(self, group: RankGroup, ranks: Sequence[int]) -> RankGroup | None:
        """A group of some ranks of a group; None on its other ranks. All ranks of the group must ask for the same subgroups
        in the same order; other ranks need not know."""
        parent = group.context // 2
        if parent >= AGAIN:
            raise UsageError("expected a group of new_group(), got one that was formed again without lost ranks")
        number = self._subgroups[parent] = self._subgroups.get(parent, -1) + 1
        if number >= SUBGROUPS:
            raise UsageError(f"more than {SUBGROUPS} groups were made within the group of ranks {group.ranks}; make another")
        if not set(ranks) <= set(group.ranks):
            raise UsageError(f"expected some of the ranks {list(group.ranks)}, got {list(ranks)}")
        chosen = sorted(ranks)
        return self._group(chosen, WITHIN + parent * SUBGROUPS + number) if self.rank in chosen else None

    def reform(self, number: int = 0, lost: Sequence[int] = ()) -> RankGroup:
        """All surviving ranks, as a new generation of the group of this number. All of them must call this.

        `lost`: ranks known to be lost, though that may not have been seen here yet. Should another rank die meanwhile, some
        ranks may get a group that the others are not in; they fail there, call this again, and agree with the rest.
        """
        queue = CallQueue(-1, tuple(range(self.size)))
        steps = self._agree(2 * (AGAIN + number) + 1, lost)
        ranks = self.engine.start(queue, "forming a group without the lost", steps, False, self.timeout).wait()
        missing = self.size - len(ranks)
        again = self._generations[number, missing] = self._generations.get((number, missing), 0) + 1
        context = AGAIN * (2 + number) + missing * GENERATIONS + again
        return self._group(ranks, context)

    def _agree(self, context: int, lost: Sequence[int]) -> Steps:
        """Exchange the missing ranks; the more are missing, the later the round, so rounds can share a context."""
        yield Wait(lambda: not self._unseen(lost), lambda: self._unseen(lost))
        while True:
            missing = sorted(self.engine.messages.left)
            alive = [rank for rank in range(self.size) if rank not in missing]
            others = [rank for rank in alive if rank != self.rank]
            view = numpy.zeros(self.size, dtype=numpy.uint8)
            view[missing] = 1
            receipts = [self.engine.messages.expect(context, len(missing), rank, self.size) for rank in others]
            for rank in others:
                self.engine.messages.send(rank, LinkMessage(DATA, context, len(missing)), view)
            outdated = partial(self._knows_more_than, len(missing))
            yield Wait(partial(_any, partial(_all_done, receipts), outdated), partial(_senders, receipts))
            for receipt in receipts:
                self.engine.messages.mailbox.withdraw(receipt, context, len(missing))
            if outdated():
                continue
            if all(receipt.buffer is not None and numpy.array_equal(receipt.buffer, view) for receipt in receipts):
                return alive
            yield Wait(outdated, partial(_senders, receipts))  # what others miss is soon missed here, too

    def _unseen(self, lost: Sequence[int]) -> list[int]:
        return [rank for rank in lost if rank not in self.engine.messages.left]

    def _knows_more_than(self, missing: int) -> bool:
        return len(self.engine.messages.left) > missing

    def close(self, politely: bool = True) -> None:
        """Leave."""
        for native in self.engine.natives:
            native.close(politely)
        self.engine.natives.clear()
        self.engine.close(politely)


def open_by_name(
    name: str,
    rank: int,
    size: int,
    join_timeout: float | None = JOIN_TIMEOUT,
    timeout: float | None = None,
    watch: RankWatch | None = None,
    call: str = "",
) -> World:
    """Ranks of one host that all know a name no other job uses. `watch`, `call`: as for `open_by_store`."""
    _check(rank, size)
    watch = watch or RankWatch()
    engine, meeting = ProgressEngine(rank, watch), Rendezvous(rank, size, Deadline(rank, join_timeout), watch, call)
    return _opened(engine, size, lambda: rendezvous_by_name(name, meeting, engine.messages), timeout)


def open_by_store(
    store: KeyValueStore,
    rank: int,
    size: int,
    route: str,
    keys: WorkerKeys | None = None,
    insecure: bool = False,
    join_timeout: float | None = JOIN_TIMEOUT,
    timeout: float | None = None,
    emulated: EmulatedHost | None = None,
    watch: RankWatch | None = None,
    call: str = "",
) -> World:
    """Ranks that see one store, on any hosts. `emulated`: this rank's place where the network is emulated. `watch`: knows
    of ranks that have ended: they are not waited for, and what needs them raises `RankLost`. `call`: needs this world."""
    _check(rank, size)
    watch = watch or RankWatch()
    engine, meeting = ProgressEngine(rank, watch), Rendezvous(rank, size, Deadline(rank, join_timeout), watch, call)
    meet = partial(rendezvous_by_store, store, meeting, engine.messages, keys, insecure, route, emulated)
    return _opened(engine, size, meet, timeout, Network(insecure, emulated is not None, route))


def _opened(
    engine: ProgressEngine,
    size: int,
    meet: Callable[[], RankLinks],
    timeout: float | None,
    network: Network = Network(),  # noqa: B008  it is frozen
) -> World:
    try:
        links = meet()
    except BaseException:
        engine.close()
        raise
    engine.watch.look("", ())  # this rank waits no more
    return World(engine, size, links, timeout, network)


def open_in_threads(size: int, timeout: float | None = None) -> list[World]:
    """Ranks in threads of this process, one for each."""
    engines = [ProgressEngine(rank) for rank in range(size)]
    made = [RankLinks((tuple(range(size)),)) for _ in range(size)]
    for high in range(size):
        for low in range(high):
            one, two = MemoryLink.pair((low, engines[low].messages), (high, engines[high].messages))
            made[low].links.append(one)
            made[high].links.append(two)
    return [World(engine, size, links, timeout) for engine, links in zip(engines, made, strict=True)]


def _all_done(receipts: Sequence[Receipt]) -> bool:
    return all(receipt.done for receipt in receipts)


def _senders(receipts: Sequence[Receipt]) -> list[int]:
    """The ranks that are waited for."""
    return [receipt.sender for receipt in receipts if receipt.sender is not None and not receipt.done]


def _any(*conditions: Callable[[], bool]) -> bool:
    return any(condition() for condition in conditions)


def _check(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise UsageError(f"expected a rank between 0 and {size - 1}, got {rank}")
