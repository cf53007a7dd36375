"""`DistributedSampler` and `DistributedBatchSampler`: they share a data set among the workers, and go on where a checkpoint
left off.

An epoch is one seeded order of all samples; worker r of n takes places r, r + n, r + 2n, ... of it. Where several ranks have
parts of one replica of the model, all of them take the same samples: there r is the replica, of n replicas.

After a checkpoint the samples that pushes before it were made of are left out, exactly, and the rest is shared anew, by
however many there are now (`sync/epoch_parts.py`). Only samplers that train have a position (`session/ledger.py`); others,
such as one for validation, always give all.

Every worker gets equally many samples, as with torch's: where it does not divide, some are used twice, or with `drop_last`
the last few not at all.

In modes that deal out whole micro-batches (`bsp+balance,micro=M`, `anytime`) the order is cut in micro-batches of the
loader's `batch_size`, and a worker gets as many as it is dealt (`sync/joint_batches.py`): every sample once.

`DistributedBatchSampler` makes batches whose size follows the workers' speed. Under `bsp+balance` joint batch k of an epoch
is places k * B to (k + 1) * B of its order, B = batch_size x workers, and each worker's batch is its share of it by the
weights in force. Every sample is used once in an epoch, and every worker gets at least one in each joint batch. With `cost`
shares are cut by predicted cost: long sequences are dealt out so that all workers take equally long, though the numbers of
their samples differ. In modes without shares by speed its batches are those of a `DistributedSampler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler

from polytempo.errors import UsageError
from polytempo.session.ledger import CHUNK, SamplerPass
from polytempo.session.session import Session, current
from polytempo.sync.epoch_parts import epoch_to_go_on_with, name_of, remaining
from polytempo.sync.joint_batches import BatchShape, EpochCut, SampleCost, checked_cost
from polytempo.sync.spec import Spec

#: Which shard of how many; None: each rank's own.
ShardOf = tuple[int, int] | None


class EpochSampler(torch.utils.data.Sampler[Any]):  # type: ignore[misc]
    """The epochs of a sampler: one seeded order each, without what earlier jobs have trained on."""

    def __init__(
        self, data: Sized, shuffle: bool, seed: int | None, drop_last: bool, training: bool | None, name: str, shard: ShardOf
    ) -> None:
        session = self._session = current()
        self._shard = shard or session.data_axis
        self._length, self._shuffle, self._drop_last, self._training = len(data), shuffle, drop_last, training
        self._seed = session.job.seed if seed is None else seed
        earlier = session.job.positions
        nameless = any(not name_of(part) for part in earlier)
        self._name = session.ledger.identify(data, self._length, shuffle, name, nameless)
        self._earlier = [] if training is False else [part for part in earlier if name_of(part) == self._name]
        self._passes: list[SamplerPass] = []  # of this epoch
        #: The epoch of the next pass; after a resume, the one to go on with.
        self.epoch = epoch_to_go_on_with(self._earlier or earlier)
        self.passing: SamplerPass | None = None  #: the last
        self.least = 1  #: what an earlier job has left of an epoch is dropped by the loader where it has fewer samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it before each epoch.

        Args:
            epoch: The number of the epoch.
        """
        self.epoch = epoch
        if self._session.registered is not None:
            self._session.registered.begin_epoch(lambda: self.left() == self._length)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of a training of `count` epochs, in place of `range(count)` and `set_epoch`.

        From 0 on, in a job that goes on from a checkpoint from the epoch in which that was made, the rest of which comes
        first. It ends when `should_stop()` is true.

        Args:
            count: The number of epochs in all, those of earlier jobs included.

        Returns:
            The numbers of the epochs.
        """
        while self._length and self.left() < min(self._least() if self._drop_last else self.least, self._length):
            self.epoch += 1
        while self.epoch < count and not self._session.should_stop():
            epoch = self.epoch
            self.set_epoch(epoch)
            yield epoch
            self.epoch = epoch + 1

    def _least(self) -> int:
        """With `drop_last`: samples of which a pass gives at least one to each worker."""
        return self.parts

    # What is left of an epoch.

    def left(self) -> int:
        self._forget_used()
        begun = any(part["epoch"] == self.epoch for part in self._earlier)
        return len(self._rest_of(self.epoch)) if begun else self._length

    def _rest(self) -> list[int]:
        self._forget_used()
        return self._rest_of(self.epoch)

    def _forget_used(self) -> None:
        if any(one.used for one in self._passes if one.epoch == self.epoch):
            # The rest of an interrupted epoch was trained on: another pass without `set_epoch` is a whole one.
            self._earlier = [part for part in self._earlier if part["epoch"] != self.epoch]
            self._passes = []

    def _rest_of(self, epoch: int) -> list[int]:
        order = order_of_epoch(self._length, self._seed if self._shuffle else None, epoch)
        return list(remaining(order, [part for part in self._earlier if part["epoch"] == epoch]))

    def _check_unsplit(self, spec: Spec) -> None:
        """Refuse shards that are not one for each rank, in modes with shares by speed."""
        rank, size, shard = self._session.rank, self._session.size, self._shard
        if shard is not None and shard != (rank, size):
            raise UsageError(
                f"worker {rank}: {spec.text} shares a data set by the speed of the {size} ranks, and this sampler gives "
                f"shard {shard[0]} of {shard[1]}; leave num_replicas= and rank= out, or use sync='bsp'"
            )

    @property
    def parts(self) -> int:
        """Into how many shards the data set is cut, where it is shared evenly."""
        return self._shard[1] if self._shard else self._session.size

    def each(self, length: int) -> int:
        """Samples of a shard of this many."""
        return length // self.parts if self._drop_last else math.ceil(length / self.parts)

    # Passes.

    def trains(self) -> bool:
        """Are steps made of what is drawn now?"""
        return self._training is True or (self._training is None and torch.is_grad_enabled())

    def _evenly(self) -> Iterator[int]:
        rest = self._rest()
        rank, size = self._shard or (self._session.rank, self._session.size)
        mine = iter([rest[place % len(rest)] for place in range(rank, self.each(len(rest)) * size, size)])
        return mine if self._training is False else self._begin(SamplerPass(self._name, self.epoch, mine, self._shard))

    def _dealt(self, shape: BatchShape, costs: SampleCost | None = None, as_stream: bool = False) -> Iterator[Any]:
        """A pass whose batches are dealt out. `as_stream`: a loader makes them again of single indices."""
        one = SamplerPass(self._name, self.epoch, cut=EpochCut(self._rest(), shape, costs))
        one.leased = self._session.ledger.ask is not None and self.trains()
        one.singles, one.each = as_stream or not shape.each, shape.each or CHUNK
        # Epochs before this one that earlier jobs may not have done in full.
        one.earlier = {part["epoch"] for part in self._earlier if part["epoch"] < self.epoch and "done" in part}
        one.order_of = self._rest_of
        batches = self._begin(one)
        return chain.from_iterable(batches) if as_stream else batches

    def _begin(self, one: SamplerPass) -> Iterator[Any]:
        self.passing = one
        self._passes = [*(other for other in self._passes if other.epoch == self.epoch), one]
        return Draws(self._session, one, self.trains)


class Draws:
    """The iterator of a pass, which a loader holds."""

    def __init__(self, session: Session, one: SamplerPass, trains: Callable[[], bool]) -> None:
        self._session, self._pass, self._trains = session, one, trains
        session.ledger.begin(one)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        one, trains = self._pass, self._trains()
        item = None if one.complete else self._session.ledger.draw(one, trains)
        if item is None:
            one.complete = True
            raise StopIteration
        if trains and self._session.registered is not None:
            self._session.registered.draw()  # what the script does after a step is done (`script_state.py`)
        return item

    def __del__(self) -> None:
        self._session.ledger.let_go(self._pass)


class DistributedSampler(EpochSampler):
    """Shards a data set over the workers, as torch's does, and resumes exactly. Give it to a `DataLoader` as `sampler=`.

    `for epoch in sampler.epochs(100)` goes on at the right epoch after a resume; or call `set_epoch` before each epoch, from
    `epoch` on.

    Args:
        dataset: The data set; only its length is read.
        shuffle: A new order in each epoch, the same on all workers.
        seed: The seed of the order; the job's `--seed` by default.
        drop_last: Leave out the last few samples instead of repeating some, where the length is not a multiple of the
            workers. In modes that deal out micro-batches it leaves out a last micro-batch that is short: give it where the
            loader has `drop_last=True`.
        training: Whether its position is saved in checkpoints. By default it is once steps follow its draws; False for data
            that is only evaluated between steps; True for data that is drawn while gradients are disabled.
        name: Its name in checkpoints. By default samplers are told apart by length, `shuffle` and the order in which data
            sets came; name those that workers do not all make in the same order.
        num_replicas: The number of shards; by default one for each rank, under a `Strategy` one for each replica.
        rank: Which of them this sampler gives, with `num_replicas`.
        batch_size: That of the loader; needed by modes that deal out micro-batches: `bsp+balance,micro=M`, and `anytime`
            unless the script calls `step(samples=...)` with the number of samples.

    Raises:
        UsageError: `init` was not called, or there is no such shard.

    Example:
        ```python
        sampler = pt.DistributedSampler(data)
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        ```
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        *,
        training: bool | None = None,
        name: str = "",
        num_replicas: int | None = None,
        rank: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(dataset, shuffle, seed, drop_last, training, name, _shard_of(num_replicas, rank))
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        ledger = self._session.ledger
        spec = ledger.spec
        if spec is None or not spec.capabilities.micro or not self.trains():
            return self._evenly()
        if self._batch_size is None and ledger.ask is None:
            raise UsageError(
                f"{spec.text} deals out whole micro-batches: expected DistributedSampler(..., batch_size=) with the "
                "loader's batch_size, got none"
            )
        self._check_unsplit(spec)
        size = self._batch_size or 0  # else step(samples=...) says how large they are
        return self._dealt(BatchShape(size, spec.capabilities.micro, self._drop_last), as_stream=True)

    def __len__(self) -> int:
        """Samples of a whole epoch, also where a resumed job has only the rest of one before it."""
        return self.each(self._length)


