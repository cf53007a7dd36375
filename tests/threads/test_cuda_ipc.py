"""Collectives in device memory: the same results as in the host's, whatever the device's lateness, and where a rank dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import COMBINES, DTYPES, OPS, Call, means_something
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import on_late_devices
from test_lost_ranks import Died, check_reformed, doom, names, until_death
from wires import Client
from worlds import Opening, attempts, close_all, everywhere, fresh_groups, nothing_left, open_worlds, opening, results

from polytempo.collectives import device_buffer
from polytempo.collectives.plans import ON_DEVICE
from polytempo.collectives.world import World
from polytempo.device.device import Devices
from polytempo.errors import PeerError, RankLost, UsageError

__all__ = ["nothing_left", "opening"]
pytestmark = pytest.mark.usefixtures("nothing_left")

COLLECTIVES = [name for name in ON_DEVICE if name != "barrier"]


def went_by_device(group: Any) -> bool:
    return group.route.slots is not None and not group.route.slots.refused and not group.buffers._buffers


@pytest.mark.parametrize("kind", ["memory", "unix"])
def test_every_collective_operation_and_dtype_equals_that_of_the_host(opening: Opening, kind: str) -> None:
    worlds = opening(kind, 3)
    on_late_devices(worlds)
    calls = [Call(name, size=7, dtype=dtype, root=1) for name in COLLECTIVES for dtype in DTYPES]
    calls += [
        Call(name, size=9, op=op, dtype=dtype, root=2)
        for name in COMBINES
        for op in OPS
        for dtype in DTYPES
        if means_something(op, dtype) and op != "sum"
    ]

    def work(world: World) -> bool:
        for call in calls:
            if kind == "memory" or call.dtype == torch.float32:
                call.make(world.all_ranks).check(call)
        return went_by_device(world.all_ranks)

    assert everywhere(worlds, work) == [True] * 3


@pytest.mark.parametrize("size", [1, 2, 5])
def test_groups_of_any_size(opening: Opening, size: int) -> None:
    worlds = opening("memory", size)
    on_late_devices(worlds)

    def work(world: World) -> None:
        for name in COLLECTIVES:
            Call(name, size=33, seed=3).make(world.all_ranks).check(name)

    everywhere(worlds, work)


def test_two_byte_floats_are_added_up_in_four(opening: Opening) -> None:
    """Else small terms are lost one by one, and the sum of float16s overflows where its mean does not."""
    worlds = opening("memory", 4)
    on_late_devices(worlds)

    def work(world: World) -> tuple[float, float]:
        small = torch.full((5,), 1.0 if world.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
        large = torch.full((5,), 60000.0, dtype=torch.float16)
        world.all_ranks.all_reduce([small]).wait()
        world.all_ranks.all_reduce([large], "mean").wait()
        return float(small[0]), float(large[0])

    exact = float(torch.tensor(1 + 3 * 2.0**-9).bfloat16())
    assert everywhere(worlds, work) == [(exact, 60000.0)] * 4


def test_lists_of_tensors_strides_and_more_than_a_slot_holds(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_buffer, "SIZES", (4096,))
    worlds = opening("memory", 2)
    on_late_devices(worlds)

    def work(world: World) -> None:
        mine = [torch.full((50, 60), 1.0 + world.rank).t(), torch.full((9,), 3, dtype=torch.int32), torch.ones(3000)]
        mine.append(torch.full((4, 4), 1j, dtype=torch.complex64).conj())
        world.all_ranks.all_reduce(mine).wait()
        wanted = [3.0, 6, 2.0, -2j]
        assert all(bool((tensor == value).all()) for tensor, value in zip(mine, wanted, strict=True)), mine
        for name in COLLECTIVES:
            Call(name, size=2500, seed=5).make(world.all_ranks).check(name)
        assert went_by_device(world.all_ranks)

    everywhere(worlds, work)


@given(
    size=st.integers(2, 4),
    calls=st.lists(st.tuples(st.sampled_from(COLLECTIVES), st.sampled_from([3, 40, 700])), min_size=2, max_size=12),
    seed=st.integers(0, 1000),
    root=st.integers(0, 1),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_no_slot_is_read_while_it_is_written(size: int, calls: list[tuple[str, int]], seed: int, root: int) -> None:
    """Calls one after another in the background: a rank's device is still at earlier ones when its host begins the next."""
    worlds = open_worlds("memory", size)
    on_late_devices(worlds, seed=seed)

    def work(world: World) -> None:
        made = [
            Call(name, size=length, root=root, seed=number).make(world.all_ranks, background=True)
            for number, (name, length) in enumerate(calls)
        ]
        for call in made:
            call.check(calls)

    try:
        everywhere(worlds, work)
    finally:
        close_all(worlds)


