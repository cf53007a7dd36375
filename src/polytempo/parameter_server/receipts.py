"""What a desk has received of each worker, and what it has answered: so that a loss is known, not guessed from silence.

A worker asks behind what it has sent, on the same connection, and is told behind what was sent to it. So what a desk does
not know was lost on the way here, and what it has answered and the worker does not have was lost on the way back.
Forgetting a receipt is safe: the worker then sends again, and the sequencer counts nothing twice.
"""

from __future__ import annotations

#: What was sent: "push", "read" or "pull", the track, and the step or request.
Key = tuple[str, str, int]

#: Receipts that are kept of one worker.
LIMIT = 1 << 12
#: In place of an answer's place in the log: there is no answer yet.
NOT_YET = -2


class Receipts:
    """The receipts of one shard, by worker and incarnation."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept: dict[tuple[int, int], dict[Key, int]] = {}  # with the place of the answer

    def received(self, worker: int, incarnation: int, key: Key) -> bool:
        """Something is here; False when it was here before."""
        kept = self._kept.setdefault((worker, incarnation), {})
        if key in kept:
            return False
        self._put(kept, key, NOT_YET)
        return True

    def answered(self, worker: int, incarnation: int, key: Key, place: int = -1) -> None:
        """Its answer goes out now."""
        self._put(self._kept.setdefault((worker, incarnation), {}), key, place)

    def _put(self, kept: dict[Key, int], key: Key, place: int) -> None:
        kept.pop(key, None)  # the newest stand last
        kept[key] = place
        if len(kept) > self._limit:
            del kept[next(iter(kept))]

    def state(self, worker: int, incarnation: int, key: Key) -> tuple[str, int]:
        """ "unknown", "received" or "answered", and the place of the answer."""
        place = self._kept.get((worker, incarnation), {}).get(key)
        if place is None:
            return "unknown", -1
        return ("received", -1) if place == NOT_YET else ("answered", place)

    def forget(self, worker: int, incarnation: int) -> None:
        """This life of a worker, and those before it, are over."""
        for known in [k for k in self._kept if k[0] == worker and k[1] <= incarnation]:
            del self._kept[known]
