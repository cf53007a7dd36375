"""Ranks tell each other of their devices, inside a call: all have the same list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polytempo.collectives.device_buffer import RECORD, facts_of, gather_facts, pack, unpack
from polytempo.collectives.device_choice import DeviceFacts, choose_way
from polytempo.collectives.group import RankGroup, exchange
from polytempo.collectives.tasks import Steps
from polytempo.collectives.world import open_in_threads
from polytempo.device.host_device import HostDevice
from polytempo.errors import PeerError


def test_all_ranks_have_the_facts_of_all() -> None:
    worlds = open_in_threads(3)
    names = ["one", "other", "one"]

    def then_of(group: RankGroup) -> Callable[[list[torch.Tensor], object], Steps]:
        own = facts_of(group.engine.rank, group.place, HostDevice(names[group.rank]))

        def then(_: list[torch.Tensor], inside: object) -> Steps:
            return (yield from gather_facts(inside, own))

        return then

    groups = [world.all_ranks for world in worlds]
    tasks = [exchange(group, torch.zeros(1), then_of(group), True) for group in groups]
    found = [task.wait(10) for task in tasks]
    assert found[0] == found[1] == found[2]
    assert [(fact.rank, fact.host, fact.device, fact.nccl) for fact in found[0]] == [
        (number, 0, name, False) for number, name in enumerate(names)
    ]
    assert choose_way(found[0]).name == "cpu"
    assert choose_way(found[0][::2]).name == "cuda-ipc"
    for world in worlds:
        world.close()


def test_more_devices_than_fit_leave_the_own_one() -> None:
    reachable = frozenset(f"GPU-{number:036}" for number in range(200))
    facts = DeviceFacts(3, 1, f"GPU-{150:036}", reachable, True)
    record = pack(facts)
    assert record.numel() == RECORD
    found = unpack(record)
    assert facts.device in found.reachable
    assert found.reachable < reachable
    assert (found.rank, found.host, found.device, found.nccl) == (3, 1, facts.device, True)


def test_what_are_no_facts_is_refused() -> None:
    with pytest.raises(PeerError, match="facts of a device"):
        unpack(torch.zeros(RECORD, dtype=torch.uint8))
