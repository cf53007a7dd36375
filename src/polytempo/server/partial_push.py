"""Buckets that came ahead of their push, and the push put together from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polytempo.errors import PeerError
from polytempo.protocol.messages import PartialPush, Push
from polytempo.protocol.values import BufferRange
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes

#: (track, worker, incarnation, bucket)
PartialKey = tuple[str, int, int, int]


class PartialPushes:
    """The newest of each bucket of each worker: at most one model a worker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[PartialKey, tuple[PartialPush, list[Bytes]]] = {}

    def keep(self, staged: PartialPush, buffers: list[Bytes]) -> None:
        """A bucket is here; what came of it before is out of date."""
        if [piece.stop - piece.start for piece in staged.pieces] != [buffer.nbytes for buffer in buffers]:
            raise PeerError("a bucket was refused: its pieces are not as long as it says")
        identity = staged.id
        self._drop((identity.track, identity.worker, identity.incarnation, staged.bucket))
        self._kept[identity.track, identity.worker, identity.incarnation, staged.bucket] = staged, buffers

    def assemble(self, push: Push, buffers: list[Bytes], sizes: Sequence[int]) -> list[Bytes] | None:
        """The push as if it had come whole; None when a bucket it counts on is not here."""
        if not push.staged and not push.patches:
            return buffers
        found = list(self._found(push))
        if len(found) < len(push.staged):
            return None
        pairs = [(piece, data) for staged, parts in found for piece, data in zip(staged.pieces, parts, strict=True)]
        if len(push.patches) != len(buffers):
            raise PeerError("a push was refused: it has more pieces than it names, or fewer")
        pairs += zip(push.patches, buffers, strict=True)
        if sum(data.nbytes for _, data in pairs) != sum(sizes):
            raise PeerError(f"a push was refused: its pieces do not add up to the {sum(sizes)} bytes of this shard")
        whole = [self._pool.take(size) for size in sizes]
        for piece, data in pairs:
            self._put(whole, piece, data)
        for data in buffers:
            self._pool.give(data)
        for bucket in push.staged:
            self._drop((push.id.track, push.id.worker, push.id.incarnation, bucket.number))
        return whole

    def _found(self, push: Push) -> Iterator[tuple[PartialPush, list[Bytes]]]:
        for bucket in push.staged:
            kept = self._kept.get((push.id.track, push.id.worker, push.id.incarnation, bucket.number))
            if kept is not None and kept[0].serial == bucket.serial and kept[0].id == push.id:
                yield kept

    def _put(self, whole: list[Bytes], piece: BufferRange, data: Bytes) -> None:
        fits = 0 <= piece.buffer < len(whole) and 0 <= piece.start <= piece.stop <= whole[piece.buffer].nbytes
        if not fits or data.nbytes != piece.stop - piece.start:
            raise PeerError("a push was refused: a piece of it lies outside this shard")
        whole[piece.buffer][piece.start : piece.stop] = data

    def _drop(self, key: PartialKey) -> None:
        for buffer in self._kept.pop(key, (None, []))[1]:
            self._pool.give(buffer)

    def forget(self, worker: int, incarnation: int) -> None:
        """A worker is gone."""
        for key in [key for key in self._kept if key[1] == worker and key[2] <= incarnation]:
            self._drop(key)
