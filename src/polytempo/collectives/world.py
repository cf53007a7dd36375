"""All ranks of a job, as one of them sees them: links to the others, a progress engine, and groups.

A group that has lost a member can be formed again without it: the surviving ranks first agree on the lost ones, by telling
each other which ranks they miss until all miss the same. A rank that is only silent may be alive: `quorum.py` says who may
go on without it. Where there is a coordinator its word is waited for; else a rank that one of them does not hear is given
up by all, and told so.

Every group has a context, which its messages carry. A new group of the world takes the next number, on all ranks. A subgroup
takes one of its parent's, on the parent's ranks alone, so what one group makes for itself need not be known outside.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import numpy

from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.device_choice import Network
from polytempo.collectives.group import RankGroup
from polytempo.collectives.mailbox import Receipt
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.quorum import objection, of_ranks
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.transport.deadline import Deadline, RankWatch
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.link_relay import EmulatedHost
from polytempo.transport.memory import MemoryLink
from polytempo.transport.peer_link import DATA, LinkMessage
from polytempo.transport.rendezvous import KeyValueStore, RankLinks, Rendezvous, rendezvous_by_name, rendezvous_by_store
from polytempo.transport.zeromq import HOST_TIMEOUT, patience_for

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
#: Seconds after which a rank that waits in a step listens to the coordinator.
LISTEN_EVERY = 0.5
#: Seconds in which what a rank has sent is taken in, once the coordinator has said that it is gone: it may have finished.
LAST_WORDS = 1.0
#: What a rank is told that was given up by the coordinator's word.
GIVEN_UP = "the coordinator has given it up"
#: How a rank is missed: it may be alive, or its process is known to have ended.
SILENT, ENDED = 1, 2
#: Says which ranks the coordinator has given up, after listening for a moment; None, once this rank has left it.
Word = Callable[[], frozenset[int] | None]


class World:
    """This process among all."""

    def __init__(
        self,
        engine: ProgressEngine,
        size: int,
        links: RankLinks,
        timeout: float | None = None,
        network: Network = Network(),  # noqa: B008  it is frozen
        host_timeout: float = HOST_TIMEOUT,
        word: Word | None = None,
    ) -> None:
        self.engine, self.rank, self.size, self.hosts = engine, engine.rank, size, links.hosts
        self.timeout, self.network, self.word = timeout, network, word
        self.patience = patience_for(host_timeout)  #: seconds in which a link comes back, or is given up
        self._members: dict[int, tuple[int, ...]] = {}  # of the last generation, by number
        self._views: dict[tuple[int, int, int], Receipt] = {}  # context, rank, and how many it misses
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

    def reform(self, number: int = 0) -> RankGroup:
        """All surviving ranks, as a new generation of the group of this number. All of them must call this.

        Should another rank die meanwhile, some ranks may get a group that the others are not in; they fail there, call this
        again, and agree with the rest.

        Raises:
            RankLost: These ranks may not go on without the lost (`quorum.py`), or others go on without this one.
        """
        members = self._members.get(number, tuple(range(self.size)))
        word = self._await_word(members)
        steps = self._agree(2 * (AGAIN + number) + 1, members, word or ())
        queue, name = CallQueue(-1, members), "forming a group without the lost"
        ranks, ended = self.engine.start(queue, name, steps, False, self.timeout).wait()
        if word is not None:
            word = self._await_word(members)
        self._check(members, ranks, ended, word)
        self._members[number] = tuple(ranks)
        missing = self.size - len(ranks)
        again = self._generations[number, missing] = self._generations.get((number, missing), 0) + 1
        context = AGAIN * (2 + number) + missing * GENERATIONS + again
        return self._group(ranks, context)

    def wait(self, task: Task) -> None:
        """Wait for a call, and listen meanwhile: ranks that the coordinator gives up are lost at once, and not when their
        link has been silent for long enough.

        Raises:
            RankLost: A rank that takes part has ended, or was given up.
        """
        since: dict[int, float] = {}
        while self.word is not None and not task.done:
            with suppress(PeerError):  # the time is over, or the call has failed, which the last wait raises
                task.wait(LISTEN_EVERY)
            if task.done:  # as almost always: listening takes a moment, which no step should wait for
                break
            now = time.monotonic()
            due = [rank for rank in self.word() or () if now - since.setdefault(rank, now) >= LAST_WORDS]
            if due:
                self.engine.start(CallQueue(-1, ()), "giving up ranks", self._give_up(due), False).wait()
        task.wait()

    def _give_up(self, word: Iterable[int]) -> Steps:
        for rank in word:
            self.engine.messages.give_up(rank, GIVEN_UP)
        return
        yield

    def confirm_loss(self, members: Sequence[int], lost: Sequence[int] = ()) -> list[int]:
        """Some of these ranks are missing: which, once the others may go on without them. `lost`: as another rank has told,
        which may have lost others than the coordinator gives up.

        Raises:
            RankLost: They may not.
        """
        word, left = self._await_word(members), self.engine.messages.left
        if word:
            self.engine.start(CallQueue(-1, ()), "giving up ranks", self._give_up(word), False).wait()
        told = lost if word is None else ()
        missing = [rank for rank in members if rank in left or rank in told]
        self._check(members, [rank for rank in members if rank not in missing], {*self._ended(), *told}, word)
        return missing

    def _check(
        self, members: Sequence[int], present: Sequence[int], ended: Iterable[int], word: frozenset[int] | None
    ) -> None:
        missing = tuple(rank for rank in members if rank not in present)
        self._check_given_up()
        if why := objection(members, present, frozenset(ended), word):
            raise RankLost(f"rank {self.rank} ends: {why}", missing)

    def _check_given_up(self) -> None:
        messages = self.engine.messages
        if messages.given_up:
            raise RankLost(f"the other ranks go on without rank {self.rank}: {messages.given_up}", tuple(messages.silent))

    def _ended(self) -> list[int]:
        """Ranks whose end is known to a kernel that was heard."""
        messages = self.engine.messages
        return [rank for rank in messages.left if rank not in messages.silent]

    def _await_word(self, members: Sequence[int]) -> frozenset[int] | None:
        """Wait until the coordinator has given up every member of another host that this rank misses, and one at least. It
        hears of a killed process at once, so its word is waited for where a connection has closed, too: what one side has
        closed because it has given this rank up looks the same.

        Of two hosts that have lost each other alone, and not the coordinator, the one with the higher rank ends first: then
        the coordinator gives it up, and the other goes on.

        Returns:
            All ranks that it has given up; None where there is no coordinator.

        Raises:
            RankLost: It has not given them up in time.
        """
        if self.word is None:
            return None
        deadline, here = Deadline(self.rank), next(host for host in self.hosts if self.rank in host)
        while True:
            word = self.word()
            if word is None:  # it has left: it is told no more, and goes on without those only that have ended
                return frozenset()
            self.engine.look()  # this rank may lose another meanwhile
            missed = [rank for rank in members if rank in self.engine.messages.left]
            unknown = [rank for rank in missed if rank not in word and rank not in here]
            if not unknown and (missed or word & set(members)):
                return word
            patience = self.patience * (3 if not unknown else 2 if self.rank < max(unknown) else 1)
            if deadline.waited >= patience:
                which = of_ranks(unknown) if unknown else "the rank that another has lost"
                cause = f"rank {self.rank} cannot reach {which}" if unknown else f"rank {self.rank} has lost no rank"
                text = f"{cause}, and the coordinator has not given up {which} in {deadline.waited:.0f} s"
                raise RankLost(f"{text}; look at the network between the hosts", tuple(unknown))
            deadline.report(lambda: f"for the coordinator to give up {of_ranks(unknown) if unknown else 'a rank'}")  # noqa: B023

    def _agree(self, context: int, members: Sequence[int], word: Iterable[int]) -> Steps:
        """Exchange the missing ranks; the more are missing, the later the round, so rounds can share a context.

        A rank that others miss, and this one does not, has ended, and is soon missed here, too; or it is given up after a
        while. The one that most of them miss goes first, or the highest: two that miss each other need not both be lost,
        and most of the others choose the same.
        """
        messages, until = self.engine.messages, 0.0
        yield from self._give_up(word)
        while True:
            self._check_given_up()
            missing = [rank for rank in range(self.size) if rank in messages.left]
            alive = [rank for rank in members if rank not in missing]
            others = [rank for rank in alive if rank != self.rank]
            view, ended = numpy.zeros(self.size, dtype=numpy.uint8), self._ended()
            view[missing] = SILENT
            view[ended] = ENDED
            ahead = [self._view(context, rank, tag) for rank in others for tag in range(len(missing) + 1, self.size)]
            receipts = [self._view(context, rank, len(missing)) for rank in others]
            for rank in others:
                messages.send(rank, LinkMessage(DATA, context, len(missing)), view)
            outdated, missed = partial(self._knows_more_than, len(missing)), partial(self._missed_by, (*receipts, *ahead))
            yield Wait(lambda: _all_done(receipts) or outdated() or bool(missed()), partial(_senders, receipts))  # noqa: B023
            if not outdated() and _all_done(receipts) and not missed():
                views = [numpy.asarray(receipt.buffer) for receipt in receipts]
                for rank in others:
                    self._views.pop((context, rank, len(missing)))
                return alive, {rank for rank in missing if any(theirs[rank] == ENDED for theirs in (view, *views))}
            until = until or time.monotonic() + self.patience
            yield Wait(lambda: outdated() or time.monotonic() > until, lambda: sorted(missed()))  # noqa: B023
            if not outdated() and (counts := missed()):
                rank = max(counts, key=lambda rank: (counts[rank], rank))
                messages.give_up(rank, f"another rank has heard nothing of rank {rank}")

    def _view(self, context: int, rank: int, missing: int) -> Receipt:
        """What a rank says that misses this number of ranks; it may come before this rank misses as many."""
        key = context, rank, missing
        if key not in self._views:
            self._views[key] = self.engine.messages.expect(context, missing, rank, self.size)
        return self._views[key]

    def _missed_by(self, receipts: Iterable[Receipt]) -> Counter[int]:
        """Ranks that these views miss and this rank does not, and how many views."""
        views = [numpy.flatnonzero(receipt.buffer) for receipt in receipts if receipt.done and receipt.buffer is not None]
        return Counter(int(rank) for view in views for rank in view if rank not in self.engine.messages.left)

    def _knows_more_than(self, missing: int) -> bool:
        return len(self.engine.messages.left) > missing

    def close(self, politely: bool = True, told: bool = False) -> None:
        """Leave.

        Args:
            politely: This rank has done what others need of it.
            told: It ends in the middle, because the whole job does: it says goodbye, so that ranks which have not been told
                yet name the one that was lost first, and not this one.
        """
        for native in self.engine.natives:
            native.close(politely)
        self.engine.natives.clear()
        self.engine.close(politely or told)


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
    _check_rank(rank, size)
    watch = watch or RankWatch()
    engine, meeting = ProgressEngine(rank, watch), Rendezvous(rank, size, Deadline(rank, join_timeout), watch, call)
    return World(engine, size, _met(engine, partial(rendezvous_by_name, name, meeting, engine.messages)), timeout)


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
    host_timeout: float = HOST_TIMEOUT,
    watch: RankWatch | None = None,
    call: str = "",
    word: Word | None = None,
) -> World:
    """Ranks that see one store, on any hosts. `emulated`: this rank's place where the network is emulated. `host_timeout`: a
    link comes back within these seconds, or is given up. `watch`: knows of ranks that have ended; they are not waited for,
    and what needs them raises `RankLost`. `call`: that needs this world. `word`: the coordinator's, where there is one."""
    _check_rank(rank, size)
    watch = watch or RankWatch()
    engine, meeting = ProgressEngine(rank, watch), Rendezvous(rank, size, Deadline(rank, join_timeout), watch, call)
    meet = partial(rendezvous_by_store, store, meeting, engine.messages, keys, insecure, route, emulated, host_timeout)
    links, network = _met(engine, meet), Network(insecure, emulated is not None, route)
    return World(engine, size, links, timeout, network, host_timeout, word)


def _met(engine: ProgressEngine, meet: Callable[[], RankLinks]) -> RankLinks:
    try:
        links = meet()
    except BaseException:
        engine.close()
        raise
    engine.watch.look("", ())  # this rank waits no more
    return links


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
    return [receipt.sender for receipt in receipts if receipt.sender is not None and not receipt.done]


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise UsageError(f"expected a rank between 0 and {size - 1}, got {rank}")
