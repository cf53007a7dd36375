"""`DistributedBatchSampler`: batches whose size follows the workers' speed.

Under `bsp+balance` joint batch k of an epoch is places k * B to (k + 1) * B of its order, B = batch_size x workers, and each
worker's batch is its share of it by the weights in force (`session/dealing.py`). Every sample is used once in an epoch, and
every worker gets at least one in each joint batch. With `cost` shares are cut by predicted cost: long sequences are dealt
out so that all workers take equally long, though the numbers of their samples differ.

In modes without shares by speed every worker's batches are those of a `DistributedSampler` and this `batch_size`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import BatchSampler

from polytempo.errors import UsageError
from polytempo.session.session import current
from polytempo.sync.spec import Spec
from polytempo.train.dealt_epoch import BatchShape, CostTable, DealtEpoch, SampleCost
from polytempo.train.sampler import DistributedSampler, check_unsplit


class DistributedBatchSampler(torch.utils.data.Sampler[list[int]]):  # type: ignore[misc]
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
        self._session = current()
        self._samples = DistributedSampler(
            dataset, shuffle, seed, drop_last, training=training, name=name, num_replicas=num_replicas, rank=rank
        )
        self._training, self._share = training, self._samples._share
        self.batch_size, self.drop_last = batch_size, drop_last
        self._costs = CostTable(cost) if cost is not None else None

    @property
    def epoch(self) -> int:
        """The epoch of the next pass; after a resume, the one to go on with."""
        return self._samples.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it before each epoch.

        Args:
            epoch: The number of the epoch.
        """
        self._samples.set_epoch(epoch)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, as for `DistributedSampler`.

        Args:
            count: The number of epochs in all, those of earlier jobs included.

        Returns:
            The numbers of the epochs.
        """
        spec = self._session.dealing.spec
        shape = None if spec is None else self._shape(spec)
        whole = shape.each if shape is not None and shape.micro else self.batch_size * self._samples._parts
        return self._samples._order.epochs(count, whole if self.drop_last else 1)

    def __iter__(self) -> Iterator[list[int]]:
        spec, order = self._session.dealing.spec, self._samples._order
        if spec is None:
            return iter(BatchSampler(self._samples, self.batch_size, self.drop_last))
        check_unsplit(self._share, self._session.rank, self._session.size, spec)
        dealt = DealtEpoch(self._session.dealing, order.rest(), self._shape(spec), self._costs, order)
        return dealt.batches(order.name, self.epoch, self._trains, order.completed)

    def _trains(self) -> bool:
        return self._training is True or (self._training is None and torch.is_grad_enabled())

    def _shape(self, spec: Spec) -> BatchShape:
        micro = spec.micro
        return BatchShape(math.ceil(self.batch_size / micro) if micro else self.batch_size, micro, self.drop_last)

    def __len__(self) -> int:
        """Batches of a whole epoch, on average over the workers; also where a resumed job has only the rest of one."""
        spec = self._session.dealing.spec or self._session.job.spec
        if not spec.capabilities.by_speed:
            return len(BatchSampler(self._samples, self.batch_size, self.drop_last))
        length, size, shape = self._samples._order.length, self._session.size, self._shape(spec)
        return math.ceil(shape.places(length) / size) if shape.micro else len(shape.joint_batches(length, size))
