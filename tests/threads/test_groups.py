"""Every collective by every algorithm over every kind of link makes of its numbers what a serial loop makes of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import COMBINES, DTYPES, OPS, Call, algorithms, combined, means_something, values
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import Client
from worlds import (
    KINDS,
    PATIENCE,
    Cache,
    Hosts,
    Opening,
    all_worlds,
    alone,
    at_once,
    attempts,
    close_all,
    everywhere,
    fresh_groups,
    nothing_left,
    open_worlds,
    opening,
    results,
    worlds_of,
)

from polytempo.collectives.cost import Speeds
from polytempo.collectives.group import RankGroup
from polytempo.collectives.plans import PLANS
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World
from polytempo.errors import PeerError, UsageError
from polytempo.train import communication

__all__ = ["all_worlds", "nothing_left", "opening", "worlds_of"]

moderately = settings(max_examples=12, deadline=None, derandomize=True, database=None)
thoroughly = settings(max_examples=80, deadline=None, derandomize=True, database=None)

#: Ranks on several hosts, evenly and not, in order and not.
SPLITS: list[Hosts] = [
    ((0, 1), (2, 3)),
    ((0,), (1, 2)),
    ((0, 1, 2), (3,)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3, 4), (5,)),
    ((0, 3, 4), (1,), (2, 5, 6)),
]
ALL_REDUCES = [how for name, how in PLANS if name == "all_reduce"]


def hosts_of(kind: str, size: int) -> int:
    """So many hosts the ranks of a world believe to be on, unless told otherwise."""
    return size if kind == "zmq" else 1


def run(groups: Sequence[RankGroup], calls: Sequence[Call]) -> list[list[list[torch.Tensor]]]:
    """The same calls on all ranks, one after another; what came out of each."""
    return at_once(len(groups), lambda rank: [call.make(groups[rank]).check(call) for call in calls])


def same_bits(ranks: Sequence[Sequence[torch.Tensor]]) -> bool:
    first, *others = [[tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors] for tensors in ranks]
    return all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(first, other, strict=True))


# All of them.


def around(size: int) -> list[int]:
    """Lengths at which cutting into as many parts as there are ranks could go wrong."""
    return sorted({0, 1, size - 1, size, size + 1})


def marked(kind: str, size: int) -> list[pytest.MarkDecorator]:
    """Every size by memory and by one kind of link; the others of the larger sizes are for `make proof`."""
    if size in (1, 2, 3, 5):
        return []
    return [pytest.mark.long] if kind == "memory" or size == 8 else [pytest.mark.long, pytest.mark.proof]


@pytest.mark.parametrize(
    ("kind", "size"),
    [pytest.param(kind, size, marks=marked(kind, size)) for kind in KINDS for size in range(1, 10)],
)
def test_every_collective_by_every_algorithm_is_what_a_loop_makes_of_it(worlds_of: Cache, kind: str, size: int) -> None:
    groups = fresh_groups(worlds_of(kind, size))
    calls = [
        Call(name, how, length, DTYPES[(index + length) % len(DTYPES)], root=(index + length) % size, seed=index)
        for index, (name, how) in enumerate(algorithms(hosts_of(kind, size)))
        for length in around(size)
    ]
    run(groups, calls)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_barrier_and_all_others_without_shared_memory_go_by_messages(worlds_of: Cache, size: int) -> None:
    """Each rank on a host of its own, over queues: `auto` has speeds to go by, the same on all ranks."""
    groups = fresh_groups(worlds_of("memory", size, alone(size)))
    run(groups, [Call(name, how, 7, root=size - 1) for name, how in algorithms(size)])
    speeds = {group.speeds for group in groups}
    assert len(speeds) == 1
    assert None not in speeds
    assert len({group.choice("all_reduce", 1 << 20).algorithm for group in groups}) == 1
    assert {group.last_choice.algorithm for group in groups if group.last_choice} <= {how for _, how in PLANS}


@pytest.mark.parametrize("kind", ["unix", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("memory", "zmq"))])
@pytest.mark.parametrize("how", ALL_REDUCES)
def test_a_million_numbers_are_added_up(worlds_of: Cache, kind: str, how: str) -> None:
    if kind != "zmq" or how != "shared-memory":
        run(fresh_groups(worlds_of(kind, 3)), [Call("all_reduce", how, 1_000_000)])


@pytest.mark.long
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.proof), 3, pytest.param(5, marks=pytest.mark.proof)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_numbers_go_every_way(worlds_of: Cache, kind: str, size: int) -> None:
    """Several boards after each other, many pieces, many frames. Two thirds of them are no round number of anything."""
    groups = fresh_groups(worlds_of(kind, size))
    for name, how in algorithms(hosts_of(kind, size)):
        listed = name in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
        run(groups, [Call(name, how, 1_000_001 // size if listed else 1_000_001, root=size // 2)])


@pytest.mark.parametrize(
    ("kind", "size"),
    [("memory", 3), *(pytest.param(kind, size, marks=pytest.mark.long) for kind in KINDS for size in (2, 5))],
)
def test_every_operation_on_every_dtype_for_which_it_means_something(worlds_of: Cache, kind: str, size: int) -> None:
    groups = fresh_groups(worlds_of(kind, size))
    ways = [(name, how) for name, how in algorithms(hosts_of(kind, size)) if name in COMBINES and how != "auto"]
    some = ways if size > 3 else ways[::2]
    calls = [
        Call(name, how, size + 2, dtype, op, seed=index)
        for index, (name, how) in enumerate(some)
        for dtype in DTYPES
        for op in OPS
        if means_something(op, dtype)
    ]
    run(groups, calls)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_end_with_the_same_bits(worlds_of: Cache, kind: str) -> None:
    """Also where the order of adding makes a difference."""
    groups, size = fresh_groups(worlds_of(kind, 5)), 5

    def work(rank: int) -> list[torch.Tensor]:
        found = []
        for how in ALL_REDUCES:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                if kind != "zmq" or how != "shared-memory":
                    mine = torch.randn(1001, generator=torch.Generator().manual_seed(rank)).to(dtype)
                    groups[rank].all_reduce([mine], "mean", how).wait()
                    found.append(mine)
        return found

    ranks = at_once(size, work)
    assert same_bits(ranks)
    wanted = torch.stack([torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(size)]).mean(0)
    for found in ranks[0]:
        torch.testing.assert_close(found.float(), wanted, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_a_number_is_the_same_everywhere(worlds_of: Cache, dtype: torch.dtype) -> None:
    groups = fresh_groups(worlds_of("unix", 3))
    odd = [float("nan"), float("inf"), -float("inf"), -0.0, 1.0]

    def work(rank: int) -> list[torch.Tensor]:
        found = []
        for op in ("sum", "mean", "min", "max", "prod"):
            for how in ALL_REDUCES:
                found.append(torch.tensor(odd[rank:] + odd[:rank], dtype=dtype))
                groups[rank].all_reduce([found[-1]], op, how).wait()
        return found

    ranks = at_once(3, work)
    assert same_bits(ranks)
    assert all(found.isnan()[[0, 3, 4]].all() for found in ranks[0])


@pytest.mark.parametrize("how", ALL_REDUCES)
def test_torchs_own_operations_are_understood(worlds_of: Cache, how: str) -> None:
    groups = fresh_groups(worlds_of("memory", 3))
    kinds = torch.distributed.ReduceOp
    pairs = [
        (kinds.SUM, "sum"),
        (kinds.AVG, "mean"),
        (kinds.MIN, "min"),
        (kinds.MAX, "max"),
        (kinds.PRODUCT, "prod"),
        (kinds.BAND, "band"),
        (kinds.BOR, "bor"),
        (kinds.BXOR, "bxor"),
    ]

    def work(rank: int) -> None:
        for theirs, ours in [*pairs, *((kinds(theirs), ours) for theirs, ours in pairs)]:
            dtype = torch.int32 if ours.startswith("b") else torch.float32
            mine = values(dtype, 7, rank, ours)
            groups[rank].all_reduce([mine], theirs, how).wait()
            assert torch.equal(mine, combined(ours, [values(dtype, 7, other, ours) for other in range(3)])), theirs

    at_once(3, work)


# Tensors of every form.


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2)[::2]


def turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(3, 4).t()


def framed(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(5, 6, dtype=tensor.dtype)
    room[1:4, 1:5] = tensor.reshape(3, 4)
    return room[1:4, 1:5]


def scalar(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0].clone()


def conjugate(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex64).conj()


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)


def parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor


FORMS = [every_second, turned, framed, scalar, conjugate, channels_last, parameter]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["ring", "shared-memory", "hierarchical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_tensors_that_are_not_contiguous_are_changed_in_place(
    worlds_of: Cache, form: Callable[[torch.Tensor], torch.Tensor], how: str, dtype: torch.dtype
) -> None:
    groups = fresh_groups(worlds_of("memory", 3))

    def work(rank: int) -> None:
        mine = form(values(dtype, 12, rank))
        wanted = combined("sum", [form(values(dtype, 12, other)).detach() for other in range(3)])
        groups[rank].all_reduce([mine], "sum", how).wait()
        assert torch.equal(mine, wanted)
        assert mine.requires_grad == (form is parameter and dtype == torch.float32)

    at_once(3, work)


@pytest.mark.parametrize("form", FORMS)
def test_every_collective_takes_tensors_of_every_form(
    worlds_of: Cache, form: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as places for what comes, and as inputs that stay as they are."""
    if form is scalar:
        monkeypatch.setattr(Call, "values", lambda call, rank, to=0: torch.tensor(31.0 * rank + to))
    else:
        plain = Call.values
        monkeypatch.setattr(Call, "values", lambda call, rank, to=0: form(plain(call, rank, to)))
    monkeypatch.setattr(Call, "empty", lambda call: torch.ones_like(call.values(0)))
    groups = fresh_groups(worlds_of("memory", 3))
    run(groups, [Call(name, how, 12, root=1) for name, how in algorithms(1) if name != "barrier"])


