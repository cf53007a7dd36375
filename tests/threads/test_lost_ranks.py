"""Ranks that end: who needs them learns of whom, who does not need them does not mind, and the others can go on."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calls import Call, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import Client
from worlds import (
    KINDS,
    PATIENCE,
    Hosts,
    Opening,
    alone,
    attempts,
    close_all,
    everywhere,
    nothing_left,
    open_worlds,
    opening,
    outcomes,
    results,
)

from polytempo.collectives import messaging
from polytempo.collectives.group import RankGroup
from polytempo.collectives.plans import PLANS
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import AGAIN, World
from polytempo.errors import PeerError, RankLost
from polytempo.transport import deadline
from polytempo.transport.peer_link import LinkMessage

__all__ = ["nothing_left", "opening"]
pytestmark = pytest.mark.usefixtures("nothing_left")

ALL_REDUCES = [how for name, how in PLANS if name == "all_reduce"]
TWO_BY_TWO: Hosts = ((0, 1), (2, 3))


class Died(BaseException):
    """The end of a process, for its thread: nothing of ours may catch it."""


def doom(world: World, sends: int, when: Callable[[LinkMessage], bool] = lambda message: True) -> None:
    """Let this rank end after so many messages of a kind, without another word."""
    original, left = world.engine.messages.send, [sends]

    def send(to: int, message: LinkMessage, *about: Any) -> None:
        if when(message):
            if not left[0]:
                raise Died
            left[0] -= 1
        original(to, message, *about)

    world.engine.messages.send = send  # type: ignore[method-assign]


def until_death(world: World, work: Callable[[World], Any], politely: bool = False) -> Any:
    """What comes out of it, if this rank lives that long; else its end."""
    try:
        return work(world)
    except Died as death:
        world.engine.messages.__dict__.pop("send", None)
        world.close(politely)
        return death


def names(error: object, *ranks: int) -> bool:
    """Does an error say that one of these ranks is the lost one?"""
    if not isinstance(error, RankLost):
        return False
    said = re.match(r"rank (\d+) (has left the job|is gone \(.+?\))", str(error))
    return said is not None and int(said[1]) in ranks and set(error.ranks) <= set(ranks) and bool(error.ranks)


def ways(kind: str, size: int) -> list[tuple[str, str]]:
    return [(name, how) for name, how in algorithms(size if kind == "zmq" else 1) if how != "auto" or name == "barrier"]


def warm(worlds: Sequence[World]) -> None:
    """Boards are made and speeds are known."""
    everywhere(worlds, lambda world: [world.all_ranks.barrier().wait(), world.all_ranks.all_reduce([torch.ones(9)]).wait()])


def sum_over(group: RankGroup) -> torch.Tensor:
    """All ranks add up a bit of their own, so that the sum says who took part."""
    mine = torch.full((50,), 1 << group.engine.rank, dtype=torch.int64)
    group.all_reduce([mine], algorithm="ring").wait()
    return mine


def took_part(total: torch.Tensor) -> list[int]:
    assert (total == total[0]).all()
    return [rank for rank in range(60) if int(total[0]) >> rank & 1]


def check_reformed(worlds: Sequence[World], survivors: Sequence[int]) -> list[RankGroup]:
    """Those who are left form a group that works, the same on all of them."""
    left = [worlds[rank] for rank in survivors]
    groups = everywhere(left, lambda world: world.reform())
    assert {group.ranks for group in groups} == {tuple(survivors)}
    assert len({group.context for group in groups}) == 1
    sums = results(*[Client(lambda group=group: sum_over(group)) for group in groups])
    assert [took_part(total) for total in sums] == [list(survivors)] * len(survivors)
    results(*[Client(lambda group=group: Call("all_gather", size=70_000).make(group).check()) for group in groups])
    return groups


# Before a collective.


@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_has_left_is_named_by_all_in_every_collective(opening: Opening, kind: str, politely: bool) -> None:
    worlds = opening(kind, 3)
    calls = [Call(name, how, root=index % 3) for index, (name, how) in enumerate(ways(kind, 3))]
    groups = [[world.new_group([0, 1, 2]) for world in worlds] for _ in calls]
    warm(worlds)
    worlds[1].close(politely)

    def work(world: World) -> None:
        for call, group in zip(calls, groups, strict=True):
            mine = group[world.rank]
            assert mine is not None
            with pytest.raises(RankLost) as caught:  # noqa: PT012  who only sends learns of it by his next call
                call.make(mine).task.wait()
                mine.barrier().wait()
            assert names(caught.value, 1), f"{call}: {caught.value}"
            assert ("has left the job" in str(caught.value)) == politely
            with pytest.raises(RankLost) as again:
                mine.barrier().wait()
            assert str(again.value) == str(caught.value)

    everywhere([worlds[0], worlds[2]], work)
    groups.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_was_waited_for_and_leaves_is_named(opening: Opening, kind: str) -> None:
    """All others are in the middle of a call when it goes."""
    for name, how in (("all_reduce", "auto"), ("all_reduce", "ring"), ("all_gather", "ring"), ("barrier", "auto")):
        worlds = open_worlds(kind, 3)
        warm(worlds)
        calls = [Call(name, how).make(world.all_ranks, background=True).task for world in worlds[:2]]
        worlds[2].close()
        for task in calls:
            (outcome,) = outcomes(Client(task.wait))
            assert names(outcome, 2), outcome
        close_all(worlds)


def test_groups_without_it_go_on(opening: Opening) -> None:
    for kind in KINDS:
        worlds = opening(kind, 4)
        warm(worlds)
        pairs = [[world.new_group(ranks) for world in worlds] for ranks in ([0, 1], [1, 3], [2, 3])]
        worlds[2].close()

        def work(world: World, pairs: list[Any] = pairs) -> None:
            for pair in pairs[:2]:
                if pair[world.rank] is not None:
                    Call("all_reduce", size=1000).make(pair[world.rank]).check()
            if world.rank == 3:
                with pytest.raises(RankLost, match="rank 2 has left the job"):
                    pairs[2][3].barrier().wait()

        everywhere([worlds[0], worlds[1], worlds[3]], work)
        pairs.clear()


# In the middle.


def in_the_middle(worlds: Sequence[World], who: int, how: str, sends: int, size: int) -> list[Any]:
    """One dies after so many sends of an all-reduce; what came out of each, right if it is a result."""
    call = Call("all_reduce", how, size)
    warm(worlds)
    doom(worlds[who], sends)

    def work(world: World) -> Any:
        result = call.make(world.all_ranks).check(call)
        if world.rank == who:
            raise Died
        return result

    return attempts(worlds, lambda world: until_death(world, work))


@pytest.mark.parametrize("how", ALL_REDUCES)
@pytest.mark.parametrize("kind", ["memory", "unix"])
@pytest.mark.parametrize("sends", [0, 1, 2, 5])
def test_a_death_in_the_middle_is_named_and_survived(opening: Opening, kind: str, how: str, sends: int) -> None:
    who, size = sends % 4, 4
    worlds = opening(kind, size)
    found = in_the_middle(worlds, who, how, sends, 1000)
    survivors = [rank for rank in range(size) if rank != who]
    for rank in survivors:
        assert not isinstance(found[rank], BaseException) or names(found[rank], who), found[rank]
    if sends == 0:
        assert all(isinstance(found[rank], RankLost) for rank in survivors), "nobody can do without what it never sent"
    old = [worlds[rank].all_ranks for rank in survivors]
    for outcome in outcomes(*[Client(lambda group=group: group.barrier().wait()) for group in old]):
        assert names(outcome, who), outcome
    groups = check_reformed(worlds, survivors)
    assert groups[0].context != old[0].context


@pytest.mark.parametrize("how", [how for how in ALL_REDUCES if how != "shared-memory"])
@pytest.mark.parametrize("size", [100, 300_000])
def test_a_death_in_the_middle_is_named_and_survived_over_zeromq(opening: Opening, how: str, size: int) -> None:
    hosts = TWO_BY_TWO if how == "hierarchical" else alone(4)
    worlds = opening("zmq", 4, hosts)
    found = in_the_middle(worlds, 2, how, 1, size)
    assert all(not isinstance(found[rank], BaseException) or names(found[rank], 2) for rank in (0, 1, 3)), found
    check_reformed(worlds, [0, 1, 3])


@pytest.mark.parametrize("kind", ["unix", "memory"])
@pytest.mark.parametrize("how", ["ring", "tree", "shared-memory"])
def test_a_death_in_the_middle_of_much_is_named_and_survived(opening: Opening, kind: str, how: str) -> None:
    """Payloads are half there, and half sent."""
    worlds = opening(kind, 3)
    found = in_the_middle(worlds, 1, how, 3, 2_000_000)
    assert all(not isinstance(found[rank], BaseException) or names(found[rank], 1) for rank in (0, 2)), found
    check_reformed(worlds, [0, 2])


def test_on_two_hosts_a_leader_may_die(opening: Opening) -> None:
    for who in range(4):
        worlds = opening("memory", 4, TWO_BY_TWO)
        found = in_the_middle(worlds, who, "hierarchical", 2, 100)
        others = [rank for rank in range(4) if rank != who]
        assert all(not isinstance(found[rank], BaseException) or names(found[rank], who) for rank in others), found
        check_reformed(worlds, others)


def test_who_dies_before_it_hands_over_shared_memory_is_named(opening: Opening) -> None:
    """The first of a host makes the board."""
    worlds = opening("unix", 3)
    doom(worlds[0], 0)
    found = attempts(worlds, lambda world: until_death(world, lambda world: world.all_ranks.barrier().wait()))
    assert names(found[1], 0)
    assert names(found[2], 0)
    check_reformed(worlds, [1, 2])


# Who leaves because of it.


def lose_on_one_link(lost: World, by: int) -> None:
    """One rank sees that this one has crashed; the others do not see it yet."""
    lost.engine.messages.links[by].close()


@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("kind", ["memory", "unix"])
def test_who_leaves_because_of_a_lost_rank_is_not_named_instead(opening: Opening, kind: str, politely: bool) -> None:
    """Rank 1 sees that rank 2 is lost and tells rank 0, which leaves; what it says to rank 3 is late, under load."""
    worlds = opening(kind, 4)
    warm(worlds)
    lose_on_one_link(worlds[2], by=1)
    worlds[1].engine.messages.links[3].send = lambda *about: None  # type: ignore[method-assign]
    for rank in (1, 0):
        (outcome,) = outcomes(Client(lambda rank=rank: worlds[rank].all_ranks.barrier().wait()))
        assert names(outcome, 2), outcome
    worlds[0].close(politely)
    (outcome,) = outcomes(Client(lambda: worlds[3].all_ranks.barrier().wait()))
    assert names(outcome, 2), outcome


def test_who_waits_in_vain_for_another_tells_of_the_lost_rank(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for rank 0, and gives that up since rank 2 is lost: rank 0 has heard of it before rank 1 leaves."""
    monkeypatch.setattr(messaging, "GRACE", 0.0)
    worlds = opening("memory", 3)
    warm(worlds)
    call = worlds[1].all_ranks.broadcast([torch.ones(3)], 0, algorithm="ring")
    worlds[1].engine.look()
    assert not call.is_completed()
    lose_on_one_link(worlds[2], by=1)
    (outcome,) = outcomes(Client(call.wait))
    assert names(outcome, 2), outcome
    worlds[1].close()
    (outcome,) = outcomes(Client(lambda: worlds[0].all_ranks.barrier().wait()))
    assert names(outcome, 2), outcome


