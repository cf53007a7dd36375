"""Ranks that call different things: all of them learn of two ranks and both calls; then the group goes on, as others do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from calls import Call
from wires import Client
from worlds import (
    KINDS,
    PATIENCE,
    Cache,
    Hosts,
    Opening,
    all_worlds,
    at_once,
    attempts,
    everywhere,
    fresh_groups,
    nothing_left,
    opening,
    outcomes,
    worlds_of,
)

from polytempo.collectives import call_queues
from polytempo.collectives.cost import Speeds
from polytempo.collectives.group import RankGroup
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.world import World
from polytempo.errors import PeerError

__all__ = ["all_worlds", "nothing_left", "opening", "worlds_of"]

BOTH = re.compile(r"rank (\d+) calls (.+) where rank (\d+) calls (.+) \(call (\d+) of group [0-9, ]+\); all ranks must make")

#: What all ranks call, and what one of them calls instead; how the two are named.
Odd = tuple[list[Call], list[Call]]
ODD: dict[str, Odd] = {
    "another shape": ([Call("all_reduce", size=5)], [Call("all_reduce", size=6)]),
    "another shape, by a ring": ([Call("all_reduce", "ring", 50)], [Call("all_reduce", "ring", 60)]),
    "another shape, by a tree": ([Call("all_reduce", "tree", 50)], [Call("all_reduce", "tree", 5)]),
    "another shape, by two trees": ([Call("all_reduce", "double-tree", 5)], [Call("all_reduce", "double-tree", 9)]),
    "another shape, halving": ([Call("all_reduce", "halving-doubling", 5)], [Call("all_reduce", "halving-doubling", 9)]),
    "another shape, and another board": ([Call("all_reduce", size=10)], [Call("all_reduce", size=50_000)]),
    "a shape of nothing": ([Call("all_reduce", "ring", 5)], [Call("all_reduce", "ring", 0)]),
    "another dtype": ([Call("all_reduce")], [Call("all_reduce", dtype=torch.int32)]),
    "another dtype, by a ring": ([Call("all_gather", "ring")], [Call("all_gather", "ring", dtype=torch.int32)]),
    "another operation": ([Call("all_reduce", op="sum")], [Call("all_reduce", op="max")]),
    "another operation in a tree": ([Call("reduce", "tree", op="sum")], [Call("reduce", "tree", op="mean")]),
    "another collective": ([Call("all_reduce")], [Call("broadcast")]),
    "another collective by messages": ([Call("all_gather", "ring")], [Call("reduce_scatter", "ring")]),
    "a barrier": ([Call("barrier")], [Call("all_to_all")]),
    "another root": ([Call("broadcast", root=0)], [Call("broadcast", root=1)]),
    "another root of a tree": ([Call("broadcast", "tree", root=0)], [Call("broadcast", "tree", root=1)]),
    "another root to reduce to": ([Call("reduce", root=1)], [Call("reduce", root=0)]),
    "another root to scatter from": ([Call("scatter", "linear", root=0)], [Call("scatter", "linear", root=1)]),
    "another algorithm": ([Call("all_reduce", "ring")], [Call("all_reduce", "tree")]),
    "another algorithm than auto": ([Call("all_reduce")], [Call("all_reduce", "double-tree")]),
    "gather against scatter": ([Call("gather", root=0)], [Call("scatter", root=0)]),
    "gather against scatter by messages": ([Call("gather", "linear", root=1)], [Call("scatter", "linear", root=1)]),
    "two calls the other way round": (
        [Call("all_reduce", "ring"), Call("all_gather", "ring")],
        [Call("all_gather", "ring"), Call("all_reduce", "ring")],
    ),
    "two calls the other way round, shared": (
        [Call("broadcast"), Call("all_reduce", size=3)],
        [Call("all_reduce", size=3), Call("broadcast")],
    ),
    "one call too few": (
        [Call("all_reduce"), Call("all_reduce"), Call("all_gather")],
        [Call("all_reduce"), Call("all_gather")],
    ),
}


def words_of(call: Call) -> str:
    """What the description of a call begins with."""
    return f"{call.collective}("


def error_of(work: Callable[[], object]) -> str:
    """What it fails with."""
    with pytest.raises(PeerError) as caught:
        work()
    return str(caught.value)


def attempt(work: Callable[[], object]) -> Exception | None:
    """What it fails with, if it fails as a group does."""
    try:
        work()
    except PeerError as error:
        return error
    return None


def make_all(group: RankGroup, calls: Sequence[Call], background: bool = False) -> str:
    """Make calls until one fails, and then one more, since who only sends has ended before anybody knows; the error."""

    def work() -> None:
        made = [call.make(group, True) for call in calls] if background else (call.make(group) for call in calls)
        for one in made:
            one.task.wait(PATIENCE)
        group.barrier().wait(PATIENCE)

    text = error_of(work)
    assert BOTH.search(text), text
    return text


def go_on(group: RankGroup, text: str) -> None:
    """Calls up to the last one that any rank had made end as that one did; from the next on all is well."""
    outcome: Exception | None = PeerError(text)
    for _ in range(20):
        if outcome is not None:
            assert BOTH.search(str(outcome)), outcome
            outcome = attempt(lambda: Call("all_reduce").make(group).check())
    assert outcome is None, f"the group is never usable again: {outcome}"
    assert group.queue.generation == 1, "what was left of the calls that failed has failed the group once more"
    for call in (Call("broadcast", size=30_000), Call("all_gather", "ring"), Call("all_reduce", size=50_000)):
        call.make(group).check()


def check(texts: Sequence[str], odd: int, usual: Sequence[Call], other: Sequence[Call]) -> None:
    """Everybody's error names two ranks, one of them the odd one, and both calls."""
    both = zip([*usual, Call("barrier")], [*other, Call("barrier")], strict=False)
    firsts = next((mine, theirs) for mine, theirs in both if mine != theirs)
    for text in texts:
        found = BOTH.search(text)
        assert found
        one, call_of_one, two, call_of_two, _ = found.groups()
        assert odd in (int(one), int(two))
        assert one != two
        assert call_of_one != call_of_two
        calls = {call_of_one.split("(")[0], call_of_two.split("(")[0]}
        assert calls <= {call.collective for call in (*usual, *other, Call("barrier"))}
        if text.count("call 1 of"):
            assert calls == {call.collective for call in firsts}


