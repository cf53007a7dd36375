"""Partial pushes: buckets travel to servers on other hosts while backward runs, and the push of `step()` commits them.

What is sent is a copy, since the gradient may change before `step()`. At `step()` the push names the buckets that count as
they were sent, and carries the rest: what was never sent, and what differs from the copy. A bucket that is sent again in the
same step replaces the one before. A lost bucket is a lost push: the whole push is sent again.

Buckets of parameters on a GPU are sent at the beginning of `step()`, as they arrive (`device_exchange.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from polytempo.client.client import Client
from polytempo.client.client_state import PartlySent
from polytempo.profile_ranges import profiled
from polytempo.protocol.layout import Layout
from polytempo.protocol.messages import PartialPush
from polytempo.protocol.values import BufferRange, PushId, SentBucket
from polytempo.reducer.buckets import Bucket, BucketScheduler, plan_buckets, rest_of
from polytempo.reducer.device_exchange import GpuBuckets
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.transport.channel import Bytes

#: Bytes of a bucket.
LIMIT = 4 << 20


@dataclass
class BucketSend:
    """A copy of a bucket that was sent: for each shard its pieces."""

    serial: int
    copies: list[list[Bytes]]


class PartialPushes:
    """The buckets of one optimizer; `identity` names the push that they belong to."""

    def __init__(
        self,
        client: Client,
        layout: Layout,
        buffer: FlatBuffer,
        params: Sequence[int],
        identity: Callable[[], PushId],
        gpu: GpuBuckets | None = None,
    ) -> None:
        self._client, self._layout, self._buffer, self._identity = client, layout, buffer, identity
        self._gpu = gpu
        self._observed: list[int] | None = []  # the order of the first backward; None once it was used
        self._serial = 0
        self._plan([place.index for place in layout.places if place.index in params][::-1])

    def _plan(self, order: Sequence[int]) -> None:
        self._buckets: list[Bucket] = plan_buckets(self._layout, order, LIMIT)
        self._sent: dict[int, BucketSend] = {}
        params = [bucket.params for bucket in self._buckets]
        self._scheduler = BucketScheduler(params, self._launch, in_order=False, differs=self._differs)

    def complete(self, index: int) -> None:
        """A gradient is in the flat buffer; its bucket is sent when it is the last of it."""
        if self._observed is not None and index not in self._observed:
            self._observed.append(index)
        self._scheduler.complete(index)

    def _launch(self, number: int) -> None:
        if self._gpu is None:
            self._send(number)
        else:
            self._gpu.stage(number, self._buckets[number].params)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in it."""
        return 0 if self._gpu is None else self._gpu.device_bytes

    @property
    def on_gpu(self) -> bool:
        """Are gradients taken by `gather`?"""
        return self._gpu is not None

    def gather(self) -> tuple[int, ...]:
        """Of parameters on a GPU: send the buckets that have left it, and take all gradients as they are now."""
        assert self._gpu is not None
        for number in self._gpu.arrived():
            self._send(number)
        return self._gpu.settle()

    def _send(self, number: int) -> None:
        with profiled("push bucket", number):
            self._serial += 1
            pieces = self._buckets[number].pieces
            now = [[self._now(shard, piece) for piece in of_shard] for shard, of_shard in enumerate(pieces)]
            # What has left a GPU is a copy already.
            copies = now if self._gpu is not None else [[one.copy() for one in of_shard] for of_shard in now]
            self._sent[number] = BucketSend(self._serial, copies)
            for shard, buffers in enumerate(copies):
                if buffers:
                    message = PartialPush(id=self._identity(), bucket=number, serial=self._serial, pieces=pieces[shard])
                    self._client.send(shard, message, buffers)

    def _now(self, shard: int, piece: BufferRange) -> Bytes:
        return self._buffer.parts[shard][piece.buffer][piece.start : piece.stop]

    def commit(self) -> list[PartlySent]:
        """For each shard: the buckets that count as they were sent, and the pieces that go now, with their bytes."""
        changed = set(self._scheduler.changed()) if self._gpu is None else self._gpu.changed
        good = [number for number in self._sent if number not in changed]
        result = []
        for shard in range(len(self._layout.shards)):
            committed = [n for n in good if self._buckets[n].pieces[shard]]
            rest = rest_of(self._layout, shard, [p for n in committed for p in self._buckets[n].pieces[shard]])
            names = tuple(SentBucket(number, self._sent[number].serial) for number in committed)
            result.append((names, rest, [self._now(shard, piece) for piece in rest]))
        self.start_over()
        return result

    def _differs(self, number: int) -> bool:
        copies = self._sent[number].copies
        return not all(
            numpy.array_equal(copy, self._now(shard, piece))
            for shard, of_shard in enumerate(self._buckets[number].pieces)
            for piece, copy in zip(of_shard, copies[shard], strict=True)
        )

    def start_over(self) -> None:
        """The next step's buckets; after the first backward, in the order it had. What was sent and not committed counts
        for nothing."""
        if self._observed:
            known = [index for bucket in self._buckets for index in bucket.params]
            self._plan(self._observed + [index for index in known if index not in self._observed])
            self._observed = None
        self._sent.clear()
        self._scheduler.start_over()
        if self._gpu is not None:
            self._gpu.start_over()
