"""Which samples a replica takes in a step of `fit`: those of a step are the same under every strategy.

An epoch is one seeded order of all samples, cut into batches of the whole job. Replica d of D takes places d, d + D, ... of
each batch. What earlier runs took of an epoch is left out (`sync/epoch_parts.py`), under any number of replicas and any
batch size, so that a run resumes in the middle of an epoch. A last batch that is not full is left out of training: replicas
and schedules need equal parts, and with `shuffle` the next epoch leaves out others. Evaluation takes all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from polytempo.errors import UsageError, WrongType
from polytempo.sync.epoch_parts import remaining
from polytempo.train.prepare import KEPT, is_shuffled
from polytempo.train.sampler import order_of_epoch

#: Inputs and targets.
Batch = tuple[Any, Any]
#: What replicas took of an epoch: `size` replicas, and the samples that each has `taken`.
Part = Mapping[str, Any]
DEFAULT_BATCH = 32


class SampleSource:
    """A data set, a loader over one, a stream (`IterableDataset`) or a pair of tensors, read in batches.

    Args:
        data: The samples: pairs of input and target.
        batch_size: Of the whole job; by default the loader's, or 32.
        shuffle: A new order in each epoch; by default the loader's choice, or that of `otherwise`.
        seed: Of the order.
        name: The argument that `data` was, for errors.
        otherwise: Whether data without a loader are shuffled.
    """

    def __init__(
        self, data: Any, batch_size: int | None, shuffle: bool | None, seed: int, name: str = "data", otherwise: bool = True
    ) -> None:
        self._loader, self._tensors, self._seed = None, None, seed
        if isinstance(data, DataLoader):
            self._loader, dataset = data, data.dataset
        elif isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
            self._tensors, dataset = (data[0], data[1]), data[0]
            if len(data[0]) != len(data[1]):
                raise UsageError(f"{name}: expected as many targets as inputs, got {len(data[0])} and {len(data[1])}")
        elif not hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
            expected = "a Dataset, a DataLoader or a pair of tensors (inputs, targets)"
            raise WrongType(f"{name}: expected {expected}, got {type(data).__name__}")
        else:
            dataset = data
        self._dataset, self._stream = dataset, isinstance(dataset, IterableDataset)
        if self._loader is not None and not self._stream:
            shuffled = is_shuffled(self._loader, f"fit({name}=)", "give fit the data set itself")
            shuffle = shuffled if shuffle is None else shuffle
        elif self._loader is not None and self._loader.num_workers:
            raise UsageError(
                f"{name}: a stream is read in the process of each rank, got num_workers={self._loader.num_workers}; "
                "use num_workers=0"
            )
        of_loader = self._loader.batch_size if self._loader is not None else None
        self.batch_size: int = batch_size or of_loader or DEFAULT_BATCH  #: of the whole job
        self.shuffle: bool = otherwise and not self._stream if shuffle is None else shuffle
        self.length: int | None = None if self._stream else len(dataset)  #: None for a stream
        if self._stream and self.shuffle:
            raise UsageError(f"{name}: an IterableDataset has its own order; leave out shuffle=True")
        if self.length is not None and self.length < self.batch_size and otherwise:
            raise UsageError(
                f"{name}: expected at least one batch of {self.batch_size}, got {self.length} samples; "
                f"use batch_size={self.length}"
            )

    def training(self, epoch: int, parts: Sequence[Part], replica: int, replicas: int) -> Iterator[Batch]:
        """The batches that a replica trains on in the rest of an epoch, of which `parts` were taken by earlier runs."""
        rest = remaining(self._places(epoch), parts)
        whole = iter(lambda: list(islice(rest, self.batch_size)), [])
        mine = (batch[replica::replicas] for batch in whole if len(batch) == self.batch_size)
        return self._load(mine, epoch)

    def steps(self, parts: Sequence[Part]) -> int | None:
        """The number of steps in the rest of an epoch; None for a stream."""
        if self.length is None:
            return None
        return (self.length - sum(sum(part["taken"]) for part in parts)) // self.batch_size

    def evaluation(self, replica: int, replicas: int) -> Iterator[Batch]:
        """The batches that a replica evaluates: every `replicas`-th; the last of all may be smaller."""
        places = self._places(0)
        batches = iter(lambda: list(islice(places, self.batch_size)), [])
        return self._load(islice(batches, replica, None, replicas), 0)

    def example(self) -> tuple[tuple[Any, ...] | None, Any]:
        """The inputs of the first batch, as a tuple, and its targets; None of a stream, which may give its samples once."""
        if self.length is None:
            return None, None
        x, y = next(self._load(iter([list(range(self.batch_size))]), 0))
        return (x if isinstance(x, tuple) else (x,)), y

    def _places(self, epoch: int) -> Iterator[Any]:
        """Indices of samples in the order of an epoch; of a stream the samples themselves."""
        if self.length is None:
            return iter(self._dataset)
        return iter(order_of_epoch(self.length, self._seed if self.shuffle else None, epoch))

    def _load(self, batches: Iterator[list[Any]], epoch: int) -> Iterator[Batch]:
        collate: Callable[[Any], Any] = self._loader.collate_fn if self._loader is not None else default_collate
        if self._tensors is not None:
            x, y = self._tensors
            yield from ((x[batch], y[batch]) for batch in batches)
        elif self._stream:
            yield from (_pair(collate(batch)) for batch in batches)
        else:
            kept = [name for name in KEPT if name not in ("batch_size", "drop_last", "generator")]
            options = {name: getattr(self._loader, name) for name in kept if hasattr(self._loader, name)}
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            chosen = list(batches)
            yield from map(_pair, DataLoader(self._dataset, batch_sampler=chosen, generator=generator, **options))


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{len(batch)} values" if isinstance(batch, tuple | list) else type(batch).__name__
        raise WrongType(f"expected batches of (inputs, targets), got {what}; several inputs go into one tuple")
    return batch[0], batch[1]
