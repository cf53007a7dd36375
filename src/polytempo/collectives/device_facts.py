"""What each rank of a group says of its GPU, once, inside the group's first call with tensors that are on one.

facts = yield from gather_facts(inside, facts_of(rank, place, device))    the same list on every rank, in their order
way = choose_way(facts, group.network)
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed

from polytempo.collectives.device_choice import DeviceFacts
from polytempo.collectives.steps import Place
from polytempo.collectives.tasks import Steps
from polytempo.device.device import Device
from polytempo.errors import PeerError

#: Bytes of what a rank says: the identities of some 60 devices fit.
RECORD = 4096


def facts_of(rank: int, place: Place, device: Device | None) -> DeviceFacts:
    """Those of this rank.

    Args:
        rank: Its rank in the job.
        place: Its place in the group.
        device: Where its tensors are; None for the CPU.
    """
    host = next(number for number, members in enumerate(place.hosts) if place.rank in members)
    if device is None:
        return DeviceFacts(rank, host, "")
    nccl = device.place.type == "cuda" and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return DeviceFacts(rank, host, device.identity, device.reachable(), nccl)


def gather_facts(inside: Any, own: DeviceFacts) -> Steps:
    """Steps of a call in which all ranks take part; their result is the list of all ranks' facts.

    Args:
        inside: The group within its call (`Nested`).
        own: Those of this rank.
    """
    record = pack(own)
    rows = [torch.empty_like(record) for _ in range(inside.size)]
    yield from inside.all_gather(rows, record)
    return [unpack(row) for row in rows]


def pack(facts: DeviceFacts) -> torch.Tensor:
    """As bytes, of one size on all ranks. Devices that do not fit count as not reachable."""
    reachable = sorted(facts.reachable, key=lambda identity: (identity != facts.device, identity))
    while len(text := json.dumps([facts.rank, facts.host, facts.device, reachable, facts.nccl]).encode()) > RECORD:
        reachable.pop()
    return torch.frombuffer(bytearray(text.ljust(RECORD, b" ")), dtype=torch.uint8)


def unpack(record: torch.Tensor) -> DeviceFacts:
    """From bytes."""
    try:
        rank, host, device, reachable, nccl = json.loads(bytes(record.numpy()))
        return DeviceFacts(int(rank), int(host), str(device), frozenset(map(str, reachable)), bool(nccl))
    except (ValueError, TypeError) as error:
        raise PeerError(f"a rank sent something that are no facts of a device: {error}") from None
