"""Where workers that keep the values themselves add up what they have: gradients, or values that are averaged.

    HostSums    in shared memory of one host: each worker's flat buffer is its slot, each adds up its part of the mean
    DeviceSums  in memory of GPUs that reach each other: each worker makes the whole mean (`collectives/device_mean.py`)
    BucketSums  over whatever links there are: an all-reduce for each bucket of parameters, most while backward runs

In memory that all workers have, a sum is made when all that is added up is known to be there. Buckets are reduced before it
is known who is in the round: in the same order on all ranks, each multiplied by its rank's share; the gradients themselves
stay as they are. What turns out to be wrong is made again, or multiplied (`coordination.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from polytempo.client.client import Client
from polytempo.collectives.device_mean import DeviceMeanBuffer
from polytempo.collectives.group import RankGroup
from polytempo.collectives.progress_engine import ProgressEngine
from polytempo.collectives.shared_buffer import SharedMeanBuffer, mean_in_place
from polytempo.collectives.tasks import Task
from polytempo.collectives.world import World
from polytempo.device.device import Device
from polytempo.errors import PeerError, RankLost
from polytempo.profile_ranges import profiled
from polytempo.protocol.layout import ITEM_SIZES, Layout
from polytempo.protocol.values import OptimizerSpec, number_of, number_of_part
from polytempo.reducer.buckets import Bucket, BucketScheduler, plan_buckets
from polytempo.reducer.copier import Copier
from polytempo.reducer.exchange import GradientMean
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.server.optimizer_state import as_bytes
from polytempo.session.session import Session
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes

#: Flat buffers of different dtypes start at multiples of this in a slot.
ALIGNMENT = 64
#: Shared buffers of optimizers in groups are numbered from here on: some for each optimizer.
OF_GROUPS, PARTS = 1 << 20, 1 << 10
#: What workers share in host memory where their gradients are on devices has a number of its own.
OF_DEVICES = 1 << 27
#: Bytes of a bucket.
BUCKET = 8 << 20


class SlotAllocator:
    """Hands out parts of a slot, one after another."""

    pins = False

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._used = 0

    def allocate(self, size: int) -> Bytes:
        """The next part."""
        start = self._used
        self._used = aligned(start + size)
        return self._data[start : start + size]


def aligned(size: int) -> int:
    """The next offset at which a flat buffer may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def buffer_number(session: Session, name: str, spec: OptimizerSpec) -> int:
    """Of an optimizer's shared buffer, the same on all members; a rank may be in groups that others are not in."""
    return OF_GROUPS + number_of(name) * PARTS + number_of_part(name) if spec.members else session.next_buffer()


class Sums(ABC):
    """Where the sums of one optimizer lie, for one worker."""

    copier: Copier  #: moves between parameters and what this worker adds
    mean: GradientMean  #: of the last round

    @abstractmethod
    def wait_until_read(self) -> None:
        """Before this worker's part is written: wait until no other reads the one before."""

    @abstractmethod
    def handed(self) -> int:
        """Bytes handed to other workers so far."""


class MemorySums(Sums):
    """Sums in memory that all workers have; `shared` is what they share of the host's, `client` counts the bytes."""

    def __init__(self, shared: SharedMeanBuffer, client: Client, layout: Layout) -> None:
        self.shared, self._client, self._layout = shared, client, layout
        self._handed = 0

    def start_from(self, root: int) -> None:
        """Make the parameters those of this worker."""
        rank, members = self.shared.peers.rank, self.shared.members
        self.shared.round += 1
        if rank == root:
            self.copier.gather(self.copier.next_buffer(), lambda param: param.detach())
            self.wait_until_filled()
        if root in self.shared.meet("put", members):
            raise PeerError(f"worker {root} ended before the other workers had its initial parameters")
        if rank != root:
            self._take_from(root)
        self.shared.meet("taken", members)

    def make(self, members: Sequence[int], weights: Sequence[float]) -> None:
        """Make the weighted mean of what these workers have put here."""
        with profiled("all_reduce in shared memory"):
            self._make(members, weights)
        for dtype, length in self._layout.sizes.items():
            self._client.connections.count(length * ITEM_SIZES[dtype])
            self._handed += length * ITEM_SIZES[dtype]

    def handed(self) -> int:
        return self._handed

    @abstractmethod
    def wait_until_filled(self) -> None:
        """Wait until what this worker has put here may be read."""

    @abstractmethod
    def _take_from(self, root: int) -> None: ...

    @abstractmethod
    def _make(self, members: Sequence[int], weights: Sequence[float]) -> None: ...


