"""`DistributedSampler`: shares a data set among the workers, and goes on where a checkpoint left off.

An epoch is one seeded order of all samples; worker r of n takes places r, r + n, r + 2n, ... of it. Where several ranks have
parts of one replica of the model, all of them take the same samples: there r is the replica, of n replicas.

After a checkpoint the samples that pushes before it were made of are left out, exactly, and the rest is shared anew, by
however many there are now (`epoch_order.py`).
Only samplers that train have a position (`positions.py`); others, such as one for validation, always give all.

Every worker gets equally many samples, as with torch's: where it does not divide, some are used twice, or with `drop_last`
the last few not at all.

In modes that deal out whole micro-batches (`bsp+balance,micro=M`, `anytime`) the order is cut in micro-batches of the
loader's `batch_size`, and a worker gets as many as it is dealt (`dealt_epoch.py`): every sample once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from contextlib import closing

import torch

from polytempo.errors import UsageError
from polytempo.session.session import current
from polytempo.sync.spec import Spec
from polytempo.train.dealt_epoch import BatchShape, DealtEpoch
from polytempo.train.epoch_order import EpochOrder, shard_of


class DistributedSampler(torch.utils.data.Sampler[int]):  # type: ignore[misc]
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
        self._session = current()
        self._share = shard_of(num_replicas, rank) or self._session.data_axis
        self._drop_last, self._training, self._batch_size = drop_last, training, batch_size
        self._order = EpochOrder(self._session, dataset, shuffle, seed, training, name)

    @property
    def epoch(self) -> int:
        """The epoch of the next pass; after a resume, the one to go on with."""
        return self._order.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._order.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it before each epoch.

        Args:
            epoch: The number of the epoch.
        """
        self._order.begin(epoch)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of a training of `count` epochs, in place of `range(count)` and `set_epoch`.

        From 0 on, in a job that goes on from a checkpoint from the epoch in which that was made, the rest of which comes
        first. It ends when `should_stop()` is true.

        Args:
            count: The number of epochs in all, those of earlier jobs included.

        Returns:
            The numbers of the epochs.
        """
        return self._order.epochs(count, self._parts if self._drop_last else 1)

    def __iter__(self) -> Iterator[int]:
        if self._training is False:
            yield from self._mine()
            return
        dealing = self._session.dealing
        micro = dealing.spec.micro if dealing.spec is not None else 0
        if dealing.spec is not None and micro and self._trains():
            shape = BatchShape(self._size_of_micro_batch(dealing.spec), micro, self._drop_last)
            deal = DealtEpoch(dealing, self._order.rest(), shape, None, self._order)
            batches = deal.batches(self._order.name, self.epoch, self._trains, self._order.completed, as_stream=True)
            with closing(batches):  # type: ignore[type-var]
                for batch in batches:
                    yield from batch
            return
        passing = self._session.positions.begin(self._order.name, self.epoch, self._share)
        try:
            for index in self._mine():
                trains = self._trains()
                if trains:
                    self._order.drawing()
                passing.draw(trains)
                yield index
            self._order.completed(passing.epoch, lambda: self._session.positions.used(passing))
        finally:
            passing.ended = True

    def _trains(self) -> bool:
        return self._training is True or torch.is_grad_enabled()

    def _size_of_micro_batch(self, spec: Spec) -> int:
        if self._batch_size is None and self._session.dealing.take is not None:
            check_unsplit(self._share, self._session.rank, self._session.size, spec)
            return 0  # step(samples=...) says how large they are
        if self._batch_size is None:
            raise UsageError(
                f"{spec.text} deals out whole micro-batches: expected DistributedSampler(..., batch_size=) with the "
                "loader's batch_size, got none"
            )
        check_unsplit(self._share, self._session.rank, self._session.size, spec)
        return self._batch_size

    def __len__(self) -> int:
        """Samples of a whole epoch, also where a resumed job has only the rest of one before it."""
        return self._each(self._order.length)

    def _each(self, length: int) -> int:
        return length // self._parts if self._drop_last else math.ceil(length / self._parts)

    @property
    def _parts(self) -> int:
        """Into how many shards the data set is cut."""
        return self._share[1] if self._share else self._session.size

    def _mine(self) -> list[int]:
        rest = self._order.rest()
        rank, size = self._share or (self._session.rank, self._session.size)
        each = self._each(len(rest))
        return [rest[place % len(rest)] for place in range(rank, each * size, size)]


def check_unsplit(share: tuple[int, int] | None, rank: int, size: int, spec: Spec) -> None:
    """Refuse shards that are not one for each rank, in modes with shares by speed."""
    if share is not None and share != (rank, size):
        raise UsageError(
            f"worker {rank}: {spec.text} shares a data set by the speed of the {size} ranks, and this sampler gives shard "
            f"{share[0]} of {share[1]}; leave num_replicas= and rank= out, or use sync='bsp'"
        )
