"""`Exchange`: how the gradients or values of one optimizer get to the other workers of its job, and are added up there.

One exchange belongs to one `DistributedOptimizer`, or to one fragment of its model:

    ServerExchange     to parameter servers, which hold the values and apply the update (`servers.py`)
    PeerExchange       among the workers, each of which holds all values and applies the update to the mean (`peers.py`);
                       in rounds with deadlines `DeadlinePeers` (`deadline_peers.py`)
    NeighbourExchange  models, from worker to worker; a sequencer decides who are neighbours in a step (`neighbours.py`)

In modes with blocks of local steps what travels is values, or their change since the anchor, and there are no gradient
hooks. A round is begun and finished apart there, with local steps in between where the mode overlaps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.client.client_state import ClientState
from polytempo.protocol.layout import Layout
from polytempo.protocol.push import Measures
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.copier import Copier
from polytempo.reducer.flat_buffer import FlatBuffer, GradientHooks
from polytempo.session.session import Session
from polytempo.sync.directives import Directive

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


@dataclass(frozen=True)
class Traffic:
    """What an exchange has cost this worker so far."""

    sent: int  #: bytes
    received: int
    handed: int  #: bytes of values handed to other workers, sent or in shared memory; over servers, exchanged
    device_bytes: int  #: device memory that it has taken, beside the parameters and their gradients


class Exchange(ABC):
    """Exchanges the gradients, or values, of one optimizer.

    Subclasses set `copier`, `hooks` and, where values stay with the workers, `mean`.

    Args:
        session: The job.
        spec: What the job knows of the optimizer.
        state: What servers, or a sequencer, have answered.
        layout: Where values lie in flat buffers, and how they are cut along servers.
    """

    copier: Copier  #: moves between parameters and flat buffers
    hooks: GradientHooks | None = None  #: copy gradients into the flat buffer while backward runs
    mean: GradientMean | None = None  #: the mean of the last round, where the update is made on the workers

    def __init__(self, session: Session, spec: OptimizerSpec, state: ClientState, layout: Layout) -> None:
        self.session, self.spec, self.client_state, self.layout = session, spec, state, layout
        self.name = state.name  #: of the optimizer in the job
        self.step = 0  #: the next that this worker makes
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
    def directive(self) -> Directive | None:
        """What the policy has said of the step that starts, beside that it may."""
        return self.client_state.answer.directive

    @abstractmethod
    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        """Make `.grad` of every parameter the mean over the workers, before the step's own push.

        Returns:
            Whether the round was skipped; `.grad` is then as it was.
        """

    def set_sending(self, sending: bool) -> None:
        """Buckets do not leave during backward while gradients are accumulated."""
        self.sending = sending

    @abstractmethod
    def traffic(self) -> Traffic:
        """What it has cost this worker so far."""

    # Values.

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

    @abstractmethod
    def take_writes(self, declared: bool = False) -> None:
        """Deal with values that the script has written since the last step, as `renew` has found them.

        Args:
            declared: The script says that it has written, and that these values are to be the job's.
        """

    @abstractmethod
    def read_values(self) -> None:
        """Load the job's newest values into the parameters."""
