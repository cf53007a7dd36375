"""Between hosts: buckets are sent while backward runs, and `step()` commits them.

What is sent is a copy, so that a gradient that is changed afterwards (clipped, unscaled, accumulated) is told from what
went: at `step()` the copy is compared with the bucket as it is now; what differs, and what was never sent, goes with the
push. A bucket that is sent again in the same step replaces the one before. A lost bucket is a lost push: it is sent again
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from polytempo.client.client import Client
from polytempo.client.client_state import PartlySent
from polytempo.protocol.layout import Layout
from polytempo.protocol.messages import PartialPush
from polytempo.protocol.values import BufferRange, PushId, SentBucket
from polytempo.reducer.buckets import Bucket, plan_buckets, rest_of
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.transport.channel import Bytes

#: Bytes of a bucket.
LIMIT = 4 << 20


@dataclass
class BucketSend:
    """A copy of a bucket on its way: for each shard its pieces."""

    serial: int
    copies: list[list[Bytes]]


class BucketOverlap:
    """The buckets of one track."""

    def __init__(self, client: Client, layout: Layout, flat: FlatBuffer, params: Sequence[int]) -> None:
        self._client, self._layout, self._flat = client, layout, flat
        places = [place.index for place in layout.places if place.index in params]
        self._plan(places[::-1])
        self._seen: list[int] | None = []  # the order of the first backward; None once it was used
        self._serial = 0

    def _plan(self, order: Sequence[int]) -> None:
        self._buckets: list[Bucket] = plan_buckets(self._layout, order, LIMIT)
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.params}
        self._waiting = [set(bucket.params) for bucket in self._buckets]
        self._sent: dict[int, BucketSend] = {}

    def complete(self, index: int, identity: PushId) -> None:
        """A gradient is in the bucket; when it is the last of it, the bucket is sent."""
        if self._seen is not None and index not in self._seen:
            self._seen.append(index)
        number = self._bucket_of[index]
        self._waiting[number].discard(index)
        if not self._waiting[number]:
            self._waiting[number] = set(self._buckets[number].params)
            self._send(number, identity)

    def _send(self, number: int, identity: PushId) -> None:
        self._serial += 1
        pieces = self._buckets[number].pieces
        copies = [[self._now(shard, p).copy() for p in of_shard] for shard, of_shard in enumerate(pieces)]
        self._sent[number] = BucketSend(self._serial, copies)
        for shard, buffers in enumerate(copies):
            if buffers:
                message = PartialPush(id=identity, bucket=number, serial=self._serial, pieces=pieces[shard])
                self._client.stage(shard, message, buffers)

    def _now(self, shard: int, piece: BufferRange) -> Bytes:
        return self._flat.parts[shard][piece.buffer][piece.start : piece.stop]

    def commit(self) -> list[PartlySent]:
        """For each shard: the buckets that count as they were sent, and the pieces that go now, with their bytes."""
        good = [number for number in self._sent if self._is_unchanged(number)]
        result = []
        for shard in range(len(self._layout.shards)):
            staged = [n for n in good if self._buckets[n].pieces[shard]]
            rest = rest_of(self._layout, shard, [p for n in staged for p in self._buckets[n].pieces[shard]])
            names = tuple(SentBucket(number, self._sent[number].serial) for number in staged)
            result.append((names, rest, [self._now(shard, piece) for piece in rest]))
        self._begin_again()
        return result

    def drop(self) -> None:
        """The step was skipped: what was sent for it counts for nothing."""
        self._begin_again()

    def _is_unchanged(self, number: int) -> bool:
        copies = self._sent[number].copies
        return all(
            numpy.array_equal(copy, self._now(shard, piece))
            for shard, of_shard in enumerate(self._buckets[number].pieces)
            for piece, copy in zip(of_shard, copies[shard], strict=True)
        )

    def _begin_again(self) -> None:
        """The next step's buckets; after the first backward, in the order it had."""
        if self._seen:
            known = [index for bucket in self._buckets for index in bucket.params]
            self._plan(self._seen + [index for index in known if index not in self._seen])
            self._seen = None
        self._sent.clear()
        self._waiting = [set(bucket.params) for bucket in self._buckets]
