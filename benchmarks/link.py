"""All-reduce of 25 MB between two hosts: network namespaces on this machine, joined by a cable of 100 Mbit/s (tc tbf).

Beside gloo and the bound: what the busiest way of the cable must carry, over its rate. Between hosts ours is encrypted.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import sys
from contextlib import ExitStack
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from cases import Bar, Case, Cell, Ratio, Subject
from rigs import Rig, RigFailed, Round, answer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "network"))

if TYPE_CHECKING:
    from hosts import Hosts

SIZE, RATE = 25_000_000, "100mbit"
BYTES_A_SECOND = 12_500_000
CLONE_NEWNET = 0x40000000


@cache
def _cable() -> Hosts:
    """One for all rigs, which are measured in turns."""
    from hosts import two_hosts, why_not

    if reason := why_not():
        raise RigFailed(reason)
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(two_hosts(RATE))


def _enter(namespace: str) -> None:
    """Be on that host from now on."""
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise RigFailed(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
    os.close(descriptor)


def _our_worker(pipe: Connection, rank: int, size: int, hosts: Hosts, key: str, port: int) -> None:
    _enter(hosts.a if rank < size // 2 else hosts.b)
    import torch

    from polytempo.client.key_value_store import store_at
    from polytempo.collectives.world import open_by_store
    from polytempo.transport.keys import read_key_file

    address = f"{hosts.address}:{port}"
    store = store_at(address, rank, size, False, 60)
    world = open_by_store(store, rank, size, address, read_key_file(key))
    tensor = torch.zeros(SIZE // 4)

    def make(work: str, algorithm: str) -> Round:
        return lambda: world.all_ranks.all_reduce([tensor], "sum", algorithm).wait()

    answer(pipe, make)
    world.close()


def _gloo_worker(pipe: Connection, rank: int, size: int, hosts: Hosts, port: int) -> None:
    _enter(hosts.a if rank < size // 2 else hosts.b)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{hosts.address}:{port}", rank=rank, world_size=size)
    tensor = torch.zeros(SIZE // 4)
    answer(pipe, lambda work, _: lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    from polytempo.transport.keys import make_keys, write_key_file

    key = rig.directory / "key"
    write_key_file(key, make_keys().workers)
    rig.pauses = False  # a process that is stopped for long is taken for dead
    rig.add_workers(_our_worker, workers, workers, _cable(), str(key), 7100 + workers)


def start_gloo(rig: Rig, workers: int, servers: int) -> None:
    rig.pauses = False
    rig.add_workers(_gloo_worker, workers, workers, _cable(), 7200 + workers)


def start_nothing(rig: Rig, workers: int, servers: int) -> None:
    """A bound is computed."""


def bound(rig: Rig, work: str, variant: str) -> float:
    """Seconds: 2n(p-1)/p for a flat ring of p ranks, 2n(h-1)/h for one stream a host."""
    streams = 2 * int(work) if variant == "ring" else 2
    return 2 * SIZE * (streams - 1) / streams / BYTES_A_SECOND


SINGLE, DOUBLE = "2 hosts, 1 rank each", "2 hosts, 2 ranks each"
RING = Ratio("ring / its bound", ("ring",), ("bound, ring",))
LEVELS = Ratio("hierarchical / its bound", ("hierarchical",), ("bound, one stream a host",))
PEER = Ratio("auto / gloo", ("auto",), ("gloo",))

CASE = Case(
    name="link",
    title="All-reduce of 25 MB over a cable of 100 Mbit/s, seconds",
    cells=(Cell(SINGLE, "1", 2), Cell(DOUBLE, "2", 4)),
    subjects=(
        Subject("auto", start_ours, "auto"),
        Subject("ring", start_ours, "ring"),
        Subject("hierarchical", start_ours, "hierarchical"),
        Subject("gloo", start_gloo),
        Subject("bound, ring", start_nothing, "ring", meter=bound),
        Subject("bound, one stream a host", start_nothing, "hosts", meter=bound),
    ),
    ratios=(RING, LEVELS, PEER),
    bars=(
        Bar(RING, (SINGLE, DOUBLE), most=1.15),
        Bar(LEVELS, (SINGLE, DOUBLE), most=1.15),
        Bar(PEER, (SINGLE, DOUBLE), most=1.0),
    ),
    unit="s",
    repeats=(3, 2),
)
