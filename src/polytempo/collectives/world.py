"""All ranks of a job, as one of them sees them: links to everybody, an engine, and groups.

A group whose member has died can be formed again without it: the ranks that are left first agree on who that is, by telling
each other whom they miss until all miss the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.group import RankGroup
from polytempo.collectives.mailbox import Receipt
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.tasks import Steps, Wait
from polytempo.errors import UsageError
from polytempo.transport.deadline import Deadline
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.memory_link import MemoryLink
from polytempo.transport.peer_link import DATA, LinkMessage
from polytempo.transport.rendezvous import KeyValueStore, Met, meet_by_name, meet_by_store

PATIENCE = 60.0
#: Contexts from here on belong to groups that were formed again.
AGAIN = 1 << 20
GENERATIONS = 1 << 12


class World:
    """This process among all."""

    def __init__(self, engine: ProgressEngine, size: int, met: Met, timeout: float | None = None) -> None:
        self.engine, self.rank, self.size, self.hosts = engine, engine.rank, size, met.hosts
        self.timeout = timeout
        self._generations: dict[tuple[int, int], int] = {}
        engine.when_closed = met.close
        engine.attach(met.links)
        self._groups = 0
        self.all_ranks = self._group(range(size), 0)

    def _group(self, ranks: Sequence[int], context: int) -> RankGroup:
        return RankGroup(self.engine, ranks, self.hosts, context, self.timeout)

    def new_group(self, ranks: Sequence[int]) -> RankGroup | None:
        """A group of some ranks; None for who is not in it. All ranks must ask for the same groups in the same order."""
        chosen = sorted(set(ranks))
        if len(chosen) != len(ranks) or not chosen or not 0 <= chosen[0] <= chosen[-1] < self.size:
            raise UsageError(f"expected some of the ranks 0 to {self.size - 1}, each once, got {list(ranks)}")
        self._groups += 1
        return self._group(chosen, self._groups) if self.rank in chosen else None

    def reform(self, number: int = 0, lost: Sequence[int] = ()) -> RankGroup:
        """Everybody who is left, as a new generation of the group of this number. All of them must call this.

        `lost`: who is known to be gone, though it may not have been seen here yet. Should somebody die meanwhile, some may
        get a group that nobody else is in; they fail there, come back, and meet those who are still here.
        """
        queue = CallQueue(-1, tuple(range(self.size)))
        steps = self._agree(2 * (AGAIN + number) + 1, lost)
        ranks = self.engine.start(queue, "forming a group without the lost", steps, False, self.timeout).wait()
        missing = self.size - len(ranks)
        again = self._generations[number, missing] = self._generations.get((number, missing), 0) + 1
        context = AGAIN * (2 + number) + missing * GENERATIONS + again
        return self._group(ranks, context)

    def _agree(self, context: int, lost: Sequence[int]) -> Steps:
        """Tell all others whom one misses; the more are missing, the later the round, so all rounds can share a context."""
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
            yield Wait(outdated, partial(_senders, receipts))  # whom others miss is soon missed here, too

    def _unseen(self, lost: Sequence[int]) -> list[int]:
        return [rank for rank in lost if rank not in self.engine.messages.left]

    def _knows_more_than(self, missing: int) -> bool:
        return len(self.engine.messages.left) > missing

    def close(self, politely: bool = True) -> None:
        """Leave."""
        self.engine.close(politely)


def open_by_name(name: str, rank: int, size: int, patience: float = PATIENCE, timeout: float | None = None) -> World:
    """Ranks of one host that all know a name nobody else uses."""
    _check(rank, size)
    engine = ProgressEngine(rank)
    return _opened(engine, size, lambda: meet_by_name(name, rank, size, engine.messages, Deadline(rank, patience)), timeout)


def open_by_store(
    store: KeyValueStore,
    rank: int,
    size: int,
    route: str,
    keys: WorkerKeys | None = None,
    insecure: bool = False,
    patience: float = PATIENCE,
    timeout: float | None = None,
    gone: Callable[[], Mapping[int, str]] = dict,
) -> World:
    """Ranks that see one store, on any hosts. `gone`: who cannot come any more, and why, as far as is known."""
    _check(rank, size)
    engine = ProgressEngine(rank)
    meet = partial(meet_by_store, store, rank, size, engine.messages, Deadline(rank, patience, gone), keys, insecure, route)
    return _opened(engine, size, meet, timeout)


def _opened(engine: ProgressEngine, size: int, meet: Callable[[], Met], timeout: float | None) -> World:
    try:
        met = meet()
    except BaseException:
        engine.close()
        raise
    return World(engine, size, met, timeout)


def open_in_threads(size: int, timeout: float | None = None) -> list[World]:
    """As many ranks in this process, one for each of its threads."""
    engines = [ProgressEngine(rank) for rank in range(size)]
    mets = [Met((tuple(range(size)),)) for _ in range(size)]
    for high in range(size):
        for low in range(high):
            one, two = MemoryLink.pair((low, engines[low].messages), (high, engines[high].messages))
            mets[low].links.append(one)
            mets[high].links.append(two)
    return [World(engine, size, met, timeout) for engine, met in zip(engines, mets, strict=True)]


def _all_done(receipts: Sequence[Receipt]) -> bool:
    return all(receipt.done for receipt in receipts)


def _senders(receipts: Sequence[Receipt]) -> list[int]:
    """Whom we wait for."""
    return [receipt.sender for receipt in receipts if receipt.sender is not None and not receipt.done]


def _any(*conditions: Callable[[], bool]) -> bool:
    return any(condition() for condition in conditions)


def _check(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise UsageError(f"expected a rank between 0 and {size - 1}, got {rank}")
