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
from polytempo.protocol.layout import lay_out
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
from polytempo.reducer.sums import BucketSums, Sums, VotingGroup, buffer_number, gather_bytes, memory_sums
from polytempo.session.session import Session
from polytempo.sync.directives import Directive


class PeerExchange(Exchange):
    """One optimizer of a worker that averages with others.

    Args:
        session: The job.
        spec: Of the optimizer.
        coordination: Says who is in a round.
        sums: Where the mean is made.
        hooked: Copy gradients into the flat buffer by hooks, while backward runs.
    """

    mean: GradientMean

    def __init__(
        self, session: Session, spec: OptimizerSpec, coordination: Coordination, sums: Sums, hooked: bool = True
    ) -> None:
        super().__init__(session, spec, coordination.state, sums.copier.layout)
        self.coordination, self.sums = coordination, sums
        self.copier, self.mean, self.step = sums.copier, sums.mean, coordination.step
        self._averages = True  # the round under way makes the mean; else `agree` has made it
        if hooked and not self.copier.on_device:
            early = self._leaving(sums) if isinstance(sums, BucketSums) else None
            self.hooks = GradientHooks(self.copier.params, self.copier.next_buffer(), early)

    def _leaving(self, sums: BucketSums) -> Callable[[int], None]:
        def complete(index: int) -> None:
            if self.sending:
                sums.complete(index)

        return complete

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

    def groups(self) -> list[RankGroup]:
        """The groups of ranks in which it makes its rounds, where ranks make them among themselves."""
        return self.coordination.groups()

    def traffic(self) -> Traffic:
        return Traffic(*self.coordination.moved(), self.sums.handed(), self.copier.device_bytes)

    # Values.

    def take_writes(self, declared: bool = False) -> None:
        if declared:
            self.copier.watch.declare()  # the next round compares the replicas

    def read_values(self) -> None:
        """Replicas have them already."""


def in_shared_memory(
    session: Session, name: str, spec: OptimizerSpec, params: Sequence[torch.Tensor], hooked: bool = True
) -> PeerExchange:
    """The workers of one host, with a sequencer.

    Args:
        session: The job.
        name: Of the optimizer in the job.
        spec: Of the optimizer.
        params: What is averaged: gradients of these, or their values.
        hooked: Are these gradients, which backward makes?
    """
    session.local_peers()  # it listens before the sequencer tells other workers of this one
    clock = SequencerClient(session, spec, ClientState(name))
    number, device = buffer_number(session, name, spec), device_of_all(session.devices, params) if hooked else None
    answer = clock.state.answer
    sums = memory_sums(session, clock.client, number, lay_out(spec.tensors, 1), params, answer.members, device)
    sums.start_from(answer.shares[0].worker)
    return PeerExchange(session, spec, BySequencer(session, clock, spec, sums), sums, hooked)


def by_all_reduce(
    session: Session,
    name: str,
    spec: OptimizerSpec,
    params: Sequence[torch.Tensor],
    hooked: bool = True,
    beside: Coordination | None = None,
    expected: Callable[[], float] | None = None,
) -> PeerExchange:
    """The ranks of a job without a sequencer, or on several hosts; arguments as of `in_shared_memory`.

    Args:
        beside: Of the same optimizer: its rounds and these follow one another, in one order on all ranks.
        expected: Says, while backward runs, what this rank's gradients will weigh.
    """
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


def make_peers(
    session: Session,
    name: str,
    spec: OptimizerSpec,
    params: Sequence[torch.Tensor],
    hooked: bool = True,
    beside: Coordination | None = None,
    expected: Callable[[], float] | None = None,
) -> PeerExchange:
    """Through shared memory on one host under `polytempo run`, else by all-reduce; arguments as of these."""
    if session.client is not None and session.job.meeting:
        return in_shared_memory(session, name, spec, params, hooked)
    return by_all_reduce(session, name, spec, params, hooked, beside, expected)


def _check_alike(group: RankGroup, spec: OptimizerSpec) -> None:
    """All ranks must optimize the same."""
    file = f" of a file with the digest {spec.digest}" if spec.digest else ""
    head = [f"sync {spec.sync}{file}", f"optimizer {spec.optimizer}", f"clip_norm {spec.clip_norm}"]
    tensors = [f"parameter {t.name} of {t.dtype}{list(t.shape)} in group {t.group}" for t in spec.tensors]
    text = "\n".join([*head, f"{len(tensors)} parameters", *tensors])
    if len(set(gather_bytes(group, digest_of(text).to_bytes(8, "little")))) > 1:
        raise_difference(group, text)
