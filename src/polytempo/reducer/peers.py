"""Workers that keep the values themselves: they average gradients, and each runs the wrapped optimizer on the mean.

All make the same change, so all replicas stay the same. Who is in a round is said by a `Coordination` (`coordination.py`):
the sequencer, or a ballot. Where the sum is made is said by `Sums` (`sums.py`): in memory that all workers have, or bucket
by bucket over whatever links there are. In modes with blocks of local steps values are averaged in the place of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polytempo.client.client_state import ClientState
from polytempo.collectives.group import RankGroup
from polytempo.collectives.shared_buffer import SharedMeanBuffer, all_on_device
from polytempo.device.device import FENCE_BYTES
from polytempo.protocol.layout import ITEM_SIZES, lay_out
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import OptimizerSpec, number_of
from polytempo.reducer.coordination import (
    ByBallot,
    BySequencer,
    Coordination,
    SequencerClient,
    digest_of,
    raise_difference,
)
from polytempo.reducer.device_moves import device_of_all
from polytempo.reducer.exchange import Exchange, GradientMean, GroupValues, Traffic
from polytempo.reducer.flat_buffer import FlatBuffer, GradientHooks
from polytempo.reducer.sums import (
    OF_DEVICES,
    BucketSums,
    DeviceSums,
    HostSums,
    MemorySums,
    Sums,
    VotingGroup,
    aligned,
    buffer_number,
    gather_bytes,
)
from polytempo.session.session import Session
from polytempo.sync.directives import Directive


class PeerExchange(Exchange):
    """One optimizer of a worker that averages with others; `hooked`: gradients, which hooks bring while backward runs."""

    mean: GradientMean

    def __init__(
        self, session: Session, spec: OptimizerSpec, coordination: Coordination, sums: Sums, hooked: bool = True
    ) -> None:
        super().__init__(session, spec, coordination.state, sums.copier.layout)
        self.coordination, self.sums = coordination, sums
        self.copier, self.mean, self.step = sums.copier, sums.mean, coordination.step
        self._averages = True  # the round under way makes the mean; else `agree` has made it
        if hooked and not self.copier.on_device:
            leaves = self._complete if isinstance(sums, BucketSums) else None
            self.hooks = GradientHooks(self.copier.params, self.copier.next_buffer(), leaves)

    def _complete(self, index: int) -> None:
        if self.sending and isinstance(self.sums, BucketSums):
            self.sums.complete(index)

    def buffer_of(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[FlatBuffer, tuple[int, ...]]:
        self.sums.wait_until_read()
        return super().buffer_of(of)

    # A step.

    def begin(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        self.coordination.begin(self._report(hyper, absent, buffer is None), measures, self._averages)

    def finish(self) -> None:
        self.coordination.end(self._averages)
        self._averages = True
        self.step, self.waited = self.coordination.step, self.coordination.waited

    @property
    def directive(self) -> Directive | None:
        return self.coordination.directive

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        absent = () if skip else self.gradients()[1]
        self.coordination.agree(self._report(hyper, absent, skip), samples)
        self._averages = False
        if not self.mean.skipped:
            self.mean.assign()
        return self.mean.skipped

    def _report(self, hyper: GroupValues, absent: Sequence[int], skip: bool) -> StepReport:
        return StepReport(hyper=hyper, absent=tuple(absent), skip=skip, touched=self.copier.watch.touched)

    def join(self) -> bool:
        """Take part in one round without data. True once all workers have run out of data."""
        over = self.coordination.join()
        self.step = self.coordination.step
        return over

    def traffic(self) -> Traffic:
        return Traffic(*self.coordination.moved(), self.sums.handed(), self.copier.device_bytes)

    # Values.

    def take_writes(self, declared: bool = False) -> None:
        if declared:
            self.copier.watch.declare()  # the next round compares the replicas

    def read_values(self) -> None:
        """Replicas have them already."""


def make_peers(
    session: Session,
    name: str,
    spec: OptimizerSpec,
    params: Sequence[torch.Tensor],
    hooked: bool = True,
    beside: Coordination | None = None,
    expected: Callable[[], float] | None = None,
) -> PeerExchange:
    """Through shared memory on one host under `polytempo run`, else by all-reduce.

    Args:
        session: The job.
        name: Of the optimizer in the job.
        spec: Of the optimizer.
        params: What is averaged: gradients of these, or their values.
        hooked: Are these gradients, which backward makes?
        beside: Of the same optimizer: its rounds and these follow one another, in one order on all ranks.
        expected: Says, while backward runs, what this worker's gradients will weigh.
    """
    if session.client is not None and session.job.meeting:
        session.local_peers()  # it listens before the sequencer tells other workers of this one
        clock = SequencerClient(session, spec, ClientState(name))
        memory = _memory_sums(session, name, spec, params, clock, hooked)
        memory.start_from(clock.state.answer.shares[0].worker)
        return PeerExchange(session, spec, BySequencer(session, clock, spec, memory), memory, hooked)
    device = device_of_all(session.devices, params) if len(session.world().hosts) == 1 else None
    voters = beside.voters if isinstance(beside, ByBallot) else None
    if voters is None:
        voters = VotingGroup(session.world(), number_of(name), session.least, spec.members)
    sums = BucketSums(voters, lay_out(spec.tensors, 1), params, device, hooked, expected)
    coordination = ByBallot(session, spec, ClientState(name), voters, sums)
    _check_alike(voters.group, spec)
    with torch.no_grad():
        voters.group.broadcast([param.detach() for param in params], 0).wait()
    sums.copier.watch.record()
    return PeerExchange(session, spec, coordination, sums, hooked)


def _memory_sums(
    session: Session,
    name: str,
    spec: OptimizerSpec,
    params: Sequence[torch.Tensor],
    clock: SequencerClient,
    hooked: bool,
) -> MemorySums:
    """On the workers' devices, if all have one and these reach each other, or in host memory. While others are waited for,
    the servers are heard."""
    peers, members, layout = session.local_peers(), clock.state.answer.members, lay_out(spec.tensors, 1)
    number, also = buffer_number(session, name, spec), clock.client.watched()
    device = device_of_all(session.devices, params) if hooked else None
    peers.meet(members)
    if all_on_device(peers, members, number, device is not None, also) and device is not None:
        shared = SharedMeanBuffer(peers, members, number + OF_DEVICES, FENCE_BYTES, also)
        on_device = DeviceSums(shared, clock.client, layout, params, device)
        if on_device.usable:
            return on_device
    size = sum(aligned(length * ITEM_SIZES[dtype]) for dtype, length in layout.sizes.items())
    return HostSums(SharedMeanBuffer(peers, members, number, max(size, 1), also), clock.client, layout, params)


def _check_alike(group: RankGroup, spec: OptimizerSpec) -> None:
    """All ranks must optimize the same."""
    file = f" of a file with the digest {spec.digest}" if spec.digest else ""
    head = [f"sync {spec.sync}{file}", f"optimizer {spec.optimizer}", f"clip_norm {spec.clip_norm}"]
    tensors = [f"parameter {t.name} of {t.dtype}{list(t.shape)} in group {t.group}" for t in spec.tensors]
    text = "\n".join([*head, f"{len(tensors)} parameters", *tensors])
    if len(set(gather_bytes(group, digest_of(text).to_bytes(8, "little")))) > 1:
        raise_difference(group, text)
