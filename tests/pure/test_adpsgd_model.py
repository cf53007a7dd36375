"""AD-PSGD in every order of deliveries: no worker waits for ever, and averages keep the sum.

The walk goes through all states that 2 to 5 members can reach, each once, with the state machine that live workers use
(`PairAveraging`) and the roles of `sync/adpsgd.py`, for any partner that may be drawn. Messages between two members
arrive in the order sent, all else in any order: a member begins its step, a message arrives, a step ends; and in some walks
a member dies, with or without its messages, and the others hear of it at any later moment, or one joins whose rank shifts
all roles by one place.

Values are not part of a state: what becomes of them depends on the orders alone. Each state is reached with values of its
own, on which every move is checked: an average keeps the sum of the two, as halves of whole numbers, exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest

from polytempo.sync.adpsgd import PairAveraging, passive_neighbours

SCALE = 1 << 40  # values stay whole through this many halvings


class PairRequest(NamedTuple):
    """`sender` asks `receiver` to average; `step` is the sender's."""

    sender: int
    receiver: int
    step: int


class PairReply(NamedTuple):
    """The answer to the request of the same step."""

    sender: int
    receiver: int
    step: int
    averaged: bool


class Member(NamedTuple):
    """What a member is doing: its step, and whom it asked in it."""

    step: int = 0
    partner: int = -1  # named by its release; -1: none
    begun: bool = False
    waiting: bool = False
    model: bool = True  # False: it joined, and has no values yet


Message = PairRequest | PairReply
Members = tuple[tuple[int, Member], ...]
Channels = tuple[tuple[tuple[int, int], tuple[Message, ...]], ...]


@dataclass(frozen=True)
class Size:
    """How large a job is, and what may befall it."""

    members: int
    steps: int = 2
    deaths: int = 0
    joins: int = 0
    topology: str = "ring"


@dataclass(frozen=True)
class World:
    """A state, and beside it the values it was reached with."""

    members: Members
    channels: Channels = ()
    unheard: frozenset[tuple[int, int]] = frozenset()  # (who, of whose death)
    gone: frozenset[int] = frozenset()
    deaths: int = 0
    joins: int = 0
    values: dict[int, int] = field(default_factory=dict, compare=False)
    carried: dict[Message, int] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> tuple[object, ...]:
        return self.members, self.channels, self.unheard, self.gone, self.deaths, self.joins

    def total(self) -> int:
        """The sum of all values, as if granted averages under way between two that live had arrived."""
        doing = dict(self.members)
        total = sum(self.values[rank] for rank in doing)
        for _, messages in self.channels:
            for message in messages:
                if isinstance(message, PairReply) and message.averaged and message.sender in doing:
                    total += self.carried[message] - self.values[message.receiver]
        return total


Move = tuple[object, ...]


