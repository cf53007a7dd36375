"""Workers that keep models of their own and mix them with those of neighbours: what `gossip` and `adpsgd` share.

Values go from worker to worker (`neighbour_links.py`). The sequencer gets pushes without data, and its releases say with
which workers the next step is to be mixed. All start from one worker's values, with push-sum weight 1.

`consolidate()` asks all other workers for their values and shows the mean, weighted by push-sum weights (`model_mean.py`).
It is for looking at, and any worker may call it alone: the next `step()` goes on from the worker's own values, with the
gradient that was computed meanwhile. So nothing is added to the models or lost by it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from polytempo.compression.chain import parse_chain
from polytempo.errors import PeerError, UsageError
from polytempo.protocol.layout import lay_out
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.model_mean import FIRST_VALUES, FillMessage, ModelMean, ModelMessage
from polytempo.reducer.neighbour_links import NeighbourLinks
from polytempo.reducer.reducer import GroupValues, Reducer, SequencerClient
from polytempo.session.session import Session
from polytempo.transport.buffer_pool import Pool


class NeighbourReducer(Reducer):
    """One optimizer of a worker with neighbours."""

    def __init__(self, session: Session, name: str, spec: OptimizerSpec, params: Sequence[torch.Tensor]) -> None:
        super().__init__(session, name, spec, lay_out(spec.tensors, 1))
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
        self._start_from(self.answer.shares[0].worker)

    def new_message(self) -> ModelMessage:
        """Memory for a message between neighbours."""
        return ModelMessage(self.layout, self.cast)

    def _start_from(self, root: int) -> None:
        """All workers take the values of one."""
        rank, first = self.session.rank, ModelMessage(self.layout)
        if rank == root:
            buffer = self.copier.next_buffer()
            self.copier.gather(buffer, lambda param: param.detach())
            first.fill(buffer.tensors, 1.0)
            others = [member for member in self.answer.members if member != rank]
            self.links.settle(self.links.send(first.data, others, FIRST_VALUES))
        elif self.links.receive(first.data, root, FIRST_VALUES):
            self.load(first)
        else:
            raise PeerError(f"worker {root} ended before worker {rank} had its initial parameters")

    def load(self, message: ModelMessage) -> None:
        """Make the parameters these values."""
        buffer = self.copier.next_buffer()
        for dtype, flat in buffer.tensors.items():
            flat.copy_(message.flats[dtype])
        self.copier.scatter({0: buffer.parts[0]})

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
        self.copier.watch.touched = ""  # models differ: what a script writes to one is its own
        self._clock.push(StepReport(hyper=hyper, skip=skip), measures, self.traffic())
        self.waited = time.perf_counter() - began

    def finish(self) -> None:
        """Wait for the release of the next one."""
        began = time.perf_counter()
        self._clock.wait_for(self._clock.step + 1)
        self._clock.step = self.step = self.client_state.released
        self.waited = self._clock.waited = self.waited + time.perf_counter() - began

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        raise UsageError(f"{self.spec.sync} has no agreed gradient; clip before step() instead")

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
        self.models.load(list(self.answer.members), self.step, self._shown)
        self.copier.scatter({0: self._shown.parts[0]})

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

    def traffic(self) -> tuple[int, int]:
        """Bytes to and from neighbours, and to and from the sequencer."""
        sent, received = self.links.traffic()
        client = self._clock.client
        return sent + client.bytes_sent, received + client.bytes_received

    def handed(self) -> int:
        return self.links.traffic()[0]