class DistributedBatchSampler(EpochSampler):
    """Shards a data set over the workers in batches, whose size follows their speed where the mode says so. Give it to a
    `DataLoader` as `batch_sampler=`.

    `for epoch in sampler.epochs(100)` goes on at the right epoch after a resume; or call `set_epoch` before each epoch, from
    `epoch` on.

    Args:
        dataset: The data set; only its length is read.
        batch_size: The mean batch of a worker: the joint batch has `batch_size` times the number of workers, whatever the
            shares are. With `micro=M` in the mode, and under `anytime` (8), it hands out micro-batches of `batch_size / M`
            samples, rounded up: a worker takes M of them in a round, on average.
        shuffle: A new order in each epoch, the same on all workers.
        seed: The seed of the order; the job's `--seed` by default.
        drop_last: Leave out the last joint batch of an epoch where it is smaller than the others. By default it is used; one
            with fewer samples than workers goes with the joint batch before it.
        cost: What a sample costs, by its index: tokens, frames, bytes. Shares are then cut by cost, so that samples of very
            different length keep all workers busy for equally long. It is asked once for each sample, on every worker.
        training: As for `DistributedSampler`. With False, all workers get even shares.
        name: As for `DistributedSampler`.
        num_replicas: As for `DistributedSampler`; not in modes with shares by speed.
        rank: With `num_replicas`.

    Raises:
        UsageError: `init` was not called, `batch_size` is no number from 1 on, or there is no such shard.

    Example:
        ```python
        sampler = pt.DistributedBatchSampler(data, batch_size=32, cost=lambda index: len(data[index]))
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
        ```
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        *,
        cost: SampleCost | None = None,
        training: bool | None = None,
        name: str = "",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise UsageError(f"expected batch_size= of at least 1 for DistributedBatchSampler, got {batch_size!r}")
        super().__init__(dataset, shuffle, seed, drop_last, training, name, _shard_of(num_replicas, rank))
        self.batch_size, self.drop_last = batch_size, drop_last
        self._costs = checked_cost(cost) if cost is not None else None

    def _least(self) -> int:
        spec = self._session.ledger.spec
        return self._shape(spec).each if spec is not None and spec.capabilities.micro else self.batch_size * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        spec = self._session.ledger.spec
        if spec is None:
            return iter(BatchSampler(self._evenly(), self.batch_size, self.drop_last))
        self._check_unsplit(spec)
        return self._dealt(self._shape(spec), self._costs)

    def _shape(self, spec: Spec) -> BatchShape:
        micro = spec.capabilities.micro
        return BatchShape(math.ceil(self.batch_size / micro) if micro else self.batch_size, micro, self.drop_last)

    def __len__(self) -> int:
        """Batches of a whole epoch, on average over the workers; also where a resumed job has only the rest of one."""
        spec = self._session.ledger.spec or self._session.job.spec
        if not spec.capabilities.by_speed:
            return len(BatchSampler(range(self.each(self._length)), self.batch_size, self.drop_last))
        size, shape = self._session.size, self._shape(spec)
        return math.ceil(shape.units(self._length) / size) if shape.micro else len(shape.joint_batches(self._length, size))


def _shard_of(num_replicas: int | None, rank: int | None) -> ShardOf:
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None or not 0 <= rank < num_replicas:
        raise UsageError(
            f"expected num_replicas= and a rank= from 0 to one less, got num_replicas={num_replicas} and rank={rank}; "
            "give both, or none of them"
        )
    return rank, num_replicas


def order_of_epoch(length: int, seed: int | None, epoch: int) -> list[int]:
    """All samples, in the seeded order of an epoch, or as they are."""
    if seed is None:
        return list(range(length))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(length, generator=generator).tolist()  # type: ignore[no-any-return]
