"""Answers that say less than all values: the difference to what the worker holds, through a filter.

For each worker the shard keeps what it holds (its *shadow*); an answer is the filtered difference between the values and
the shadow, which then moves by exactly what was said. The worker does the same on its side, so both stay equal to the bit,
and what an answer leaves out is in the next difference: the residual is what the worker lacks. An answer that must be
repeated is the same one again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.filters.chain import ChainSpec
from polytempo.parameter_server.state import as_tensor
from polytempo.protocol.layout import Stretch
from polytempo.transport.channel import Bytes

Flats = dict[str, torch.Tensor]


class AnswerFilter:
    """The answers of one store."""

    def __init__(self, chain: ChainSpec, stretches: Sequence[Stretch]) -> None:
        self.chain = chain
        self._stretches = stretches
        self._shadows: dict[int, Flats] = {}
        self._last: dict[int, tuple[int, list[Bytes]]] = {}  # worker: the exchange that was answered, and how

    def say(self, worker: int, exchange: int, values: Flats) -> list[Bytes] | None:
        """An answer's buffers; None where all values must be sent as they are: without a filter, and at first."""
        if self.chain.is_lossless:
            return None
        if exchange < 0 or worker not in self._shadows:
            self._shadows[worker] = {dtype: flat.clone() for dtype, flat in values.items()}
            return None
        if worker in self._last and self._last[worker][0] == exchange:
            return self._last[worker][1]
        buffers = [b for s in self._stretches for b in self._difference(self._shadows[worker][s.dtype], values[s.dtype])]
        self._last[worker] = exchange, buffers
        return buffers

    def _difference(self, shadow: torch.Tensor, value: torch.Tensor) -> list[Bytes]:
        said = self.chain.new(value.numel(), value.dtype).encode(value - shadow)
        shadow.add_(self.chain.decode(said, value.numel(), value.dtype))
        return said

    def forget(self, worker: int) -> None:
        """A worker is gone."""
        self._shadows.pop(worker, None)
        self._last.pop(worker, None)


class Shadow:
    """The worker's side: what it was told, all in all."""

    def __init__(self, chain: ChainSpec, shards: Sequence[Sequence[Stretch]]) -> None:
        self.chain = chain
        self._shards = shards
        self._parts: dict[int, list[Bytes]] = {}

    def hear(self, parts: dict[int, list[Bytes]], filtered: bool) -> dict[int, list[Bytes]]:
        """The values after an answer."""
        for shard, buffers in parts.items():
            if not filtered:
                self._parts[shard] = [buffer.copy() for buffer in buffers]
                continue
            for index, stretch in enumerate(self._shards[shard]):
                said = buffers[index * self.chain.buffers : (index + 1) * self.chain.buffers]
                held = as_tensor(self._parts[shard][index], stretch.dtype)
                held.add_(self.chain.decode(said, stretch.size, held.dtype))
        return {shard: self._parts[shard] for shard in parts}
