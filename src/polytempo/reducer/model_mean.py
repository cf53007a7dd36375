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

`NeighbourLinks` send and receive in the background, by rank and tag, over the links of the world. A rank that is gone ends
every wait for it: its link has closed, or the sequencer has said that it left (a link between hosts may stay open for a
while after its process has died). What it had sent before its link closed is still received. A rank that is there and does
not take or bring what is due is reported by name after a while, and is an error after `LONGEST`.

`RequestService` answers other workers at any time, while the worker itself computes: one thread for all kinds of requests of
an optimizer. It must have ended before the process does: the interpreter's end would abort it inside of torch.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from polytempo.collectives.point_to_point import listen, receive, send
from polytempo.collectives.tasks import Task
from polytempo.compression.chain import CASTS
from polytempo.errors import PeerError, RankLost
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.sums import aligned, traffic_of
from polytempo.server.optimizer_state import Flats
from polytempo.session.session import Session
from polytempo.transport.deadline import Deadline

#: Seconds in which a message must come through, once it is on its way.
LONGEST = 600.0
#: Seconds in which what a rank has sent may still come, once the sequencer has said that it is gone.
LAST_WORDS = 3.0
#: Seconds between two calls of `tick`, while it asks for them.
TICK = 0.2
#: Messages on their way, and to which rank.
Sending = list[tuple[int, Task]]
#: Bytes behind the values of a message: a weight, and a mark.
TRAILER = 16
#: A weight as close to 1 as this is 1: sums of rounded shares are not quite, and then nothing is divided.
CLOSE = 1e-12
#: Tags of messages: steps are counted from 0.
FIRST_VALUES, READ, ANSWER, HAND_OVER, AVERAGE = -1, -2, -3, -4, -5
#: Seconds in which a worker that is behind the asker may catch up, before it answers as it is.
PATIENCE = 2.0


class NeighbourLinks:
    """One optimizer's messages. All workers make their optimizers in the same order, so each has tags of its own."""

    def __init__(self, session: Session) -> None:
        group = session.world().new_group(range(session.size))
        assert group is not None
        group.timeout = LONGEST
        self._session, self._group, self.rank = session, group, session.rank
        self._departed: set[int] = set()
        session.when_departed(self._departed.add)

    def is_gone(self, rank: int) -> bool:
        """Has a rank left the job, or died?"""
        return rank in self._departed or rank in self._group.engine.messages.left

    def has_crashed(self, rank: int) -> bool:
        """Has the link to a rank closed without a goodbye?"""
        return rank in self._group.engine.messages.crashed

    # Sending.

    def send(self, data: torch.Tensor, to: Iterable[int], tag: int) -> Sending:
        """Send to these ranks in the background; `data` must not change before `settle` has returned."""
        return [(rank, send(self._group, data, rank, tag, background=True)) for rank in to]

    def settle(self, sending: Sending) -> None:
        """Wait until what was sent may be changed again."""
        for rank, task in sending:
            self.finish(task, rank)
        sending.clear()

    # Receiving.

    def receive(self, data: torch.Tensor, source: int, tag: int, patience: float = LONGEST) -> bool:
        """Receive from a rank. False: it is gone, or brings nothing for `patience` seconds; `data` may change later then."""
        return self.finish(self.start_receive(data, source, tag), source, patience)

    def start_receive(self, data: torch.Tensor, source: int, tag: int, due: bool = True) -> Task:
        """Receive in the background. Where it is not `due` yet, the wait for it begins with `finish`."""
        task = receive(self._group, data, source, tag, background=True)
        task.idle = not due
        return task

    def listen(self, data: torch.Tensor, tag: int) -> Task:
        """Receive from any rank what need not come; the task ends with an error when the links are closed."""
        return listen(self._group, data, tag)

    # Waiting.

    def finish(self, task: Task, rank: int, patience: float = LONGEST) -> bool:
        """Wait for a message from or to a rank; whether it came through.

        Raises:
            PeerError: The links of this worker are closed, or the rank neither ended nor moved for `LONGEST` seconds.
        """
        deadline, gone = Deadline(self.rank, patience), None
        while not task.done and not deadline.over:
            task.wait_quietly(deadline.until_next_look)
            if not task.done:
                if task.idle:  # the engine reports the others
                    deadline.report(lambda: f"in {task.name}, for rank {rank}")
                self._listen()
                if rank in self._departed and gone is None:
                    gone = Deadline(self.rank, LAST_WORDS, firm=True)
                if gone is not None and gone.over:
                    return False
        if not task.done and patience == LONGEST:
            raise PeerError(deadline.line(f"in {task.name}, for rank {rank}"))
        if task.error is not None and not isinstance(task.error, RankLost):
            raise PeerError(str(task.error))
        if task.error is not None and rank not in self._departed:
            self._session.world().confirm_loss([self.rank, rank])
        return task.done and task.error is None

    def _listen(self) -> None:
        """Hear which workers have left."""
        session = self._session
        if session.client is not None and session.lock.acquire(blocking=False):
            try:
                session.client.poll()
            finally:
                session.lock.release()

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other workers so far."""
        return traffic_of(self._group.engine)


class RequestService:
    """The requests of one optimizer. `tick` is called after each request; and soon again, if it says so.

    A kind of request has a tag and memory for one message. Its handler is called with the rank that sent it; the next
    message of the kind is received after that. The thread ends with `stop`, or when the links are closed or all other
    workers are gone.
    """

    def __init__(self, links: NeighbourLinks, tick: Callable[[], bool]) -> None:
        self._links, self._tick = links, tick
        self._kinds: dict[int, tuple[torch.Tensor, Callable[[int], None]]] = {}
        self._came: SimpleQueue[tuple[int, Task] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="polytempo-requests", daemon=True)

    def on(self, tag: int, data: torch.Tensor, handle: Callable[[int], None]) -> None:
        """Receive requests of a kind into `data`; before `start`."""
        self._kinds[tag] = data, handle

    def start(self) -> None:
        """Answer from now on."""
        for tag in self._kinds:
            self._listen(tag)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; returns when the thread has ended."""
        self._came.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _listen(self, tag: int) -> None:
        self._links.listen(self._kinds[tag][0], tag).when_done(lambda task: self._came.put((tag, task)))

    def _serve(self) -> None:
        left, again = set(self._kinds), False
        with torch.no_grad():
            while left:
                try:
                    came = self._came.get(timeout=TICK if again else None)
                    if came is None:
                        return
                    if came[1].error is None:
                        self._handle(came[0], int(came[1].result))
                    else:
                        left.discard(came[0])
                except Empty:
                    pass
                again = self._tick()

    def _handle(self, tag: int, source: int) -> None:
        try:
            self._kinds[tag][1](source)
        except Exception:  # noqa: BLE001  the workers that ask must be answered, and this one must hear of it
            sys.stderr.write(f"polytempo: rank {self._links.rank} failed to answer:\n{traceback.format_exc()}")
        self._listen(tag)


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
        self.service = RequestService(links, self._tick)
        self.finished: int | None = None  #: steps this worker has finished, where others wait for them
        self.left = False  #: it has handed its values over
        self._looking = False  # at the mean
        self._asked = torch.zeros(1, dtype=torch.int64)
        self._gift = ModelMessage(layout)
        self._estates: list[tuple[int, ModelMessage]] = []  # handed over, by whom, and not in this worker's values yet
        self._givers: set[int] = set()
        self._came = threading.Condition(self.lock)
        self._later: list[Waiting] = []
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
