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
from collections.abc import Callable, Sequence
from typing import Any

import torch

from polytempo.client.client_state import ClientState
from polytempo.collectives.group import RankGroup
from polytempo.protocol.layout import Layout
from polytempo.protocol.push import Measures
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.reducer.gradient_mean import GradientMean
from polytempo.server.optimizer_state import SegmentState
from polytempo.session.session import Session
from polytempo.sync.directives import Directive, NextBlock

#: The hyper-parameters of all parameter groups.
GroupValues = tuple[dict[str, Any], ...]


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

    def __init__(self, session: Session, name: str, spec: OptimizerSpec, layout: Layout, delay: int = 0) -> None:
        self.session, self.name, self.spec, self.layout = session, name, spec, layout
        self.client_state = ClientState(name, ahead=delay)
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
    def directive(self) -> Directive | None:
        """What the policy has said of the step that starts, beside that it may."""
        return self.client_state.answer.directive

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

    def settle(self) -> None:
        """Wait for pushes that are still unanswered."""

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
