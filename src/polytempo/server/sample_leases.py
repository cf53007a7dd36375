"""Leases of samples, at the sequencer: in `anytime` each worker takes as many as it manages (`sync/sample_queue.py`).

    lease      a worker asks for places of an epoch's order: it gets what it needs now, and more ahead while there is much
               left, so that near the end of an epoch no slow worker holds what fast ones could take
    applied    the places of an applied push are done
    discarded  those of a discarded push return to the queue, and so does what its worker gives back
    left       all that a worker held returns, but for what is in pushes that are counted and still to be applied

An epoch that is gone through several times without `set_epoch` has a queue for each *turn*: a worker asks for the next turn
once it was told that nothing is left of one. What returns after that is leased first in the next turn, or by a worker that
asks for an earlier epoch: each answer names those that have such places. A job that goes on from a checkpoint asks for what
is left of the epoch before, too. A push does not name the turn: it is of the first
in which its worker holds the places. What earlier jobs have done of an epoch is left out by the samplers: places are of what
they have left (`train/epoch_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polytempo.protocol.messages import LeaseSamples, Push, SamplesLeased
from polytempo.protocol.values import Position
from polytempo.sync.sample_queue import Range, SampleQueue, without

#: A worker holds at most this part of what is left for each worker, beyond what it needs now.
AHEAD = 4
#: Epochs of a sampler whose queues are kept: what returns late is leased to workers that ask for an earlier epoch.
EPOCHS = 4

#: Sampler, epoch, turn.
QueueKey = tuple[str, int, int]


class SampleLeases:
    """The queues of all samplers.

    Args:
        size: The number of workers.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._queues: dict[QueueKey, SampleQueue] = {}
        self._begun: set[tuple[str, int]] = set()  # samplers and epochs that places were leased of
        self._last: dict[int, SamplesLeased] = {}  # the last answer to each worker, which may be lost on its way

    def lease(self, worker: int, asked: LeaseSamples) -> SamplesLeased:
        """What a worker gets; asked again, the same."""
        last = self._last.get(worker)
        if last is not None and last.request == asked.request:
            return last
        for queue, ranges in self._held(worker, [Position(asked.epoch, 0, asked.sampler, done=asked.back)]):
            queue.give_back(worker, ranges)
        for queue, ranges in self._held(worker, [Position(asked.epoch, 0, asked.sampler, done=asked.done)]):
            queue.finish(worker, ranges)
        taken = self._take(worker, asked) if asked.count else []
        earlier = tuple(self._earlier(asked.sampler, asked.epoch))
        answer = self._last[worker] = SamplesLeased(request=asked.request, ranges=tuple(taken), earlier=earlier)
        return answer

    def _take(self, worker: int, asked: LeaseSamples) -> list[Range]:
        """What has returned of earlier turns comes first: their order is the same."""
        key = asked.sampler, asked.epoch
        own = [] if asked.turn < 0 and key in self._begun else [self._queue(*key, max(asked.turn, 0), asked.length)]
        turns = sorted(k for k in self._queues if k[:2] == key and (asked.turn < 0 or k[2] < asked.turn))
        queue = next((queue for queue in [*(self._queues[k] for k in turns), *own] if queue.left), None)
        if queue is None:
            return []
        ahead = min(asked.ahead, queue.left // (AHEAD * self._size)) // asked.count
        return queue.take(worker, (1 + ahead) * asked.count)

    def _earlier(self, sampler: str, epoch: int) -> list[int]:
        """Epochs before this one of which places have returned."""
        mine = [(key, queue) for key, queue in self._queues.items() if key[0] == sampler and key[1] < epoch]
        return sorted({key[1] for key, queue in mine if queue.left})

    def _queue(self, sampler: str, epoch: int, turn: int, length: int) -> SampleQueue:
        key = (sampler, epoch, turn)
        if key not in self._queues:
            self._queues[key] = SampleQueue(length)
            self._begun.add((sampler, epoch))
            for old in [k for k in self._queues if k[0] == sampler and k[1] <= epoch - EPOCHS]:
                del self._queues[old]
        return self._queues[key]

    def applied(self, push: Push) -> None:
        """A push was applied."""
        for queue, ranges in self._held(push.id.worker, push.positions):
            queue.finish(push.id.worker, ranges)

    def discarded(self, push: Push) -> None:
        """A push was discarded or refused."""
        for queue, ranges in self._held(push.id.worker, push.positions):
            queue.give_back(push.id.worker, ranges)

    def left(self, worker: int, pending: Iterable[Push]) -> None:
        """A worker is gone, and these of its pushes are still to be applied."""
        self._last.pop(worker, None)
        kept: dict[int, list[Range]] = {}
        for push in pending:
            for queue, ranges in self._held(worker, push.positions) if push.id.worker == worker else ():
                kept.setdefault(id(queue), []).extend(ranges)
        for queue in self._queues.values():
            queue.give_back(worker, without(queue.held(worker), kept.get(id(queue), ())))

    def _held(self, worker: int, positions: Sequence[Position]) -> list[tuple[SampleQueue, list[Range]]]:
        """The queues from which a worker has these places, and which of them."""
        found = []
        for position in positions:
            left: Sequence[Range] = position.done
            for key in sorted(key for key in self._queues if key[:2] == (position.sampler, position.epoch)):
                here = self._queues[key].held(worker, left)
                if here:
                    found.append((self._queues[key], here))
                    left = without(left, here)
        return found