@pytest.mark.parametrize("how", [*ALL_REDUCES, "auto"])
def test_a_list_of_many_shapes_and_dtypes_is_fused(worlds_of: Cache, how: str) -> None:
    groups = fresh_groups(worlds_of("unix", 3))

    def tensors(rank: int) -> list[torch.Tensor]:
        shapes = [(3, 4), (), (0,), (1,), (2, 3, 5), (70_000,), (7,)]
        made = [values(torch.float32, shape, 10 * rank + at) for at, shape in enumerate(shapes)]
        made[2:2] = [values(torch.int64, (5, 5), rank), values(torch.bfloat16, 3, rank)]
        return [
            *made,
            values(torch.int64, 2, rank),
            every_second(values(torch.float32, 12, rank)),
            values(torch.bool, 9, rank),
        ]

    def work(rank: int) -> None:
        mine = tensors(rank)
        groups[rank].all_reduce(mine, "sum", how).wait()
        for got, *terms in zip(mine, *(tensors(other) for other in range(3)), strict=True):
            assert torch.equal(got, combined("sum", terms))
        mine = tensors(rank)
        groups[rank].broadcast(mine, 1).wait()
        for got, wanted in zip(mine, tensors(1), strict=True):
            assert torch.equal(got, wanted)

    at_once(3, work)