class Walk:
    """All states of a job, and what was seen on the way."""

    def __init__(self, size: Size, answers: bool = True) -> None:
        self.size = size
        self.answers = answers  # False, to see what that would do: one that waits answers no request
        self.seen: Counter[str] = Counter()
        self.edges: dict[tuple[object, ...], list[tuple[object, ...]]] = {}

    def go(self) -> None:
        ranks = range(1, self.size.members + 1)
        values = {rank: 7**rank * SCALE for rank in ranks}
        unseen = []
        for first in self._choices([*ranks], [(rank, Member()) for rank in ranks]):
            unseen.append(World(first, deaths=self.size.deaths, joins=self.size.joins, values=values))
        known = {world.key for world in unseen}
        while unseen:
            world = unseen.pop()
            edges = self.edges[world.key] = []
            moved = False
            for move, twin in self.moves(world):
                moved |= move[0] not in ("die", "join")
                self.look_at(world, move, twin)
                edges.append(twin.key)
                if twin.key not in known:
                    known.add(twin.key)
                    unseen.append(twin)
            if not moved:
                self.look_at_end(world)
        self.look_at_cycles()

    # What can happen.

    def moves(self, world: World) -> Iterator[tuple[Move, World]]:
        for rank, doing in world.members:
            if not doing.begun and doing.step < self.size.steps:
                yield ("begin", rank), self.begin(world, rank, doing)
            elif doing.begun and not doing.waiting:
                yield from ((("finish", rank), twin) for twin in self.finish(world, rank, doing))
            if world.deaths:
                yield from ((("die", rank), twin) for twin in self.die(world, rank))
        for pair, messages in world.channels:
            if self.answers or isinstance(messages[0], PairReply) or not dict(world.members)[pair[1]].waiting:
                yield ("deliver", *pair), self.deliver(world, *pair)
        for who, dead in world.unheard:
            yield ("hear", who, dead), self.hear(world, who, dead)
        if world.joins:
            yield from ((("join", 0), twin) for twin in self.join(world))

    def begin(self, world: World, rank: int, doing: Member) -> World:
        if doing.partner < 0:
            return changed(world, rank, doing._replace(begun=True))
        pair = PairAveraging(rank)
        pair.begin(doing.step, doing.partner)
        request = PairRequest(rank, doing.partner, doing.step)
        heard = doing.partner in world.gone and (rank, doing.partner) not in world.unheard
        if heard:  # the driver knows that the partner is gone
            assert pair.lost(doing.partner)
        twin = changed(world, rank, doing._replace(begun=True, waiting=pair.waiting_for is not None))
        return twin if heard else sent(twin, request, world.values[rank])

    def finish(self, world: World, rank: int, doing: Member) -> Iterator[World]:
        """A step ends: it adds its change, and its worker is released into the next; without a model it changes nothing."""
        twin = changed(world, rank, Member(doing.step + 1, model=doing.model))
        if doing.model:
            twin = replace(twin, values={**world.values, rank: world.values[rank] + 11**rank * SCALE})
        return (replace(twin, members=members) for members in self._choices([rank], list(twin.members)))

    def deliver(self, world: World, sender: int, receiver: int) -> World:
        queues = dict(world.channels)
        message, *rest = queues.pop((sender, receiver))
        if rest:
            queues[sender, receiver] = tuple(rest)
        world = replace(world, channels=tuple(sorted(queues.items())))
        value, doing = world.carried[message], dict(world.members)[receiver]
        pair = PairAveraging(receiver)
        if doing.waiting:
            pair.begin(doing.step, doing.partner)
        if isinstance(message, PairRequest):
            return self.asked(world, pair, message, value)
        if not pair.replied(message.sender, message.step):
            self.seen["ignored"] += 1
            return world
        self.seen["averaged" if message.averaged else "declined"] += 1
        got = doing._replace(waiting=False, model=doing.model or message.averaged)
        twin = changed(world, receiver, got)
        return replace(twin, values={**world.values, receiver: value}) if message.averaged else twin

    def asked(self, world: World, pair: PairAveraging, request: PairRequest, value: int) -> World:
        reply = PairReply(pair.rank, request.sender, request.step, pair.grants())
        assert reply.averaged == (pair.waiting_for is None)
        if not reply.averaged:
            return sent(world, reply, 0) if request.sender not in world.gone else world
        mean, odd = divmod(world.values[pair.rank] + value, 2)
        assert not odd
        world = replace(world, values={**world.values, pair.rank: mean})
        return sent(world, reply, mean) if request.sender not in world.gone else world

    def die(self, world: World, rank: int) -> Iterator[World]:
        """It is gone, with what was sent to it, and with or without what it had sent."""
        members = tuple((other, doing) for other, doing in world.members if other != rank)
        unheard = {(who, of) for who, of in world.unheard if who != rank} | {(other, rank) for other, _ in members}
        after = replace(
            world, members=members, deaths=world.deaths - 1, gone=world.gone | {rank}, unheard=frozenset(unheard)
        )
        for kept in (True, False):
            queues = {pair: sent for pair, sent in world.channels if pair[1] != rank and (kept or pair[0] != rank)}
            yield replace(after, channels=tuple(queues.items()))

    def hear(self, world: World, who: int, dead: int) -> World:
        doing = dict(world.members)[who]
        pair = PairAveraging(who)
        if doing.waiting:
            pair.begin(doing.step, doing.partner)
        lost = pair.lost(dead)
        self.seen["lost"] += lost
        world = replace(world, unheard=world.unheard - {(who, dead)})
        return changed(world, who, doing._replace(waiting=doing.waiting and not lost))

    def join(self, world: World) -> Iterator[World]:
        """Rank 0 joins: all others are one place further, so each that was active is passive in its next step."""
        members = [(0, Member(model=False)), *world.members]
        world = replace(world, joins=world.joins - 1, values={**world.values, 0: 0})
        return (replace(world, members=chosen) for chosen in self._choices([0], members))

    def _choices(self, released: list[int], members: list[tuple[int, Member]]) -> list[Members]:
        """The members, once for each way to name partners to those that are released now."""
        ranks = [rank for rank, _ in members]
        able = [rank for rank, doing in members if doing.model]
        ways = [tuple(members)]
        for place, (rank, doing) in enumerate(members):
            if rank not in released or doing.step >= self.size.steps:
                continue
            partners = [ranks[other] for other in passive_neighbours(self.size.topology, place, len(ranks))]
            partners = [other for other in partners if other in able]
            if not doing.model:
                partners = [other for other in able if other != rank]
            named = [doing._replace(partner=partner) for partner in partners or [-1]]
            ways = [(*way[:place], (rank, choice), *way[place + 1 :]) for way in ways for choice in named]
        return ways

    # What must hold.

    def look_at(self, world: World, move: Move, twin: World) -> None:
        self.seen[str(move[0])] += 1
        touched = {rank for rank in move[1:] if isinstance(rank, int)}
        if move[0] == "finish":
            rank = next(iter(touched))
            change = 11**rank * SCALE if dict(world.members)[rank].model else 0
            assert twin.total() == world.total() + change, move
        elif move[0] in ("begin", "join") or (move[0] == "deliver" and not touched & world.gone):
            assert twin.total() == world.total(), move
        else:  # one that is gone had a part in it: each keeps its own, or has the mean
            for rank, _ in twin.members:
                means = {(world.values[rank] + value) // 2 for value in world.carried.values()}
                assert twin.values[rank] in {world.values[rank], *world.carried.values(), *means}
                assert twin.values[rank] == world.values[rank] or move[0] == "deliver"

    def look_at_end(self, world: World) -> None:
        self.seen["end"] += 1
        for rank, doing in world.members:
            assert not doing.waiting, f"worker {rank} waits for ever: {world}"
            assert doing.step == self.size.steps
        assert not world.channels
        if not world.gone and not any(rank == 0 for rank, _ in world.members):
            start = sum(7**rank + self.size.steps * 11**rank for rank, _ in world.members)
            assert sum(world.values.values()) == start * SCALE

    def look_at_cycles(self) -> None:
        """Every run ends: no state can come twice."""
        into = Counter(key for edges in self.edges.values() for key in edges)
        free = [key for key in self.edges if not into[key]]
        ended = 0
        while free:
            key = free.pop()
            ended += 1
            for after in self.edges[key]:
                into[after] -= 1
                if not into[after]:
                    free.append(after)
        assert ended == len(self.edges)


def changed(world: World, rank: int, doing: Member) -> World:
    return replace(world, members=tuple((other, doing if other == rank else before) for other, before in world.members))


def sent(world: World, message: Message, value: int) -> World:
    queues = dict(world.channels)
    pair = message.sender, message.receiver
    if message.receiver not in dict(world.members):
        return world  # it is gone
    queues[pair] = (*queues.get(pair, ()), message)
    return replace(world, channels=tuple(sorted(queues.items())), carried={**world.carried, message: value})


SIZES = (
    Size(2, steps=4),
    Size(3, steps=3),
    Size(4, steps=2),
    Size(5, steps=1),
    Size(2, steps=3, deaths=1),
    Size(3, steps=2, deaths=1),
    Size(3, steps=1, deaths=2),
    Size(2, steps=2, joins=1),
)
#: Seconds to minutes each: `make proof` walks them.
LARGER = (
    Size(5, steps=1, topology="full"),
    Size(5, steps=1, topology="exp"),
    Size(4, steps=3),
    Size(5, steps=2),
    Size(4, steps=1, deaths=1),
    Size(3, steps=2, deaths=2),
    Size(5, steps=1, deaths=1),
    Size(2, steps=2, deaths=1, joins=1),
    Size(3, steps=2, joins=1),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "size" in metafunc.fixturenames:
        sizes = (*SIZES, *LARGER) if metafunc.config.getoption("--proof") else SIZES
        metafunc.parametrize("size", sizes, ids=[str(size).removeprefix("Size") for size in sizes])


def test_no_order_of_deliveries_blocks_a_worker(size: Size, record_property: Callable[[str, object], None]) -> None:
    walk = Walk(size)
    walk.go()
    record_property("states", len(walk.edges))
    assert walk.seen["averaged"]
    assert walk.seen["end"]
    assert bool(walk.seen["lost"]) == bool(size.deaths)
    if not size.deaths and not size.joins:
        assert not walk.seen["declined"], "while members stay no request is declined: only active ones wait"


@pytest.mark.parametrize("changes", [Size(2, joins=1), Size(3, deaths=1)])
def test_the_walk_finds_a_worker_that_waits_for_ever(changes: Size) -> None:
    """Were requests to a worker that waits not answered, roles that change would close a cycle of waits."""
    with pytest.raises(AssertionError, match="waits for ever"):
        Walk(changes, answers=False).go()


@pytest.mark.parametrize("members", [2, 3])
def test_without_that_answer_workers_that_keep_their_roles_do_not_block_either(members: int) -> None:
    """Every edge joins an active and a passive one: no cycle of waits is there by construction."""
    Walk(Size(members, steps=2), answers=False).go()
