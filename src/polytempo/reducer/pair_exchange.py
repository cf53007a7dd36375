"""One worker's side of the averages of `adpsgd`: it asks a partner, and answers those that ask, from a thread of its own.

    state      x and its push-sum weight w, flat tensors beside the parameters, under a lock
    ask        begin: x is sent to the partner, in the background; finish: the partner's values have come, and
               x = x + (theirs - mine) / 2, where mine is what was sent
    answer     a thread receives requests; under the lock it replies with this worker's values and makes the same change with
               the two exchanged. So a pair is averaged once on each side or not at all, and its sum is kept, also where a
               cast rounds what travels
    leave      a worker that finishes declines from then on, and gives its (x, w) to another, which adds them to its own

Which request is granted is decided in `sync/pairwise.py`. The other half of a pair whose partner dies meanwhile is lost with
it; this worker keeps its values.
"""

from __future__ import annotations

import threading

import torch

from polytempo.collectives.tasks import Task
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.model_message import ModelMessage
from polytempo.reducer.neighbour_links import Sending
from polytempo.reducer.neighbour_reducer import FIRST_VALUES, NeighbourReducer
from polytempo.server.pull_compression import Flats
from polytempo.sync.pairwise import PairAveraging, PairReply, PairRequest

#: The tag of requests; their mark is the step of the asker, under which it is answered, or `GIFT`.
REQUEST = FIRST_VALUES - 1
#: The mark of values that a leaving worker gives away.
GIFT = -1


class PairExchange:
    """The state of one worker, and its averages with others."""

    def __init__(self, reducer: NeighbourReducer) -> None:
        self._reducer, self._links = reducer, reducer.links
        self._pair = PairAveraging(reducer.session.rank)
        self._lock = threading.Lock()
        self._own: Flats = {}  # x; halves in float32
        self._out, self._in = reducer.new_message(), reducer.new_message()
        self._reply: Task | None = None
        self._sending: Sending = []
        self._leaving = False
        self._answering = threading.Lock()  # a pair is averaged here, and its reply not sent yet
        self._may_accept = threading.Event()  # what other workers leave behind
        self._may_accept.set()
        buffer = reducer.copier.next_buffer()
        reducer.copier.gather(buffer, lambda param: param.detach())
        for dtype, flat in buffer.tensors.items():
            self._own[dtype] = flat.to(torch.float32 if flat.element_size() <= 2 else flat.dtype, copy=True)
        self._thread = threading.Thread(target=self._serve, name="polytempo-averages", daemon=True)
        self._thread.start()
        reducer.session.flushing.append(self.leave)

    # The state.

    def add(self, change: FlatBuffer) -> None:
        """Move the model by this."""
        with self._lock:
            for dtype, own in self._own.items():
                own.add_(change.tensors[dtype], alpha=self._reducer.weight)

    def snapshot(self, target: FlatBuffer) -> None:
        """The model of now, x / w."""
        with self._lock:
            for dtype, own in self._own.items():
                target.tensors[dtype].copy_(own if self._reducer.weight == 1.0 else own / self._reducer.weight)
        target.changed_all()

    def hold_gifts(self) -> None:
        """Let what other workers leave behind wait: the mean of all models is made."""
        self._may_accept.clear()

    def accept_gifts(self) -> None:
        """It is made."""
        self._may_accept.set()

    # Asking.

    def begin(self) -> None:
        """Ask the partner that the last release has named, if it has."""
        row, step = self._reducer.answer.mixing, self._reducer.step
        if row is None:
            return
        partner = row.send[0][0]
        with self._lock:
            self._pair.begin(step, partner)
            self._out.fill(self._own, self._reducer.weight, step)
        self._reply = self._links.start_receive(self._in.data, partner, step)
        self._sending = self._links.send(self._out.data, [partner], REQUEST)

    def finish(self) -> None:
        """Wait for the reply to what was asked, and take it."""
        partner, task = self._pair.waiting_for, self._reply
        if partner is None or task is None:
            return
        came = self._links.finish(task, partner)
        self._links.settle(self._sending)
        self._reply = None
        with self._lock:
            if not came:
                self._pair.lost(partner)
                self._in = self._reducer.new_message()  # should a reply come after all, it must not be written over another
                return
            reply = PairReply(partner, self._links.rank, self._out.mark, bool(self._in.mark))
            if self._pair.replied(reply) and reply.averaged:
                self._average(self._in, self._out)

    def _average(self, theirs: ModelMessage, mine: ModelMessage) -> None:
        """The mean of a pair, of which both have what was sent. The caller holds the lock."""
        for dtype, own in self._own.items():
            own.add_(theirs.flats[dtype], alpha=0.5).sub_(mine.flats[dtype], alpha=0.5)
        self._reducer.weight += (theirs.weight - mine.weight) / 2

    # Answering, in a thread.

    def _serve(self) -> None:
        """Answer requests until the links are closed, or all other workers are gone."""
        asked, answer = self._reducer.new_message(), self._reducer.new_message()
        with torch.no_grad():
            while True:
                task = self._links.listen(asked.data, REQUEST)
                task.wait_quietly(None)
                if task.error is not None:
                    return
                if asked.mark == GIFT:
                    self._accept(asked)
                    continue
                source = int(task.result)
                with self._answering:
                    self._answer(PairRequest(source, self._links.rank, asked.mark), asked, answer)
                    for _, sent in self._links.send(answer.data, [source], asked.mark):
                        sent.wait_quietly(None)  # it ends when the asker is gone

    def _answer(self, request: PairRequest, asked: ModelMessage, answer: ModelMessage) -> None:
        with self._lock:
            averaged = self._pair.requested(request).averaged and not self._leaving
            answer.fill(self._own, self._reducer.weight, int(averaged))
            if averaged:
                self._average(asked, answer)

    def _accept(self, gift: ModelMessage) -> None:
        self._may_accept.wait()
        with self._lock:
            for dtype, own in self._own.items():
                own.add_(gift.flats[dtype])
            self._reducer.weight += gift.weight

    # The end.

    def leave(self) -> None:
        """Finish what was asked, and give this worker's values to another: it has finished."""
        self.finish()
        rank = self._links.rank
        there = [member for member in self._reducer.answer.members if member != rank and not self._links.is_gone(member)]
        with self._answering, self._lock:  # replies that were begun are on their way
            self._leaving = True
            self._out.fill(self._own, self._reducer.weight, GIFT)
        later = sorted(there, key=lambda member: (member - rank) % self._reducer.session.size)
        self._links.settle(self._links.send(self._out.data, later[:1], REQUEST))