def test_lists_of_tensors_of_other_sizes_are_gathered_and_scattered(worlds_of: Cache) -> None:
    """By all_gather, reduce_scatter and all_to_all, where everybody knows the sizes."""
    size = 4
    for kind, hosts in (("memory", None), ("memory", alone(4)), ("unix", None)):
        groups = fresh_groups(worlds_of(kind, size, hosts))

        def work(rank: int, groups: list[RankGroup] = groups) -> None:
            group = groups[rank]
            outputs = [torch.zeros(3 * other) for other in range(size)]
            for how in ("auto", "ring", *([] if len(group.place.hosts) > 1 else ["shared-memory"])):
                group.all_gather(outputs, values(torch.float32, 3 * rank, rank), how).wait()
                for other, got in enumerate(outputs):
                    assert torch.equal(got, values(torch.float32, 3 * other, other))
                mine, parts = torch.zeros(2 * rank), [values(torch.float32, 2 * other, rank) for other in range(size)]
                group.reduce_scatter(mine, parts, "sum", how).wait()
                assert torch.equal(mine, sum(values(torch.float32, 2 * rank, other) for other in range(size)))
            inputs = [values(torch.float32, rank + 2 * other, rank) for other in range(size)]
            outputs = [torch.zeros(other + 2 * rank) for other in range(size)]
            group.all_to_all(outputs, inputs).wait()
            for other, got in enumerate(outputs):
                assert torch.equal(got, values(torch.float32, other + 2 * rank, other))

        at_once(size, work)


@pytest.mark.parametrize("longest", [10, 30_000])
def test_all_to_all_of_other_sizes_is_right_or_refused_through_shared_memory(worlds_of: Cache, longest: int) -> None:
    groups, size = fresh_groups(worlds_of("memory", 3)), 3

    def work(rank: int) -> None:
        inputs = [values(torch.float32, longest * (rank + 1) * (other + 1), rank) for other in range(size)]
        outputs = [torch.zeros(longest * (rank + 1) * (other + 1)) for other in range(size)]
        try:
            groups[rank].all_to_all(outputs, inputs, "shared-memory").wait()
        except UsageError:
            return
        for other, got in enumerate(outputs):
            assert torch.equal(got, values(torch.float32, longest * (rank + 1) * (other + 1), other))

    at_once(size, work)


def test_gathering_in_place_gathers(worlds_of: Cache) -> None:
    groups, size = fresh_groups(worlds_of("memory", 3)), 3

    def work(rank: int) -> None:
        for how in ("ring", "shared-memory"):
            whole = torch.zeros(size, 4)
            whole[rank] = float(rank + 1)
            groups[rank].all_gather(list(whole), whole[rank], how).wait()
            assert whole[:, 0].tolist() == [1.0, 2.0, 3.0]

    at_once(size, work)


