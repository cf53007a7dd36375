"""Rounds with deadlines among workers: the sequencer closes a round, then exactly its workers add up their sums.

A worker reports its part of a round by a push without data. The answer names the workers in the round, what they weigh, and
the divisor; then the sum is made, and each worker runs the wrapped optimizer on it (`train/round_exchange.py`). Flat
buffers are host memory; parameters on a GPU are staged. This is no `PeerExchange` (`peers.py`): a worker that is stopped
holds up no other here, and catches up; rounds are made in a thread of their own, and the script takes their means later.

SharedSums   on one host, in shared memory: no worker waits for another that is stopped or dead
GroupSums    between hosts: an all-reduce in a group of exactly these ranks

**On one host** every worker has a slot with room for two rounds, used in turn. It puts its sum there before it reports the
round. So when the sequencer has closed the round, all sums of its workers are there, whatever has become of them since; each
worker reads them in the order of ranks.

A place is used again two rounds later. A worker writes there once the round between is closed, and workers in that round had
read what was there. One that had not is not in that round: it was stopped. It sees by the number beside a sum, after it has
read that, that the place is another round's, and catches up.

**Between hosts** there is a group for each set of ranks. The sequencer numbers the sets, so that their ranks need not agree
on that. A rank that is stopped is in no set, and delays no other; unless it is stopped after its report and before it has
added its part.

A rank says of each round that it has the sum, or that it has not because another rank is lost. Where no rank has it, the
ranks that are left add up what they have. Where one rank has it and another has not, the other ends: the sum is made of what
the lost rank had.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from polytempo.client.client import BackgroundWait
from polytempo.client.client_state import ClientState
from polytempo.collectives.call_queues import CallQueue
from polytempo.collectives.group import RankGroup
from polytempo.collectives.point_to_point import receive, send
from polytempo.collectives.reduce_ops import reduce_into
from polytempo.collectives.shared_buffer import SharedMeanBuffer
from polytempo.collectives.tasks import Steps, Task, Wait
from polytempo.collectives.world import World
from polytempo.errors import JobEnded, PeerError, RankLost, UsageError
from polytempo.protocol.layout import ITEM_SIZES, Layout, lay_out
from polytempo.protocol.push import Measures, StepReport
from polytempo.protocol.values import ClosedRound, OptimizerSpec, Share, number_of
from polytempo.reducer.coordination import SequencerClient
from polytempo.reducer.copier import Copier
from polytempo.reducer.exchange import Exchange, GroupValues, Traffic
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.sums import ALIGNMENT, SlotAllocator, aligned, buffer_number, traffic_of
from polytempo.session.session import Session
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.local_peers import Also, LocalPeers

#: The part of an optimizer's contexts that the messages of rounds have.
BESIDE = 1
#: Seconds after which a rank that leaves no longer waits until what it has sent is gone.
LAST_WAIT = 10.0


class PeerMessages:
    """The messages of one optimizer, on one rank.

    Args:
        world: All ranks of the job.
        members: Those of the optimizer.
        number: The number of the optimizer in the job.
    """

    def __init__(self, world: World, members: Sequence[int], number: int) -> None:
        self.world, self.rank, self.number = world, world.rank, number
        self.group = world.group_of_optimizer(members, number, BESIDE)
        self._notes = self.group.context + 1  # the context of notes
        self._tasks: list[Task] = []  # what is sent in the background

    def send(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Send tensors of the host to a rank, in the background; they stay as they are from now on."""
        to = self.group.ranks.index(rank)
        self._tasks = [task for task in self._tasks if not task.done]
        self._tasks += [send(self.group, tensor, to, tag, background=True) for tensor in tensors]

    def receive(self, tensors: Iterable[torch.Tensor], rank: int, tag: int) -> None:
        """Fill tensors of the host with what a rank has sent.

        Raises:
            RankLost: The rank is lost.
        """
        source = self.group.ranks.index(rank)
        for tensor in tensors:
            receive(self.group, tensor, source, tag).wait()

    def settle(self) -> None:
        """Wait, for a while, until what was sent is gone: a rank that is stopped does not receive."""
        with suppress(PeerError):
            for task in self._tasks:
                task.wait(LAST_WAIT)

    # Notes: whole numbers that only grow.

    def note(self, ranks: Iterable[int], number: int) -> None:
        """Tell these ranks a number; those that are lost are left out."""
        messages, context = self.world.engine.messages, self._notes

        def steps() -> Steps:
            there = [rank for rank in ranks if rank != self.rank and rank not in messages.left]
            messages.notify(there, context, number)
            return
            yield

        self._run("telling how a round went", steps())

    def noted(self, rank: int) -> int:
        """The last number that a rank has told; -1 before the first."""
        return self.world.engine.messages.notified.get((rank, self._notes), -1)

    def wait_for(self, missing: Callable[[], list[int]], name: str) -> None:
        """Wait until no rank is missing, by what ranks have told, and which are lost."""

        def steps() -> Steps:
            yield Wait(lambda: not missing(), missing)

        self._run(name, steps())

    def is_lost(self, rank: int) -> bool:
        """Has a rank ended, as far as this one knows?"""
        return rank in self.world.engine.messages.left

    def _run(self, name: str, steps: Steps) -> Any:
        engine = self.world.engine
        return engine.start(CallQueue(-1, self.group.ranks), name, steps, False, self.group.timeout).wait()

    def handed(self, context: int) -> int:
        """Bytes handed to other ranks in the group of a context."""
        handed = self.world.engine.messages.handed
        return handed[context] + handed[context + 1]