# After a collective.


@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_who_does_not_need_it_any_more_does_not_mind(opening: Opening, kind: str, politely: bool) -> None:
    """A rank leaves the moment its part is done: everybody else ends well, too."""
    for index, (name, how) in enumerate(ways(kind, 3)):
        worlds = open_worlds(kind, 3)
        call, who = Call(name, how, 3000, root=(index + 1) % 3), index % 3

        def work(world: World, call: Call = call, who: int = who) -> None:
            call.make(world.all_ranks).check(call)
            if world.rank == who:
                world.close(politely)

        everywhere(worlds, work)
        close_all(worlds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("call", "early"),
    [
        (Call("gather", "linear", root=0), 2),
        (Call("reduce", "tree", root=0), 2),
        (Call("scatter", "linear", root=2), 2),
        (Call("broadcast", "tree", root=2), 2),
        (Call("broadcast", "ring", root=2), 2),
    ],
    ids=lambda value: f"{value.collective} {value.algorithm}" if isinstance(value, Call) else "",
)
def test_a_rank_that_has_done_its_part_may_leave_before_others_begin(
    opening: Opening, kind: str, call: Call, early: int
) -> None:
    worlds = opening(kind, 3)
    warm(worlds)
    everywhere([worlds[early]], lambda world: (call.make(world.all_ranks).check(), world.close()))

    def seen_to_leave(world: World) -> bool:
        world.engine.look()
        return early in world.engine.messages.left

    for world in worlds:
        if world.rank != early:
            wait_until(lambda world=world: seen_to_leave(world))
    everywhere([world for world in worlds if world.rank != early], lambda world: call.make(world.all_ranks).check(call))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        threading.Event().wait(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_all_leave_as_soon_as_they_are_done(opening: Opening, kind: str) -> None:
    for turn in range(4):
        worlds = open_worlds(kind, 4)

        def work(world: World, turn: int = turn) -> None:
            Call("all_reduce", "auto" if turn % 2 else "ring", 20_000).make(world.all_ranks).check()
            world.close(politely=turn < 2)

        everywhere(worlds, work)
        close_all(worlds)


# Forming again.


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_at_once_are_survived(opening: Opening, kind: str) -> None:
    worlds = opening(kind, 5)
    warm(worlds)
    for who in (1, 4):
        worlds[who].close(politely=who == 1)
    found = attempts([worlds[rank] for rank in (0, 2, 3)], lambda world: sum_over(world.all_ranks))
    assert all(names(error, 1, 4) for error in found), found
    check_reformed(worlds, [0, 2, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_one_death_after_another_is_survived(opening: Opening, kind: str) -> None:
    worlds = opening(kind, 5)
    warm(worlds)
    alive, contexts = [0, 1, 2, 3, 4], set[int]()
    groups = {world.rank: world.all_ranks for world in worlds}
    for who in (2, 0, 4, 1):
        worlds[who].close(politely=False)
        alive.remove(who)
        found = attempts([worlds[rank] for rank in alive], lambda world, groups=groups: sum_over(groups[world.rank]))
        assert all(names(error, who) for error in found), found
        again = check_reformed(worlds, alive)
        contexts.add(again[0].context)
        groups = {group.engine.rank: group for group in again}
    assert len(contexts) == 4


def test_who_learns_of_a_death_from_others_waits_until_it_sees_it(opening: Opening) -> None:
    """Its own link may still say nothing."""
    worlds = opening("memory", 3)
    forming = Client(lambda: worlds[0].reform().ranks)
    other = Client(lambda: worlds[1].reform().ranks)
    worlds[2].close()
    assert results(forming, other) == [(0, 1), (0, 1)]


def test_groups_are_formed_again_by_number(opening: Opening) -> None:
    """Two users of one world do so each in its own time."""
    worlds = opening("memory", 3)
    worlds[1].close()
    left = [worlds[0], worlds[2]]

    def work(world: World) -> list[RankGroup]:
        order = (0, 5) if world.rank else (5, 0)
        tasks = [Client(lambda number=number: world.reform(number)) for number in order]
        return sorted(results(*tasks), key=lambda group: group.context)

    for one, two in zip(*everywhere(left, work), strict=True):
        assert one.ranks == two.ranks == (0, 2)
        assert one.context == two.context


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("told", [1, 2])
def test_a_death_while_the_others_form_again_is_survived(opening: Opening, kind: str, told: int) -> None:
    """It has told one of them, or two, whom it misses, and not the third: those think all is agreed, and he does not."""
    worlds = opening(kind, 5)
    warm(worlds)
    worlds[4].close(politely=False)
    doom(worlds[3], told, lambda message: message.context >= AGAIN)

    def work(world: World) -> tuple[tuple[int, ...], list[int]]:
        group = world.all_ranks
        while True:
            try:
                return group.ranks, took_part(sum_over(group))
            except PeerError:
                group = world.reform()

    found = attempts(worlds[:4], lambda world: until_death(world, work))
    assert isinstance(found[3], Died)
    assert found[:3] == [((0, 1, 2), [0, 1, 2])] * 3


@pytest.mark.long
@given(
    size=st.integers(3, 5),
    how=st.sampled_from(ALL_REDUCES),
    dooms=st.lists(st.tuples(st.sampled_from(["call", "reform"]), st.integers(0, 4)), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_whoever_dies_wherever_the_others_go_on(
    size: int, how: str, dooms: list[tuple[str, int]], data: st.DataObject
) -> None:
    kind, order = data.draw(st.sampled_from(["memory", "unix"])), data.draw(st.permutations(range(size)))
    doomed = dict(zip(order, [("call", 1), *dooms][: size - 1], strict=False))
    worlds = open_worlds(kind, size)
    warm(worlds)
    for rank, (where, sends) in doomed.items():
        in_reform = where == "reform"
        doom(worlds[rank], sends, lambda message, when=in_reform: (message.context >= AGAIN) == when)

    def work(world: World) -> tuple[tuple[int, ...], list[int]]:
        group, failures = world.all_ranks, 0
        while True:
            try:
                mine = torch.full((50,), 1 << world.rank, dtype=torch.int64)
                group.all_reduce([mine], algorithm=how if group is world.all_ranks else "ring").wait()
                if doomed.get(world.rank, ("", 0))[0] == ("reform" if failures else "call"):
                    raise Died
                group.barrier().wait()
            except PeerError:
                group, failures = world.reform(), failures + 1
            else:
                return group.ranks, took_part(mine)

    try:
        found = attempts(worlds, lambda world: until_death(world, work))
    finally:
        close_all(worlds)
    survivors = tuple(rank for rank in range(size) if not isinstance(found[rank], Died))  # some could not send so much
    assert {rank for rank in range(size) if rank not in doomed} <= set(survivors)
    assert [found[rank] for rank in survivors] == [(survivors, list(survivors))] * len(survivors)


# Closing.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("background", [False, True])
def test_closing_ends_a_call_that_another_thread_waits_for(opening: Opening, kind: str, background: bool) -> None:
    worlds = opening(kind, 2)
    began = threading.Event()

    def wait() -> None:
        task = worlds[0].all_ranks.barrier(background)
        began.set()
        task.wait()

    waiting = Client(wait)
    assert began.wait(PATIENCE)
    closing = Client(worlds[0].close)
    error, closed = outcomes(waiting, closing)
    assert closed is None
    assert isinstance(error, PeerError)
    assert "closed" in str(error)


def test_closing_ends_all_that_is_under_way(opening: Opening) -> None:
    worlds = opening("unix", 2)
    group = worlds[0].all_ranks
    tasks = [Call("all_reduce", size=10).make(group, background=True).task for _ in range(5)]
    ended = [threading.Event() for _ in tasks]
    for task, event in zip(tasks, ended, strict=True):
        task.when_done(lambda _, event=event: event.set())
    worlds[0].close()
    for task, event in zip(tasks, ended, strict=True):
        assert task.is_completed()
        assert event.is_set()
        with pytest.raises(PeerError, match="closed"):
            task.wait()


def test_closing_twice_and_from_several_threads_is_closing(opening: Opening) -> None:
    for kind in KINDS:
        worlds = opening(kind, 2)
        warm(worlds)
        results(*[Client(world.close) for world in worlds for _ in range(3)])


def test_a_callback_may_close(opening: Opening) -> None:
    worlds = opening("memory", 2)
    closed = [threading.Event(), threading.Event()]

    def work(world: World) -> None:
        def close(_: Task) -> None:
            world.close()
            closed[world.rank].set()

        world.all_ranks.barrier(background=True).when_done(close)
        assert closed[world.rank].wait(PATIENCE / 4)

    everywhere(worlds, work)


# Waiting for long.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "FIRST_REPORT", 0.02)
    monkeypatch.setattr(deadline, "LOOK_EVERY", 0.01)


def heard(capsys: pytest.CaptureFixture[str], pattern: str, found: list[str]) -> bool:
    found.append(capsys.readouterr().err)
    return re.search(pattern, "".join(found)) is not None


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("background", [False, True])
def test_who_waits_for_long_says_for_whom(
    opening: Opening, kind: str, background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = opening(kind, 3)
    come = threading.Event()

    def work(world: World) -> None:
        if world.rank == 1:
            assert come.wait(PATIENCE)
        Call("all_reduce", "tree").make(world.all_ranks, background).check()

    clients = [Client(lambda world=world: work(world)) for world in worlds]
    said: list[str] = []
    line = r"rank 0 has waited \d+ s in all_reduce\(sum, float32\[5\], by tree\) #1 in group world, for rank 1: rank 1"
    while not heard(capsys, line, said) and not clients[0].over():
        come.wait(0.005)
    come.set()
    results(*clients)
    assert ", for rank 1: rank 1 waits in no call: it computes, or is outside this library\n" in "".join(said)


@pytest.mark.usefixtures("impatient")
def test_who_waits_for_several_names_them(opening: Opening, capsys: pytest.CaptureFixture[str]) -> None:
    worlds = opening("memory", 4)
    waiting = Client(lambda: worlds[0].all_ranks.barrier().wait())
    said: list[str] = []
    while (
        not heard(capsys, r"rank 0 has waited 0 s in barrier\(\) #1 in group world, for ranks 1, 2, 3: ", said)
        and not waiting.over()
    ):
        waiting.join(0.005)
    results(*[Client(lambda world=world: world.all_ranks.barrier().wait()) for world in worlds[1:]], waiting)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["memory", "unix"])
@pytest.mark.parametrize("background", [False, True])
def test_who_waits_too_long_fails_and_names_who_is_missing(opening: Opening, kind: str, background: bool) -> None:
    worlds = opening(kind, 4, timeout=0.2)
    words = r"rank \d has waited \d+ s in all_reduce\(sum, float32\[5\]\) #1 in group world, for ranks 1, 3"

    def work(world: World) -> None:
        with pytest.raises(PeerError, match=words):
            Call("all_reduce").make(world.all_ranks, background).task.wait()
        with pytest.raises(PeerError, match=words):
            world.all_ranks.barrier().wait()

    everywhere([worlds[0], worlds[2]], work)
    for late in (worlds[1], worlds[3]):
        (outcome,) = outcomes(Client(lambda late=late: Call("all_reduce").make(late.all_ranks).task.wait()))
        assert re.search(words, str(outcome)), "who comes later is told"


@pytest.mark.usefixtures("impatient")
def test_who_waits_too_long_in_a_ring_or_for_another_host_fails_too(opening: Opening) -> None:
    for kind, how in (("memory", "ring"), ("unix", "tree"), ("zmq", "ring"), ("zmq", "auto")):
        worlds = opening(kind, 3, timeout=0.2)
        for outcome in attempts(
            worlds[:2], lambda world, how=how: Call("all_reduce", how).make(world.all_ranks).task.wait()
        ):
            assert isinstance(outcome, PeerError)
            assert re.search(r"rank \d has waited \d+ s in all_reduce\(.*\) #1 in group world, for rank \d", str(outcome))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("background", [False, True])
def test_ranks_that_wait_in_different_calls_tell_each_other_which(opening: Opening, background: bool) -> None:
    worlds = opening("unix", 2, timeout=PATIENCE)
    pairs = [world.new_group([0, 1], 0.5) for world in worlds]
    assert pairs[1] is not None
    first = Client(lambda: Call("all_reduce").make(worlds[0].all_ranks, background).check())
    (second,) = outcomes(Client(pairs[1].barrier(background).wait))
    one, other = "all_reduce(sum, float32[5]) #1 in group world", "barrier() #1 in group of ranks 0, 1"
    assert re.fullmatch(
        rf"rank 1 has waited \d s in {re.escape(other)}, for rank 0: rank 0 is in {re.escape(one)}", str(second)
    )
    results(first, Client(lambda: Call("all_reduce").make(worlds[1].all_ranks, background).check()))
    until = time.monotonic() + PATIENCE
    while worlds[0].engine.messages.calls and time.monotonic() < until:
        worlds[0].engine.look()
    assert worlds[0].engine.messages.calls == {}, "it waits no more"


@pytest.mark.usefixtures("impatient")
def test_who_is_in_time_is_not_hurt_by_a_timeout(opening: Opening) -> None:
    """It counts from where a call begins, and not while it waits for its turn."""
    worlds = opening("memory", 2, timeout=10.0)

    def work(world: World) -> None:
        made = [Call("all_reduce", seed=seed).make(world.all_ranks, background=True) for seed in range(200)]
        for one in made:
            one.check()

    everywhere(worlds, work)
