"""How a tensor is cut into shards, and put together again.

A parameter is cut along one dimension. One that consists of several blocks along it (query, key and value of an attention)
is cut block by block. A vocabulary that does not divide is padded with zeros at its end; `join` drops them, so shard and
join are exact inverses. Optimizer state of a parameter's shape is cut in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.errors import UsageError


@dataclass(frozen=True)
class Sharding:
    """How one parameter is cut.

    Attributes:
        shape: The shape of the whole.
        dim: The dimension that is cut.
        blocks: Blocks of equal size along it, each of which is cut.
        padded: Zeros may be added at the end, where it does not divide. Otherwise that is refused.
    """

    shape: tuple[int, ...]
    dim: int = 0
    blocks: int = 1
    padded: bool = False

    def rows(self, size: int) -> int:
        """The length of a shard along `dim`, over all blocks."""
        length = self.shape[self.dim]
        if self.padded:
            return -(-length // size)
        if length % (self.blocks * size):
            raise UsageError(
                f"expected a multiple of {self.blocks * size} along dimension {self.dim}, got shape {self.shape}"
            )
        return length // size

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """The shape of each of `size` shards."""
        return (*self.shape[: self.dim], self.rows(size), *self.shape[self.dim + 1 :])

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """A rank's shard, in memory of its own."""
        if tuple(full.shape) != self.shape:
            raise UsageError(f"expected the whole tensor of shape {self.shape}, got {tuple(full.shape)}")
        if self.padded:
            rows = self.rows(size)
            shard = full.new_zeros(self.shard_shape(size))
            start = min(rank * rows, self.shape[self.dim])
            count = min(rows, self.shape[self.dim] - start)
            shard.narrow(self.dim, 0, count).copy_(full.narrow(self.dim, start, count))
            return shard
        each = self.rows(size) // self.blocks
        parts = [block.narrow(self.dim, rank * each, each) for block in full.chunk(self.blocks, self.dim)]
        return torch.cat(parts, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole, from the shards of all ranks in their order."""
        size = len(shards)
        wrong = [tuple(shard.shape) for shard in shards if tuple(shard.shape) != self.shard_shape(size)]
        if wrong:
            raise UsageError(f"expected {size} shards of shape {self.shard_shape(size)}, got {wrong[0]}")
        if self.padded:
            return torch.cat(tuple(shards), self.dim).narrow(self.dim, 0, self.shape[self.dim]).contiguous()
        pieces = [shard.chunk(self.blocks, self.dim) for shard in shards]
        return torch.cat([piece[block] for block in range(self.blocks) for piece in pieces], self.dim)