@dataclass(frozen=True)
class EndedRound:
    """A round that has ended, as its workers heard from the sequencer."""

    step: int  #: the number of the round that follows, the same on all
    shares: Sequence[Share]  #: its workers by rank, and their samples
    group: int  #: the number of this set of workers
    divisor: float  #: of the sum

    @property
    def ranks(self) -> list[int]:
        """The ranks of its workers."""
        return [share.worker for share in self.shares]


class RoundSums(ABC):
    """The sums of one optimizer, on one worker."""

    remade = False  #: a sum was made again without a rank that was lost in it: replicas are to be compared

    @abstractmethod
    def put(self, total: FlatBuffer | None, step: int) -> None:
        """Before this worker reports round `step`: its sum of it, which stays as it is until the round's sum is made; None
        where it has no sample."""

    @abstractmethod
    def make(self, result: FlatBuffer, closed: EndedRound) -> bool:
        """Make a flat buffer the sum of a round over its divisor.

        Returns:
            False where this rank has come too late for it, because it was stopped: it has missed the round.

        Raises:
            RankLost: A rank of the round is lost, and the sum cannot be made without it.
        """

    @abstractmethod
    def handed(self) -> int:
        """Bytes handed to other workers so far."""


#: Rounds that a slot has room for.
PLACES = 2
#: In place of the number of a round, while a sum is written.
WRITING = 0


