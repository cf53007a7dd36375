"""Buckets: which gradients travel together, and the one mechanism that lets them leave while backward is still running.

The plan: backward completes gradients in about the reverse order of use. Parameters are taken in that order and put into
buckets of some megabytes. In a shard's buffers a bucket is a few pieces, mostly one.

The scheduler launches a bucket when its last gradient is complete, remembers what was launched, and finds the buckets whose
gradients were changed afterwards. How a bucket travels is the `launch` callback's business: a partial push to servers
(`pushes.py`), an all-reduce (`sums.py`) or Horovod's all-reduce with compression
(`horovod/gradient_buckets.py`).

    complete     a hook of backward says that a gradient is there; the bucket leaves once it has all
    launch_rest  at the end of the step: what has not left
    changed      launched buckets whose gradients were changed afterwards (clipped, unscaled, accumulated)
    start_over   the next step
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
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
    buckets = []
    for group in group_by_size(sized, limit):
        members = [places[index] for index in group]
        buckets.append(Bucket(tuple(group), tuple(_pieces(layout, shard, members) for shard in range(len(layout.shards)))))
    return buckets


def _pieces(layout: Layout, shard: int, places: Sequence[TensorPlace]) -> tuple[BufferRange, ...]:
    """The parts of these tensors that a shard holds, in bytes of its buffers, as few as there can be."""
    found = []
    for buffer, segment in enumerate(layout.shards[shard]):
        item = ITEM_SIZES[segment.dtype]
        for place in places:
            start, stop = max(place.start, segment.start), min(place.stop, segment.stop)
            if place.info.dtype == segment.dtype and start < stop:
                found.append(BufferRange(buffer, (start - segment.start) * item, (stop - segment.start) * item))
    result: list[BufferRange] = []
    for piece in sorted(found, key=lambda piece: (piece.buffer, piece.start)):
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


class BucketScheduler:
    """The buckets of one optimizer, given as the indices of their parameters.

    Args:
        buckets: For each bucket its parameters.
        launch: Lets a bucket travel.
        stamp: Something that differs once a parameter's gradient has changed.
        differs: An exact comparison of a bucket with what was launched. It replaces stamps where the way of travel keeps a
            copy: a clipped gradient that was small enough has another stamp and the same bytes, and one written through
            `.data` the same stamp and other bytes.
        in_order: Launch in the order of the buckets, whatever order backward takes: collectives need the same order on all
            ranks. Otherwise a bucket leaves as soon as it is complete, and again when all of it was completed again.
        hold_last: Leave the last bucket to `launch_rest`: nothing is left of backward to hide it behind.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        launch: Callable[[int], None],
        stamp: Callable[[int], object] = lambda index: None,
        *,
        in_order: bool,
        hold_last: bool = False,
        differs: Callable[[int], bool] | None = None,
    ) -> None:
        self._buckets = [tuple(bucket) for bucket in buckets]
        self._launch, self._stamp, self._in_order = launch, stamp, in_order
        self._differs = differs or (lambda number: self._stamps[number] != self._stamps_of(number))
        self._early = len(self._buckets) - hold_last  # buckets that may leave during backward
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self.start_over()

    def start_over(self) -> None:
        """Begin a step: no gradient is there, no bucket has left."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._stamps: dict[int, list[object]] = {}  # of the gradients of launched buckets, in the order of launching

    @property
    def launched(self) -> list[int]:
        """The buckets that have left, in order."""
        return list(self._stamps)

    def complete(self, index: int) -> None:
        """A gradient is complete; launch what has become ready."""
        number = self._bucket_of.get(index)
        if number is None:
            return
        self._missing[number].discard(index)
        if not self._in_order:
            if not self._missing[number]:
                self._missing[number].update(self._buckets[number])
                self._send(number)
            return
        while len(self._stamps) < self._early and not self._missing[len(self._stamps)]:
            self._send(len(self._stamps))

    def launch_rest(self) -> None:
        """Launch what has not left yet, in order, with the gradients as they are."""
        for number in range(len(self._buckets)):
            if number not in self._stamps:
                self._send(number)

    def changed(self) -> list[int]:
        """Launched buckets with a gradient that has changed since."""
        return [number for number in self._stamps if self._differs(number)]

    def _send(self, number: int) -> None:
        self._stamps[number] = self._stamps_of(number)
        self._launch(number)

    def _stamps_of(self, number: int) -> list[object]:
        return [self._stamp(index) for index in self._buckets[number]]
