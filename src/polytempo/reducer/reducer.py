"""`Reducer`: the interface through which an optimizer's gradients are reduced over the workers of a job.

One reducer belongs to one `DistributedOptimizer`. There are four ways for the gradients to travel, and one for models:

    ServerReducer         to parameter servers, which hold the values and apply the update
    SharedMemoryReducer   through the shared memory of one host; a sequencer decides which workers are in a round
    CollectiveReducer     by all-reduce between hosts; a ballot at the end of the step decides the same
    PeerReducer           by all-reduce among the workers of each round, in modes with deadlines; a sequencer names them
    NeighbourReducer      models, from worker to worker; a sequencer decides which workers are neighbours in a step

With all but the first the values stay with the workers. `mean` is the agreed gradient of the second and third, on which each
worker runs the wrapped optimizer itself. The defaults below are for these; `ServerReducer` overrides them.

In modes with blocks of local steps what travels is values, or their change since the anchor, and there are no gradient
hooks. A round is begun and finished apart there, with local steps in between where the mode overlaps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState
from polytempo.client.requests import Outstanding
from polytempo.collectives.group import RankGroup
from polytempo.protocol.layout import Layout, lay_out
from polytempo.protocol.messages import Answer, Push
from polytempo.protocol.push import FirstValues, Measures, StepReport
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.server.optimizer_state import SegmentState
from polytempo.session.session import Session
from polytempo.sync.directives import Directive, NextBlock
from polytempo.transport.channel import Bytes

#: The hyper-parameters of all parameter groups.
GroupValues = tuple[dict[str, Any], ...]
#: These optimizers only read gradients, so they may be given the mean where it lies; their foreach forms may write.
READERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


class GradientMean:
    """The mean gradient of a round, in a flat buffer, on which every worker runs the wrapped optimizer itself."""

    def __init__(self, copier: Copier, buffer: FlatBuffer) -> None:
        self._copier, self.buffer = copier, buffer
        self._copies: dict[int, torch.Tensor] = {}
        self.absent: tuple[int, ...] = ()  #: parameters that had no gradient on any worker
        self.skipped = False  #: a worker skipped the round, and so did all: there is no mean

    def assign(self) -> None:
        """Make `.grad` of every parameter the mean, which the script may change."""
        self._copier.assign_gradients(self.buffer.views, self.absent)

    @contextmanager
    def as_gradients(self, in_place: bool) -> Iterator[None]:
        """Inside, `.grad` of every parameter is the mean: the buffer itself (read only), or a copy that may be changed."""
        params = self._copier.params
        own = [param.grad for param in params]
        for index, param in enumerate(params):
            mean = self.buffer.views[index]
            if not in_place:
                if index not in self._copies:
                    self._copies[index] = torch.empty_like(param)
                mean = self._copies[index].copy_(mean)
            param.grad = None if index in self.absent else mean
        try:
            yield
        finally:
            for param, grad in zip(params, own, strict=True):
                param.grad = grad

    def forget_copies(self) -> None:
        """Parameters were moved: copies are made anew, like them."""
        self._copies.clear()

    def may_read_in_place(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does this optimizer leave the gradients as they are? On a device the mean is this worker's own, to be changed."""
        if self.buffer.on_device:
            pairs = ((self.buffer.views[index], param) for index, param in enumerate(self._copier.params))
            return all(view.device == param.device and view.stride() == param.stride() for view, param in pairs)
        plain = not any(group.get("foreach") for group in optimizer.param_groups)
        usual = all(param.device.type == "cpu" and param.is_contiguous() for param in self._copier.params)
        return plain and usual and type(optimizer) in READERS


class SequencerClient:
    """A clock of the sequencer, for a worker whose gradients do not go to servers: it pushes without data.

    The sequencer decides which workers are in a round, and keeps the record and the budget, as for any other push.
    """

    def __init__(self, session: Session, spec: OptimizerSpec, state: ClientState) -> None:
        assert session.client is not None
        self.client: Client = session.client
        self._session, self.state = session, state
        with session.lock:
            self.client.register(state.name, spec, lambda: (FirstValues(), self._no_data()), state)
        self.step = state.released
        self.waited = 0.0  #: seconds of the last round

    def _no_data(self) -> list[list[Bytes]]:
        return [[] for _ in range(self.client.shards)]

    def push(self, report: StepReport, measures: Measures, traffic: tuple[int, int]) -> None:
        """Report a step."""
        if measures.exchanged is None:
            measures.exchanged = self.waited
        push = Push(
            id=PushId(self.state.name, self.client.rank, self.client.incarnation, self.step),
            version=self.state.version,
            sent=traffic[0],
            received=traffic[1],
            measures=measures,
            body=report,
        )
        with self._session.lock:
            self.client.push(Outstanding(push, self._no_data()))

    def wait_for(self, step: int) -> None:
        """Wait until this worker may start a step."""
        with self._session.lock:
            self.client.wait_for_release(self.state.name, step)


