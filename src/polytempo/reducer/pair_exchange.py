"""One worker's side of the averages of `adpsgd`: it asks a partner, and answers those that ask, from a thread.

    state      x and its push-sum weight w, flat tensors beside the parameters, under a lock
    ask        begin: x is sent to the partner, in the background; finish: the partner's values have come, and
               x = x + (theirs - mine) / 2, where mine is what was sent
    answer     under the lock, with this worker's values; then the same change is made here, with the two exchanged. So both
               sides of a pair make the same change, and its sum is kept, also where a cast rounds what travels
    leave      a worker that finishes declines from then on, and hands its (x, w) over to another (`model_mean.py`)

Which request is granted is decided by the machine (`sync/adpsgd.py`). The other half of a pair whose partner dies meanwhile
is lost with it; this worker keeps its values.
"""

from __future__ import annotations

import threading
import time

import torch

from polytempo.collectives.tasks import Task
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.model_mean import AVERAGE, ModelMessage
from polytempo.reducer.neighbour_links import Sending
from polytempo.reducer.neighbour_reducer import NeighbourReducer
from polytempo.server.pull_compression import Flats
from polytempo.sync.machine import AnswerPartner, Orders, Parted, Replied, Requested, WorkerEvent, WorkerMachine


class PairExchange:
    """The state of one worker, and its averages with others. The mark of a request is the step of the asker, under whose
    number it is answered; the mark of an answer says whether it was granted."""

    def __init__(self, reducer: NeighbourReducer, machine: WorkerMachine) -> None:
        self._reducer, self._links, self._machine = reducer, reducer.links, machine
        self._partner: int | None = None  # that was asked, and is waited for
        self._taken = False  # was its reply taken, for another worker that wanted to know this one's values?
        self._models = reducer.share(self._tell)
        self._lock = self._models.lock
        self._answering = threading.Lock()  # a pair is averaged here, and its reply not sent yet
        self._out, self._in = reducer.new_message(), reducer.new_message()
        self._asked, self._answer = reducer.new_message(), reducer.new_message()
        self._reply: Task | None = None
        self._sending: Sending = []
        buffer = reducer.copier.next_buffer()
        reducer.copier.gather(buffer, lambda param: param.detach())
        self._own: Flats = {  # x; halves in float32
            dtype: flat.to(torch.float32 if flat.element_size() <= 2 else flat.dtype, copy=True)
            for dtype, flat in buffer.tensors.items()
        }
        self._models.service.on(AVERAGE, self._asked.data, self._requested)
        self._models.service.start()

    # The state.

    def add(self, change: FlatBuffer) -> None:
        """Move the model by this, and take in what leaving workers have handed over."""
        with self._lock:
            for dtype, own in self._own.items():
                own.add_(change.tensors[dtype], alpha=self._reducer.weight)
            estate = self._models.inherit(0)
            if estate is not None:
                for dtype, own in self._own.items():
                    own.add_(estate.flats[dtype])
                self._reducer.weight += estate.weight

    def snapshot(self, target: FlatBuffer) -> None:
        """The model of now, x / w."""
        with self._lock:
            for dtype, own in self._own.items():
                target.tensors[dtype].copy_(own if self._reducer.weight == 1.0 else own / self._reducer.weight)
        target.changed_all()

    def _tell(self, message: ModelMessage) -> None:
        self._take_reply()  # its partner has made the average already
        message.fill(self._own, self._reducer.weight)

    # Asking.

    def ask(self, partner: int, step: int) -> None:
        """Send x to a partner, for an average."""
        with self._lock:
            self._partner = partner
            self._out.fill(self._own, self._reducer.weight, step)
        self._reply = self._links.start_receive(self._in.data, partner, step)
        self._sending = self._links.send(self._out.data, [partner], AVERAGE)

    def finish(self) -> Orders:
        """Wait for the reply to what was asked, and take it; what is to be done then."""
        partner, task = self._partner, self._reply
        if partner is None or task is None:
            return ()
        came = self._links.finish(task, partner)
        self._links.settle(self._sending)
        event: WorkerEvent = Parted(partner)
        with self._lock:
            if came:
                self._take_reply()
                event = Replied(partner, self._out.mark, bool(self._in.mark))
            else:
                self._in = self._reducer.new_message()  # should a reply come after all, it must not be written over another
            self._partner, self._reply, self._taken = None, None, False
            return self._machine.handle(event, time.monotonic())

    def _take_reply(self) -> None:
        """Take the reply if it is there. The caller holds the lock."""
        task = self._reply
        if task is None or self._taken or not task.done or task.error is not None:
            return
        self._taken = True
        if self._in.mark:
            self._average(self._in, self._out)

    def _average(self, theirs: ModelMessage, mine: ModelMessage) -> None:
        """The mean of a pair, of which both have what was sent. The caller holds the lock."""
        for dtype, own in self._own.items():
            own.add_(theirs.flats[dtype], alpha=0.5).sub_(mine.flats[dtype], alpha=0.5)
        self._reducer.weight += (theirs.weight - mine.weight) / 2

    # Answering, in the thread of the service.

    def _requested(self, source: int) -> None:
        asked, answer = self._asked, self._answer
        with self._answering:
            with self._lock:
                (reply,) = self._machine.handle(Requested(source, asked.mark), time.monotonic())
                averaged = isinstance(reply, AnswerPartner) and reply.averaged and not self._models.left
                answer.fill(self._own, self._reducer.weight, int(averaged))
                if averaged:
                    self._average(asked, answer)
            for _, sent in self._links.send(answer.data, [source], asked.mark):
                sent.wait_quietly(None)  # it ends when the asker is gone

    # The end.

    def leave(self) -> None:
        """Finish what was asked, and hand this worker's values over: it has finished."""
        self.finish()
        with self._answering:  # replies that were begun are on their way
            self._models.leave(list(self._reducer.answer.members), steps=0)  # steps of different workers have no order
        self._models.service.stop()
