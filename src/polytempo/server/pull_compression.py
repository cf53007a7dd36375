"""Answers that say less than all values: the difference to what the worker holds, through a filter.

For each worker the shard keeps what it holds (its *shadow*); an answer is the filtered difference between the values and
the shadow, which then moves by exactly what was said. The worker does the same on its side, so both stay equal to the bit,
and what an answer leaves out is in the next difference: the residual is what the worker lacks. An answer that must be
repeated is the same one again, and differences are added up in the order of the pushes they answer: where pushes overlap
(`delay`), several are kept, and one that comes before an earlier one waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.compression.chain import ChainSpec
from polytempo.protocol.layout import Stretch
from polytempo.server.optimizer_state import Flats, as_bytes, as_tensor
from polytempo.transport.channel import Bytes


class PullCompression:
    """The answers of one store."""

    def __init__(self, chain: ChainSpec, stretches: Sequence[Stretch], ahead: int = 0) -> None:
        self.chain = chain
        self._stretches, self._ahead = stretches, ahead
        self._shadows: dict[int, Flats] = {}
        self._said: dict[int, dict[int, list[Bytes]]] = {}  # worker: exchange: what it may ask for again

    def say(self, worker: int, exchange: int, values: Flats) -> list[Bytes] | None:
        """An answer's buffers; None where all values must be sent as they are: at first."""
        if exchange < 0 or worker not in self._shadows:
            self._shadows[worker] = {dtype: flat.clone() for dtype, flat in values.items()}
            self._said[worker] = {}
            return None
        said = self._said[worker]
        if exchange in said:
            return said[exchange]
        if said and exchange < max(said):
            return None  # the worker has had it, and does not listen
        shadow = self._shadows[worker]
        said[exchange] = [b for s in self._stretches for b in self._difference(shadow[s.dtype], values[s.dtype])]
        self._said[worker] = {known: said[known] for known in said if known >= exchange - self._ahead}
        return said[exchange]

    def _difference(self, shadow: torch.Tensor, value: torch.Tensor) -> list[Bytes]:
        chain = self.chain.new(value.numel(), value.dtype, value.device)
        said = [as_bytes(part) for part in chain.encode_tensors(value - shadow)]
        shadow.add_(self.chain.decode(said, value.numel(), value.dtype, value.device))
        return said

    def told(self, worker: int) -> Flats:
        return self._shadows[worker]

    def forget(self, worker: int) -> None:
        self._shadows.pop(worker, None)
        self._said.pop(worker, None)


class Shadow:
    """The worker's side: what it was told, all in all."""

    def __init__(self, chain: ChainSpec, shards: Sequence[Sequence[Stretch]], overlap: bool = False) -> None:
        self.chain = chain
        self._shards, self._overlap = shards, overlap
        self._parts: dict[int, list[Bytes]] = {}
        self._next = 0  # the exchange whose difference is to be added
        self._early: dict[int, dict[int, list[Bytes]]] = {}  # those of later ones

    def hear(self, parts: dict[int, list[Bytes]], filtered: bool, exchange: int = 0) -> dict[int, list[Bytes]]:
        """The values after an answer, as far as nothing is missing between."""
        if not filtered:
            self._parts = {shard: [buffer.copy() for buffer in buffers] for shard, buffers in parts.items()}
            self._next = exchange + 1
        elif not self._overlap:
            self._add(parts)
        else:
            self._early[exchange] = {shard: [buffer.copy() for buffer in buffers] for shard, buffers in parts.items()}
            while self._next in self._early:
                self._add(self._early.pop(self._next))
                self._next += 1
        return self._parts

    def _add(self, parts: dict[int, list[Bytes]]) -> None:
        for shard, buffers in parts.items():
            for index, stretch in enumerate(self._shards[shard]):
                said = buffers[index * self.chain.buffers : (index + 1) * self.chain.buffers]
                held = as_tensor(self._parts[shard][index], stretch.dtype)
                held.add_(self.chain.decode(said, stretch.size, held.dtype))