# Several hosts.


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        *(("memory", split) for split in SPLITS[1:4]),
        *(pytest.param("memory", split, marks=pytest.mark.long) for split in (SPLITS[0], *SPLITS[4:])),
        *(pytest.param("zmq", split, marks=pytest.mark.long) for split in SPLITS),
    ],
    ids=str,
)
def test_hosts_of_any_kind_make_no_difference(worlds_of: Cache, kind: str, split: Hosts) -> None:
    size = sum(map(len, split))
    groups = fresh_groups(worlds_of(kind, size, split))
    assert all(group.place.hosts == split for group in groups)
    calls = [
        Call(name, how, length, root=length % size, seed=length)
        for name, how in algorithms(len(split))
        for length in (0, 1, size, 1000)
    ]
    run(groups, calls)
    run(groups, [Call("all_reduce", "hierarchical", 7, dtype, op) for dtype in DTYPES for op in ("sum", "max", "bxor")
                 if means_something(op, dtype)])  # fmt: skip


def test_two_hosts_over_zeromq_with_shared_memory_inside(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("zmq", 4, ((0, 1), (2, 3))))
    run(groups, [Call("all_reduce", "hierarchical", length) for length in (0, 1, 5, 100_000)])
    run(groups, [Call(name, "auto", 50, root=3) for name in dict.fromkeys(name for name, _ in PLANS)])


@pytest.mark.parametrize("split", [((0, 1), (2, 3)), ((0, 1, 2), (3, 4), (5,))], ids=str)
@pytest.mark.long
def test_a_large_tensor_goes_in_many_pieces_between_hosts(worlds_of: Cache, split: Hosts) -> None:
    """More than a board holds, so that boards are used in turns while the ring is still busy."""
    for kind in ("memory", "zmq"):
        groups = fresh_groups(worlds_of(kind, sum(map(len, split)), split))
        run(groups, [Call("all_reduce", "hierarchical", length, seed=length) for length in (1_500_000, 1_100_003, 3)])


def test_shared_memory_between_hosts_is_refused(worlds_of: Cache) -> None:
    group = fresh_groups(worlds_of("memory", 4, ((0, 1), (2, 3))))[0]
    with pytest.raises(UsageError, match=r"ranks of several hosts have no memory in common.*hierarchical"):
        group.all_reduce([torch.ones(1)], algorithm="shared-memory")


def test_a_group_on_one_of_the_hosts_shares_memory(worlds_of: Cache) -> None:
    worlds = worlds_of("zmq", 4, ((0, 1), (2, 3)))
    groups = fresh_groups(worlds, [2, 3])
    assert [group.rank for group in groups] == [0, 1]
    run(groups, [Call("all_reduce", "shared-memory", 100), Call("gather", "shared-memory", 3, root=1)])


def test_auto_does_not_measure_twice(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("memory", 4, ((0, 1), (2, 3))))
    for group in groups:
        group.speeds = Speeds(alpha=1.0, beta=1e-12)  # as if each message took a second
    run(groups, [Call("all_reduce", size=10)])
    assert {group.speeds for group in groups} == {Speeds(alpha=1.0, beta=1e-12)}
    choices = [group.last_choice for group in groups if group.last_choice]
    assert len(choices) == 4
    assert all("2 s expected over 2 hosts" in choice.reason for choice in choices)


# Many calls.


def calls_of(hosts: int, size: int) -> st.SearchStrategy[list[Call]]:
    one = st.builds(
        lambda way, length, dtype, op, root, seed: Call(
            *way, length, dtype, op if way[0] in COMBINES and means_something(op, dtype) else "sum", root, seed
        ),
        st.sampled_from(algorithms(hosts)),
        st.integers(0, 40) | st.sampled_from([1000, 4096, 16_384, 16_385, 70_000]),
        st.sampled_from([dtype for dtype in DTYPES if not dtype.is_complex]),
        st.sampled_from(OPS),
        st.integers(0, size - 1),
        st.integers(0, 100),
    )
    return st.lists(one, min_size=1, max_size=25)


@given(calls=calls_of(1, 4))
@moderately
def test_any_calls_after_each_other(all_worlds: Cache, calls: list[Call]) -> None:
    run(fresh_groups(all_worlds("unix", 4)), calls)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["memory", "unix", "zmq"])
@given(data=st.data())
@thoroughly
def test_any_calls_after_each_other_over_all_links(all_worlds: Cache, kind: str, data: st.DataObject) -> None:
    split = data.draw(st.sampled_from([None, ((0, 1), (2, 3)), ((0, 2, 3), (1,))])) if kind != "unix" else None
    hosts = len(split) if split else hosts_of(kind, 4)
    run(fresh_groups(all_worlds(kind, 4, split)), data.draw(calls_of(hosts, 4)))


