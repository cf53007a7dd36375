"""Latency and bandwidth between hosts, measured once by a group: its first rank plays ping-pong with one of another host.

What they find is sent to everybody, so that all ranks choose alike.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

import numpy

from polytempo.collectives.cost import Speeds
from polytempo.collectives.messaging import Messaging
from polytempo.collectives.tasks import Steps
from polytempo.transport.channel import Bytes
from polytempo.transport.peer_link import DATA, LinkMessage

SMALL, LARGE = 64, 512 << 10
ROUNDS = 5
FOUND = struct.Struct("<dd")


def measure(messages: Messaging, context: int, number: int, ranks: Sequence[int], hosts: Sequence[Sequence[int]]) -> Steps:
    """The speeds, on every rank."""
    first, second = ranks[hosts[0][0]], ranks[hosts[1][0]]
    tag, found = -number, numpy.zeros(FOUND.size, dtype=numpy.uint8)
    if messages.rank == first:
        yield from _play(messages, context, tag, second, found)
        for rank in ranks:
            if rank != first:
                messages.send(rank, LinkMessage(DATA, context, tag), found.copy())
    else:
        if messages.rank == second:
            yield from _answer(messages, context, tag, first)
        receipt = messages.expect(context, tag, first, FOUND.size, found)
        yield messages.until(receipt)
    alpha, beta = FOUND.unpack(found.tobytes())
    return Speeds(alpha=alpha, beta=beta)


def _play(messages: Messaging, context: int, tag: int, other: int, found: Bytes) -> Steps:
    best = {}
    for size in (SMALL, LARGE):
        times = []
        for _ in range(ROUNDS if size == SMALL else 2):
            began = time.perf_counter()
            messages.send(other, LinkMessage(DATA, context, tag), numpy.zeros(size, dtype=numpy.uint8))
            yield messages.until(messages.expect(context, tag, other, size))
            times.append(time.perf_counter() - began)
        best[size] = min(times) / 2
    beta = max(1e-12, (best[LARGE] - best[SMALL]) / (LARGE - SMALL))
    found[:] = numpy.frombuffer(FOUND.pack(best[SMALL], beta), dtype=numpy.uint8)


def _answer(messages: Messaging, context: int, tag: int, other: int) -> Steps:
    for size in (SMALL,) * ROUNDS + (LARGE,) * 2:
        receipt = messages.expect(context, tag, other, size)
        yield messages.until(receipt)
        messages.send(other, LinkMessage(DATA, context, tag), receipt.buffer)
