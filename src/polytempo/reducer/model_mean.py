"""A worker's model among those of others: as a message, in a sum of several, and the mean of all.

A message is the values of all parameters and their push-sum weight:

    values of each dtype, one flat tensor after another | weight and mark (float64)

The mark says what the message is for, where its tag does not. A cast ("bf16", "fp16") sends wider values in two bytes each.
A sender knows what its neighbours got: the message itself. It takes exactly that away from its own values, so that rounding
moves no mass.

The sum that a worker mixes in a step is x = P_ii x_i + sum of P_ij x_j, and the push-sum weight alike; the model is x / w.
Parts are added in the order of ranks, the worker's own among them, so that workers which mix the same parts at the same
weights get the same bits. Halves (float16, bfloat16) are added up in float32. What left this worker is taken away as it was
sent: after a cast x_i - sum of P_ji q_i, where q_i is the message, so that sums over all workers are kept.

The mean of all models is for the one worker that asks:

    read        a worker asks all others for their (x, w); each answers from a thread with the values of its last finished
                step. The mean is the sum of x over the sum of w. Nothing changes by it, so one worker may look alone.
                In `gossip`, where steps have an order, a worker that is behind the asker answers when it has caught up, or
                after `PATIENCE`: so if all look after the same step, all see the mean of that step
    hand over   a worker that finishes gives its (x, w) to the lowest rank that is there, which takes them into its own in
                its next step: sums over all workers are kept. From then on it has weight 0

Values travel in full for both, whatever cast the steps use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from polytempo.compression.chain import CASTS
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.peer_messages import LAST_WORDS, NeighbourLinks, RequestService
from polytempo.reducer.sums import aligned
from polytempo.server.pull_compression import Flats
from polytempo.transport.deadline import Deadline

#: Bytes behind the values of a message: a weight, and a mark.
TRAILER = 16
#: A weight as close to 1 as this is 1: sums of rounded shares are not quite, and then nothing is divided.
CLOSE = 1e-12
#: Tags of messages: steps are counted from 0.
FIRST_VALUES, READ, ANSWER, HAND_OVER, AVERAGE = -1, -2, -3, -4, -5
#: Seconds in which a worker that is behind the asker may catch up, before it answers as it is.
PATIENCE = 2.0


class ModelMessage:
    """Memory for one message, used again and again. `cast`: a name of `CASTS`, or empty."""

    def __init__(self, layout: Layout, cast: str = "") -> None:
        kinds: dict[str, torch.dtype] = {dtype: getattr(torch, dtype) for dtype in layout.sizes}
        if cast:
            kinds |= {dtype: CASTS[cast] for dtype in layout.sizes if ITEM_SIZES[dtype] > CASTS[cast].itemsize}
        starts, size = {}, 0
        for dtype, length in layout.sizes.items():
            starts[dtype] = size = aligned(size)
            size += length * kinds[dtype].itemsize
        size = -(-size // TRAILER) * TRAILER
        self.data = torch.zeros(size + TRAILER, dtype=torch.uint8)  #: what is sent
        self.flats: Flats = {
            dtype: self.data[start : start + layout.sizes[dtype] * kinds[dtype].itemsize].view(kinds[dtype])
            for dtype, start in starts.items()
        }
        self._trailer = self.data[size:].view(torch.float64)

    @property
    def weight(self) -> float:
        """The push-sum weight of these values."""
        return float(self._trailer[0])

    @property
    def mark(self) -> int:
        """What the message is for."""
        return int(self._trailer[1])

    @mark.setter
    def mark(self, mark: int) -> None:
        self._trailer[1] = mark

    def fill(self, values: Flats, weight: float, mark: int = 0) -> None:
        """Take these values, cast where that is to be."""
        for dtype, flat in self.flats.items():
            if flat.data_ptr() != values[dtype].data_ptr():  # else they lie in here
                flat.copy_(values[dtype])
        self._trailer[0], self._trailer[1] = weight, mark

    def add(self, other: ModelMessage) -> None:
        """Add values and weight of another."""
        for dtype, flat in self.flats.items():
            flat.add_(other.flats[dtype])
        self._trailer[0] += other.weight


#: Fills a message with this worker's x and w. Called under the lock.
FillMessage = Callable[[ModelMessage], None]


class MixingSum:
    """Adds up the parts of one step, into the memory of `target` where its dtype allows."""

    def __init__(self, target: FlatBuffer) -> None:
        self._target = target
        self._total: Flats = {
            dtype: flat if flat.element_size() > 2 else torch.empty_like(flat, dtype=torch.float32)
            for dtype, flat in target.tensors.items()
        }
        self.start()

    def start(self) -> None:
        """Begin with nothing."""
        self.weight, self._empty = 0.0, True

    def add(self, values: Flats, weight: float, share: float) -> None:
        """Add a share of these values and of their weight."""
        for dtype, total in self._total.items():
            if not self._empty:
                total.add_(values[dtype], alpha=share)
            elif values[dtype].dtype == total.dtype:
                torch.mul(values[dtype], share, out=total)
            else:
                total.copy_(values[dtype]).mul_(share)
        self.weight, self._empty = self.weight + share * weight, False

    def finish(self) -> float:
        """Make `target` the model; the weight of its values."""
        if abs(self.weight - 1.0) <= CLOSE:
            self.weight = 1.0
        for dtype, total in self._total.items():
            if self.weight != 1.0:
                total.div_(self.weight)
            if total is not self._target.tensors[dtype]:
                self._target.tensors[dtype].copy_(total)
        self._target.changed_all()
        return self.weight


@dataclass(frozen=True, eq=False)
class Waiting:
    """A rank that has asked for a step which this worker has not made yet."""

    rank: int
    step: int
    patience: Deadline


class ModelMean:
    """What one worker asks of all, and tells them. `lock` guards the values that are told."""

    def __init__(self, links: NeighbourLinks, layout: Layout, fill: FillMessage) -> None:
        self._links, self._layout, self._fill = links, layout, fill
        self.lock = threading.Lock()
        self.service = RequestService(links)
        self.finished: int | None = None  #: steps this worker has finished, where others wait for them
        self.left = False  #: it has handed its values over
        self._looking = False  # at the mean
        self._asked = torch.zeros(1, dtype=torch.int64)
        self._gift = ModelMessage(layout)
        self._estates: list[tuple[int, ModelMessage]] = []  # handed over, by whom, and not in this worker's values yet
        self._givers: set[int] = set()
        self._came = threading.Condition(self.lock)
        self._later: list[Waiting] = []
        self.service.tick = self._tick
        self.service.on(READ, self._asked, self._read)
        self.service.on(HAND_OVER, self._gift.data, self._accept)

    # Telling.

    def _read(self, source: int) -> None:
        with self.lock:
            step = int(self._asked[0])
            waits = not (self.left or self._looking) and self.finished is not None and self.finished < step
            if waits:
                self._later.append(Waiting(source, step, Deadline(self._links.rank, PATIENCE, firm=True)))
        if not waits:
            self._tell(source)

    def _tell_waiting(self, is_due: Callable[[Waiting], bool]) -> None:
        """Answer those that wait for this worker to make more steps, if they are to wait no longer."""
        with self.lock:
            due = [waiting for waiting in self._later if is_due(waiting)]
            self._later = [waiting for waiting in self._later if waiting not in due]
        for waiting in due:
            self._tell(waiting.rank)

    def _tick(self) -> bool:
        """Answer those that have waited for too long; is there another?"""
        if self._later:
            self._tell_waiting(lambda waiting: waiting.patience.over)
        return bool(self._later)

    def _tell(self, rank: int) -> None:
        message = ModelMessage(self._layout)
        with self.lock:
            self._fill_all(message)
        self._links.send(message.data, [rank], ANSWER)

    def _fill_all(self, message: ModelMessage, without: Sequence[int] = ()) -> None:
        """Fill a new message with this worker's values, and what was handed over to it; once it has left, with nothing.
        `without`: ranks whose values are known."""
        if self.left:
            return
        self._fill(message)
        for giver, estate in self._estates:
            if giver not in without:
                message.add(estate)

    def finish_step(self, steps: int) -> None:
        """This worker has made this number of steps: answer those that waited for it."""
        self.finished = steps
        if self._later:
            self._tell_waiting(lambda waiting: waiting.step <= steps)

    # Asking.

    def load(self, members: list[int], steps: int, target: FlatBuffer) -> None:
        """Make `target` the mean of all models.

        Args:
            members: The workers of the job, those that have left among them.
            steps: The steps that this worker has made.
            target: Receives the mean.

        Raises:
            PeerError: A worker that is there has not answered; the error names it.
        """
        self._looking = True
        self._tell_waiting(lambda _: True)  # it will not make a step before it has looked
        others = [rank for rank in members if rank != self._links.rank]
        there = [rank for rank in others if not self._links.is_gone(rank)]
        request, answer = torch.tensor([steps]), ModelMessage(self._layout)
        self._links.settle(self._links.send(request, there, READ))
        total = MixingSum(target)
        for rank in list(there):
            if not self._links.receive(answer.data, rank, ANSWER):
                answer = ModelMessage(self._layout)  # should its answer come after all, it must not be written over another
                there.remove(rank)
            elif answer.weight:
                total.add(answer.flats, answer.weight, 1.0)
            else:
                there.remove(rank)  # it has just handed its values over
        self._await_gifts([rank for rank in others if rank not in there], there)
        own = ModelMessage(self._layout)
        with self.lock:
            self._fill_all(own, without=there)  # some may have left since they answered
            self._looking = False
        total.add(own.flats, own.weight, 1.0)
        total.finish()

    def _await_gifts(self, gone: list[int], there: list[int]) -> None:
        """Workers that left since the last step have handed over to the lowest rank: what they sent is accepted soon."""
        if there and min(there) < self._links.rank:
            return
        deadline = Deadline(self._links.rank, LAST_WORDS, firm=True)
        with self._came:
            while not deadline.over and any(not self._links.has_crashed(rank) for rank in gone if rank not in self._givers):
                self._came.wait(deadline.until_next_look)

    # Handing over.

    def _accept(self, source: int) -> None:
        estate = ModelMessage(self._layout)
        estate.fill(self._gift.flats, self._gift.weight, self._gift.mark)
        with self._came:
            self._estates.append((source, estate))
            self._givers.add(source)
            self._came.notify_all()

    def inherit(self, step: int) -> ModelMessage | None:
        """What workers handed over that did not make this step: it belongs to this worker's values from now on. The caller
        holds the lock."""
        due = [estate for _, estate in self._estates if estate.mark <= step]
        self._estates = [(giver, estate) for giver, estate in self._estates if estate.mark > step]
        for estate in due[1:]:
            due[0].add(estate)
        return due[0] if due else None

    def leave(self, members: list[int], steps: int) -> None:
        """This worker has finished after this number of steps: give its values to the lowest rank that is there. Stop the
        service afterwards."""
        there = [rank for rank in sorted(members) if rank != self._links.rank and not self._links.is_gone(rank)]
        message = ModelMessage(self._layout)
        with self.lock:
            self._fill_all(message)
            message.mark = steps
            self.left = True
            later, self._later = self._later, []
        sending = self._links.send(message.data, there[:1], HAND_OVER)
        for waiting in later:
            self._tell(waiting.rank)
        self._links.settle(sending)
