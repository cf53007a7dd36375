"""A rank that waits in shared memory adds up what has come; whichever is late, the result has the bits of a sum in order."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import on_late_devices
from wires import Client
from worlds import PATIENCE, Cache, Hosts, Opening, all_worlds, at_once, fresh_groups, nothing_left, opening, worlds_of

from polytempo.collectives import executor
from polytempo.collectives.group import RankGroup
from polytempo.collectives.messaging import Messaging
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World
from polytempo.errors import RankLost
from polytempo.transport.deadline import LOOK_EVERY

__all__ = ["all_worlds", "nothing_left", "opening", "worlds_of"]

BLOCK = 128
#: Of several ranks, each adds up some blocks, the last not whole.
LENGTH = 4 * 5 * BLOCK + 77
COMBINE = {"sum": torch.add, "max": torch.maximum, "prod": torch.mul}


class Arrivals:
    """Lets ranks come one after another: each when those before have done all that they can without it, or some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added: dict[int, list[int]] = {}  #: by rank: how many terms each of its additions had, in this round
        self._events: defaultdict[tuple[int, int], threading.Event] = defaultdict(threading.Event)
        self._pieces = math.inf
        monkeypatch.setattr(executor, "BLOCK", BLOCK)
        monkeypatch.setattr(executor, "NEARLY_EVEN", 0.0)
        self._watch_pieces(monkeypatch)
        self._count_terms(monkeypatch)

    def _watch_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        add_up = executor._Execution._add_up

        def watched(execution: Any, members: Any, number: int, missing: Callable[[], list[int]]) -> Iterator[float]:
            for pieces, pause in enumerate(add_up(execution, members, number, missing)):
                if pause == math.inf or pieces >= self._pieces:
                    self._events[execution.messages.rank, len(missing())].set()
                yield pause

        monkeypatch.setattr(executor._Execution, "_add_up", watched)

    def _count_terms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        total, step = executor.total, executor._Execution.total
        here = threading.local()

        def counted(name: str, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
            if out.numel() and getattr(here, "rank", None) is not None:
                self.added.setdefault(here.rank, []).append(len(terms))
            total(name, terms, out)

        def by_rank(execution: Any, about: Any) -> None:
            here.rank = execution.messages.rank
            try:
                step(execution, about)
            finally:
                here.rank = None

        monkeypatch.setattr(executor, "total", counted)
        monkeypatch.setattr(executor._Execution, "total", by_rank)
        monkeypatch.setitem(executor.ACTIONS, executor.Total, by_rank)

    def __call__(self, orders: Sequence[Sequence[int]], call: Callable[[int], Any], pieces: float = math.inf) -> list[Any]:
        """The results of all ranks, which come in this order: in one for each host. `pieces`: after so many, who waits lets
        the next one come."""
        self.added, self._pieces = {}, pieces
        self._events.clear()

        def come(rank: int) -> Any:
            order = next(order for order in orders if rank in order)
            place = order.index(rank)
            for before in order[:place]:  # as it is when all before have been heard of
                assert self._events[before, len(order) - place].wait(PATIENCE)
            return call(rank)

        return at_once(sum(map(len, orders)), come)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    return Arrivals(monkeypatch)


def terms_of(size: int, dtype: torch.dtype, length: int = LENGTH) -> list[torch.Tensor]:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(length, generator=generator, dtype=torch.float64) * 100).to(dtype) for _ in range(size)]


def opened(worlds: Sequence[World]) -> list[RankGroup]:
    """Groups whose ranks have their memory: the first one makes it, and would be waited for."""
    groups = fresh_groups(worlds)
    at_once(len(groups), lambda rank: [groups[rank].all_reduce([torch.ones(size)]).wait() for size in (1, LENGTH, 40_000)])
    return groups


