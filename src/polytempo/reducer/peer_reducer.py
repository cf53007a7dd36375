"""Rounds with deadlines among workers: the sequencer closes a round, then exactly its workers add up their sums.

    report      a push without data; the answer names the workers in the round, what they weigh, and the divisor
    add_up      an all-reduce in a group of these ranks. There is a group for each set of ranks; the sequencer numbers the
                sets, so that their ranks need not agree on that. A rank that is stopped is in no set, and delays no other
    send        beside the rounds: a rank that has the newest values hands them to one that has missed rounds

A rank says of each round that it has the sum, or that it has not because another rank is lost. Where no rank has it, the
ranks that are left add up what they have. Where one rank has it and another has not, the other ends: the sum is made of what
the lost rank had.

Flat buffers are host memory; parameters on a GPU are staged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from polytempo.client.background_wait import BackgroundWait
from polytempo.collectives import point_to_point
from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.group import RankGroup
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.errors import PeerError, RankLost, UsageError
from polytempo.protocol.layout import lay_out
from polytempo.protocol.messages import Answer
from polytempo.protocol.optimizer_names import number_of
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.reducer import GroupValues, Reducer
from polytempo.reducer.sequencer_client import SequencerClient
from polytempo.session.session import Session
from polytempo.transport.buffer_pool import Pool

#: The part of an optimizer's contexts in which all its ranks tell each other of rounds, and hand over values.
BESIDE = 1
#: Tags from here downwards, one for each round, belong to sums that are made again without a lost rank.
AGAIN = -1
#: Seconds after which a rank that leaves no longer waits for what it has handed over.
LAST_WAIT = 10.0


class PeerReducer(Reducer):
    """The workers of a job with deadlines, each with values of its own that are all alike."""

    def __init__(self, session: Session, name: str, spec: OptimizerSpec, params: Sequence[torch.Tensor]) -> None:
        super().__init__(session, name, spec, lay_out(spec.tensors, 1))
        if session.job.incarnation:
            raise UsageError(
                f"worker {session.rank} comes back to a job of {spec.sync} over all-reduce, whose workers have made their "
                "links to each other once; start the job with --via ps, or again"
            )
        self._world, self._number = session.world(), number_of(name)
        self._clock = SequencerClient(session, spec, self.client_state)
        self.step = self._clock.step
        self.copier = Copier(params, self.layout, Pool())
        members = self.answer.members
        self._beside = self._world.group_of_optimizer(members, self._number, BESIDE)
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        self._tasks: list[Task] = []  # what is handed over, in the background
        self.digests = self.copier.watch.digests  #: of what must be alike on all workers after a write by the script
        self._start_from(self.answer.shares[0].worker)

    @property
    def answer(self) -> Answer:
        """What came with the last release."""
        return self.client_state.answer

    def new_buffer(self) -> FlatBuffer:
        """Memory for sums or values of all parameters."""
        return FlatBuffer(self.layout, Pool(), pinned=False)

    def _start_from(self, root: int) -> None:
        """All workers take the values of one."""
        buffer = self.copier.next_buffer()
        if self.session.rank == root:
            self.copier.gather(buffer, lambda param: param.detach())
        self._beside.broadcast(list(buffer.tensors.values()), self._beside.ranks.index(root)).wait()
        if self.session.rank != root:
            self.copier.scatter({0: buffer.parts[0]})

    # A round.

    def begin(self, buffer: FlatBuffer | None, hyper: GroupValues, average: bool = True, **about: Any) -> None:
        """Report this worker's part of a round; what it is made of stays here."""
        self._clock.push(hyper, self.traffic(), skip=False, **about)

    def finish(self) -> None:
        """Wait until the round has ended; `answer` says how."""
        wait = BackgroundWait(self._clock.client, self.session.lock)  # the script's thread may use the client meanwhile
        wait.for_release(self.client_state, self._clock.step + 1, lambda: False)
        self._clock.step = self.step = self.client_state.released

    def agree(self, hyper: GroupValues, samples: float, skip: bool) -> bool:
        raise UsageError(
            f"synchronize() is not possible under {self.spec.sync}, whose mean is known when the round ends; use clip_norm="
        )

    def add_up(self, result: FlatBuffer, fill: Callable[[], None], ranks: Sequence[int], which: int) -> None:
        """Make a flat buffer the sum over these ranks.

        Args:
            result: Receives the sum.
            fill: Fills it with what this rank adds.
            ranks: The ranks in the round, ascending.
            which: The number of this set of ranks.

        Raises:
            RankLost: A rank is lost, and another has the sum already.
        """
        fill()
        try:
            group = self._group(ranks, which)
            group.all_reduce(list(result.tensors.values()), "sum", self._algorithm(group)).wait()
        except RankLost as error:
            fill()
            self._add_up_again(result, ranks, error)
        self._tell(ranks, 2 * self.step + 1)

    def _group(self, ranks: Sequence[int], which: int) -> RankGroup:
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self._world.group_of_round(key, self._number, which)
        return self._groups[key]

    def _algorithm(self, group: RankGroup) -> str:
        """Sets of ranks that are not all are many and short-lived: they get no memory of their own to share."""
        return "auto" if group.size == self._beside.size or len(group.place.hosts) > 1 else "ring"

    def gather(self, data: bytes, ranks: Sequence[int], which: int) -> list[bytes]:
        """The bytes of each of these ranks, which have the same length on all."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in ranks]
        self._group(ranks, which).all_gather(rows, mine).wait()
        return [row.numpy().tobytes() for row in rows]

    # When a rank is lost in the middle of a round. Notes of a rank only grow: 2 * step says that it has failed to make the
    # sum of this round, anything above that it has made it.

    def _tell(self, ranks: Iterable[int], note: int) -> None:
        messages = self._world.engine.messages

        def steps() -> Steps:
            others = [rank for rank in ranks if rank != self.session.rank and rank not in messages.left]
            messages.notify(others, self._beside.context + 1, note)
            return
            yield

        self._run("telling how a round went", steps())

    def _run(self, name: str, steps: Steps) -> Any:
        engine = self._world.engine
        return engine.start(CallQueue(-1, self._beside.ranks), name, steps, False, self._beside.timeout).wait()

    def _add_up_again(self, result: FlatBuffer, ranks: Sequence[int], error: RankLost) -> None:
        """The lowest of the ranks that are left adds up what they have."""
        note, tag, mine = 2 * self.step, AGAIN - self.step, self.session.rank
        self._tell(ranks, note)
        messages, context = self._world.engine.messages, self._beside.context + 1

        def left() -> list[int]:
            return [rank for rank in ranks if rank not in messages.left and rank not in error.ranks]

        def heard(rank: int) -> int:
            return note if rank == mine else messages.notified.get((rank, context), -1)

        def unheard() -> list[int]:
            return [rank for rank in left() if heard(rank) < note]

        def hear() -> Steps:
            yield Wait(lambda: not unheard(), unheard)

        self._run("hearing which ranks have the sum of a round", hear())
        if done := [rank for rank in left() if heard(rank) > note]:
            raise RankLost(f"{error}; rank {done[0]} has the sum of that round, and rank {mine} has not", error.ranks)
        first, *rest = left()
        flats = list(result.tensors.values())
        if mine != first:
            self.send(flats, first, tag)
            self.receive(flats, first, tag)
            return
        received = [torch.empty_like(flat) for flat in flats]
        for rank in rest:
            self.receive(received, rank, tag)
            torch._foreach_add_(flats, received)
        for rank in rest:
            self.send([flat.clone() for flat in flats], rank, tag)

    # Single messages.

    def send(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Send tensors of the host to a rank, in the background; they stay as they are from now on."""
        to = self._beside.ranks.index(rank)
        self._tasks = [task for task in self._tasks if not task.done]
        self._tasks += [point_to_point.send(self._beside, tensor, to, tag, background=True) for tensor in tensors]

    def receive(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Fill tensors of the host with what a rank has sent.

        Raises:
            RankLost: The rank is lost.
        """
        source = self._beside.ranks.index(rank)
        for tensor in tensors:
            point_to_point.receive(self._beside, tensor, source, tag).wait()

    def settle(self) -> None:
        """Wait, for a while, until what was sent has gone: a rank that is stopped does not receive."""
        with suppress(PeerError):
            for task in self._tasks:
                task.wait(LAST_WAIT)

    # Figures.

    def groups(self) -> list[RankGroup]:
        return [self._beside, *self._groups.values()]

    def traffic(self) -> tuple[int, int]:
        """Bytes to and from other workers, and to and from the sequencer."""
        messages, client = self._world.engine.messages, self._clock.client
        sent = sum(link.payload_sent for link in messages.links.values())
        return sent + client.bytes_sent, messages.payload_received + client.bytes_received

    def handed(self) -> int:
        handed = self._world.engine.messages.handed
        return sum(handed[group.context] + handed[group.context + 1] for group in self.groups())
