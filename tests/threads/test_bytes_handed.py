"""Bytes that a rank hands to others count the same, whether they are sent or lie in shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_bytes_counted import Hosts, all_reduce
from worlds import Cache, all_worlds, everywhere, fresh_groups, nothing_left, worlds_of

from polytempo.collectives.group import RankGroup
from polytempo.collectives.world import World
from polytempo.pipeline.point_to_point import FORWARD, PointToPoint
from polytempo.pipeline.stage_message import StageMessage

__all__ = ["all_worlds", "nothing_left", "worlds_of"]

ONE_HOST: Hosts = ((0, 1, 2, 3),)


def handed(worlds: list[World], work: Callable[[RankGroup], object]) -> list[int]:
    """What each rank hands to the others, while all do this in a new group: by collectives and by single messages."""
    groups = {world.rank: group for world, group in zip(worlds, fresh_groups(worlds), strict=True)}
    everywhere(worlds, lambda world: work(groups[world.rank]))
    counts = [(world.engine.messages.handed, groups[world.rank].context) for world in worlds]
    return [count[context] + count[context + 1] for count, context in counts]


@pytest.mark.parametrize("kind", ["memory", "unix"])
def test_of_an_all_reduce(kind: str, worlds_of: Cache) -> None:
    worlds, nbytes = worlds_of(kind, 4, ONE_HOST), 4 * 4096
    assert handed(worlds, all_reduce(4096, "ring")) == [2 * 3 * nbytes // 4] * 4
    assert handed(worlds, all_reduce(4096, "shared-memory")) == [nbytes] * 4  # a part for each rank, and a sum for all


def test_of_a_gathering_in_shared_memory(worlds_of: Cache) -> None:
    def gather(group: RankGroup) -> None:
        mine = torch.ones(4096)
        group.all_gather([torch.empty_like(mine) for _ in range(group.size)], mine).wait()

    assert handed(worlds_of("unix", 4, ONE_HOST), gather) == [4 * 4096] * 4


@pytest.mark.parametrize("kind", ["memory", "unix"])
@pytest.mark.parametrize("nbytes", [100, 20_000])
def test_of_a_message_between_stages(kind: str, nbytes: int, worlds_of: Cache) -> None:
    """The smaller is sent, the larger lies in shared memory where links are sockets."""

    def pass_on(group: RankGroup) -> None:
        p2p = PointToPoint(group, torch.device("cpu"))
        if group.rank == 0:
            for number in range(3):
                p2p.send(group.ranks[1], FORWARD, StageMessage([torch.ones(nbytes, dtype=torch.uint8)], number=number))
            p2p.settle()
        elif group.rank == 1:
            for number in range(3):
                assert int(p2p.take(group.ranks[0], FORWARD, number).values[0].sum()) == nbytes
        group.barrier().wait()

    padded = -(-nbytes // 64) * 64
    assert handed(worlds_of(kind, 4, ONE_HOST), pass_on) == [8192 + 3 * (64 + padded), 0, 0, 0]  # and the announcement