class HostSums(MemorySums):
    """Sums in shared memory of the host."""

    def __init__(self, shared: SharedMeanBuffer, client: Client, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        super().__init__(shared, client, layout)
        self.copier = Copier(params, layout, SlotAllocator(shared.slot_bytes(shared.peers.rank)))
        self.mean = GradientMean(self.copier, FlatBuffer(layout, SlotAllocator(shared.result_bytes()), pinned=False))

    def wait_until_read(self) -> None:
        """A round has ended when all have read what is in it."""

    def wait_until_filled(self) -> None:
        """The host has written it itself."""

    def _take_from(self, root: int) -> None:
        values = FlatBuffer(self._layout, SlotAllocator(self.shared.slot_bytes(root)))
        self.copier.scatter({0: values.parts[0]})

    def _make(self, members: Sequence[int], weights: Sequence[float]) -> None:
        offset = 0
        for dtype, length in self._layout.sizes.items():
            self.shared.round += 1
            mean_in_place(self.shared, members, weights, getattr(torch, dtype), length, offset)
            offset += aligned(length * ITEM_SIZES[dtype])


class DeviceSums(MemorySums):
    """Sums in memory of the workers' devices; `usable`: they reach each other."""

    def __init__(
        self, shared: SharedMeanBuffer, client: Client, layout: Layout, params: Sequence[torch.Tensor], device: Device
    ) -> None:
        super().__init__(shared, client, layout)
        self.copier = Copier(params, layout, device)
        slot, result = self.copier.next_buffer(), self.copier.landing
        form = slot.order_as(params)
        result.order_as(params)
        self.copier.find_places()
        self._buffer = DeviceMeanBuffer(shared, device, slot.ranges, form)
        self.usable = self._buffer.usable
        self.mean = GradientMean(self.copier, result)

    def wait_until_read(self) -> None:
        self._buffer.wait_until_read()

    def wait_until_filled(self) -> None:
        self._buffer.wait_until_filled()

    def _take_from(self, root: int) -> None:
        for dtype, flat in self.copier.landing.tensors.items():
            flat.copy_(self._buffer.slot(root)[dtype][: flat.numel()])
        self.copier.land()
        self._buffer.wait_until_filled()  # and the other's slot is read

    def _make(self, members: Sequence[int], weights: Sequence[float]) -> None:
        self._buffer.mean(members, weights, self.mean.buffer.tensors)


def traffic_of(engine: ProgressEngine) -> tuple[int, int]:
    """Bytes to and from other ranks of the job so far."""
    messages = engine.messages
    return sum(link.payload_sent for link in messages.links.values()), messages.payload_received


class VotingGroup:
    """The ranks that make rounds, and the last vote.

    Reducers whose rounds follow one another, in one order on all ranks, share one: where a rank has died, a rank that has
    gone on to the next reducer forms the group again together with ranks that have not.

    Args:
        world: All ranks of the job.
        number: The number of the first reducer's optimizer in the job, the same on all ranks.
        least: With fewer ranks left, the death of a rank is raised.
        members: The ranks that make rounds, where they are not all: then they go on together or not at all.
    """

    def __init__(self, world: World, number: int, least: int, members: Sequence[int] = ()) -> None:
        group = world.group_of_optimizer(members, number) if members else world.new_group(range(world.size))
        assert group is not None
        self.world, self.group, self._number, self._least = world, group, number + 1, least
        self._may_shrink = not members
        self._votes = 0
        self.ballots: list[bytes] = []  #: of the last vote
        self.voted: tuple[int, ...] = ()  #: whose they are: of more ranks than the group has, where one has died since

    def vote(self, ballot: bytes) -> None:
        """Give this rank's ballot, and get all."""
        self.ballots = gather_bytes(self.group, ballot, self.world.wait)
        self.voted = self.group.ranks
        self._votes += 1

    def form_again(self, error: RankLost) -> bool:
        """Form the group again without the dead ranks.

        Returns:
            Whether another rank has seen the vote to its end that this rank has not; its ballots are here then.
        """
        if not self._may_shrink or self.world.size - len({*self.world.engine.messages.left, *error.ranks}) < self._least:
            raise error
        before, earlier, members = self._votes, self.ballots, self.group.ranks
        self.group = self.world.reform(self._number)
        if self.group.size < self._least:
            raise error
        counts = [int.from_bytes(data, "little") for data in gather_bytes(self.group, before.to_bytes(8, "little"))]
        self._votes = max(counts)
        if min(counts) == max(counts):
            return False
        knows = counts.index(max(counts))
        sizes = torch.tensor([len(earlier), len(earlier[0]) if earlier else 0])
        self.group.broadcast([sizes], knows).wait()
        count, each = (int(size) for size in sizes)
        data = torch.zeros(count * each, dtype=torch.uint8)
        if before == max(counts):
            data.copy_(torch.frombuffer(bytearray(b"".join(earlier)), dtype=torch.uint8))
        self.group.broadcast([data], knows).wait()
        if before == max(counts):
            return False
        whole = data.numpy().tobytes()
        self.ballots = [whole[start : start + each] for start in range(0, len(whole), each)]
        self.voted = members
        return True


def gather_bytes(group: RankGroup, data: bytes, wait: Callable[[Task], object] = Task.wait) -> list[bytes]:
    """All ranks' bytes, which must have the same length on each."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    outputs = [torch.empty_like(mine) for _ in range(group.size)]
    wait(group.all_gather(outputs, mine))
    return [as_bytes(output).tobytes() for output in outputs]


class BucketSums(Sums):
    """Sums by all-reduce.

    Args:
        voters: The ranks that make them.
        layout: Where parameters lie in flat buffers.
        params: What is averaged.
        device: Where the flat buffers lie; None: in host memory.
        hooked: Are these gradients, which backward makes? Then buckets leave meanwhile, from host memory; and the first
            round is scaled by the weights of its ballots, as later ones are by those of the round before, so that a resumed
            run is the same to the bit: buckets that have left by then are reduced again.
        expected: Says, before the first bucket of a round leaves, what this rank's gradients will weigh.
    """

    def __init__(
        self,
        voters: VotingGroup,
        layout: Layout,
        params: Sequence[torch.Tensor],
        device: Device | None,
        hooked: bool,
        expected: Callable[[], float] | None = None,
    ) -> None:
        self._voters, self._expected = voters, expected
        self.early = hooked and device is None  #: do buckets leave while backward runs, by `complete`?
        self.copier = Copier(params, layout, device or Pool())
        result = FlatBuffer(layout, Pool(), pinned=False) if device is None else self.copier.landing
        self.mean, gradients = GradientMean(self.copier, result), self.copier.next_buffer()
        self._is_narrow = "float16" in layout.sizes  # sums must not be larger than means
        order = [place.index for place in sorted(layout.places, key=lambda place: -place.index)]
        buckets: list[Bucket] = [bucket for bucket in plan_buckets(layout, order, BUCKET) if bucket.pieces[0]]
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each bucket, in the gradients and in the mean
        for bucket in buckets:
            parts = []
            for piece in bucket.pieces[0]:
                segment = layout.shards[0][piece.buffer]
                item = ITEM_SIZES[segment.dtype]
                part = slice(segment.start + piece.start // item, segment.start + piece.stop // item)
                parts.append((gradients.tensors[segment.dtype][part], result.tensors[segment.dtype][part]))
            self._parts.append(parts)
        self.count = len(buckets)  #: of buckets
        params_of = [bucket.params for bucket in buckets]
        self._scheduler = BucketScheduler(params_of, self._launch, gradients.stamp, in_order=True, hold_last=True)
        self._weight = 1.0  # what this rank's gradients are expected to weigh
        self._total = float(voters.group.size)  # and those of all ranks together
        self._is_first = hooked  # and no total is known: it is scaled as later ones are
        self.start_over()

    def start_over(self) -> None:
        """No bucket has left: the next round, or this one again."""
        self._tasks: list[Task] = []  # of buckets that were launched
        self._final_weight: float | None = None  # the step's own weight, once it is known
        self._scheduler.start_over()

    def wait_until_read(self) -> None:
        """Buckets are copied to where the mean will be when they leave."""

    def handed(self) -> int:
        return self._voters.world.engine.messages.handed[self._voters.group.context]

    # While backward runs.

    def complete(self, index: int) -> None:
        """A gradient is in the flat buffer."""
        if self._expected is not None and not self._tasks:
            self._weight = self._expected()
        self._scheduler.complete(index)

    def launch(self, weight: float) -> None:
        """Let all buckets travel in the background, at the weight that the ballot will say."""
        self._weight = weight
        try:
            self._scheduler.launch_rest()
        except RankLost:  # the end of the round deals with it
            self.start_over()

    def _launch(self, number: int) -> None:
        with profiled("all_reduce bucket", number):
            if self._final_weight is None:
                self._fill(number, self._weight)
                self._tasks.append(self._reduce(number, background=True))
            else:
                self._fill(number, self._final_weight)
                self._voters.world.wait(self._reduce(number, background=False))

    def _fill(self, number: int, weight: float) -> None:
        for source, target in self._parts[number]:
            if weight:
                torch.mul(source, weight / self._total, out=target)
            else:
                target.zero_()

    def _reduce(self, number: int, background: bool) -> Task:
        return self._voters.group.all_reduce([target for _, target in self._parts[number]], "sum", background=background)

    # At the end of a step.

    def changed(self, weight: float) -> frozenset[int]:
        """Buckets that have left with other gradients than there are now, or with another weight than this."""
        changed = self._scheduler.changed() if weight == self._weight else self._scheduler.launched
        self._weight = weight or self._weight
        return frozenset(changed)

    def launch_rest(self, weight: float) -> None:
        """Let go what has not left, at this weight, and wait for all buckets."""
        self._final_weight = weight
        self._scheduler.launch_rest()
        for task in self._tasks:
            self._voters.world.wait(task)

    def to_repeat(self, total: float, changed: Sequence[int]) -> Sequence[int]:
        """Buckets to reduce again for this total: those that have changed on a rank, or all, where they were scaled for
        another total and that matters: float16 may overflow when it is scaled anew, and the first round had no total."""
        if total in (0, self._total) or not (self._is_narrow or self._is_first):
            return changed
        self._total = total
        return range(self.count)

    def make_again(self, number: int, weight: float) -> None:
        """Reduce a bucket again."""
        self._fill(number, weight)
        self._voters.world.wait(self._reduce(number, background=False))

    def finish(self, total: float) -> None:
        """All have these sums. They were made for a total as in the step before; mostly it is the same."""
        if total != self._total:
            for _, target in (part for parts in self._parts for part in parts):
                target.mul_(self._total / total)
        self._total, self._is_first = total, False
