"""The order of a sampler's epochs: one seeded order of all samples, without what earlier jobs have trained on.

A part of an epoch that an earlier job has done is said in one of two ways: how many samples each of its workers took, which
took every n-th place (`size`, `taken`), or which places its updates were made of (`done`), where batches were dealt out.
Places count what the parts before it have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import torch

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.sync.epoch_parts import epoch_to_go_on_with

T = TypeVar("T")


class EpochOrder:
    """Of one sampler.

    Args:
        session: The job.
        dataset: The data set; only its length is read.
        shuffle: A new order in each epoch, the same on all workers.
        seed: The seed of the order; the job's by default.
        training: False: it has no position.
        name: Its name in checkpoints, where the script gives one.
    """

    def __init__(
        self, session: Session, dataset: Sized, shuffle: bool, seed: int | None, training: bool | None, name: str
    ) -> None:
        self.length, self._shuffle = len(dataset), shuffle
        self._session = session
        self._seed = session.job.seed if seed is None else seed
        earlier = session.job.positions
        nameless = any(not part.get("sampler") for part in earlier)
        self.name = session.positions.identify(dataset, self.length, shuffle, name, nameless)
        self._earlier = [] if training is False else [part for part in earlier if part.get("sampler", "") == self.name]
        self._complete: list[tuple[int, Callable[[], bool]]] = []  # passes that ran to their end: epoch, was it used up?
        self.epoch = epoch_to_go_on_with(self._earlier or earlier)

    def epochs(self, count: int, least: int = 1) -> Iterator[int]:
        """The numbers of the epochs that are left of this many, each of them the next pass's; fewer where the job's budget
        is used up. What an earlier job has left of an epoch counts from `least` samples on: fewer are dropped."""
        while self.length and self.left() < min(least, self.length):
            self.epoch += 1
        while self.epoch < count and not self._session.should_stop():
            epoch = self.epoch
            self.begin(epoch)
            yield epoch
            self.epoch = epoch + 1

    def begin(self, epoch: int) -> None:
        """The next pass is one of this epoch."""
        self.epoch = epoch
        if self._session.registered is not None:
            self._session.registered.begin_epoch(lambda: self.left() == self.length)

    def drawing(self) -> None:
        """A sample to train on is handed out: what the script does after a step is done (`script_state.py`)."""
        if self._session.registered is not None:
            self._session.registered.draw()

    def completed(self, epoch: int, used: Callable[[], bool]) -> None:
        """A pass has run to its end; `used` tells whether it was trained on, and not only looked at."""
        self._complete.append((epoch, used))

    def rest(self) -> list[int]:
        """What is left of the epoch, in its order."""
        self._forget_used()
        return self.rest_of(self.epoch)

    def left(self) -> int:
        """The number of samples that are left of the epoch."""
        self._forget_used()
        begun = any(part["epoch"] == self.epoch for part in self._earlier)
        return len(self.rest_of(self.epoch)) if begun else self.length

    def _forget_used(self) -> None:
        if any(used() for epoch, used in self._complete if epoch == self.epoch):
            # The rest of an interrupted epoch was trained on: another pass without `set_epoch` is a whole one.
            self._earlier = [part for part in self._earlier if part["epoch"] != self.epoch]
            self._complete = []

    def rest_of(self, epoch: int) -> list[int]:
        """What earlier jobs have left of an epoch, in its order."""
        return list(remaining(self._order(epoch), [part for part in self._earlier if part["epoch"] == epoch]))

    def unfinished(self) -> set[int]:
        """Epochs before this one that earlier jobs may not have done in full, where places were dealt out."""
        return {part["epoch"] for part in self._earlier if part["epoch"] < self.epoch and "done" in part}

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self.length, generator=generator).tolist()  # type: ignore[no-any-return]


def shard_of(num_replicas: int | None, rank: int | None) -> tuple[int, int] | None:
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
    """The rest of an epoch after earlier jobs."""
    for part in parts:
        order = _but(order, part["done"]) if "done" in part else _after(order, part["size"], part["taken"])
    return iter(order)


def _after(order: Iterable[T], size: int, taken: Sequence[int]) -> Iterator[T]:
    return (sample for place, sample in enumerate(order) if place // size >= taken[place % size])


def _but(order: Iterable[T], done: Sequence[Sequence[int]]) -> Iterator[T]:
    """All but these ranges of places, which are ascending."""
    ranges = iter(done)
    start, stop = next(ranges, (-1, -1))
    for place, sample in enumerate(order):
        while stop >= 0 and place >= stop:
            start, stop = next(ranges, (-1, -1))
        if not start <= place < stop:
            yield sample
