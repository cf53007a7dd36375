"""Messages from one rank to another: by tag, in any order of posting, from anybody, and mixed up with nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from calls import DTYPES, Call, values
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import Client
from worlds import (
    KINDS,
    PATIENCE,
    Cache,
    Opening,
    all_worlds,
    at_once,
    attempts,
    close_all,
    everywhere,
    fresh_groups,
    nothing_left,
    open_worlds,
    opening,
    outcomes,
    worlds_of,
)

from polytempo.collectives.group import RankGroup
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.world import World
from polytempo.errors import PeerError, UsageError

__all__ = ["all_worlds", "nothing_left", "opening", "worlds_of"]

every_link = pytest.mark.parametrize("kind", KINDS)


def number(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def got(group: RankGroup, source: int | None = None, tag: int = 0) -> tuple[float, int]:
    """Receive one number; it, and whose it was."""
    place = number(-1)
    who: int = receive(group, place, source, tag).wait()
    return place.item(), who


@pytest.fixture
def pair(worlds_of: Cache, kind: str) -> list[RankGroup]:
    return fresh_groups(worlds_of(kind, 2))


@pytest.fixture
def three(worlds_of: Cache, kind: str) -> list[RankGroup]:
    return fresh_groups(worlds_of(kind, 3))


def both(groups: list[RankGroup], one: Callable[[RankGroup], object], other: Callable[[RankGroup], object]) -> list[object]:
    """One thing on rank 0, another on rank 1."""
    return at_once(2, lambda rank: (one, other)[rank](groups[rank]))


# One message.


@every_link
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_sent_is_received(pair: list[RankGroup], dtype: torch.dtype) -> None:
    sent = values(dtype, (3, 4), 5)

    def take(group: RankGroup) -> int:
        place = torch.ones(3, 4, dtype=dtype)
        who: int = receive(group, place, 0).wait()
        assert torch.equal(place, sent)
        return who

    assert both(pair, lambda group: send(group, sent, 1).wait(), take)[1] == 0


@every_link
def test_a_message_of_nothing_is_a_message(pair: list[RankGroup]) -> None:
    def give(group: RankGroup) -> None:
        for shape in ((0,), (3, 0), (0, 2)):
            send(group, torch.ones(shape), 1, tag=9).wait()
        send(group, number(3), 1).wait()

    def take(group: RankGroup) -> tuple[float, int]:
        for shape in ((0,), (3, 0), (0, 2)):
            assert receive(group, torch.ones(shape), 0, tag=9).wait() == 0
        return got(group)

    assert both(pair, give, take)[1] == (3.0, 0)


@every_link
def test_tensors_that_are_not_contiguous_are_sent_and_filled(pair: list[RankGroup]) -> None:
    sent = values(torch.float32, (4, 6), 1)

    def take(group: RankGroup) -> None:
        room = torch.zeros(6, 8)
        receive(group, room.t()[1:5, :], 0).wait()
        assert torch.equal(room.t()[1:5, :], sent)
        assert room.t()[0].sum() == 0
        room = torch.nn.Parameter(torch.zeros(4, 6))
        receive(group, room, 0).wait()
        assert torch.equal(room, sent)

    def give(group: RankGroup) -> None:
        send(group, sent.t().contiguous().t(), 1).wait()
        send(group, torch.nn.Parameter(sent), 1).wait()

    both(pair, give, take)


def test_a_sent_tensor_may_be_changed_at_once(worlds_of: Cache) -> None:
    """When `send` returns, whether or not anybody has begun to receive."""
    for kind in KINDS:
        groups = fresh_groups(worlds_of(kind, 2))
        told = threading.Event()

        def give(group: RankGroup, told: threading.Event = told) -> None:
            for size in (10, 100_000):
                mine = torch.ones(size)
                send(group, mine, 1).wait()
                mine.fill_(2.0)
            told.set()

        def take(group: RankGroup, told: threading.Event = told) -> None:
            assert told.wait(PATIENCE)
            for size in (10, 100_000):
                place = torch.zeros(size)
                receive(group, place, 0).wait()
                assert place.sum() == size

        both(groups, give, take)


# Tags and order.


@every_link
def test_tags_tell_messages_apart_whatever_the_order(pair: list[RankGroup]) -> None:
    tags = [0, 7, -3, 1 << 62, -(1 << 62), 1]

    def give(group: RankGroup) -> None:
        for tag in tags:
            send(group, number(tag), 1, tag).wait()

    def take(group: RankGroup) -> None:
        for tag in reversed(tags):
            assert got(group, 0, tag) == (float(tag), 0)

    both(pair, give, take)


@every_link
def test_messages_of_one_tag_keep_their_order(pair: list[RankGroup]) -> None:
    """Small and large ones alike."""
    sizes = [1, 50_000, 3, 0, 200_000, 2, 2]

    def give(group: RankGroup) -> None:
        for index, size in enumerate(sizes):
            send(group, torch.full((size,), float(index)), 1).wait()

    def take(group: RankGroup) -> None:
        for index, size in enumerate(sizes):
            place = torch.zeros(size)
            receive(group, place, None if index % 2 else 0).wait()
            assert torch.equal(place, torch.full((size,), float(index)))

    both(pair, give, take)


@every_link
@pytest.mark.parametrize("first", ["who sends", "who receives"])
def test_it_does_not_matter_who_comes_first(pair: list[RankGroup], first: str) -> None:
    ready = threading.Event()

    def give(group: RankGroup) -> None:
        if first == "who receives":
            assert ready.wait(PATIENCE)
        for index in range(3):
            send(group, torch.full((40_000,), float(index)), 1, tag=index).wait()
        ready.set()

    def take(group: RankGroup) -> None:
        places = [torch.zeros(40_000) for _ in range(3)]
        if first == "who sends":
            assert ready.wait(PATIENCE)
        tasks = [receive(group, places[index], 0, tag=index, background=True) for index in (2, 0, 1)]
        ready.set()
        for task in tasks:
            assert task.wait() == 0
        assert [place[0].item() for place in places] == [0.0, 1.0, 2.0]

    both(pair, give, take)


# From anybody.


@every_link
def test_who_receives_from_anybody_learns_from_whom(three: list[RankGroup]) -> None:
    def work(rank: int) -> object:
        if rank:
            return send(three[rank], number(rank), 0).wait()
        return sorted([got(three[0]), got(three[0])])

    assert at_once(3, work)[0] == [(1.0, 1), (2.0, 2)]


@every_link
def test_receives_from_one_and_from_anybody_share_messages_by_order_of_posting(three: list[RankGroup]) -> None:
    posted, first_sent = threading.Event(), threading.Event()

    def work(rank: int) -> object:
        group = three[rank]
        if rank == 0:
            places = [number(-1) for _ in range(3)]
            one = receive(group, places[0], 2, background=True)
            anybody = receive(group, places[1], None, background=True)
            other = receive(group, places[2], 1, background=True)
            posted.set()
            return [one.wait(), anybody.wait(), other.wait(), *(place.item() for place in places)]
        assert posted.wait(PATIENCE)
        if rank == 1:
            send(group, number(10), 0).wait()
            send(group, number(11), 0).wait()
            first_sent.set()
        else:
            assert first_sent.wait(PATIENCE)
            send(group, number(20), 0).wait()
        return None

    assert at_once(3, work)[0] == [2, 1, 1, 20.0, 10.0, 11.0]


# Much.


@pytest.mark.parametrize("kind", [*KINDS])
def test_ten_megabytes_cross_each_other(pair: list[RankGroup]) -> None:
    def swap(group: RankGroup) -> None:
        mine, place = torch.full((2_500_000,), float(group.rank)), torch.empty(2_500_000)
        send(group, mine, 1 - group.rank).wait()
        receive(group, place, 1 - group.rank).wait()
        assert place.sum() == 2_500_000 * (1 - group.rank)

    both(pair, swap, swap)


@every_link
def test_large_ones_cross_each_other_in_the_background(pair: list[RankGroup]) -> None:
    def swap(group: RankGroup) -> None:
        other = 1 - group.rank
        mine = [torch.full((300_000,), float(10 * group.rank + tag)) for tag in range(4)]
        places = [torch.empty(300_000) for _ in range(4)]
        tasks = [receive(group, places[tag], other, tag, background=True) for tag in (3, 1)]
        tasks += [send(group, mine[tag], other, tag, background=True) for tag in range(4)]
        tasks += [receive(group, places[tag], other, tag, background=True) for tag in (0, 2)]
        for task in reversed(tasks):
            task.wait()
        for tag, place in enumerate(places):
            assert torch.equal(place, torch.full((300_000,), float(10 * other + tag)))

    both(pair, swap, swap)


@every_link
def test_many_small_ones_arrive(pair: list[RankGroup]) -> None:
    def give(group: RankGroup) -> None:
        for task in [send(group, number(index), 1, tag=index % 5, background=True) for index in range(1000)]:
            task.wait()

    def take(group: RankGroup) -> None:
        for tag in (3, 1, 4, 0, 2):
            assert [got(group, 0, tag)[0] for _ in range(200)] == [float(5 * index + tag) for index in range(200)]

    both(pair, give, take)


@given(
    messages=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0, 1, 3, 5000, 30_000])),
        max_size=20,
    ),
    data=st.data(),
)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_any_messages_between_any_ranks(
    all_worlds: Cache, messages: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    """Messages: from whom, to whom, with which tag, how many numbers. Each rank posts its own in an order of its own."""
    groups = fresh_groups(all_worlds(data.draw(st.sampled_from(["memory", "unix"])), 3))
    numbered = [(index, *message) for index, message in enumerate(messages) if message[0] != message[1]]
    orders = [data.draw(st.permutations([m for m in numbered if rank in m[1:3]])) for rank in range(3)]

    def work(rank: int) -> None:
        group = groups[rank]
        in_order = {message: iter([m for m in numbered if m[1:4] == message[1:4]]) for message in numbered}
        channels = {message[1:4]: in_order[message] for message in numbered}
        tasks, places = [], []
        for message in orders[rank]:
            index, source, to, tag, size = next(channels[message[1:4]])  # those of one channel stay in order
            if source == rank:
                tasks.append(send(group, torch.full((size,), float(index)), to, tag, background=True))
            else:
                places.append((torch.empty(size), index))
                tasks.append(receive(group, places[-1][0], source, tag, background=True))
        for task in tasks:
            task.wait()
        for place, index in places:
            assert torch.equal(place, torch.full_like(place, float(index)))

    at_once(3, work)


# Kept apart.


@every_link
def test_messages_of_other_groups_and_collectives_are_not_mixed_up(worlds_of: Cache, kind: str) -> None:
    worlds = worlds_of(kind, 3)
    first, second = fresh_groups(worlds), fresh_groups(worlds)

    def work(rank: int) -> None:
        after = (rank + 1) % 3
        tasks = [
            send(group, number(value), after, background=True) for group, value in ((first[rank], 1), (second[rank], 2))
        ]
        Call("all_reduce", "ring", 3).make(first[rank]).check()
        tasks.append(send(first[rank], number(3), after, background=True))
        Call("all_to_all", "linear", 1, seed=4).make(second[rank]).check()
        assert got(second[rank])[0] == 2.0
        assert got(first[rank])[0] == 1.0
        Call("all_gather", "ring", 2).make(first[rank]).check()
        assert got(first[rank], (rank + 2) % 3) == (3.0, (rank + 2) % 3)
        for task in tasks:
            task.wait()

    at_once(3, work)


@every_link
def test_messages_do_not_wait_for_collectives(pair: list[RankGroup]) -> None:
    """A collective that cannot go on keeps no message back, and a receive that waits keeps no collective back."""

    def early(group: RankGroup) -> None:
        summed = Call("all_reduce", "ring").make(group, background=True)
        later = receive(group, place := number(-1), 1, tag=5, background=True)
        send(group, number(1), 1).wait()
        assert got(group, 1, tag=1) == (2.0, 1)
        summed.check()
        later.wait()
        assert place.item() == 6.0

    def late(group: RankGroup) -> None:
        assert got(group, 0) == (1.0, 0)
        send(group, number(2), 0, tag=1).wait()
        Call("all_reduce", "ring").make(group).check()
        send(group, number(6), 0, tag=5).wait()

    both(pair, early, late)


@every_link
def test_ranks_of_a_group_are_numbered_within_it(worlds_of: Cache, kind: str) -> None:
    groups = fresh_groups(worlds_of(kind, 3), [0, 2])

    def work(at: int) -> object:
        return send(groups[0], number(8), 1).wait() if at == 0 else got(groups[1])

    assert at_once(2, work)[1] == (8.0, 0)


# Mistakes.


@every_link
@pytest.mark.parametrize("first", ["who sends", "who receives"])
@pytest.mark.parametrize("sizes", [(10, 20), (30_000, 10), (10, 30_000), (0, 3), (3, 0)])
def test_a_message_of_another_size_is_an_error_that_names_both(
    pair: list[RankGroup], first: str, sizes: tuple[int, int]
) -> None:
    ready = threading.Event()
    sent, expected = sizes

    def give(group: RankGroup) -> None:
        if first == "who receives":
            assert ready.wait(PATIENCE)
        send(group, torch.ones(sent), 1, tag=2).wait()
        send(group, number(7), 1, tag=2).wait()
        ready.set()

    def take(group: RankGroup) -> None:
        place = torch.zeros(expected)
        if first == "who sends":
            assert ready.wait(PATIENCE)
        task = receive(group, place, 0, tag=2, background=True)
        ready.set()
        words = f"expected {4 * expected} bytes from rank 0, got {4 * sent}: float32\\[{expected}\\] does not fit .* tag 2"
        with pytest.raises(PeerError, match=words):
            task.wait()
        assert place.sum() == 0, "and nothing was written"
        assert got(group, 0, tag=2) == (7.0, 0), "and the next message is the next"

    both(pair, give, take)


def test_a_rank_does_not_send_to_itself(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("memory", 3), [1, 2])
    for call in (send, receive):
        with pytest.raises(UsageError, match="rank 1 cannot send to itself; copy the tensor"):
            call(groups[1], number(1), 1)
        with pytest.raises(UsageError, match="expected a rank from 0 to 1, got 2"):
            call(groups[1], number(1), 2)


def test_a_tensor_that_is_not_dense_is_refused(worlds_of: Cache) -> None:
    group = fresh_groups(worlds_of("memory", 3))[0]
    for call in (send, receive):
        with pytest.raises(UsageError, match="expected a dense tensor"):
            call(group, torch.ones(3).to_sparse(), 1).wait()


def test_a_tag_that_no_message_can_carry_is_refused(worlds_of: Cache) -> None:
    group = fresh_groups(worlds_of("memory", 3))[0]
    with pytest.raises(UsageError, match="tag"):
        send(group, number(1), 1, tag=1 << 63).wait()


# Lost ranks.


@every_link
@pytest.mark.parametrize("politely", [True, False])
def test_a_message_that_was_sent_is_received_after_its_sender_has_left(opening: Opening, kind: str, politely: bool) -> None:
    worlds = opening(kind, 2)
    everywhere(worlds, lambda world: world.all_ranks.barrier().wait())
    place = torch.zeros(1000)

    def leave(world: World) -> None:
        send(world.all_ranks, torch.ones(1000), 1).wait()
        world.close(politely)

    def take(world: World) -> None:
        task = receive(world.all_ranks, place, 0)
        assert task.wait() == 0
        with pytest.raises(PeerError, match=r"rank 0 (has left the job|is gone)"):
            receive(world.all_ranks, place, 0).wait()

    everywhere(worlds, lambda world: leave(world) if world.rank == 0 else take(world))
    assert place.sum() == 1000


@every_link
def test_who_waits_for_a_message_of_somebody_who_leaves_learns_of_it(opening: Opening, kind: str) -> None:
    worlds = opening(kind, 3)
    everywhere(worlds, lambda world: world.all_ranks.barrier().wait())

    def work(world: World) -> None:
        if world.rank == 2:
            world.close()
        elif world.rank == 1:
            receive(world.all_ranks, number(0), 2).wait()
        else:
            send(world.all_ranks, number(4), 1, tag=3).wait()

    outcome = attempts(worlds, work)
    assert outcome[0] is None
    assert isinstance(outcome[1], PeerError)
    assert "rank 2 has left the job: rank 1 needs it in recv(float32[1], from 2, tag 0)" in str(outcome[1])
    assert got(worlds[1].all_ranks, 0, tag=3) == (4.0, 0), "the others are still there"


@every_link
def test_who_waits_for_anybody_gives_up_when_all_have_left(opening: Opening, kind: str) -> None:
    worlds = opening(kind, 3)
    everywhere(worlds, lambda world: world.all_ranks.barrier().wait())
    place, waiting = number(0), threading.Event()

    def work(world: World) -> None:
        if world.rank:
            assert waiting.wait(PATIENCE)
            world.close()
        else:
            task = receive(world.all_ranks, place, None, background=True)
            waiting.set()
            task.wait()

    error, *others = attempts(worlds, work)
    assert others == [None, None]
    assert isinstance(error, PeerError)
    assert "rank 1 has left the job; rank 2 has left the job" in str(error)


@every_link
def test_a_send_to_somebody_who_has_left_is_an_error(opening: Opening, kind: str) -> None:
    worlds = opening(kind, 2)
    everywhere(worlds, lambda world: world.all_ranks.barrier().wait())
    worlds[1].close()

    def until_it_is_noticed() -> None:
        while True:
            send(worlds[0].all_ranks, number(1), 1).wait()

    (outcome,) = outcomes(Client(until_it_is_noticed))
    assert isinstance(outcome, PeerError), outcome
    assert "rank 1 has left the job" in str(outcome)


def test_a_receive_that_was_given_up_takes_nothing_from_the_next(opening: Opening) -> None:
    """After a timeout its message belongs to who asks next."""
    worlds = opening("memory", 2, timeout=0.2)
    group = worlds[0].all_ranks
    with pytest.raises(PeerError, match=r"rank 0 has waited .* recv\(float32\[1\], from 1, tag 0\), for rank 1"):
        receive(group, number(-1), 1).wait()
    send(worlds[1].all_ranks, number(5), 0).wait()
    (outcome,) = outcomes(Client(lambda: got(group, 1)))
    assert outcome == (5.0, 1)


@every_link
@pytest.mark.parametrize("thread", [False, True])
def test_messages_on_a_closed_world_fail_at_once(nothing_left: None, kind: str, thread: bool) -> None:
    worlds = open_worlds(kind, 2)
    everywhere(worlds, lambda world: world.all_ranks.barrier(thread).wait())
    close_all(worlds)

    def both_ways(world: World) -> list[str]:
        found = []
        for call in (send, receive):
            for background in (False, True):
                with pytest.raises(PeerError, match="closed") as caught:
                    call(world.all_ranks, number(1), 1 - world.rank, background=background).wait()
                found.append(str(caught.value))
        return found

    everywhere(worlds, both_ways)
