"""Random numbers inside split regions.

All ranks of a tensor group draw the same numbers outside: their default generators are in the same state. Inside, where each
rank has other features, they must differ: a seed is drawn from the common generator, alike on all ranks, and mixed with the
rank; afterwards the common generator goes on, still alike on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.tensor_parallel.group import TensorGroup

#: An odd number, so that different ranks have different seeds (Knuth's multiplicative hash).
STRIDE = 0x9E3779B97F4A7C15
MASK = (1 << 63) - 1


@contextmanager
def shard_random(group: TensorGroup, device: torch.device) -> Iterator[None]:
    """Inside the block torch's default generator of this device is the rank's own."""
    if group.size == 1:
        yield
        return
    common = int(torch.randint(1 << 62, ()).item())
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed((common + group.rank * STRIDE) & MASK)
    try:
        yield
    finally:
        generator.set_state(state)


class ShardDropout(nn.Dropout):  # type: ignore[misc]
    """`nn.Dropout` inside a split region: each rank drops other elements."""

    group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Drop elements of this rank's features."""
        if not self.training or self.p == 0:
            return input
        with shard_random(self.group, input.device):
            return functional.dropout(input, self.p, True, self.inplace)