# Ranks that differ.


@pytest.mark.parametrize("who", [[0], [1], [0, 2], []])
def test_where_some_ranks_have_tensors_on_the_cpu_all_go_by_the_host(opening: Opening, who: list[int]) -> None:
    worlds = opening("memory", 3)
    on_late_devices(worlds, who)

    def work(world: World) -> None:
        for number in range(2):
            for name in COLLECTIVES:
                Call(name, size=50, root=1, seed=number).make(world.all_ranks).check(name)

    everywhere(worlds, work)


def test_ranks_may_come_to_the_device_and_leave_it(opening: Opening) -> None:
    worlds = opening("memory", 2)

    def work(world: World) -> None:
        for number in range(8):
            if number % 4 == world.rank:
                on_late_devices([world])
            elif number % 4 == 2 + world.rank:
                world.engine.streams.devices = Devices()
            Call("all_reduce", size=50, seed=number).make(world.all_ranks).check(number)

    everywhere(worlds, work)


def test_devices_that_do_not_reach_each_other_go_by_the_host(opening: Opening) -> None:
    worlds = opening("memory", 3)
    on_late_devices(worlds, alike=False)

    def work(world: World) -> bool:
        for name in COLLECTIVES:
            Call(name, size=50, root=1).make(world.all_ranks).check(name)
        assert world.all_ranks.route.slots is not None
        with pytest.raises(UsageError, match="reach each other"):
            world.all_ranks.all_reduce([torch.ones(3)], algorithm="cuda-ipc").wait()
        Call("all_reduce").make(world.all_ranks).check()
        return world.all_ranks.route.slots.refused

    assert everywhere(worlds, work) == [True] * 3


def test_what_is_small_may_go_by_the_host(opening: Opening) -> None:
    worlds = opening("memory", 2)
    on_late_devices(worlds)

    def work(world: World) -> list[bool]:
        group, found = world.all_ranks, []
        group.route.floor = 400
        for length in (99, 100):
            Call("all_reduce", size=length).make(group).check()
            found.append(group.route.slots is not None)
        return found

    assert everywhere(worlds, work) == [[False, True]] * 2


def test_tensors_on_the_cpu_are_refused_by_name(opening: Opening) -> None:
    worlds = opening("memory", 2)
    with pytest.raises(UsageError, match="cuda-ipc needs all tensors on one GPU, got cpu"):
        worlds[0].all_ranks.all_reduce([torch.ones(3)], algorithm="cuda-ipc")


# Ranks that fail or die.


def test_after_a_failed_call_the_group_goes_on_in_device_memory(opening: Opening) -> None:
    worlds = opening("memory", 3)
    on_late_devices(worlds)

    def work(world: World) -> None:
        group = world.all_ranks
        for number in range(4):
            Call("all_reduce", size=60, seed=number).make(group).check()
            with pytest.raises(PeerError, match="all ranks must make the same calls"):
                group.all_reduce([torch.ones(7 if world.rank == 1 else 8)]).wait()
            Call("all_gather", size=60, seed=number).make(group).check()
        assert went_by_device(group)

    everywhere(worlds, work)


@pytest.mark.parametrize("sends", range(9))
def test_a_death_between_any_two_messages_is_named_and_survived(opening: Opening, sends: int) -> None:
    """A rank sends two handles and two notes in its first call, and two notes in each of the others."""
    who = sends % 3
    worlds = opening("memory", 3)
    on_late_devices(worlds, seed=sends)
    calls = [Call("all_reduce", size=900, seed=seed) for seed in range(4)]
    doom(worlds[who], sends)

    def work(world: World) -> int:
        done = 0
        try:
            for call in calls:
                call.make(world.all_ranks).check(call)
                done += 1
        except RankLost as error:
            return done if names(error, who) else -9
        raise Died

    found = attempts(worlds, lambda world: until_death(world, work))
    survivors = [rank for rank in range(3) if rank != who]
    counts = [found[rank] for rank in survivors]
    assert max(counts) - min(counts) <= 1, counts
    assert max(counts) <= max(0, (sends - 1) // 2), counts
    check_reformed(worlds, survivors)


def test_a_new_group_and_one_formed_again_have_memory_of_their_own(opening: Opening) -> None:
    worlds = opening("memory", 3)
    on_late_devices(worlds)
    pairs = fresh_groups(worlds, [0, 2])
    results(*[Client(lambda group=group: Call("all_reduce", size=90).make(group).check()) for group in pairs])
    everywhere(worlds, lambda world: Call("all_reduce", size=90).make(world.all_ranks).check())
    devices = {world.engine.streams.devices.stand_in for world in worlds}
    held = [device.allocated for device in devices if device is not None]
    assert sorted(held) == [2 << 20, 4 << 20, 4 << 20]