# All kinds of differences.


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ODD)
def test_who_calls_something_else_is_named_by_everybody(worlds_of: Cache, case: str, kind: str, size: int) -> None:
    usual, other = ODD[case]
    odd = len(case) % size
    worlds = worlds_of(kind, size)
    groups, spare = fresh_groups(worlds), fresh_groups(worlds)

    def work(rank: int) -> str:
        text = make_all(groups[rank], other if rank == odd else usual)
        go_on(groups[rank], text)
        Call("all_reduce").make(spare[rank]).check()
        return text

    check(at_once(size, work), odd, usual, other)


@pytest.mark.parametrize("case", ["another shape", "another algorithm", "two calls the other way round, shared"])
def test_calls_in_the_background_fail_in_the_same_way(worlds_of: Cache, case: str) -> None:
    usual, other = ODD[case]
    for kind in KINDS:
        worlds = worlds_of(kind, 3)
        groups, spare = fresh_groups(worlds), fresh_groups(worlds)

        def work(rank: int, groups: list[RankGroup] = groups, spare: list[RankGroup] = spare) -> str:
            text = make_all(groups[rank], [*(other if rank == 1 else usual), Call("barrier")], background=True)
            go_on(groups[rank], text)
            Call("all_reduce").make(spare[rank], background=True).check()
            return text

        check(at_once(3, work), 1, usual, other)


HOSTS: Hosts = ((0, 1), (2, 3))


@pytest.mark.parametrize("kind", ["memory", "zmq"])
@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_on_two_hosts_everybody_learns_of_it(worlds_of: Cache, kind: str, odd: int) -> None:
    usual, other = [Call("all_reduce", "hierarchical", 20)], [Call("all_reduce", "hierarchical", 21)]
    groups = fresh_groups(worlds_of(kind, 4, HOSTS))

    def work(rank: int) -> str:
        text = make_all(groups[rank], other if rank == odd else usual)
        go_on(groups[rank], text)
        return text

    check(at_once(4, work), odd, usual, other)


