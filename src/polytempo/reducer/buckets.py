"""Which gradients travel together, while backward is still running.

Backward completes gradients in about the reverse order of use; the order seen in the first backward is the one that counts.
Parameters are taken in that order and put into buckets of some megabytes; a bucket is sent when its last gradient is
complete. In a shard's buffers a bucket is a few pieces: mostly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.protocol.layout import ITEM_SIZES, Layout, TensorPlace
from polytempo.protocol.values import BufferRange


@dataclass(frozen=True)
class Bucket:
    """Parameters, and where they lie in the buffers of each shard."""

    params: tuple[int, ...]
    pieces: tuple[tuple[BufferRange, ...], ...]


def plan_buckets(layout: Layout, order: Sequence[int], limit: int) -> list[Bucket]:
    """Buckets of at least `limit` bytes (the last may be smaller), in the order in which gradients are completed."""
    places = {place.index: place for place in layout.places}
    buckets: list[Bucket] = []
    taken: list[int] = []
    size = 0
    for index in order:
        taken.append(index)
        size += (places[index].stop - places[index].start) * ITEM_SIZES[places[index].info.dtype]
        if size >= limit:
            buckets.append(_bucket(layout, [places[i] for i in taken]))
            taken, size = [], 0
    if taken:
        buckets.append(_bucket(layout, [places[i] for i in taken]))
    return buckets


def _bucket(layout: Layout, places: Sequence[TensorPlace]) -> Bucket:
    pieces = tuple(_joined(_pieces(layout, shard, places)) for shard in range(len(layout.shards)))
    return Bucket(tuple(place.index for place in places), pieces)


def _pieces(layout: Layout, shard: int, places: Sequence[TensorPlace]) -> list[BufferRange]:
    """The parts of these tensors that a shard holds, in bytes of its buffers."""
    found = []
    for buffer, stretch in enumerate(layout.shards[shard]):
        item = ITEM_SIZES[stretch.dtype]
        for place in places:
            start, stop = max(place.start, stretch.start), min(place.stop, stretch.stop)
            if place.info.dtype == stretch.dtype and start < stop:
                found.append(BufferRange(buffer, (start - stretch.start) * item, (stop - stretch.start) * item))
    return sorted(found, key=lambda piece: (piece.buffer, piece.start))


def _joined(pieces: Sequence[BufferRange]) -> tuple[BufferRange, ...]:
    result: list[BufferRange] = []
    for piece in pieces:
        last = result[-1] if result else None
        if last is not None and (last.buffer, last.stop) == (piece.buffer, piece.start):
            result[-1] = BufferRange(piece.buffer, last.start, piece.stop)
        else:
            result.append(piece)
    return tuple(result)


def rest_of(layout: Layout, shard: int, pieces: Sequence[BufferRange]) -> tuple[BufferRange, ...]:
    """What of a shard's buffers these pieces leave out."""
    result = []
    for buffer, stretch in enumerate(layout.shards[shard]):
        at = 0
        for piece in sorted((p for p in pieces if p.buffer == buffer), key=lambda p: p.start):
            if piece.start > at:
                result.append(BufferRange(buffer, at, piece.start))
            at = max(at, piece.stop)
        if at < stretch.nbytes:
            result.append(BufferRange(buffer, at, stretch.nbytes))
    return tuple(result)