class SharedSums(RoundSums):
    """The slots of all workers, on one.

    Args:
        peers: The other workers of the host.
        members: The ranks of all.
        number: Of the shared buffer, the same on all.
        layout: Where parameters lie in flat buffers.
        also: What else to watch while waiting for the memory.
    """

    def __init__(
        self, peers: LocalPeers, members: Sequence[int], number: int, layout: Layout, also: Sequence[Also] = ()
    ) -> None:
        self._rank, self._layout, self._handed = peers.rank, layout, 0
        size = ALIGNMENT + sum(aligned(length * ITEM_SIZES[dtype]) for dtype, length in layout.sizes.items())
        self._shared = SharedMeanBuffer(peers, members, number, PLACES * size, also)
        self._places = {rank: [self._place(rank, index * size, size) for index in range(PLACES)] for rank in members}

    def _place(self, rank: int, start: int, size: int) -> tuple[numpy.ndarray, FlatBuffer]:
        memory = self._shared.slot_bytes(rank)[start : start + size]
        return memory[:8].view(numpy.uint64), FlatBuffer(self._layout, SlotAllocator(memory[ALIGNMENT:]))

    def put(self, total: FlatBuffer | None, step: int) -> None:
        if total is None:  # it weighs nothing, so no worker reads it
            return
        number, place = self._places[self._rank][step % PLACES]
        number[0] = WRITING
        for dtype, flat in total.tensors.items():
            place.tensors[dtype].copy_(flat)
            self._handed += flat.nbytes
        number[0] = step + 1

    def make(self, result: FlatBuffer, closed: EndedRound) -> bool:
        places = [self._places[share.worker][(closed.step - 1) % PLACES] for share in closed.shares if share.weight > 0]
        for dtype, flat in result.tensors.items():
            terms = [place.tensors[dtype] for _, place in places]
            if dtype != "float16":
                reduce_into(terms, flat, 1 / closed.divisor)
                continue
            torch.div(terms[0], closed.divisor, out=flat)  # sums may be larger than float16 can be
            for term in terms[1:]:
                flat.add_(term, alpha=1 / closed.divisor)
        return all(number[0] == closed.step for number, _ in places)

    def handed(self) -> int:
        return self._handed


#: Tags from here downwards, one for each round, belong to sums that are made again without a lost rank.
AGAIN = -1


class RoundGroups:
    """The groups of the sets of ranks that have made rounds."""

    def __init__(self, messages: PeerMessages) -> None:
        self._messages = messages
        self.groups: dict[tuple[int, ...], RankGroup] = {}

    def of(self, closed: EndedRound) -> RankGroup:
        """The group of a round's ranks."""
        key, messages = tuple(closed.ranks), self._messages
        if key not in self.groups:
            self.groups[key] = messages.world.group_of_round(key, messages.number, closed.group)
        return self.groups[key]

    def gather(self, data: bytes, closed: EndedRound) -> dict[int, bytes]:
        """The bytes of each rank of a round, which have the same length on all."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in closed.ranks]
        self.of(closed).all_gather(rows, mine, self.algorithm(closed)).wait()
        return {rank: row.numpy().tobytes() for rank, row in zip(closed.ranks, rows, strict=True)}

    def algorithm(self, closed: EndedRound) -> str:
        """Sets of ranks that are not all may be many, and short-lived: on one host they get no memory of their own."""
        group = self.of(closed)
        return "auto" if group.size == self._messages.group.size or len(group.place.hosts) > 1 else "ring"


class GroupSums(RoundSums):
    """The sums of one optimizer, on one rank."""

    def __init__(self, messages: PeerMessages, groups: RoundGroups) -> None:
        self._messages, self._groups = messages, groups
        self._total: FlatBuffer | None = None

    def put(self, total: FlatBuffer | None, step: int) -> None:
        self._total = total

    def make(self, result: FlatBuffer, closed: EndedRound) -> bool:
        flats = list(result.tensors.values())
        self._fill(result, closed.divisor)
        try:
            self._messages.world.wait(self._groups.of(closed).all_reduce(flats, "sum", self._groups.algorithm(closed)))
        except RankLost as error:
            lost = self._messages.world.confirm_loss(closed.ranks, error.ranks)
            self._fill(result, closed.divisor)
            self._make_again(flats, closed, RankLost(str(error), tuple(lost)))
            self.remade = True
        self._messages.note(closed.ranks, 2 * closed.step + 1)
        return True

    def _fill(self, result: FlatBuffer, divisor: float) -> None:
        """This rank's part of the sum."""
        for dtype, flat in result.tensors.items():
            if self._total is None:
                flat.zero_()
            else:
                torch.div(self._total.tensors[dtype], divisor, out=flat)

    def _make_again(self, flats: list[torch.Tensor], closed: EndedRound, error: RankLost) -> None:
        """A rank is lost: the lowest of the others adds up what they have. A note of twice a round's number says that a rank
        has not the sum, a higher one that it has."""
        messages, failed, tag = self._messages, 2 * closed.step, AGAIN - closed.step
        messages.note(closed.ranks, failed)

        peers = [rank for rank in closed.ranks if rank not in (messages.rank, *error.ranks)]

        def unheard() -> list[int]:
            return [rank for rank in peers if messages.noted(rank) < failed and not messages.is_lost(rank)]

        messages.wait_for(unheard, "hearing which ranks have a round's sum")
        if done := [rank for rank in peers if messages.noted(rank) > failed]:
            raise RankLost(f"{error}; rank {done[0]} has that round's sum, and rank {messages.rank} has not", error.ranks)
        rest = [rank for rank in peers if not messages.is_lost(rank)]
        if rest and rest[0] < messages.rank:
            messages.send(flats, rest[0], tag)
            messages.receive(flats, rest[0], tag)  # it sends once it has received
            return
        received = [torch.empty_like(flat) for flat in flats]
        for rank in rest:
            messages.receive(received, rank, tag)
            torch._foreach_add_(flats, received)
        for rank in rest:
            messages.send([flat.clone() for flat in flats], rank, tag)

    def handed(self) -> int:
        return sum(self._messages.handed(group.context) for group in self._groups.groups.values())