def test_the_text_says_what_both_have_called(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("memory", 2))

    def work(rank: int) -> object:
        if rank:
            return groups[1].all_reduce([torch.ones(2, 3), torch.ones(1, dtype=torch.int8)], "max", "ring").wait()
        return groups[0].reduce(torch.ones(4), 1, "mean").wait()

    for text in at_once(2, lambda rank: error_of(lambda: work(rank))):
        assert "all_reduce(max, float32[2, 3], int8[1], by ring)" in text
        assert "reduce(mean, float32[4], to 1)" in text
        assert "rank 0" in text
        assert "rank 1" in text
        assert "(call 1 of group 0, 1)" in text


# Differences that are hard to see.


@pytest.mark.parametrize("kind", ["memory", "unix"])
@pytest.mark.parametrize("how", ["auto", "ring", "tree"])
@pytest.mark.parametrize(
    "sizes",
    [([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]), ([1, 2, 3, 4, 5], [1, 2, 3, 4, 4, 1]), ([1] * 9, [1] * 8), ([1] * 4, [1] * 5)],
    ids=["the fifth is longer", "the fifth is cut in two", "the ninth is missing", "there is a fifth"],
)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_long_lists_that_differ_late_differ(
    worlds_of: Cache, collective: str, sizes: tuple[list[int], list[int]], how: str, kind: str
) -> None:
    """Also where all are as long together."""
    groups = fresh_groups(worlds_of(kind, 3))

    def work(rank: int) -> None:
        tensors = [torch.ones(size) for size in sizes[rank == 2]]
        if collective == "all_reduce":
            groups[rank].all_reduce(tensors, "sum", how).wait(PATIENCE)
        else:
            groups[rank].broadcast(tensors, 0, how).wait(PATIENCE)
        groups[rank].barrier().wait(PATIENCE)

    for text in at_once(3, lambda rank: error_of(lambda: work(rank))):
        assert BOTH.search(text), text


@pytest.mark.parametrize("how", ["ring", "shared-memory"])
def test_lists_that_differ_only_in_where_a_dtype_stands_differ(worlds_of: Cache, how: str) -> None:
    groups = fresh_groups(worlds_of("memory", 2))
    tensors = [[torch.float32, torch.float32, torch.float32, torch.float32, torch.int32, torch.int64]]
    tensors.append([*tensors[0][:4], torch.int64, torch.int32])

    def work(rank: int) -> None:
        groups[rank].all_reduce([torch.ones(2, dtype=dtype) for dtype in tensors[rank]], "sum", how).wait(PATIENCE)
        groups[rank].barrier().wait(PATIENCE)

    for text in at_once(2, lambda rank: error_of(lambda: work(rank))):
        assert BOTH.search(text), text


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_other_sizes_than_others_expect_are_an_error(worlds_of: Cache, kind: str) -> None:
    """`all_gather` of tensors that differ in size: what the description leaves out is found by the bytes."""
    groups = fresh_groups(worlds_of(kind, 2))

    def work(rank: int) -> None:
        outputs = [torch.ones(3), torch.ones(4)] if rank == 0 else [torch.ones(3), torch.ones(5)]
        groups[rank].all_gather(outputs, torch.ones(3 if rank == 0 else 5)).wait(PATIENCE)
        groups[rank].barrier().wait(PATIENCE)

    for text in at_once(2, lambda rank: error_of(lambda: work(rank))):
        assert "expected 16 bytes from rank 1, got 20" in text or BOTH.search(text), text


@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_a_root_whose_list_does_not_fit_is_told_before_anything_starts_or_by_everybody(
    worlds_of: Cache, collective: str
) -> None:
    """Nobody gets numbers that nobody sent."""
    groups = fresh_groups(worlds_of("memory", 3))

    def work(rank: int) -> object:
        group, lists = groups[rank], [torch.ones(4), torch.ones(4), torch.ones(7)] if rank == 0 else None
        try:
            if collective == "gather":
                group.gather(lists, torch.ones(4), 0).wait(0.5)
            else:
                group.scatter(torch.ones(4), lists, 0).wait(0.5)
        except Exception as error:  # noqa: BLE001  which one is looked at below
            return error
        return None

    first, *others = at_once(3, work)
    assert isinstance(first, Exception), first
    del others  # they waited for a call that was never made, or learnt of it


