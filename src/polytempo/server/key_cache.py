"""Lists of ids that workers name by their digest: filled in at the desk, so that nobody behind it knows of digests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polytempo.compression.key_cache import KeyReceiver
from polytempo.errors import PeerError
from polytempo.protocol.messages import Push
from polytempo.protocol.values import Keys
from polytempo.server.optimizer_state import as_bytes, as_tensor
from polytempo.server.shard_tables import row_buffers
from polytempo.transport.channel import Bytes

#: Bytes of lists that are kept for one worker.
LIMIT = 64 << 20


class Unknown(Exception):
    """A list is not here (any more): it must be sent in full."""


class KeyCache:
    """The lists that each worker has sent to this shard."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._lists: dict[int, KeyReceiver] = {}

    def forget(self, worker: int) -> None:
        """A worker is gone, or has come anew."""
        self._lists.pop(worker, None)

    def whole(self, push: Push, buffers: Sequence[Bytes]) -> tuple[list[Bytes], list[Bytes]]:
        """The dense buffers of a push, and those of its tables with every list of ids; `Unknown` when one is missing."""
        known = sum(self._key(keys).known for _, keys in _lists(push) if keys)
        count = row_buffers(push) - known
        if count > len(buffers):
            raise PeerError(f"a push was refused: {len(buffers)} buffers came, its tables alone need {count}")
        cut = len(buffers) - count
        rest = iter(buffers[cut:])
        result: list[Bytes] = []
        for part in push.rows:
            if part.span is None:
                result.append(self._filled(push.id.worker, part.keys, rest))
            result.append(next(rest))
        result += [self._filled(push.id.worker, want.keys, rest) for want in push.wants]
        return list(buffers[:cut]), result

    def _filled(self, worker: int, keys: Sequence[Keys], rest: Iterator[Bytes]) -> Bytes:
        return self.list_of(worker, self._key(keys) if keys else None, rest)

    def _key(self, keys: Sequence[Keys]) -> Keys:
        if self._shard >= len(keys):
            raise PeerError(f"a list of ids was refused: it names no digest for shard {self._shard}")
        return keys[self._shard]

    def list_of(self, worker: int, keys: Keys | None, rest: Iterator[Bytes]) -> Bytes:
        """One list: as it came, or as it came before."""
        if keys is None:
            return next(rest)
        lists = self._lists.setdefault(worker, KeyReceiver(LIMIT))
        if not keys.known:
            data = next(rest)
            if data.nbytes % 8:
                raise PeerError(f"a list of ids of {data.nbytes} bytes was refused; each has 8")
            lists.take(keys.digest, as_tensor(data, "int64"))
            return data
        ids = lists.find(keys.digest)
        if ids is None:
            raise Unknown
        return as_bytes(ids).copy()  # the memory of pushes is used again


def _lists(push: Push) -> Iterator[tuple[int, Sequence[Keys]]]:
    for part in push.rows:
        if part.span is None:
            yield part.table, part.keys
    for want in push.wants:
        yield want.table, want.keys
