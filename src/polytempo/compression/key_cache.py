"""Key caching (Li et al., OSDI 2014): a list of ids that was sent before is sent as a digest of eight bytes.

Both sides keep the lists that they used last, up to a limit of bytes. The sender goes by its own: a list that it still has
was sent before. If one side drops a list first, that only costs a miss: the receiver reports it, the sender drops the digest
and sends the list. With equal limits and messages in order there are no misses.

Where this departs from the paper: the sender compares the whole list, not only its digest. Two lists with one digest are
then sent in full, each in its turn, and are never taken for each other.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch

from polytempo.errors import PeerError, UsageError

#: What a list costs beside its ids, so that many short ones are bounded too.
OVERHEAD = 128


def digest_of(ids: torch.Tensor) -> int:
    """A number of 64 bits that tells lists apart."""
    return int.from_bytes(hashlib.blake2b(ids.contiguous().numpy(), digest_size=8).digest(), "little")


class KeyLists:
    """Lists of ids by their digests; the least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise UsageError(f"expected a limit of at least 0 bytes for lists of keys, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._lists: OrderedDict[int, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lists)

    def get(self, digest: int) -> torch.Tensor | None:
        """The list, which counts as used now."""
        if digest not in self._lists:
            return None
        self._lists.move_to_end(digest)
        return self._lists[digest]

    def put(self, digest: int, ids: torch.Tensor) -> None:
        """Keep a copy; a list above the limit is not kept, and pushes nothing out."""
        self.drop(digest)
        if _cost(ids) > self.limit_bytes:
            return
        self._lists[digest] = ids.clone()
        self.nbytes += _cost(ids)
        while self.nbytes > self.limit_bytes:
            self.drop(next(iter(self._lists)))

    def drop(self, digest: int) -> None:
        """Forget a list, if it is there."""
        ids = self._lists.pop(digest, None)
        if ids is not None:
            self.nbytes -= _cost(ids)


def _cost(ids: torch.Tensor) -> int:
    return int(ids.numel()) * 8 + OVERHEAD


class KeySender:
    """The side that has lists to send. One for each receiver."""

    def __init__(self, limit_bytes: int) -> None:
        self.lists = KeyLists(limit_bytes)

    def offer(self, ids: torch.Tensor) -> tuple[int, bool]:
        """The digest of a list, and whether it will do; if not, the list must go with it."""
        if not _is_list(ids):
            raise UsageError(f"expected a flat int64 tensor of ids on the CPU, got {list(ids.shape)} {ids.dtype}")
        digest = digest_of(ids)
        before = self.lists.get(digest)
        known = before is not None and torch.equal(before, ids)
        if not known:
            self.lists.put(digest, ids)
        return digest, known

    def forget(self, digest: int) -> None:
        """The receiver does not have it: the next offer will say so."""
        self.lists.drop(digest)


class KeyReceiver:
    """The side that is sent lists. One for each sender."""

    def __init__(self, limit_bytes: int) -> None:
        self.lists = KeyLists(limit_bytes)

    def take(self, digest: int, ids: torch.Tensor) -> torch.Tensor:
        """Keep a list that came with its digest, and give it back."""
        if not _is_list(ids):
            raise PeerError(f"expected a flat int64 tensor of ids, got {list(ids.shape)} {ids.dtype}")
        right = digest_of(ids)
        if digest != right:
            raise PeerError(f"expected the digest {right:016x} with a list of {ids.numel()} ids, got {digest:016x}")
        self.lists.put(digest, ids)
        return ids

    def find(self, digest: int) -> torch.Tensor | None:
        """The list, not to be changed; None is a miss, which is reported to the sender."""
        return self.lists.get(digest)


def _is_list(ids: torch.Tensor) -> bool:
    return bool(ids.dtype == torch.int64 and ids.dim() == 1 and ids.device.type == "cpu")
