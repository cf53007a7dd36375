"""Dense pushes through a filter: a chain, with its residual, for each stretch of each shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from polytempo.filters.chain import Chain, ChainSpec
from polytempo.parameter_server.state import as_tensor
from polytempo.protocol.layout import Layout
from polytempo.transport.channel import Bytes


class PushFilters:
    """The chains of one exchange."""

    def __init__(self, spec: ChainSpec, layout: Layout) -> None:
        self._layout = layout
        self._chains: list[list[Chain]] = []
        if not spec.is_lossless:
            self._chains = [[spec.new(s.size, getattr(torch, s.dtype)) for s in shard] for shard in layout.shards]

    def of(self, parts: list[list[Bytes]]) -> list[list[Bytes]]:
        """What is sent of a push, for each shard."""
        if not self._chains:
            return parts
        return [self._of_shard(shard, part) for shard, part in enumerate(parts)]

    def _of_shard(self, shard: int, part: Sequence[Bytes]) -> list[Bytes]:
        stretches = zip(self._chains[shard], part, self._layout.shards[shard], strict=True)
        return [buffer for chain, data, s in stretches for buffer in chain.encode(as_tensor(data, s.dtype))]

    # The residual of the whole model, in its flat order, so that any number of servers can go on with it.

    def state(self) -> dict[str, torch.Tensor]:
        """What was produced and not sent yet, by dtype; empty without a lossy filter."""
        if not self._chains:
            return {}
        whole = {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in self._layout.sizes.items()}
        for shard, stretches in enumerate(self._layout.shards):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                whole[s.dtype] = whole[s.dtype].to(chain.residual.dtype)
                whole[s.dtype][s.start : s.stop] = chain.residual
        return whole

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        for shard, stretches in enumerate(self._layout.shards if self._chains and state else ()):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                chain.load({"residual": state[s.dtype][s.start : s.stop].to(chain.residual.dtype)})