class Reducer(ABC):
    """Reduces the gradients of one optimizer.

    Subclasses set `copier`, `hooks` and, where values stay with the workers, `mean`.
    """

    copier: Copier  #: moves between parameters and flat buffers
    hooks: GradientHooks | None = None  #: copy gradients into the flat buffer while backward runs
    mean: GradientMean | None = None  #: the mean of the last round, where the update is made on the workers
    on_servers = False  #: do servers hold the values?
    holds_state = False  #: do servers keep the wrapped optimizer's state?
    needs_join = False  #: must a worker that has run out of data go on taking part until all have?

    def __init__(self, session: Session, name: str, spec: OptimizerSpec, layout: Layout | None = None) -> None:
        """`layout`: of values that are cut along servers."""
        self.session, self.name, self.spec, self.layout = session, name, spec, layout or lay_out(spec.tensors, 1)
        self.client_state = ClientState(name, ahead=spec.parsed.capabilities.ahead)
        self.step = 0
        self.waited = 0.0  #: seconds of the last push
        self.sending = True  #: may buckets leave during backward?

    # A step.

    def gradients(self) -> tuple[FlatBuffer, tuple[int, ...]]:
        """The flat buffer with the gradients as they are now, and the indices of the parameters that have none."""
        buffer, absent = self.buffer_of(lambda param: param.grad)
        if self.hooks is not None:
            self.hooks.adopt()
        return buffer, absent

    def buffer_of(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[FlatBuffer, tuple[int, ...]]:
        """The flat buffer with `of(param)` of each parameter, and the indices of the parameters that have none."""
        buffer = self.copier.next_buffer()
        return buffer, self.copier.gather(buffer, of)

    def push(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        """Take part in a step, and wait as the mode says: `begin` and `finish` in one."""
        self.begin(buffer, hyper, measures, absent)
        self.finish()

    @abstractmethod
    def begin(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        """Send this worker's part of a round. One round is under way at a time, and the buffer stays as it is meanwhile.
        Where `agree` has made `.grad` the mean since the round before, it is not made again.

        Args:
            buffer: What this worker contributes; None for a step that changes nothing.
            hyper: The hyper-parameters of all groups.
            measures: What is said of the worker's steps; it is not written to from here on.
            absent: The indices of the parameters that have no gradient, ascending.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait, as the mode says, for the end of the round that was begun; the result is there then."""

    @property
    def released(self) -> int:
        """The last step that this worker may start; `step` is the next that it makes."""
        return max(self.step, self.client_state.released)

    @property
    def answer(self) -> Answer:
        """What came with the last release."""
        return self.client_state.answer

    @property
    def directive(self) -> Directive | None:
        """What the policy has said of the step that starts, beside that it may."""
        return self.answer.directive

    @property
    def period(self) -> int:
        """Local steps in the block that starts; 0 in modes without blocks."""
        return self.directive.period if isinstance(self.directive, NextBlock) else 0

    @abstractmethod
    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        """Make `.grad` of every parameter the mean over the workers, before the step's own push.

        Returns:
            Whether the round was skipped; `.grad` is then as it was.
        """

    def join(self) -> bool:
        """Take part in one round without data. True once all workers have run out of data."""
        return True

    def set_sending(self, sending: bool) -> None:
        """Buckets do not leave during backward while gradients are accumulated."""
        self.sending = sending

    def expect(self, weight: Callable[[], float]) -> None:
        """`weight` tells, while backward runs, what the next push will weigh; where buckets leave weighted, they need it."""

    def take_answer(self) -> None:
        """Take the answer to the last push, where that was deferred (`device_exchange.py`)."""

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that it has taken in this worker, beside the parameters and their gradients."""
        return self.copier.device_bytes

    def groups(self) -> list[RankGroup]:
        """The groups of ranks in which it makes its rounds, where ranks make them among themselves."""
        return []

    @abstractmethod
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""

    def handed(self) -> int:
        """Bytes handed to other workers so far, whether they are sent or lie in shared memory; over servers, exchanged."""
        return sum(self.traffic())

    # Values that the script has changed.

    def check_same(self, params: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that were added or replaced after the start."""
        self.copier.check_same(params)

    def renew(self, compare: bool = True) -> None:
        """Find parameters that were moved to other memory or written to since the last step.

        Args:
            compare: Also compare a sample of the values, for writes that torch does not count.
        """
        if self.copier.look(compare):
            if self.mean is not None:
                self.mean.forget_copies()
            if self.hooks is not None:
                self.hooks.renew()

    def carry_changes(self) -> None:
        """Deal with values that the script has written: here the next round compares the replicas."""

    def push_values(self) -> None:
        """Make this worker's values the job's: here the next round compares the replicas."""
        self.copier.watch.touched = self.copier.watch.touched or self.copier.watch.name_of(0)

    # What the job holds, where servers hold it.

    def read_values(self) -> None:
        """Load the job's newest values into the parameters. Replicas have them already."""

    def read_state(self) -> list[SegmentState]:
        """The optimizer's state on the servers, where `holds_state`."""
        return []

    def saved_state(self) -> list[SegmentState]:
        """State of the script's optimizer that servers kept in the job of the checkpoint, and workers go on with."""
        return []

    def load_state(self, state: Sequence[SegmentState]) -> None:
        """Replace the optimizer's state on the servers, where `holds_state`."""

    def residual(self) -> dict[str, torch.Tensor]:
        """What lossy push compression has held back, by dtype."""
        return {}

    def load_residual(self, residual: dict[str, torch.Tensor]) -> None:
        """Continue from such a residual."""

    def row_source(self, table: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that reads rows of a table from the servers; None where there are no servers."""
        return None
