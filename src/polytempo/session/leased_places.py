"""The places of the data that a worker has leased and not handed out yet (`server/sample_leases.py`).

A few micro-batches are leased at a time, so that not every draw is a message. The sequencer gives less ahead near the end of
an epoch. What was leased and not handed out goes back when the worker turns to another epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from polytempo.client.client import Client
from polytempo.protocol.messages import LeaseSamples, SamplesLeased
from polytempo.protocol.values import Position
from polytempo.session.dealing import united
from polytempo.sync.sample_queue import Range

#: Micro-batches that are leased ahead of the one that is needed.
AHEAD = 3


class LeasedPlaces:
    """What one worker has leased, of all its samplers.

    Args:
        client: Its connection to the sequencer.
        lock: Taken while the client is used.
    """

    def __init__(self, client: Client, lock: threading.RLock) -> None:
        self._client, self._lock = client, lock
        self._requests = 0
        self._stock: dict[tuple[str, int], list[Range]] = {}  # by sampler and epoch
        self._lengths: dict[tuple[str, int], int] = {}
        self._turns: dict[tuple[str, int], int] = {}  # how often the end of an epoch was reached

    def take(self, sampler: str, epoch: int, length: int, count: int) -> list[Range]:
        """Lease up to this many places; none where nothing is left for now: the next call asks for the epoch's next turn."""
        key = sampler, epoch
        with self._lock:
            self._turn_to(key, length)
            stock = self._stock.setdefault(key, [])
            missing = count - _size(stock)
            if missing > 0:
                stock += self._ask(key, missing, AHEAD * count).ranges
            taken, self._stock[key] = _split(stock, count)
            if not taken:
                self._turns[key] = self._turns.get(key, 0) + 1
            return taken

    def take_returned(self, sampler: str, epoch: int, length: int, count: int) -> list[Range]:
        """Lease up to this many places of an epoch that was gone through before: what has returned of it."""
        with self._lock:
            self._lengths.setdefault((sampler, epoch), length)
            return list(self._ask((sampler, epoch), count, 0, returned=True).ranges)

    def earlier(self, sampler: str, epoch: int, length: int) -> tuple[int, ...]:
        """Epochs before this one of which places have returned to the queue since all workers came to their end."""
        with self._lock:
            self._turn_to((sampler, epoch), length)
            return self._ask((sampler, epoch), 0, 0).earlier

    def give_back(self, positions: Iterable[Position], looked_at: Iterable[Position] = ()) -> None:
        """Places that were handed out and will not be trained on by this worker; `looked_at`: by none, in this turn."""
        with self._lock:
            for position in united(positions):
                self._ask(self._key(position), 0, 0, back=position.done)
            for position in united(looked_at):
                self._ask(self._key(position), 0, 0, done=position.done)

    def _key(self, position: Position) -> tuple[str, int]:
        key = position.sampler, position.epoch
        self._lengths.setdefault(key, position.length)
        return key

    def _turn_to(self, key: tuple[str, int], length: int) -> None:
        """Give back what is left of the sampler's other epochs."""
        self._lengths[key] = length
        for other in [other for other in self._stock if other[0] == key[0] and other != key]:
            if stock := self._stock.pop(other):
                self._ask(other, 0, 0, back=tuple(stock))

    def _ask(self, key: tuple[str, int], count: int, ahead: int, returned: bool = False, **more: Any) -> SamplesLeased:
        self._requests += 1
        turn = -1 if returned else self._turns.get(key, 0)
        place: dict[str, Any] = {"sampler": key[0], "epoch": key[1], "length": self._lengths[key], "turn": turn}
        return self._client.lease(LeaseSamples(request=self._requests, count=count, ahead=ahead, **place, **more))


def _size(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _split(ranges: list[Range], count: int) -> tuple[list[Range], list[Range]]:
    """The first places of these ranges, as many as `count`, and the rest."""
    first: list[Range] = []
    for index, (start, stop) in enumerate(ranges):
        if stop - start > count:
            return [*first, *([(start, start + count)] if count else [])], [(start + count, stop), *ranges[index + 1 :]]
        first.append((start, stop))
        count -= stop - start
    return first, []