# When somebody is far behind, or ahead.


@pytest.mark.parametrize("kind", KINDS)
def test_who_comes_late_learns_of_it_at_his_first_call(worlds_of: Cache, kind: str) -> None:
    groups = fresh_groups(worlds_of(kind, 3))
    known = threading.Barrier(2, timeout=PATIENCE)
    late = threading.Event()

    def work(rank: int) -> str:
        if rank == 2:
            assert late.wait(PATIENCE)
        text = make_all(groups[rank], [Call("all_reduce", size=rank % 2 + 1)])
        if rank < 2:
            known.wait()
            late.set()
        return text

    texts = at_once(3, work)
    assert all(BOTH.search(text) for text in texts)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_behind_and_calls_something_else_is_told_what(worlds_of: Cache, kind: str) -> None:
    """The others' calls are there before his own: he finds the difference himself, inside his own call."""
    groups = fresh_groups(worlds_of(kind, 3))
    for group in groups:
        group.speeds = Speeds()  # nothing is measured: who only sends need not wait
    sent = threading.Semaphore(0)

    def work(rank: int) -> str:
        if rank == 0:
            assert all(sent.acquire(timeout=PATIENCE) for _ in range(2))
            return make_all(groups[0], [Call("scatter", "linear", root=2)])
        task = Call("gather", "linear", root=0).make(groups[rank], background=True).task
        task.when_done(lambda _: sent.release())
        return error_of(lambda: (task.wait(PATIENCE), groups[rank].barrier().wait(PATIENCE)))

    for text in at_once(3, work):
        assert "gather(float32[5], to 0, by linear)" in text
        assert "scatter(float32[5], from 2, by linear)" in text


@pytest.mark.parametrize("kind", KINDS)
def test_who_makes_the_group_after_others_failed_in_it_is_told(worlds_of: Cache, kind: str) -> None:
    worlds = worlds_of(kind, 3)
    early = [world.new_group([0, 1, 2]) for world in worlds[:2]]

    def fail(rank: int) -> str:
        group = early[rank]
        assert group is not None
        return make_all(group, [Call("all_reduce", size=rank + 1)])

    texts = at_once(2, fail)
    received = receive(worlds[2].all_ranks, torch.zeros(1), 0, tag=77, background=True)
    send(worlds[0].all_ranks, torch.ones(1), 2, tag=77).wait(PATIENCE)
    received.wait(PATIENCE)  # so rank 2 has all that rank 0 said before
    group = worlds[2].new_group([0, 1, 2])
    assert group is not None
    (outcome,) = outcomes(Client(lambda: make_all(group, [Call("all_reduce", size=1)])))
    assert outcome in texts or BOTH.search(str(outcome)), outcome


