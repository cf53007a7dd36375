"""Checks of the batch that a replica trains on: it divides into the microbatches, and the replica's ranks have the same.

The first is checked by each rank for itself, so that all refuse alike and nothing is sent. The second in the first steps
only, by a digest: a loader that is seeded or shared differently on two ranks differs from the first batch on.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from polytempo.collectives.group import RankGroup
from polytempo.errors import UsageError
from polytempo.pipeline.stage_message import rows

#: Steps in which the batches of a replica's ranks are compared.
COMPARED_STEPS = 3


def checked_rows(x: Any, y: Any, microbatches: int) -> int:
    """The number of samples of a batch.

    Raises: UsageError where it does not divide into the microbatches; the text names the nearest sizes."""
    if x is None and y is None:
        raise UsageError("expected step(x, y) with the same batch on all ranks of a replica, got None for both")
    size = rows(x if x is not None else y)
    if size == 0 or size % microbatches:
        below = size // microbatches * microbatches
        near = " or ".join(str(one) for one in (below, below + microbatches) if one)
        raise UsageError(
            f"a batch of {size} samples does not divide into {microbatches} microbatches; nearest: a batch of {near} (for a "
            "DataLoader drop_last=True)"
        )
    return size


def digest(batch: Any, before: int = 1) -> int:
    """A figure that differs, but for chance, for batches with different values or shapes; 0 for no batch."""
    if batch is None:
        return 0
    if isinstance(batch, torch.Tensor):
        plain = batch.detach().cpu().contiguous()
        found = zlib.crc32(repr((tuple(plain.shape), plain.dtype)).encode(), before)
        return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), found)
    if isinstance(batch, dict):
        batch = list(batch.items())
    if isinstance(batch, tuple | list):
        for value in batch:
            before = digest(value, before)
        return before
    return zlib.crc32(repr(batch).encode(), before)


def compare(replica: RankGroup | None, x: Any, y: Any) -> None:
    """Refuse batches that differ between the ranks of a replica. A rank may leave out what its stage does not read.

    Raises: UsageError on all of them, naming two ranks."""
    if replica is None or replica.size == 1:
        return
    mine = torch.tensor([digest(x), digest(y)])
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(replica.size)]
    replica.all_gather(found, mine).wait()
    for place, what in enumerate(("inputs", "targets")):
        given = {rank: int(pair[place]) for rank, pair in zip(replica.ranks, found, strict=True) if int(pair[place])}
        first = next(iter(given), 0)
        other = next((rank for rank, figure in given.items() if figure != given[first]), None)
        if other is not None:
            raise UsageError(
                f"ranks {first} and {other} belong to one replica and got different {what}: the ranks of a replica train on "
                "the same batch; make the sampler inside strategy.scope(), and seed what draws data alike"
            )
