"""Workers that keep models of their own and mix them with those of neighbours: `gossip` and `adpsgd`.

Values go from worker to worker (`model_mean.py`). The sequencer gets pushes without data, and its releases say with
which workers the next step is to be mixed. All start from one worker's values, with push-sum weight 1.

`consolidate()` asks all other workers for their values and shows the mean, weighted by push-sum weights (`model_mean.py`).
It is for looking at, and any worker may call it alone: the next `step()` goes on from the worker's own values, with the
gradient that was computed meanwhile. So nothing is added to the models or lost by it.

A step of `gossip` (`sync/gossip.py`) sends, receives, mixes:

    send      (x, w) of now to the out-neighbours of the step, in the background, and before the push that vouches for it
    mix       after the release of the next step: x = P_ii x + sum of P_ij x_j. A neighbour that is lost, or whose process
              died before its values were through, brings nothing, and the share meant for it stays here
    leave     a worker that finishes hands its (x, w) over to another (`model_mean.py`), which adds them at its next mixing.
              What it sent for the step that it does not make counts for nothing: its neighbours learn that it left

Others that ask for this worker's values are told those of its last finished step. Where all have made the same steps, the
sum of these is exact; a worker that is a step further tells what it has then.

A worker of `adpsgd` asks a partner for an average, and answers those that ask, from a thread:

    state      x and its push-sum weight w, flat tensors beside the parameters, under a lock
    ask        begin: x is sent to the partner, in the background; finish: the partner's values have come, and
               x = x + (theirs - mine) / 2, where mine is what was sent
    answer     under the lock, with this worker's values; then the same change is made here, with the two exchanged. So both
               sides of a pair make the same change, and its sum is kept, also where a cast rounds what travels
    leave      a worker that finishes declines from then on, and hands its (x, w) over to another

Which request is granted is decided by the machine (`sync/adpsgd.py`). The other half of a pair whose partner dies meanwhile
is lost with it; this worker keeps its values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from polytempo.client.client_state import ClientState
from polytempo.collectives.tasks import Task
from polytempo.compression.chain import parse_chain
from polytempo.errors import PeerError, UsageError
from polytempo.protocol.layout import lay_out
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.coordination import SequencerClient
from polytempo.reducer.copier import Copier
from polytempo.reducer.exchange import Exchange, GroupValues, Traffic
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.model_mean import (
    AVERAGE,
    FIRST_VALUES,
    FillMessage,
    MixingSum,
    ModelMean,
    ModelMessage,
    NeighbourLinks,
    Sending,
)
from polytempo.reducer.sums import SlotAllocator
from polytempo.server.optimizer_state import Flats, as_bytes
from polytempo.session.session import Session
from polytempo.sync.directives import Mixing
from polytempo.sync.machine import AnswerPartner, Orders, Parted, Replied, Requested, WorkerEvent, WorkerMachine
from polytempo.transport.buffer_pool import Pool


class NeighbourExchange(Exchange):
    """One optimizer of a worker with neighbours."""

    def __init__(self, session: Session, name: str, spec: OptimizerSpec, params: Sequence[torch.Tensor]) -> None:
        super().__init__(session, spec, ClientState(name), lay_out(spec.tensors, 1))
        if session.job.incarnation:
            raise UsageError(
                f"worker {session.rank} comes back to a job of {spec.sync}, whose workers have made their links to each "
                "other once; start the job again"
            )
        self.links = NeighbourLinks(session)
        self.cast = parse_chain(spec.push_filter).cast
        self.models: ModelMean | None = None
        self._kept: FlatBuffer | None = None  # this worker's values, while the parameters are the mean
        self._shown: FlatBuffer | None = None  # that mean
        self._clock = SequencerClient(session, spec, self.client_state)
        self.step = self._clock.step
        self.copier = Copier(params, self.layout, Pool())
        self.weight = 1.0  #: the push-sum weight of this worker's values
        self._start_from(self.client_state.answer.shares[0].worker)

    def new_message(self) -> ModelMessage:
        """Memory for a message between neighbours."""
        return ModelMessage(self.layout, self.cast)

    def _start_from(self, root: int) -> None:
        rank, first, buffer = self.session.rank, ModelMessage(self.layout), self.copier.next_buffer()
        if rank == root:
            self.copier.gather(buffer, lambda param: param.detach())
            first.fill(buffer.tensors, 1.0)
            others = [member for member in self.client_state.answer.members if member != rank]
            self.links.settle(self.links.send(first.data, others, FIRST_VALUES))
        elif self.links.receive(first.data, root, FIRST_VALUES):
            for dtype, flat in buffer.tensors.items():
                flat.copy_(first.flats[dtype])
            self.copier.scatter({0: buffer.parts[0]})
        else:
            raise PeerError(f"worker {root} ended before worker {rank} had its initial parameters")

    # A step.

    def begin(
        self,
        buffer: FlatBuffer | None,
        hyper: GroupValues,
        measures: Measures,
        absent: Sequence[int] = (),
        skip: bool = False,
    ) -> None:
        """Report a step; `skip`: it has changed nothing."""
        began = time.perf_counter()
        self._clock.push(StepReport(hyper=hyper, skip=skip), measures, self._bytes_moved())
        self.waited = time.perf_counter() - began

    def finish(self) -> None:
        """Wait for the release of the next one."""
        began = time.perf_counter()
        self._clock.wait_for(self._clock.step + 1)
        self._clock.step = self.step = self.client_state.released
        self.waited = self._clock.waited = self.waited + time.perf_counter() - began

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        raise UsageError(f"{self.spec.sync} has no agreed gradient; clip before step() instead")

    def take_writes(self, declared: bool = False) -> None:
        self.copier.watch.touched = ""  # models differ: what a script writes to one is its own

    # The mean of all models.

    def share(self, fill: FillMessage) -> ModelMean:
        """Tell other workers this worker's values when they ask; `fill` puts them into a message."""
        self.models = ModelMean(self.links, self.layout, fill)
        return self.models

    def read_values(self) -> None:
        """Load the mean of all models, weighted by their push-sum weights, to be looked at; `restore` takes it back."""
        if self.models is None or self.session.size == 1:
            return
        self.restore()
        self._kept, self._shown = (FlatBuffer(self.layout, Pool(), pinned=False) for _ in range(2))
        self.copier.gather(self._kept, lambda param: param.detach())
        self.models.load(list(self.client_state.answer.members), self.step, self._shown)
        self.copier.scatter({0: self._shown.parts[0]})

    @property
    def shows_the_mean(self) -> bool:
        """Is the mean of all models in the parameters, in place of this worker's own?"""
        return self._kept is not None

    def restore(self) -> None:
        """Make the parameters this worker's own again, with what a script has written to them meanwhile."""
        kept, shown = self._kept, self._shown
        self._kept = self._shown = None
        if kept is None or shown is None:
            return
        for index, now in self.copier.here(lambda param: param.detach()).items():
            if not torch.equal(now, shown.views[index]):
                kept.views[index].add_(now).sub_(shown.views[index])
        self.copier.scatter({0: kept.parts[0]})

    def _bytes_moved(self) -> tuple[int, int]:
        """To and from neighbours, and to and from the sequencer."""
        sent, received = self.links.traffic()
        client = self._clock.client
        return sent + client.bytes_sent, received + client.bytes_received

    def traffic(self) -> Traffic:
        return Traffic(*self._bytes_moved(), self.links.traffic()[0], self.copier.device_bytes)


