"""Bytes are counted where they are sent: each algorithm sends as many as its description says, over the links it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from worlds import (
    KINDS,
    Cache,
    Hosts,
    all_worlds,
    everywhere,
    fresh_groups,
    nothing_left,
    worlds_of,
)

from polytempo.collectives.cost import Speeds
from polytempo.collectives.group import RankGroup
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.world import World

__all__ = ["all_worlds", "nothing_left", "worlds_of"]

TWO_BY_TWO: Hosts = ((0, 1), (2, 3))

#: By rank, and by the rank at the other end of the link.
Sent = list[dict[int, int]]


def sent_by(worlds: list[World], work: Callable[[RankGroup], object]) -> Sent:
    """What each rank sends to each other, while all do this in a new group."""

    def counted(world: World) -> dict[int, int]:
        return {rank: link.payload_sent for rank, link in world.engine.messages.links.items()}

    groups = {world.rank: group for world, group in zip(worlds, fresh_groups(worlds), strict=True)}
    for group in groups.values():
        group.speeds = Speeds()  # nothing is measured
    before = [counted(world) for world in worlds]
    everywhere(worlds, lambda world: work(groups[world.rank]))
    after = [counted(world) for world in worlds]
    return [{rank: now[rank] - then[rank] for rank in now} for now, then in zip(after, before, strict=True)]


def totals(sent: Sent) -> list[int]:
    return [sum(counts.values()) for counts in sent]


def all_reduce(count: int, how: str) -> Callable[[RankGroup], object]:
    return lambda group: group.all_reduce([torch.ones(count)], algorithm=how).wait()


# Rings.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_a_ring_sends_the_least_that_is_possible(worlds_of: Cache, kind: str, size: int) -> None:
    """2 n (p - 1) / p bytes, all of them to the next rank."""
    count = 840 * 3
    sent = sent_by(worlds_of(kind, size), all_reduce(count, "ring"))
    wanted = 2 * 4 * count * (size - 1) // size
    assert [counts[(rank + 1) % size] for rank, counts in enumerate(sent)] == [wanted] * size
    assert totals(sent) == [wanted] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_large_ring_in_many_pieces_sends_no_more(worlds_of: Cache, size: int) -> None:
    count = 300_000
    sent = sent_by(worlds_of("unix", size), all_reduce(count, "ring"))
    assert totals(sent) == [2 * 4 * count * (size - 1) // size] * size


@pytest.mark.parametrize(("size", "count"), [(3, 1), (3, 10), (5, 3), (7, 1001), (4, 0)])
def test_what_does_not_divide_evenly_is_still_sent_but_once(worlds_of: Cache, size: int, count: int) -> None:
    """Whoever sends it: (p - 1) times on the way there and (p - 1) times on the way back."""
    sent = sent_by(worlds_of("memory", size), all_reduce(count, "ring"))
    assert sum(totals(sent)) == 2 * (size - 1) * 4 * count
    most = -(-count // size)
    assert all(total <= 2 * (size - 1) * 4 * most for total in totals(sent))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_half_a_ring_sends_half(worlds_of: Cache, size: int) -> None:
    worlds = worlds_of("memory", size)

    def gather(group: RankGroup) -> object:
        return group.all_gather([torch.empty(100) for _ in range(size)], torch.ones(100), "ring").wait()

    def scatter(group: RankGroup) -> object:
        return group.reduce_scatter(torch.empty(100), [torch.ones(100) for _ in range(size)], "sum", "ring").wait()

    for half in (gather, scatter):
        sent = sent_by(worlds, half)
        assert [counts[(rank + 1) % size] for rank, counts in enumerate(sent)] == [400 * (size - 1)] * size
        assert totals(sent) == [400 * (size - 1)] * size


# The others.


@pytest.mark.parametrize("size", [2, 4, 8])
def test_halving_and_doubling_sends_what_a_ring_sends(worlds_of: Cache, size: int) -> None:
    sent = sent_by(worlds_of("memory", size), all_reduce(840, "halving-doubling"))
    assert totals(sent) == [2 * 4 * 840 * (size - 1) // size] * size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("how", ["tree", "double-tree"])
def test_a_tree_sends_everything_once_up_and_once_down_each_of_its_links(worlds_of: Cache, how: str, size: int) -> None:
    sent = sent_by(worlds_of("memory", size), all_reduce(840, how))
    assert sum(totals(sent)) == 2 * (size - 1) * 4 * 840


@pytest.mark.parametrize("size", [2, 3, 5])
def test_through_shared_memory_nothing_is_sent(worlds_of: Cache, size: int) -> None:
    for kind in ("memory", "unix"):
        assert totals(sent_by(worlds_of(kind, size), all_reduce(100_000, "shared-memory"))) == [0] * size


def test_a_broadcast_by_a_chain_sends_everything_once_over_each_of_its_links(worlds_of: Cache) -> None:
    sent = sent_by(worlds_of("memory", 5), lambda group: group.broadcast([torch.ones(500)], 2, "ring").wait())
    assert totals(sent) == [2000, 0, 2000, 2000, 2000]
    sent = sent_by(worlds_of("memory", 5), lambda group: group.broadcast([torch.ones(500)], 2, "tree").wait())
    assert sum(totals(sent)) == 4 * 2000


def test_what_goes_straight_is_sent_once(worlds_of: Cache) -> None:
    worlds, parts = worlds_of("memory", 3), [torch.ones(10) for _ in range(3)]

    def gather(group: RankGroup) -> object:
        return group.gather(parts if group.rank == 1 else None, torch.ones(10), 1, "linear").wait()

    def scatter(group: RankGroup) -> object:
        return group.scatter(torch.empty(10), parts if group.rank == 1 else None, 1, "linear").wait()

    def swap(group: RankGroup) -> object:
        return group.all_to_all([torch.empty(10) for _ in range(3)], parts, "linear").wait()

    assert sent_by(worlds, gather) == [{1: 40, 2: 0}, {0: 0, 2: 0}, {0: 0, 1: 40}]
    assert sent_by(worlds, scatter) == [{1: 0, 2: 0}, {0: 40, 2: 40}, {0: 0, 1: 0}]
    assert sent_by(worlds, swap) == [{1: 40, 2: 40}, {0: 40, 2: 40}, {0: 40, 1: 40}]


# Two hosts.


def between_hosts(sent: Sent, hosts: Hosts) -> dict[tuple[int, int], int]:
    """What links between hosts carried, if anything."""
    host = {rank: index for index, ranks in enumerate(hosts) for rank in ranks}
    links = {(source, to): count for source, counts in enumerate(sent) for to, count in counts.items()}
    return {link: count for link, count in links.items() if count and host[link[0]] != host[link[1]]}


@pytest.mark.parametrize("kind", ["memory", "zmq"])
def test_between_two_hosts_only_the_leaders_send_and_no_more_than_there_is(worlds_of: Cache, kind: str) -> None:
    count = 100_000
    worlds = worlds_of(kind, 4, TWO_BY_TWO)
    sent = sent_by(worlds, all_reduce(count, "hierarchical"))
    assert between_hosts(sent, TWO_BY_TWO) == {(0, 2): 4 * count, (2, 0): 4 * count}
    assert totals(sent) == [4 * count, 0, 4 * count, 0], "inside a host nothing is sent at all"
    flat = sent_by(worlds, all_reduce(count, "ring"))
    assert between_hosts(flat, TWO_BY_TWO) == {(1, 2): 6 * count, (3, 0): 6 * count}, "a flat ring sends half as much again"


def test_with_three_hosts_the_leaders_form_a_ring(worlds_of: Cache) -> None:
    hosts = ((0, 3, 4), (1,), (2, 5))
    sent = sent_by(worlds_of("memory", 6, hosts), all_reduce(300, "hierarchical"))
    assert between_hosts(sent, hosts) == {(0, 1): 1600, (1, 2): 1600, (2, 0): 1600}
    assert sum(totals(sent)) == 3 * 1600


# Single messages, and what is not payload.


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_message_counts_once_and_only_its_payload(worlds_of: Cache, kind: str) -> None:
    def work(group: RankGroup) -> object:
        if group.rank == 0:
            return [send(group, torch.ones(size), 1).wait() for size in (0, 1, 50_000)]
        return [receive(group, torch.ones(size), 0).wait() for size in (0, 1, 50_000)]

    assert sent_by(worlds_of(kind, 2), work) == [{1: 4 * 50_001}, {0: 0}]


def test_calls_and_heads_are_counted_as_overhead(worlds_of: Cache) -> None:
    worlds = worlds_of("memory", 2)
    before = [world.engine.messages.links[1 - world.rank].overhead_sent for world in worlds]
    sent_by(worlds, lambda group: group.barrier().wait())
    after = [world.engine.messages.links[1 - world.rank].overhead_sent for world in worlds]
    assert all(now > then for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_sends_is_what_the_others_receive(worlds_of: Cache, kind: str) -> None:
    worlds = worlds_of(kind, 4)
    before = [world.engine.messages.payload_received for world in worlds]
    sent = sent_by(worlds, all_reduce(10_000, "ring"))
    received = [world.engine.messages.payload_received - then for world, then in zip(worlds, before, strict=True)]
    assert received == [sum(counts.get(rank, 0) for counts in sent) for rank in range(4)]