def in_rank_order(op: str, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    whole: torch.Tensor = reduce(COMBINE[op], terms)
    return whole


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check_all_reduce(
    arrivals: Arrivals, groups: Sequence[RankGroup], order: Sequence[int], op: str = "sum", **how: Any
) -> None:
    terms = terms_of(len(groups), how.pop("dtype", torch.float32), how.pop("length", LENGTH))
    wanted, mine = in_rank_order(op, terms), [term.clone() for term in terms]
    arrivals([order], lambda rank: groups[rank].all_reduce([mine[rank]], op).wait(), **how)
    for rank, got in enumerate(mine):
        assert same(got, wanted), f"rank {rank}, in the order {order}"


# Every order.


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("kind", ["memory", "unix"])
def test_every_order_of_arrival_gives_the_same_bits(worlds_of: Cache, arrivals: Arrivals, kind: str, size: int) -> None:
    groups = opened(worlds_of(kind, size))
    for order in permutations(range(size)):
        check_all_reduce(arrivals, groups, order)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    order=st.permutations(range(5)),
    pieces=st.integers(0, 12),
    op=st.sampled_from(sorted(COMBINE)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    length=st.sampled_from([1, 31, 640, 5 * BLOCK, LENGTH, 40_000]),
)
def test_whoever_comes_while_others_add(
    order: list[int], pieces: int, op: str, dtype: torch.dtype, length: int, all_worlds: Cache
) -> None:
    with pytest.MonkeyPatch.context() as patching:
        groups = opened(all_worlds("memory", 5))
        check_all_reduce(Arrivals(patching), groups, order, op, pieces=pieces, dtype=dtype, length=length)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_other_collectives_that_combine(worlds_of: Cache, arrivals: Arrivals, order: tuple[int, ...]) -> None:
    groups, terms = opened(worlds_of("memory", 4)), terms_of(4, torch.float32)
    wanted = in_rank_order("sum", terms)
    for root in range(4):
        mine = [term.clone() for term in terms]
        arrivals([order], lambda rank, mine=mine, root=root: groups[rank].reduce(mine[rank], root).wait())
        assert same(mine[root], wanted)
        if root == order[-1]:  # it leaves the plan without another barrier: no rank may write sums for it
            assert set(arrivals.added[root]) == {4}
        assert all(same(mine[rank], terms[rank]) for rank in range(4) if rank != root)
    outputs, parts = [torch.empty(500) for _ in range(4)], [term[:2000].view(4, 500) for term in terms]
    arrivals([order], lambda rank: groups[rank].reduce_scatter(outputs[rank], list(parts[rank])).wait())
    for rank in range(4):
        assert same(outputs[rank], wanted[500 * rank : 500 * (rank + 1)])
        assert same(parts[rank], terms[rank][:2000].view(4, 500))


@pytest.mark.parametrize("orders", [((0, 1, 2), (3, 4, 5)), ((2, 1, 0), (4, 5, 3)), ((1, 0, 2), (5, 3, 4))])
def test_inside_each_of_several_hosts(
    opening: Opening, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch, orders: Hosts
) -> None:
    monkeypatch.setattr(RankGroup, "_pieces", lambda *about: 5)  # so that each rank adds up several chunks
    groups, terms = opened(opening("memory", 6, ((0, 1, 2), (3, 4, 5)))), terms_of(6, torch.float32)
    wanted = [term.clone() for term in terms]
    at_once(6, lambda rank: groups[rank].all_reduce([wanted[rank]], algorithm="hierarchical").wait())
    mine = [term.clone() for term in terms]
    arrivals(orders, lambda rank: groups[rank].all_reduce([mine[rank]], algorithm="hierarchical").wait())
    assert all(same(one, wanted[0]) for one in [*wanted, *mine])
    for order in orders:
        left = 2 if order[-1] in (2, 5) else 3  # the sum of the first two was made if the third was late
        assert all(set(arrivals.added[rank]) == {left} for rank in order)


@pytest.mark.parametrize("late", [2, 3])
def test_what_is_on_a_device_is_not_in_the_slots_yet(opening: Opening, arrivals: Arrivals, late: int) -> None:
    """A rank whose tensors are on a device comes to the barrier first, and puts them into host memory after it."""
    worlds, terms = opening("memory", 4), terms_of(4, torch.float32)
    groups, mine = opened(worlds), [term.clone() for term in terms]
    on_late_devices(worlds, [1])
    order = [rank for rank in (0, 2, 3) if rank != late] + [late]
    arrivals([(1,), order], lambda rank: groups[rank].all_reduce([mine[rank]]).wait())
    wanted = in_rank_order("sum", terms)
    assert all(same(one, wanted) for one in mine)


def test_tensors_larger_than_a_slot(worlds_of: Cache, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytempo.collectives.shared_buffer.SIZES", (4096,))
    groups = opened(worlds_of("memory", 4))
    for order in ((0, 1, 2, 3), (2, 3, 1, 0), (3, 1, 0, 2)):
        check_all_reduce(arrivals, groups, order)


# What is made before the last one comes.


@pytest.mark.parametrize(("late", "left"), [(3, 2), (2, 3), (1, 4), (0, 4)])
def test_a_late_rank_finds_the_sum_of_the_ranks_before_it(
    worlds_of: Cache, arrivals: Arrivals, late: int, left: int
) -> None:
    """`left`: the terms that are to be added when it has come; of four, the first that come are one by then."""
    groups = opened(worlds_of("unix", 4))
    order = [rank for rank in range(4) if rank != late] + [late]
    check_all_reduce(arrivals, groups, order)
    assert {rank: set(counts) for rank, counts in arrivals.added.items()} == {rank: {left} for rank in range(4)}


def test_it_does_not_wait_for_that_sum(worlds_of: Cache, arrivals: Arrivals) -> None:
    groups = opened(worlds_of("memory", 4))
    check_all_reduce(arrivals, groups, (0, 1, 2, 3), pieces=0)
    assert all(set(counts) <= {2, 3, 4} for counts in arrivals.added.values())


@pytest.mark.parametrize("blocks", range(1, 7))
@pytest.mark.parametrize("waits", [False, True])
def test_a_late_rank_does_not_wait_for_the_one_that_helps_it(
    opening: Opening, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch, blocks: int, waits: bool
) -> None:
    """Rank 2 is late, and rank 1 stops in the middle of its sums until rank 2 has them all. `waits`: what rank 3 has said
    long ago reaches rank 2 only when that has begun by itself."""
    monkeypatch.setattr(RankGroup, "_pieces", lambda *about: 6)  # three chunks of two blocks for each rank
    groups, terms = opened(opening("memory", 5, ((0, 1, 2, 3), (4,)))), terms_of(5, torch.float32)
    wanted, mine = [term.clone() for term in terms], [term.clone() for term in terms]
    at_once(5, lambda rank: groups[rank].all_reduce([wanted[rank]], algorithm="hierarchical").wait())
    stopped, begun, said, made = (threading.Event() for _ in range(4))
    notify, add_up, help_late = Messaging.notify, executor._Execution._add_up, executor._Execution._help
    total = executor.ACTIONS[executor.Total]

    def notify_late(messages: Messaging, ranks: Sequence[int], *about: Any) -> None:
        late = messages.rank == 3 and waits and not held
        notify(messages, [rank for rank in ranks if not (late and rank == 2)], *about)
        if late:
            held.append(lambda: notify(messages, [2], *about))

    def after_one_piece(execution: Any, *about: Any) -> Iterator[float]:
        for pause in add_up(execution, *about):
            if execution.messages.rank == 2 and pause == 0.0 and not said.is_set():
                begun.set()
                assert said.wait(PATIENCE)
            yield pause

    def stopping(execution: Any, *about: Any) -> Iterator[float]:
        for number, pause in enumerate(help_late(execution, *about), 1):
            if number == blocks and execution.messages.rank == 1:
                stopped.set()
                assert made.wait(PATIENCE)
            yield pause

    def counted(execution: Any, step: executor.Total) -> None:
        total(execution, step)
        if execution.messages.rank == 2:
            totals.append(step.chunk)
            if len(totals) == 3:
                made.set()

    def tell() -> None:
        assert begun.wait(PATIENCE)
        held[0]()
        said.set()

    def call(rank: int) -> None:
        if rank == 2:
            assert stopped.wait(PATIENCE)
        groups[rank].all_reduce([mine[rank]], algorithm="hierarchical").wait()

    held: list[Callable[[], None]] = []
    totals: list[int] = []
    monkeypatch.setattr(Messaging, "notify", notify_late)
    monkeypatch.setattr(executor._Execution, "_add_up", after_one_piece)
    monkeypatch.setattr(executor._Execution, "_help", stopping)
    monkeypatch.setitem(executor.ACTIONS, executor.Total, counted)
    teller = Client(tell if waits else begun.is_set)
    at_once(5, call)
    teller.join(PATIENCE)
    assert all(same(one, wanted[0]) for one in mine)


def test_two_ranks_have_nothing_to_add_before_both_are_there(worlds_of: Cache, arrivals: Arrivals) -> None:
    groups, terms = opened(worlds_of("memory", 2)), terms_of(2, torch.float32)
    arrivals.added.clear()
    tasks = [groups[0].all_reduce([terms[0]], background=True)]
    tasks.append(groups[1].all_reduce([terms[1]], background=True))
    for task in tasks:
        task.wait()
    assert arrivals.added == {0: [2], 1: [2]}


# Waiting.


def test_ranks_that_are_nearly_even_wait_for_each_other(worlds_of: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(executor, "NEARLY_EVEN", PATIENCE)
    monkeypatch.setattr(executor._Execution, "_begin", lambda *about: begun.append(1) or iter(()))
    groups, terms = opened(worlds_of("memory", 3)), terms_of(3, torch.float32)
    at_once(3, lambda rank: groups[rank].all_reduce([terms[rank]]).wait())
    assert begun == []


def test_who_has_added_up_all_there_is_sleeps(worlds_of: Cache, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is something to add it looks for messages between two pieces, without waiting; then it waits as ever."""
    steps: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    poll, use = ProgressEngine._poll, Task.use_the_wait

    def polled(engine: ProgressEngine, seconds: float) -> bool:
        steps[engine.rank].append(("poll", seconds))
        return poll(engine, seconds)

    def used(task: Task) -> float:
        pause = use(task)
        steps[task._engine.rank].append(("pause", pause))
        return pause

    groups = opened(worlds_of("memory", 3))
    monkeypatch.setattr(ProgressEngine, "_poll", polled)
    monkeypatch.setattr(Task, "use_the_wait", used)
    check_all_reduce(arrivals, groups, (0, 1, 2))
    for rank in (0, 1):
        after = {pause: seconds for (kind, pause), (_, seconds) in pairwise(steps[rank]) if kind == "pause"}
        assert after == {0.0: 0.0, math.inf: LOOK_EVERY}


@pytest.mark.parametrize("dies", [0, 2, 3])
def test_a_rank_that_ends_instead_of_coming_is_named(opening: Opening, arrivals: Arrivals, dies: int) -> None:
    worlds: list[World] = opening("unix", 4)
    tensors, groups = [torch.ones(LENGTH) for _ in worlds], opened(worlds)
    order = [rank for rank in range(4) if rank != dies] + [dies]

    def call(rank: int) -> object:
        if rank == dies:
            worlds[rank].engine.close(politely=False)
            return None
        with pytest.raises(RankLost) as caught:
            groups[rank].all_reduce([tensors[rank]]).wait()
        return caught.value.ranks

    assert [found for found in arrivals([order], call) if found is not None] == [(dies,)] * 3