class DeadlinePeers(Exchange):
    """The workers of a job with deadlines, each with values of its own that are all alike."""

    def __init__(self, session: Session, name: str, spec: OptimizerSpec, params: Sequence[torch.Tensor]) -> None:
        super().__init__(session, spec, ClientState(name), lay_out(spec.tensors, 1))
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
        self.messages = PeerMessages(world, self.client_state.answer.members, number_of(name))
        self.round_groups = RoundGroups(self.messages)
        if session.job.meeting:
            peers, members = session.local_peers(), self.client_state.answer.members
            peers.meet(members)
            heard = [(descriptor, self._hear) for descriptor, _ in self._clock.client.watched()]
            number = buffer_number(session, name, spec)
            self.sums: RoundSums = SharedSums(peers, members, number, self.layout, heard)
        else:
            self.sums = GroupSums(self.messages, self.round_groups)
        self.touched = ""  #: a parameter that the script has written to, which the next report tells
        self.given_up = False  #: this worker leaves the job, and waits for no answer
        self._start_from(self.client_state.answer.shares[0].worker)

    def _hear(self) -> None:
        """Handle what has come from the servers; another optimizer's communication thread may do the same."""
        with self.session.lock:
            self._clock.client.poll()

    @property
    def last_round(self) -> EndedRound:
        """The round that has ended, as the last answer says."""
        answer, closed = self.client_state.answer, self.client_state.answer.closed or ClosedRound()
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
        self._clock.push(StepReport(hyper=hyper, absent=tuple(absent), touched=touched), measures, self._bytes_moved())

    def finish(self) -> None:
        """Wait until the round has ended; `answer` says how. In the communication thread: the script may use the client."""
        wait = BackgroundWait(self._clock.client, self.session.lock)
        if not wait.for_release(self.client_state, self._clock.step + 1, lambda: self.given_up):
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

    def _bytes_moved(self) -> tuple[int, int]:
        """To and from other workers, and to and from the sequencer."""
        (sent, received), client = traffic_of(self.messages.world.engine), self._clock.client
        return sent + client.bytes_sent, received + client.bytes_received

    def traffic(self) -> Traffic:
        handed = self.sums.handed() + self.messages.handed(self.messages.group.context)
        return Traffic(*self._bytes_moved(), handed, self.copier.device_bytes)

    def take_writes(self, declared: bool = False) -> None:
        if declared:
            self.copier.watch.declare()  # the next round compares the replicas

    def read_values(self) -> None:
        """Replicas have them already."""