def test_who_is_far_ahead_is_compared_as_far_back_as_calls_are_remembered(
    worlds_of: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root may be many broadcasts ahead."""
    monkeypatch.setattr(call_queues, "REMEMBERED", 1000)
    groups = fresh_groups(worlds_of("memory", 2))

    def work(rank: int) -> str:
        calls = [Call("broadcast", "tree", size=1, root=0) for _ in range(600)]
        if rank:
            calls[5] = Call("broadcast", "tree", size=2, root=0)
        return make_all(groups[rank], calls)

    for text in at_once(2, work):
        assert "call 6 of group 0, 1" in text


def test_single_messages_of_a_group_that_failed_still_arrive(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("unix", 2))

    def work(rank: int) -> float:
        make_all(groups[rank], [Call("all_reduce", size=rank + 1)])
        place = torch.zeros(1)
        if rank == 0:
            send(groups[0], torch.ones(1), 1).wait()
        else:
            receive(groups[1], place, 0).wait()
        return place.item()

    assert at_once(2, work) == [0.0, 1.0]


def test_large_tensors_under_way_are_dropped_when_a_group_fails(worlds_of: Cache) -> None:
    """Payloads that are half there belong to nobody any more; links and other groups do not mind."""
    for kind in KINDS:
        worlds = worlds_of(kind, 3)
        for turn in range(2):
            groups, spare = fresh_groups(worlds), fresh_groups(worlds)

            def work(rank: int, groups: list[RankGroup] = groups, spare: list[RankGroup] = spare, turn: int = turn) -> None:
                how = ("ring", "tree")[turn]
                size = 400_000 if rank != turn % 3 else 300_000
                with pytest.raises(PeerError):
                    Call("all_reduce", how, size).make(groups[rank]).task.wait(PATIENCE)
                Call("all_reduce", "ring", 100_000).make(spare[rank]).check()

            at_once(3, work)


# Mistakes inside a call.


@pytest.mark.parametrize("kind", ["memory", "unix"])
def test_who_fails_in_the_middle_of_a_call_says_so_to_all(
    opening: Opening, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever went wrong in one process."""
    worlds = opening(kind, 3)
    everywhere(worlds, lambda world: world.all_ranks.barrier().wait())

    def work(world: World) -> None:
        mine = torch.ones(4)
        if world.rank == 1:
            mine = torch.ones(1).expand(4)  # cannot be written to
        world.all_ranks.all_reduce([mine]).wait(PATIENCE)
        world.all_ranks.barrier().wait(PATIENCE)

    found = attempts(worlds, work)
    assert all(isinstance(error, Exception) for error in found), found
    assert all(
        "rank 1 failed in all_reduce(sum, float32[4])" in str(error) for error in found if isinstance(error, PeerError)
    )
    assert sum(isinstance(error, PeerError) for error in found) >= 2


def test_a_group_goes_on_after_a_rank_failed_inside_a_call(worlds_of: Cache) -> None:
    """Some of the others may have ended the call well: they learn of it in the next one, and all go on with the same."""
    for kind in KINDS:
        groups = fresh_groups(worlds_of(kind, 3))

        def work(rank: int, groups: list[RankGroup] = groups) -> None:
            mine = torch.ones(4) if rank != 1 else torch.ones(1).expand(4)  # cannot be written to
            calls = (groups[rank].all_reduce([mine]) for _ in range(2))
            with pytest.raises(RuntimeError, match=r"rank 1 failed in all_reduce|single memory location"):
                _ = [call.wait(PATIENCE) for call in calls]
            assert any(attempt(groups[rank].barrier().wait) is None for _ in range(4)), "it can never be used again"

        at_once(3, work)


def test_who_makes_no_more_calls_holds_up_nobody(worlds_of: Cache) -> None:
    """Rank 1 had made two calls when the first failed: the other's second one is void, though rank 1 never calls again."""
    for kind in KINDS:
        groups = fresh_groups(worlds_of(kind, 2))
        made = threading.Event()

        def work(rank: int, groups: list[RankGroup] = groups, made: threading.Event = made) -> list[str]:
            if rank == 1:
                tasks = [Call("all_reduce", size=size).make(groups[1], background=True).task for size in (2, 5)]
                made.set()
                return [error_of(lambda task=task: task.wait(PATIENCE)) for task in tasks]
            assert made.wait(PATIENCE)
            return [error_of(lambda: Call("all_reduce", size=5).make(groups[0]).task.wait(PATIENCE)) for _ in range(2)]

        for texts in at_once(2, work):
            assert all(BOTH.search(text) for text in texts), texts


@pytest.mark.parametrize("kind", KINDS)
def test_where_all_ranks_fail_in_one_call_the_very_next_one_works(worlds_of: Cache, kind: str) -> None:
    """Whether a rank had begun the call, or had only handed it over, when it heard of the failure."""
    groups = fresh_groups(worlds_of(kind, 3))

    def work(rank: int) -> None:
        for turn in range(30):
            odd = rank == turn % 3
            error_of(
                lambda odd=odd, turn=turn: Call("all_reduce", size=5 + odd).make(groups[rank], turn % 2 > 0).task.wait()
            )
            Call("all_reduce", size=5).make(groups[rank], turn % 2 > 0).check()

    at_once(3, work)
