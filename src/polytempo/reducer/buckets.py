"""Which gradients travel together, while backward is still running.

Backward completes gradients in about the reverse order of use; the order seen in the first backward is the one that counts.
Parameters are taken in that order and put into buckets of some megabytes; a bucket is sent when its last gradient is
complete. In a shard's buffers a bucket is a few pieces: mostly one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from polytempo.protocol.layout import ITEM_SIZES, Layout, TensorPlace
from polytempo.protocol.values import BufferRange


@dataclass(frozen=True)
class Bucket:
    """Parameters, and where they lie in the buffers of each shard."""

    params: tuple[int, ...]
    pieces: tuple[tuple[BufferRange, ...], ...]


def group_by_size(sized: Iterable[tuple[int, int, Hashable]], limit: int) -> list[list[int]]:
    """Group items, in their order, until a group has at least `limit` bytes; the last of each kind may be smaller.

    Args:
        sized: Index, bytes and kind of each item; a group has items of one kind.
        limit: Bytes at which a group is complete.
    """
    complete: list[list[int]] = []
    open_groups: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    for index, size, kind in sized:
        open_groups.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + size
        if sizes[kind] >= limit:
            complete.append(open_groups.pop(kind))
            sizes[kind] = 0
    return [*complete, *open_groups.values()]


def plan_buckets(layout: Layout, order: Sequence[int], limit: int) -> list[Bucket]:
    """Buckets of at least `limit` bytes (the last may be smaller), in the order in which gradients are completed."""
    places = {place.index: place for place in layout.places}
    sized = (
        (index, (places[index].stop - places[index].start) * ITEM_SIZES[places[index].info.dtype], None) for index in order
    )
    return [_bucket(layout, [places[index] for index in group]) for group in group_by_size(sized, limit)]


def _bucket(layout: Layout, places: Sequence[TensorPlace]) -> Bucket:
    pieces = tuple(_joined(_pieces(layout, shard, places)) for shard in range(len(layout.shards)))
    return Bucket(tuple(place.index for place in places), pieces)


def _pieces(layout: Layout, shard: int, places: Sequence[TensorPlace]) -> list[BufferRange]:
    """The parts of these tensors that a shard holds, in bytes of its buffers."""
    found = []
    for buffer, segment in enumerate(layout.shards[shard]):
        item = ITEM_SIZES[segment.dtype]
        for place in places:
            start, stop = max(place.start, segment.start), min(place.stop, segment.stop)
            if place.info.dtype == segment.dtype and start < stop:
                found.append(BufferRange(buffer, (start - segment.start) * item, (stop - segment.start) * item))
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
    for buffer, segment in enumerate(layout.shards[shard]):
        at = 0
        for piece in sorted((p for p in pieces if p.buffer == buffer), key=lambda p: p.start):
            if piece.start > at:
                result.append(BufferRange(buffer, at, piece.start))
            at = max(at, piece.stop)
        if at < segment.nbytes:
            result.append(BufferRange(buffer, at, segment.nbytes))
    return tuple(result)