class GossipExchange:
    """The exchange of one optimizer, step by step."""

    def __init__(self, reducer: NeighbourExchange) -> None:
        self._reducer, self._links = reducer, reducer.links
        self._out = reducer.new_message()
        self._in: dict[int, ModelMessage] = {}  # memory for what comes from each neighbour
        self._coming: dict[int, Task] = {}  # receives of this step, posted before the values come
        memory = Pool() if reducer.cast else SlotAllocator(as_bytes(self._out.data))  # x lies in the message itself
        self._own = FlatBuffer(reducer.layout, memory, pinned=False)  # x, as it was when it was sent
        self._weight = 1.0  # w, likewise
        self._told = ModelMessage(reducer.layout)  # x and w after the last finished step, for others that ask
        self._sum = MixingSum(reducer.copier.next_buffer())
        self._sending: Sending = []
        self._models = reducer.share(lambda message: message.fill(self._told.flats, self._told.weight))
        self._gather()
        self._tell()
        if reducer.session.size > 1:
            self._models.service.start()

    def send(self, row: Mixing, step: int) -> None:
        """Send the parameters as they are now, to be mixed by this row of the step."""
        if not row.send and not row.receive:
            return
        self._gather()
        self._out.fill(self._own.tensors, self._weight)
        for rank, _ in row.receive:
            if rank not in self._in:
                self._in[rank] = self._reducer.new_message()
            self._coming[rank] = self._links.start_receive(self._in[rank].data, rank, step, due=False)
        self._sending = self._links.send(self._out.data, [rank for rank, _ in row.send], step)

    def _gather(self) -> None:
        """Take x and w as they are now."""
        self._links.settle(self._sending)
        self._reducer.copier.gather(self._own, lambda param: param.detach())
        self._weight = self._reducer.weight
        if self._weight != 1.0:
            for flat in self._own.tensors.values():
                flat.mul_(self._weight)

    def _tell(self, model: FlatBuffer | None = None) -> None:
        """Tell others that ask this model from now on, or what was gathered last."""
        with self._models.lock:
            self._told.fill((model or self._own).tensors, self._reducer.weight)
            if model is not None and self._reducer.weight != 1.0:
                for flat in self._told.flats.values():
                    flat.mul_(self._reducer.weight)
        self._models.finish_step(self._reducer.step)

    def mix(self, row: Mixing, step: int, gone: Sequence[int], change: FlatBuffer | None = None) -> None:
        """Mix what was exchanged in a step, which was pushed; the release of the next one is there.

        Args:
            row: With whom, and how much.
            step: The step.
            gone: Neighbours that left without pushing it.
            change: What the optimizer has changed since the values were sent; None where it was sent with them.
        """
        if not row.send and not row.receive:
            return  # there is no other worker
        reducer, lost, shares, own = self._reducer, set(gone), dict(row.receive), self._reducer.session.rank
        self._sum.start()
        for rank in sorted({own, *shares}):
            if rank == own:
                self._keep(row, lost)
            elif rank in lost:
                self._forget(rank)
            elif self._links.finish(self._coming.pop(rank), rank):
                self._sum.add(self._in[rank].flats, self._in[rank].weight, shares[rank])
            else:  # it died after its push, and its values did not come through
                self._forget(rank)
                self._take_back(dict(row.send).get(rank, 0.0))
        with self._models.lock:
            inherited = self._models.inherit(step)
        if inherited is not None:  # until the end of this step others may be told too little
            self._sum.add(inherited.flats, inherited.weight, 1.0)
        reducer.weight = self._sum.finish()
        mixed = reducer.copier.next_buffer()
        if change is not None:
            for dtype, flat in mixed.tensors.items():
                flat.add_(change.tensors[dtype])
        reducer.copier.scatter({0: mixed.parts[0]})
        self._tell(mixed)

    def _keep(self, row: Mixing, lost: set[int]) -> None:
        """Add this worker's own part, with the shares that were meant for lost neighbours."""
        if not self._reducer.cast:
            kept = row.keep + sum(share for rank, share in row.send if rank in lost)
            self._sum.add(self._own.tensors, self._weight, kept)
            return
        self._sum.add(self._own.tensors, self._weight, 1.0)
        self._take_back(-sum(share for rank, share in row.send if rank not in lost))

    def _take_back(self, share: float) -> None:
        """A share of what was sent stays here after all; a negative one was sent."""
        if share:
            self._sum.add(self._out.flats, self._weight, share)

    def _forget(self, rank: int) -> None:
        """Should its message come after all, it must not be written over another."""
        self._coming.pop(rank, None)
        self._in.pop(rank, None)

    def leave(self) -> None:
        """Hand this worker's values over: it has finished."""
        if self._reducer.session.size > 1:
            self._gather()
            self._tell()
            self._models.leave(list(self._reducer.client_state.answer.members), self._reducer.step)
            self._models.service.stop()


class PairExchange:
    """The state of one worker, and its averages with others. The mark of a request is the step of the asker, under whose
    number it is answered; the mark of an answer says whether it was granted."""

    def __init__(self, reducer: NeighbourExchange, machine: WorkerMachine) -> None:
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
            self._models.leave(
                list(self._reducer.client_state.answer.members), steps=0
            )  # steps of different workers have no order
        self._models.service.stop()
