"""Push compression: what is sent of a push, through a chain with its residual for each segment of each shard.

Chains lie where gradients are when they are pushed: for parameters on a GPU there, in the twin of the flat buffer
(`device_moves.py`). Then only the encoded bytes are copied to the host, together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from polytempo.compression.chain import CPU, ChainSpec, CompressionChain
from polytempo.device.pinned_memory import pinned_bytes
from polytempo.protocol.layout import Layout
from polytempo.reducer.device_moves import HostStaging
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.server.optimizer_state import as_tensor
from polytempo.transport.channel import Bytes

#: Encoded tensors start at multiples of this in host memory.
ALIGNMENT = 64


class PushFilters:
    """The chains of one optimizer.

    Args:
        spec: What to do.
        layout: The segments of each shard.
        staging: Of parameters on a GPU, which has all of them; None where gradients are pushed from the CPU.
    """

    def __init__(self, spec: ChainSpec, layout: Layout, staging: HostStaging | None = None) -> None:
        self._layout, self._staging = layout, staging
        self._chains: list[list[CompressionChain]] = []
        place = CPU if staging is None else staging.place
        if not spec.is_lossless:
            self._chains = [[spec.new(s.size, getattr(torch, s.dtype), place) for s in shard] for shard in layout.shards]

    @property
    def on_device(self) -> bool:
        """Are gradients needed on the GPU, and not on the host?"""
        return bool(self._chains) and self._staging is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of residuals on the GPU."""
        return sum(chain.residual_bytes for chains in self._chains for chain in chains) if self.on_device else 0

    def of(self, buffer: FlatBuffer) -> list[list[Bytes]]:
        """What is sent of a push, for each shard."""
        if not self._chains:
            return buffer.parts
        inputs = (self._inputs(shard, buffer) for shard in range(len(buffer.parts)))
        if self._staging is None:
            return [[data for chain, values in of_shard for data in chain.encode(values)] for of_shard in inputs]
        encoded = [[part for chain, values in of_shard for part in chain.encode_tensors(values)] for of_shard in inputs]
        return fetched(encoded, self._staging)

    def _inputs(self, shard: int, buffer: FlatBuffer) -> list[tuple[CompressionChain, torch.Tensor]]:
        inputs = []
        for chain, data, s in zip(self._chains[shard], buffer.parts[shard], self._layout.shards[shard], strict=True):
            if self._staging is not None and buffer.in_twin:
                inputs.append((chain, self._staging.twin[s.dtype][s.start : s.stop]))
                continue
            values = as_tensor(data, s.dtype)
            inputs.append((chain, values if self._staging is None else values.to(self._staging.place)))
        return inputs

    # The residual of the whole model, in its flat order, so that any number of servers can go on with it.

    def state(self) -> dict[str, torch.Tensor]:
        """What was produced and not sent yet, by dtype; empty without a lossy filter."""
        if not self._chains:
            return {}
        whole = {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in self._layout.sizes.items()}
        for shard, stretches in enumerate(self._layout.shards):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                residual = chain.residual
                whole[s.dtype] = whole[s.dtype].to(residual.dtype)
                whole[s.dtype][s.start : s.stop] = residual
        return whole

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state."""
        for shard, stretches in enumerate(self._layout.shards if self._chains and state else ()):
            for chain, s in zip(self._chains[shard], stretches, strict=True):
                chain.load({"residual": state[s.dtype][s.start : s.stop].to(chain.form.wide)})


def fetched(encoded: Sequence[Sequence[torch.Tensor]], staging: HostStaging) -> list[list[Bytes]]:
    """The bytes of tensors on a GPU, in one block of pinned memory that is theirs."""
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for parts in encoded for part in parts]
    block: Bytes = torch.empty(sum(sizes), dtype=torch.uint8).numpy() if staging.pins is None else pinned_bytes(sum(sizes))
    result: list[list[Bytes]] = []
    start = 0
    staging.copies.follow()
    for parts in encoded:
        result.append([])
        for part in parts:
            data = block[start : start + part.nbytes]
            start += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
            result[-1].append(data)
            if part.nbytes:
                staging.copies.copy(torch.from_numpy(data), part.view(torch.uint8))
    staging.copies.mark().wait()
    return result
