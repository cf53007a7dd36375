"""`DistributedSampler`: shares a data set among the workers, and goes on where a checkpoint left off.

An epoch is one seeded order of all samples; worker r of n takes places r, r + n, r + 2n, ... of it. Where several ranks have
parts of one replica of the model, all of them take the same samples: there r is the replica, of n replicas.

After a checkpoint the samples that pushes before it were made of are left out, exactly, and the rest is shared anew, by
however many there are now.
Only samplers that train have a position (`positions.py`); others, such as one for validation, always give all.

Every worker gets equally many samples, as with torch's: where it does not divide, some are used twice, or with `drop_last`
the last few not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import torch

from polytempo.errors import UsageError
from polytempo.session.positions import Pass
from polytempo.session.session import current

T = TypeVar("T")


class DistributedSampler(torch.utils.data.Sampler[int]):  # type: ignore[misc]
    """Shards a data set over the workers, as torch's does, and resumes exactly. Give it to a `DataLoader` as `sampler=`.

    Call `set_epoch` before each epoch. After a resume, `epoch` is the epoch to go on with.

    Args:
        dataset: The data set; only its length is read.
        shuffle: A new order in each epoch, the same on all workers.
        seed: The seed of the order; the job's `--seed` by default.
        drop_last: Leave out the last few samples instead of repeating some, where the length is not a multiple of the
            workers.
        training: Whether its position is saved in checkpoints. By default it is once steps follow its draws; False for data
            that is only evaluated between steps; True for data that is drawn while gradients are disabled.
        name: Its name in checkpoints. By default samplers are told apart by length, `shuffle` and the order in which data
            sets came; name those that workers do not all make in the same order.
        num_replicas: The number of shards; by default one for each rank, under a `Strategy` one for each replica.
        rank: Which of them this sampler gives, with `num_replicas`.

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
    ) -> None:
        self._session = current()
        self._share = _share(num_replicas, rank) or self._session.data_axis
        self._length = len(dataset)
        self._shuffle, self._drop_last, self._training = shuffle, drop_last, training
        self._seed = self._session.job.seed if seed is None else seed
        earlier = self._session.job.positions
        nameless = any(not part.get("sampler") for part in earlier)
        self._name = self._session.positions.identify(dataset, self._length, shuffle, name, nameless)
        self._earlier = [] if training is False else [part for part in earlier if part.get("sampler", "") == self._name]
        self._complete: list[Pass] = []  # passes that ran to their end
        self.epoch = max((part["epoch"] for part in earlier), default=0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it before each epoch.

        Args:
            epoch: The number of the epoch.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._training is False:
            yield from self._mine()
            return
        passing = self._session.positions.begin(self._name, self.epoch, self._share)
        try:
            for index in self._mine():
                passing.draw(self._training is True or torch.is_grad_enabled())
                yield index
            self._complete.append(passing)
        finally:
            passing.ended = True

    def __len__(self) -> int:
        return len(self._mine())

    def _mine(self) -> list[int]:
        if any(self._session.positions.used(one) for one in self._complete if one.epoch == self.epoch):
            # The rest of an interrupted epoch was trained on: another pass without `set_epoch` is a whole one.
            self._earlier = [part for part in self._earlier if part["epoch"] != self.epoch]
            self._complete = []
        rest = list(remaining(self._order(), [part for part in self._earlier if part["epoch"] == self.epoch]))
        rank, size = self._share or (self._session.rank, self._session.size)
        each = len(rest) // size if self._drop_last else math.ceil(len(rest) / size)
        return [rest[place % len(rest)] for place in range(rank, each * size, size)]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return torch.randperm(self._length, generator=generator).tolist()  # type: ignore[no-any-return]


def _share(num_replicas: int | None, rank: int | None) -> tuple[int, int] | None:
    """Which shard of how many was asked for."""
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None or not 0 <= rank < num_replicas:
        raise UsageError(
            f"expected num_replicas= and a rank= from 0 to one less, got num_replicas={num_replicas} and rank={rank}; "
            "give both, or none of them"
        )
    return rank, num_replicas


def remaining(order: Iterable[T], parts: Sequence[Mapping[str, Any]]) -> Iterator[T]:
    """The rest of an epoch after earlier jobs: each part has the `size` of a job and how many samples each worker took."""
    for part in parts:
        order = _after(order, part["size"], part["taken"])
    return iter(order)


def _after(order: Iterable[T], size: int, taken: Sequence[int]) -> Iterator[T]:
    return (sample for place, sample in enumerate(order) if place // size >= taken[place % size])
