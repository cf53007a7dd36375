"""`prepare`: the lines that make a plain script distributed, as one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from polytempo.errors import UsageError
from polytempo.session.session import current, init, is_initialized
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.sampler import DistributedBatchSampler, DistributedSampler

#: What a loader is made with, and keeps under the same name.
KEPT = (
    *("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


class SharedLoader(DataLoader[Any]):  # type: ignore[misc]
    """A loader of this worker's share: each time through is an epoch, and it ends when the job's budget is used up.

    Its length is that of a whole epoch, also where a resumed job has only the rest of one before it.
    """

    def __init__(self, dataset: Any, shuffle: bool, options: dict[str, Any]) -> None:
        spec = current().ledger.spec
        size, drop_last = options.get("batch_size"), options.get("drop_last", False)
        self._share: DistributedSampler | DistributedBatchSampler
        if spec is not None and size is not None:  # batches of any size, or micro-batches: that many in all
            share = self._share = DistributedBatchSampler(dataset, size, shuffle, drop_last=drop_last)
            kept = {name: value for name, value in options.items() if name not in ("batch_size", "drop_last")}
            super().__init__(dataset, batch_sampler=share, **kept)
        else:
            drops = drop_last and spec is not None  # else the loader drops what is short
            samples = self._share = DistributedSampler(dataset, shuffle, drop_last=drops, batch_size=size)
            if drop_last and spec is None:  # the loader drops, not the sampler
                samples.least = (size or 1) * samples.parts
            super().__init__(dataset, sampler=samples, **options)
        self._session, self._begun = current(), False

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of a training of `count` epochs, in place of `range(count)`.

        From 0 on, in a job that goes on from a checkpoint from the epoch in which that was made, the rest of which comes
        first. It ends when `should_stop()` is true.

        Args:
            count: The number of epochs in all, those of earlier jobs included.

        Returns:
            The numbers of the epochs.

        Example:
            ```python
            for epoch in loader.epochs(10):
                for x, y in loader:
                    ...
            ```
        """
        for epoch in self._share.epochs(count):
            self._begun = False
            yield epoch
            self._begun = False

    def __iter__(self) -> Iterator[Any]:
        self._share.set_epoch(self._share.epoch + self._begun)
        self._begun = True
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._session.should_stop():
            return
        share, size, passing = self._share, self.batch_size or 1, None
        left = share.each(share.left()) if self._session.ledger.spec is None else None
        try:
            for batch in super().__iter__():
                passing = passing or share.passing
                if passing is not None and torch.is_grad_enabled():
                    passing.hand_out(size if left is None else min(size, left))
                    left = None if left is None else left - min(size, left)
                yield batch
                if self._session.should_stop():
                    over = left is not None and left < (size if self.drop_last else 1)
                    if self._session.registered is not None and not over:
                        # The epoch is not over, but its loop is: what the script does after that is no part of a checkpoint.
                        self._session.registered.mark(whole=True)
                    return
        finally:
            if passing is not None:
                passing.over = True


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    **options: Any,
) -> tuple[torch.nn.Module, DistributedOptimizer, SharedLoader]:
    """Join the job, wrap the optimizer, and shard the loader's data over the workers, in one call.

    It stands for `init()` if that was not called, for `DistributedOptimizer(optimizer, model, ...)`, and for a loader like
    the given one with a `DistributedSampler`, or under `bsp+balance` and `anytime` with a `DistributedBatchSampler`, whose
    `set_epoch` is called at each pass. That loader ends when `should_stop()` is true, and is empty from then on; its length
    is always that of a whole epoch, and `for epoch in loader.epochs(10)` goes on at the right epoch after a resume.

    Args:
        model: The model, built and on its device.
        optimizer: Its optimizer.
        loader: A `DataLoader` over a data set with a length, in order or with `shuffle=True`. Its batches are each worker's;
            in modes with micro-batches a worker takes `batch_size` samples in a round on average, in several.
        **options: For `DistributedOptimizer`.

    Returns:
        The model, the wrapped optimizer and the loader of this worker's share.

    Raises:
        UsageError: The loader cannot be made again for a share of its data.

    Example:
        ```python
        model, optimizer, loader = pt.prepare(model, optimizer, loader)
        for epoch in loader.epochs(10):
            for x, y in loader:
                ...
        ```
    """
    shuffle = is_shuffled(loader, "prepare()", "make it yourself with sampler=pt.DistributedSampler(dataset)")
    if not is_initialized():
        init()
    kept = {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}
    wrapped = DistributedOptimizer(optimizer, model, **options)
    return model, wrapped, SharedLoader(loader.dataset, shuffle, kept)


def is_shuffled(loader: Any, caller: str, advice: str) -> bool:
    """Refuse a loader that cannot be made again for a share of its data, in the name of `caller`; is it shuffled?"""
    if type(loader) is not DataLoader:
        raise UsageError(f"{caller} expected a torch DataLoader, got {type(loader).__name__}; {advice}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"{caller} expected a data set with a length, got an IterableDataset, which has no places to share out; "
            "let it yield every size-th sample from pt.rank() on"
        )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(f"{caller} cannot share out a {type(loader.batch_sampler).__name__} (batch_sampler=); {advice}")
    sampler = loader.sampler
    partial = isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset))
    if type(sampler) not in (RandomSampler, SequentialSampler) or partial:
        what = "RandomSampler that leaves out or repeats samples" if partial else type(sampler).__name__
        raise UsageError(f"{caller} cannot share out a {what} (sampler=); {advice}")
    return isinstance(sampler, RandomSampler)
