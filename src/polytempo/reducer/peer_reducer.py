"""Rounds with deadlines among workers: the sequencer closes a round, then exactly its workers add up their sums.

A worker reports its part of a round by a push without data. The answer names the workers in the round, what they weigh, and
the divisor; then the sum is made (`round_sums.py`), and each worker runs the wrapped optimizer on it
(`train/peer_rounds.py`). Flat buffers are host memory; parameters on a GPU are staged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polytempo.client.client import BackgroundWait
from polytempo.collectives.group import RankGroup
from polytempo.errors import JobEnded, UsageError
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import ClosedRound, OptimizerSpec, number_of
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.peer_messages import PeerMessages
from polytempo.reducer.reducer import GroupValues, Reducer, SequencerClient
from polytempo.reducer.round_sums import EndedRound, GroupSums, RoundGroups, RoundSums, SharedSums
from polytempo.reducer.shared_memory_reducer import buffer_number
from polytempo.session.session import Session
from polytempo.transport.buffer_pool import Pool


class PeerReducer(Reducer):
    """The workers of a job with deadlines, each with values of its own that are all alike."""

    def __init__(self, session: Session, name: str, spec: OptimizerSpec, params: Sequence[torch.Tensor]) -> None:
        super().__init__(session, name, spec)
        if session.job.incarnation:
            raise UsageError(
                f"worker {session.rank} comes back to a job of {spec.sync} over all-reduce, whose workers have made their "
                "links to each other once; start the job with --via ps, or again"
            )
        world = session.world()
        if session.job.meeting:
            session.local_peers()  # it listens before the sequencer tells other workers of this one
        self._clock = SequencerClient(session, spec, self.client_state)
        self.step = self._clock.step
        self.copier = Copier(params, self.layout, Pool())
        self.messages = PeerMessages(world, self.answer.members, number_of(name))
        self.round_groups = RoundGroups(self.messages)
        if session.job.meeting:
            peers, members = session.local_peers(), self.answer.members
            peers.meet(members)
            heard = [(descriptor, self._hear) for descriptor, _ in self._clock.client.watched()]
            number = buffer_number(session, name, spec)
            self.sums: RoundSums = SharedSums(peers, members, number, self.layout, heard)
        else:
            self.sums = GroupSums(self.messages, self.round_groups)
        self.digests = self.copier.watch.digests  #: of what must be alike on all workers after a write by the script
        self.touched = ""  #: a parameter that the script has written to, which the next report tells
        self.given_up: Callable[[], bool] = lambda: False  #: does this worker leave the job, and wait for no answer?
        self._start_from(self.answer.shares[0].worker)

    def _hear(self) -> None:
        """Handle what has come from the servers; another optimizer's communication thread may do the same."""
        with self.session.lock:
            self._clock.client.poll()

    @property
    def last_round(self) -> EndedRound:
        """The round that has ended, as the last answer says."""
        answer, closed = self.answer, self.answer.closed or ClosedRound()
        total = sum(share.weight for share in answer.shares)
        return EndedRound(self.step, answer.shares, closed.group, closed.divisor or total)

    def new_buffer(self) -> FlatBuffer:
        """Memory for sums or values of all parameters."""
        return FlatBuffer(self.layout, Pool(), pinned=False)

    def _start_from(self, root: int) -> None:
        buffer, group = self.copier.next_buffer(), self.messages.group
        if self.session.rank == root:
            self.copier.gather(buffer, lambda param: param.detach())
        group.broadcast(list(buffer.tensors.values()), group.ranks.index(root)).wait()
        if self.session.rank != root:
            self.copier.scatter({0: buffer.parts[0]})

    # A round.

    def begin(self, buffer: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int] = ()) -> None:
        """Report this worker's part of a round."""
        self.sums.put(buffer, self.step)
        touched, self.touched = self.touched, ""
        self._clock.push(StepReport(hyper=hyper, absent=tuple(absent), touched=touched), measures, self.traffic())

    def finish(self) -> None:
        """Wait until the round has ended; `answer` says how. In the communication thread: the script may use the client."""
        wait = BackgroundWait(self._clock.client, self.session.lock)
        if not wait.for_release(self.client_state, self._clock.step + 1, self.given_up):
            raise JobEnded("this worker has left its job")
        self._clock.step = self.step = self.client_state.released

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        raise UsageError(
            f"synchronize() is not possible under {self.spec.sync}, whose mean is known when the round ends; use clip_norm="
        )

    def settle(self) -> None:
        """Wait, for a while, until what was sent to other workers is gone."""
        self.messages.settle()

    # Figures.

    def took(self, seconds: float) -> None:
        """An exchange has taken this long."""
        self.waited = self._clock.waited = seconds

    def groups(self) -> list[RankGroup]:
        return [self.messages.group, *self.round_groups.groups.values()]

    def traffic(self) -> tuple[int, int]:
        """Bytes to and from other workers, and to and from the sequencer."""
        (sent, received), client = self.messages.traffic(), self._clock.client
        return sent + client.bytes_sent, received + client.bytes_received

    def handed(self) -> int:
        return self.sums.handed() + self.messages.handed(self.messages.group.context)