@given(calls=calls_of(1, 3), data=st.data())
@moderately
def test_any_calls_at_once_waited_for_in_any_order(all_worlds: Cache, calls: list[Call], data: st.DataObject) -> None:
    groups = fresh_groups(all_worlds("memory", 3))
    orders = [data.draw(st.permutations(range(len(calls)))) for _ in range(3)]
    background = [data.draw(st.lists(st.booleans(), min_size=len(calls), max_size=len(calls))) for _ in range(3)]

    def work(rank: int) -> None:
        made = [call.make(groups[rank], in_background) for call, in_background in zip(calls, background[rank], strict=True)]
        for index in orders[rank]:
            made[index].check(calls[index])

    at_once(3, work)


# In the background.


@pytest.mark.parametrize("kind", KINDS)
def test_many_calls_are_outstanding_at_once(worlds_of: Cache, kind: str) -> None:
    groups = fresh_groups(worlds_of(kind, 3))
    names = ["all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "barrier", "gather", "scatter"]
    calls = [Call(names[index % 8], size=index * 37 % 500, seed=index) for index in range(100)]

    def work(rank: int) -> None:
        made = [call.make(groups[rank], background=True) for call in calls]
        order = list(range(100))
        random.Random(rank).shuffle(order)
        for index in order:
            made[index].check(calls[index])
            assert made[index].task.is_completed()

    at_once(3, work)


def test_a_call_in_the_background_goes_on_whether_or_not_anybody_waits(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("unix", 3))
    ended, counted = threading.Event(), threading.Semaphore(0)

    def work(rank: int) -> None:
        mine = torch.ones(1000) * rank
        task = groups[rank].all_reduce([mine], background=True)
        task.when_done(lambda _: counted.release())
        assert ended.wait(PATIENCE)
        assert task.is_completed()
        assert mine[0] == 3

    clients = [Client(lambda rank=rank: work(rank)) for rank in range(3)]
    assert all(counted.acquire(timeout=PATIENCE) for _ in range(3))
    ended.set()
    results(*clients)


def test_a_callback_runs_in_the_thread_that_ends_the_call(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("memory", 2))
    gate = threading.Barrier(2, timeout=PATIENCE)

    def work(rank: int) -> None:
        seen: list[tuple[str, Task, bool]] = []
        called = threading.Event()

        def callback(task: Task) -> None:
            seen.append((threading.current_thread().name, task, task.is_completed()))
            called.set()

        if rank == 0:
            task = groups[0].all_reduce([torch.ones(3)], background=True)
            task.when_done(callback)
            gate.wait()
        else:
            gate.wait()
            task = groups[1].all_reduce([torch.ones(3)], background=True)
            task.when_done(callback)
        task.wait()
        assert called.wait(PATIENCE)
        (first,) = seen
        assert first[1:] == (task, True)
        assert rank or first[0] == "polytempo-progress", "rank 0 had asked before anything could end"
        task.when_done(callback)
        assert seen[1][0] == threading.current_thread().name, "what has ended calls back at once"

    at_once(2, work)


def test_a_callback_may_start_the_next_call(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("memory", 2))

    def work(rank: int) -> None:
        mine, ended = torch.ones(1), threading.Event()

        def once_more(_: Task) -> None:
            if mine[0] < 100:
                groups[rank].all_reduce([mine], background=True).when_done(once_more)
            else:
                ended.set()

        once_more(groups[rank].barrier(background=True))
        assert ended.wait(PATIENCE)
        assert mine[0] == 128

    at_once(2, work)


def test_a_callback_that_fails_ends_nothing_else(opening: Opening, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody hangs, whatever somebody calls back; it is said."""
    worlds, asked = opening("memory", 2), threading.Event()

    def fail(_: Task) -> None:
        raise RuntimeError("a mistake in a callback")

    def work(world: World) -> float:
        if world.rank:
            assert asked.wait(PATIENCE)
        task = world.all_ranks.all_reduce([torch.ones(1)], background=True)
        if not world.rank:
            task.when_done(fail)
            asked.set()
        mine = torch.ones(1)
        world.all_ranks.all_reduce([mine], background=True).wait(PATIENCE / 2)
        return float(mine)

    assert everywhere(worlds, work) == [2.0, 2.0]
    assert "a mistake in a callback" in capsys.readouterr().err


def test_looking_is_enough_to_move_on(opening: Opening) -> None:
    """Without a progress thread, `is_completed` moves what can move."""
    worlds = opening("memory", 2)

    def work(world: World) -> float:
        mine = torch.ones(5)
        task = world.all_ranks.all_reduce([mine], algorithm="ring")
        while not task.is_completed():
            threading.Event().wait(0.001)
        return float(mine.sum())

    assert everywhere(worlds, work) == [10.0, 10.0]
    assert [world.engine._thread for world in worlds] == [None, None]


def test_a_blocking_call_comes_after_those_in_the_background(worlds_of: Cache) -> None:
    for kind in KINDS:
        groups = fresh_groups(worlds_of(kind, 3))

        def work(rank: int, groups: list[RankGroup] = groups) -> None:
            mine = torch.ones(3000)
            for _ in range(5):
                groups[rank].all_reduce([mine], background=True)
            groups[rank].all_reduce([mine]).wait()
            assert mine[0] == 3**6

        at_once(3, work)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(Call("broadcast", "tree"), id="tree"),
        pytest.param(Call("broadcast", "ring"), id="chain", marks=pytest.mark.long),
        pytest.param(Call("scatter", "linear"), id="straight", marks=pytest.mark.long),
    ],
)
def test_a_tensor_may_be_changed_as_soon_as_a_call_has_ended(opening: Opening, call: Call) -> None:
    """It has been sent by then, however much it is and however late others come."""
    worlds, returned = opening("unix", 2), threading.Event()
    large = replace(call, size=3_000_000)

    def work(world: World) -> None:
        if world.rank:
            returned.wait(0.3)  # comes in vain, unless the tensor is still to be sent
            large.make(world.all_ranks).check()
        else:
            made = large.make(world.all_ranks)
            made.task.wait()
            for tensor in (*made.got, *made.untouched):
                tensor.zero_()
            returned.set()

    everywhere(worlds, work)


def test_who_waits_in_vain_may_wait_again(opening: Opening) -> None:
    """A timeout gives up waiting, not the call."""
    worlds = opening("unix", 2)
    mine = torch.ones(4)
    task = worlds[0].all_ranks.all_reduce([mine], background=True)
    with pytest.raises(Exception, match=r"rank 0 has waited 0.05 s for all_reduce\(sum, float32\[4\]\).* rank 1"):
        task.wait(0.05)
    worlds[1].all_ranks.all_reduce([torch.ones(4)]).wait()
    task.wait()
    assert mine.tolist() == [2.0] * 4


# Several groups.


def test_groups_used_in_different_orders_do_not_wait_for_each_other(worlds_of: Cache) -> None:
    for kind in KINDS:
        worlds = worlds_of(kind, 4)
        groups = [[world.new_group(range(4)) for world in worlds] for _ in range(6)]

        def work(rank: int, groups: list[Any] = groups) -> None:
            order = list(range(6))
            random.Random(rank).shuffle(order)
            calls = {index: Call("all_reduce", size=300 + index, seed=index) for index in order}
            made = {index: calls[index].make(groups[index][rank], background=True) for index in order}
            random.Random(10 + rank).shuffle(order)
            for index in order:
                made[index].check(calls[index])

        at_once(4, work)


def test_groups_that_overlap_do_not_disturb_each_other(worlds_of: Cache) -> None:
    for kind in KINDS:
        worlds = worlds_of(kind, 5)
        members = [[0, 1, 2], [2, 3, 4], [0, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4], [3]]
        groups = [[world.new_group(ranks) for world in worlds] for ranks in members]

        def work(rank: int, groups: list[Any] = groups) -> None:
            mine = [group[rank] for group in groups if group[rank] is not None]
            made = []
            for turn in range(3):
                random.Random(5 * turn + rank).shuffle(mine)
                for group in mine:
                    for index, (name, how) in enumerate(
                        (("all_reduce", "ring"), ("all_gather", "auto"), ("broadcast", "tree"))
                    ):
                        call = Call(name, how, 20 * group.size, seed=group.context + turn + index, root=group.size - 1)
                        made.append((call, call.make(group, background=True)))
            for call, one in made:
                one.check(call)

        at_once(5, work)


def test_threads_of_a_rank_use_groups_of_their_own(opening: Opening) -> None:
    """Blocking, without a progress thread: whoever drives also moves what the other waits for."""
    worlds = opening("unix", 2)
    groups = [[world.new_group([0, 1]) for world in worlds] for _ in range(3)]

    def work(group: RankGroup) -> None:
        for seed in range(10):
            Call("all_reduce", "ring", 50, seed=seed).make(group).check()

    results(*[Client(lambda group=group: work(group)) for pair in groups for group in pair])
    groups.clear()


def test_ranks_of_a_group_are_numbered_within_it(worlds_of: Cache) -> None:
    groups = fresh_groups(worlds_of("memory", 5), [4, 1, 3])
    assert [group.ranks for group in groups] == [(1, 3, 4)] * 3
    assert [group.rank for group in groups] == [0, 1, 2]
    run(groups, [Call("broadcast", root=2), Call("gather", root=1), Call("scatter", root=1)])


@pytest.mark.parametrize("ranks", [[], [0, 0], [5], [-1], [0, 5]])
def test_a_group_of_ranks_that_are_not_there_is_refused(worlds_of: Cache, ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="expected some of the ranks 0 to 4, each once, got"):
        worlds_of("memory", 5)[0].new_group(ranks)


# What is refused, before anything starts.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.all_reduce([]), "all_reduce needs at least one tensor, got none"),
        (lambda g: g.broadcast([], 0), "broadcast needs at least one tensor, got none"),
        (
            lambda g: g.all_reduce([torch.ones(1)], algorithm="rings"),
            "all_reduce can go by ring, .* not by 'rings'",
        ),
        (lambda g: g.all_reduce([torch.ones(1)], "summ"), "expected op to be one of sum, .*; nearest: sum"),
        (lambda g: g.all_reduce([torch.ones(1, dtype=torch.bool)], "mean"), "expected numbers for a mean, got torch.bool"),
        (lambda g: g.all_reduce([torch.ones(1)], "band"), "expected integers for op='band', got torch.float32"),
        (
            lambda g: g.all_reduce([torch.ones(1), torch.ones(1, dtype=torch.complex64)], "max"),
            "complex numbers have no order",
        ),
        (lambda g: g.all_reduce([torch.ones(1, dtype=torch.complex64)], "prod"), "expected real numbers for op='prod'"),
        (lambda g: g.reduce(torch.ones(1), 3), "expected a rank from 0 to 2, got 3"),
        (lambda g: g.broadcast([torch.ones(1)], -1), "expected a rank from 0 to 2, got -1"),
        (lambda g: g.all_gather([torch.ones(1)] * 2, torch.ones(1)), "all_gather needs a list of 3 tensors.*got 2"),
        (lambda g: g.all_gather([torch.ones(1)] * 3, torch.ones(2)), r"expected float32\[2\] in the list.*got float32\[1\]"),
        (lambda g: g.gather([], torch.ones(1), g.rank), "gather needs a list of 3 tensors, one for each rank, got 0"),
        (lambda g: g.scatter(torch.ones(1), None, g.rank), "scatter needs a list of 3 tensors, one for each rank, got 0"),
        (lambda g: g.reduce_scatter(torch.ones(1), [torch.ones(1, dtype=torch.int8)] * 3), "expected float32"),
        (
            lambda g: g.all_to_all([torch.ones(1)] * 3, [torch.ones(1)] * 2),
            "all_to_all needs 3 tensors on each side, got 3 and 2",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_starts(worlds_of: Cache, call: Callable[[RankGroup], Any], words: str) -> None:
    group = fresh_groups(worlds_of("memory", 3))[0]
    with pytest.raises(UsageError, match=words):
        call(group)
    assert group._calls == 0


@pytest.mark.parametrize("form", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn])
def test_a_tensor_that_is_not_dense_is_refused_and_the_group_still_works(
    worlds_of: Cache, form: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """On one rank alone: the others have not been told of any call, so none was made."""
    groups = fresh_groups(worlds_of("memory", 3))

    def work(rank: int) -> None:
        if rank == 1:
            with pytest.raises(UsageError, match="expected a dense tensor"):
                groups[1].all_reduce([form(torch.ones(4))]).wait()
        Call("all_reduce").make(groups[rank]).check()

    at_once(3, work)


# As scripts call it.


@pytest.fixture
def scripts(worlds_of: Cache, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Runs something once for each of four workers; `pt` finds the world of the thread."""
    worlds, here = worlds_of("memory", 4), threading.local()

    class Session:
        watches = ()

        def world(self, call: str) -> World:
            found: World = here.world
            return found

    monkeypatch.setattr(communication, "current", Session)

    def run_scripts(script: Callable[[int], Any]) -> list[Any]:
        def work(rank: int) -> Any:
            here.world = worlds[rank]
            return script(rank)

        return at_once(4, work)

    return run_scripts


def test_in_scripts_ranks_are_those_of_the_job_also_within_a_group(scripts: Callable[..., list[Any]]) -> None:
    def script(rank: int) -> None:
        pair, every = communication.new_group([1, 3]), communication.new_group()
        assert pair.size == 2
        assert pair.rank == {1: 0, 3: 1}.get(rank, -1)
        assert every.ranks == (0, 1, 2, 3)
        mine = torch.tensor([float(rank)])
        communication.broadcast(mine, 3, group=pair)
        assert mine.item() == (3.0 if rank in (1, 3) else rank)
        mine = torch.tensor([float(rank)])
        communication.reduce(mine, 3, group=pair)
        assert mine.item() == (4.0 if rank == 3 else rank)
        gathered = [torch.zeros(1), torch.zeros(1)]
        communication.gather(torch.tensor([float(rank)]), gathered if rank == 1 else None, 1, group=pair)
        assert [t.item() for t in gathered] == ([1.0, 3.0] if rank == 1 else [0.0, 0.0])
        communication.scatter(mine, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 3 else None, 3, group=pair)
        assert mine.item() == {1: 5.0, 3: 6.0}.get(rank, rank)
        if rank in (1, 3):
            with pytest.raises(UsageError, match="rank 2 is not in the group of ranks 1, 3"):
                communication.broadcast(mine, 2, group=pair)
        communication.barrier(pair)
        communication.barrier()

    scripts(script)


def test_in_scripts_single_messages_name_ranks_of_the_job(scripts: Callable[..., list[Any]]) -> None:
    def script(rank: int) -> tuple[float, Any]:
        pair, mine = communication.new_group([1, 3]), torch.tensor([float(rank)])
        if rank == 3:
            communication.send(mine, 1, group=pair, tag=4)
            handle = communication.isend(mine, 1, group=pair)
            assert handle is not None
            return float(mine), handle.wait()
        found: Any = communication.recv(mine, group=pair, tag=4)
        handle = communication.irecv(mine, 3, group=pair)
        return float(mine), (found, handle and handle.wait())

    assert scripts(script) == [(0.0, (-1, None)), (3.0, (3, 3)), (2.0, (-1, None)), (3.0, None)]


def test_in_scripts_outside_a_group_nothing_happens(scripts: Callable[..., list[Any]]) -> None:
    def script(rank: int) -> None:
        one = communication.new_group([0])
        mine = torch.ones(2)
        if rank:
            assert communication.all_reduce(mine, group=one) is None
            assert communication.all_gather([mine], mine, group=one, async_op=True) is None
            assert communication.isend(mine, 0, group=one) is None
            with pytest.raises(UsageError, match="this rank is not in the group of ranks 0"):
                communication.explain_algorithm("all_reduce", 100, one)
        else:
            communication.all_reduce(mine, group=one)
            assert communication.explain_algorithm("all_reduce", 100).algorithm == "shared-memory"

    scripts(script)


def test_in_scripts_handles_lists_and_parameters(scripts: Callable[..., list[Any]]) -> None:
    def script(rank: int) -> None:
        tensors = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
        handle = communication.all_reduce(tensors, async_op=True)
        handle.wait()
        assert handle.is_completed()
        assert [t.tolist() for t in tensors] == [[4.0] * 2, [4] * 3]
        communication.broadcast(tensors, 2)
        output = torch.zeros(1)
        communication.reduce_scatter(output, [torch.full((1,), float(q)) for q in range(4)], "mean")
        assert output.item() == rank
        outputs = [torch.zeros(1) for _ in range(4)]
        communication.all_to_all(outputs, [torch.full((1,), 10.0 * rank + q) for q in range(4)])
        assert [t.item() for t in outputs] == [10.0 * q + rank for q in range(4)]
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 2)
        communication.broadcast_parameters(model.state_dict(), 1)
        communication.broadcast_parameters(dict(model.named_parameters()), 1)
        same = torch.stack([model.weight.detach().flatten()] * 1)
        outputs = [torch.zeros_like(same) for _ in range(4)]
        communication.all_gather(outputs, same)
        assert all(torch.equal(outputs[0], other) for other in outputs)

    scripts(script)


def test_in_scripts_a_mean_of_integers_is_refused_as_torch_does_for_one_tensor(scripts: Callable[..., list[Any]]) -> None:
    """Rounded it would not be their mean. Calls that come by torch's names round it (`test_groups`' every dtype)."""

    def script(rank: int) -> None:
        whole, real = torch.ones(2, dtype=torch.int64), torch.ones(2)
        for op in ("mean", "avg", torch.distributed.ReduceOp.AVG):
            for call in (
                lambda op=op: communication.all_reduce([real, whole], op),
                lambda op=op: communication.all_reduce(whole, op, algorithm="native"),
                lambda op=op: communication.reduce(whole, 0, op),
                lambda op=op: communication.reduce_scatter(whole, [whole] * 4, op),
            ):
                with pytest.raises(UsageError, match=r"expected floating point numbers for a mean, got torch\.int64"):
                    call()
        communication.barrier()

    scripts(script)


# Afterwards.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thread", [False, True])
def test_calls_on_a_closed_world_fail_at_once(nothing_left: None, kind: str, thread: bool) -> None:
    """Whether or not there was a progress thread."""
    worlds = open_worlds(kind, 2)
    everywhere(worlds, lambda world: world.all_ranks.barrier(thread).wait())
    close_all(worlds)
    for later in (False, True):
        for outcome in attempts(worlds, lambda world, later=later: world.all_ranks.barrier(later).wait()):
            assert isinstance(outcome, PeerError), outcome
            assert "closed" in str(outcome)
