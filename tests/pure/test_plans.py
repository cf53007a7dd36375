"""Every plan of every collective, run on symbols by `plan_checker.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checker import PlanError, SymbolicRun, check
from planning import ROOTED, apart, checked, one_host, parse_steps, plans_of

from polytempo.collectives.plans import COLLECTIVES, CUDA_IPC, ON_DEVICE, PLANS, algorithms_for, plan_for
from polytempo.collectives.steps import (
    Combine,
    Copy,
    Fetch,
    HostRanks,
    Meet,
    Place,
    Put,
    Receive,
    Send,
    Step,
    Total,
    text_of,
)
from polytempo.collectives.tree import both_trees
from polytempo.errors import UsageError

SHARED = sorted(collective for collective, algorithm in PLANS if algorithm == "shared-memory")
settled = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def splits(size: int) -> Iterator[HostRanks]:
    """One host, a host each, halves, odd and even ranks, and a large host between two small ones."""
    ranks = tuple(range(size))
    yield one_host(size)
    if size > 1:
        yield apart(size)
    if size > 2:
        yield ranks[: size // 2], ranks[size // 2 :]
        yield ranks[1::2], ranks[::2]
    if size > 3:
        yield ranks[:1], ranks[1:-1], ranks[-1:]


# The plans are right.


def marks_of(collective: str, algorithm: str) -> list[pytest.MarkDecorator]:
    """Hosts can be split in many ways: the largest of those walks takes seconds; `make check` has the drawn ones."""
    return [pytest.mark.long] if (collective, algorithm) == ("all_reduce", "hierarchical") else []


@pytest.mark.parametrize("collective", ON_DEVICE)
def test_every_plan_on_device_memory_is_right(collective: str) -> None:
    for size in range(1, 6):
        for root in range(size if collective in ROOTED else 1):
            checked(collective, CUDA_IPC, one_host(size), 1, root)


@pytest.mark.parametrize(("collective", "algorithm"), [pytest.param(*key, marks=marks_of(*key)) for key in PLANS])
def test_every_plan_is_right(collective: str, algorithm: str) -> None:
    for size in range(1, 10):
        for hosts in splits(size) if algorithm == "hierarchical" else [one_host(size)]:
            for pieces in (1, 2, 3, 4):
                for root in range(size) if collective in ROOTED else [0]:
                    checked(collective, algorithm, hosts, pieces, root)


@st.composite
def places(draw: st.DrawFn) -> HostRanks:
    """Up to 24 ranks, dealt to hosts in any way."""
    ranks = draw(st.permutations(range(draw(st.integers(1, 24)))))
    cuts = draw(st.sets(st.integers(1, len(ranks)), max_size=5)) | {0, len(ranks)}
    borders = sorted(cuts)
    return tuple(tuple(ranks[start:stop]) for start, stop in pairwise(borders))


@settled
@given(key=st.sampled_from(list(PLANS)), hosts=places(), pieces=st.integers(1, 4), data=st.data())
def test_every_plan_is_right_for_drawn_ranks(
    key: tuple[str, str], hosts: HostRanks, pieces: int, data: st.DataObject
) -> None:
    size = sum(map(len, hosts))
    root = data.draw(st.integers(0, size - 1)) if key[0] in ROOTED else 0
    checked(*key, one_host(size) if key[1] == "shared-memory" else hosts, pieces, root)


@settled
@given(names=st.lists(st.sampled_from(SHARED), min_size=3, max_size=6), size=st.integers(2, 5))
def test_calls_that_take_turns_with_two_halves_of_the_slots_do_not_race(names: list[str], size: int) -> None:
    hosts, half, calls = one_host(size), 2 * size, []
    for number, name in enumerate(names):
        chunks, plans = plans_of(name, "shared-memory", hosts, pieces=2)
        assert chunks <= half
        calls.append([[moved(step, half * (number % 2)) for step in plan] for plan in plans])
    SymbolicRun([[step for plans in calls for step in plans[rank]] for rank in range(size)], hosts, 2 * half).to_the_end()


def moved(step: Step, by: int) -> Step:
    """The same step, on chunks of the other half."""
    names = [name for name in ("chunk", "source") if hasattr(step, name)]
    fields = {name: getattr(step, name) for name in step.__slots__}
    return type(step)(**fields | {name: fields[name] + by for name in names})


def test_without_a_meeting_in_between_the_call_after_next_would_race() -> None:
    _, plans = plans_of("all_gather", "shared-memory", one_host(3))
    twice = [[*plan, *plan] for plan in plans]
    with pytest.raises(PlanError, match=r"race: .* reads chunk . of rank .'s slot, maybe while it is put"):
        SymbolicRun(twice, one_host(3), 3).to_the_end()


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_ring_sends_the_least_that_is_possible(size: int, pieces: int) -> None:
    _, plans = plans_of("all_reduce", "ring", apart(size), pieces)
    for rank, plan in enumerate(plans):
        sent = [step for step in plan if isinstance(step, Send)]
        assert len(sent) == 2 * (size - 1) * pieces
        assert {step.peer for step in sent} == {(rank + 1) % size}


def test_pieces_of_a_ring_follow_each_other() -> None:
    _, plans = plans_of("all_reduce", "ring", apart(3), pieces=2)
    lines = text_of(plans[0]).splitlines()
    assert lines[:4] == ["send 0 to 1", "send 1 to 1", "combine 4 from 2", "send 4 to 1"]


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 1, 2), (3,), (4, 5)), ((1, 0), (3, 2))])
@pytest.mark.parametrize("pieces", [1, 4])
def test_one_stream_a_host(hosts: HostRanks, pieces: int) -> None:
    _, plans = plans_of("all_reduce", "hierarchical", hosts, pieces)
    sends = {rank: sum(isinstance(step, Send) for step in plan) for rank, plan in enumerate(plans)}
    leaders = {ranks[0] for ranks in hosts}
    assert sends == {rank: 2 * (len(hosts) - 1) * pieces * (rank in leaders) for rank in sends}


def test_hosts_of_one_rank_are_a_plain_ring() -> None:
    assert plans_of("all_reduce", "hierarchical", apart(4), 2) == plans_of("all_reduce", "ring", apart(4), 2)


@pytest.mark.parametrize("size", range(1, 40))
def test_nobody_hands_on_in_both_trees(size: int) -> None:
    trees = both_trees(size)
    inner = [{rank for rank in range(size) if tree.children(rank)} for tree in trees]
    assert not inner[0] & inner[1]
    for tree in trees:
        assert max(len(tree.children(rank)) for rank in range(size)) <= 2
        assert tree.height <= size.bit_length()
        assert tree.parents.count(None) == 1


def test_a_tree_works_up_and_down_at_the_same_time() -> None:
    _, plans = plans_of("all_reduce", "tree", apart(4), pieces=6)
    kinds = [type(step).__name__ for step in plans[1]]
    assert kinds.index("Receive") < len(kinds) - 1 - kinds[::-1].index("Send")


def test_halving_sends_a_half_then_a_quarter() -> None:
    _, plans = plans_of("all_reduce", "halving-doubling", apart(8))
    peers = Counter(step.peer for step in plans[0] if isinstance(step, Send))
    assert peers == {4: 4 + 4, 2: 2 + 2, 1: 1 + 1}


def test_whoever_is_not_the_root_keeps_its_tensor_in_shared_memory() -> None:
    for collective in ("reduce", "gather"):
        _, plans = plans_of(collective, "shared-memory", one_host(4), root=2)
        assert all(isinstance(step, Put | Meet) for rank, plan in enumerate(plans) for step in plan if rank != 2)


@pytest.mark.parametrize("key", [key for key in PLANS if key[1] in ("shared-memory", "hierarchical")])
@pytest.mark.parametrize("hosts", [one_host(2), one_host(5), ((0, 1, 2), (3,), (4, 5))])
def test_a_total_may_be_begun_where_it_will_be_put(key: tuple[str, str], hosts: HostRanks) -> None:
    """A rank that waits before its totals begins them in its own slot (`executor.py`): none else reads there."""
    if key[1] == "shared-memory" and len(hosts) > 1:
        pytest.skip("memory is shared on one host only")
    for root in range(len(hosts[0]) if key[0] == "reduce" else 1):
        chunks, plans = plans_of(*key, hosts, 2, root)
        check([list(_with_totals_begun(plan)) for plan in plans], key[0], hosts, chunks, root)


def _with_totals_begun(plan: list[Step]) -> Iterator[Step]:
    for index, step in enumerate(plan):
        if isinstance(step, Meet):
            after = takewhile(lambda later: not isinstance(later, Meet), plan[index + 1 :])
            begun = [Put(later.chunk) for later in after if isinstance(later, Total)]
            yield from [*begun, step, *begun]
        else:
            yield step


# The words.


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("send 3 to 1", Send(1, 3)),
        ("receive 3 from 0", Receive(0, 3)),
        ("combine 3 from 0", Combine(0, 3)),
        ("copy 2 to 5", Copy(2, 5)),
        ("put 3", Put(3)),
        ("meet 0,1,2", Meet((0, 1, 2))),
        ("fetch 4 of 1 as 3", Fetch(1, 4, 3)),
        ("total 3 over 0,1", Total(3, (0, 1))),
    ],
)
def test_a_step_in_words(line: str, step: Step) -> None:
    assert text_of([step]) == line
    assert parse_steps(f"\n  {line}\n") == [step]


@settled
@given(key=st.sampled_from(list(PLANS)), size=st.integers(1, 9), pieces=st.integers(1, 3))
def test_plans_as_text(key: tuple[str, str], size: int, pieces: int) -> None:
    _, plans = plans_of(*key, one_host(size), pieces)
    for plan in plans:
        assert parse_steps(text_of(plan)) == plan


@pytest.mark.parametrize("line", ["snd 3 to 1", "send 3", "send 3 to 1,2", "put x", "meet", "put 1 2", "put -1"])
def test_nonsense_is_named_with_its_line(line: str) -> None:
    with pytest.raises(UsageError, match=r"line 2: no step is written .*known: send chunk to peer, "):
        parse_steps(f"put 1\n{line}")


def test_the_nearest_word_is_suggested() -> None:
    with pytest.raises(UsageError, match="nearest: receive"):
        parse_steps("recieve 1 from 0")


# Places and names.


def test_a_place_knows_its_host() -> None:
    place = Place(3, ((0, 1), (2, 3, 4)))
    assert (place.size, place.host, place.neighbours) == (5, 1, (2, 3, 4))


@pytest.mark.parametrize(("rank", "hosts"), [(0, ((0, 0),)), (0, ((1,),)), (2, ((0, 1),)), (0, ((0,), ())), (0, ())])
def test_places_that_cannot_be(rank: int, hosts: HostRanks) -> None:
    with pytest.raises(UsageError):
        Place(rank, hosts)


def test_what_there_is() -> None:
    names = "broadcast reduce all_reduce gather all_gather scatter reduce_scatter all_to_all barrier"
    assert set(COLLECTIVES) == set(names.split())
    assert algorithms_for("reduce") == ("tree", "shared-memory")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("all_reduce", "rng", Place(0, one_host(2)), 1), "for all_reduce; there are: ring, .*; nearest: ring"),
        (("allreduce", "ring", Place(0, one_host(2)), 1), "there is no collective.*; nearest: all_reduce"),
        (("all_reduce", "ring", Place(0, one_host(2)), 0), "pieces must be 1 or more"),
        (("broadcast", "ring", Place(0, one_host(2)), 1, 2), "root must be a rank from 0 to 1"),
        (("all_reduce", "shared-memory", Place(0, apart(2)), 1), "one host, and these are on 2"),
    ],
)
def test_plans_that_there_are_not(arguments: tuple[str, str, Place, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan_for(*arguments)


def test_a_plan_is_made_once() -> None:
    place = Place(1, apart(5))
    assert plan_for("all_reduce", "ring", place, 2) is plan_for("all_reduce", "ring", Place(1, apart(5)), 2)
