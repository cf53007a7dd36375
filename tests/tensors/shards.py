"""Stores of one optimizer, fed with whole tensors: cut for each shard on the way in, put together on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polytempo.device.device import Device
from polytempo.protocol.layout import lay_out
from polytempo.protocol.messages import Push
from polytempo.protocol.push import Content, PushedGradient
from polytempo.protocol.values import OptimizerSpec, PushId, TensorInfo
from polytempo.server.optimizer_state import SegmentState, as_bytes, dtype_name, is_whole
from polytempo.server.shard import Shard
from polytempo.transport.channel import Bytes

Tensors = Sequence[torch.Tensor]


class Stores:
    """All shards of one optimizer over these tensors; `groups` says in which group each stands."""

    def __init__(
        self,
        tensors: Tensors,
        shards: int,
        optimizer: str = "SGD",
        hyper: Sequence[dict[str, Any]] = ({"lr": 0.1},),
        groups: Sequence[int] | None = None,
        apply: str = "server",
        clip_norm: float | None = None,
        device: Device | None = None,
    ) -> None:
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        self.hyper = tuple(hyper)
        of_group = groups or [0] * len(tensors)
        infos = tuple(
            TensorInfo(f"p{index}", tuple(tensor.shape), dtype_name(tensor.dtype), of_group[index])
            for index, tensor in enumerate(tensors)
        )
        self.optimizer_spec = OptimizerSpec("bsp", apply, optimizer, infos, self.hyper, clip_norm)
        self.layout = lay_out(infos, shards, is_whole(optimizer))
        self.stores = [Shard(self.optimizer_spec, shard, shards, device=device) for shard in range(shards)]
        for shard, store in enumerate(self.stores):
            store.seed(self.cut(tensors, shard))

    def cut(self, tensors: Tensors, shard: int) -> list[Bytes]:
        """What of these tensors belongs to a shard, as it comes in a push."""
        flats = {
            dtype: torch.cat([tensors[p.index].detach().reshape(-1) for p in self.layout.places if p.info.dtype == dtype])
            for dtype in self.layout.sizes
        }
        return [as_bytes(flats[s.dtype][s.start : s.stop]).copy() for s in self.layout.shards[shard]]

    def values(self) -> list[torch.Tensor]:
        """The parameters, put together."""
        flats = {d: torch.full((n,), torch.nan, dtype=getattr(torch, d)) for d, n in self.layout.sizes.items()}
        for store in self.stores:
            for stretch in store.stretches:
                flats[stretch.dtype][stretch.start : stretch.stop] = store.values[stretch.dtype]
        by_index = {p.index: flats[p.info.dtype][p.start : p.stop] for p in self.layout.places}
        return [by_index[index].view(shape).clone() for index, shape in enumerate(self.shapes)]

    def update(
        self,
        *pushes: tuple[float, Tensors],
        rate: float = 1.0,
        barrier: bool = True,
        square: float = 0.0,
        version: int = 0,
        kind: type[Content] = PushedGradient,
        **fields: Any,
    ) -> None:
        """One update of these pushes (samples, tensors) on every shard; `square` is the squared norm over all shards."""
        body = kind(**{"hyper": self.hyper, **fields})
        for shard, store in enumerate(self.stores):
            parts = []
            for worker, (samples, tensors) in enumerate(pushes):
                push = Push(id=PushId("0", worker, 0, store.version), version=version, body=body)
                parts.append((push, samples, self.cut(tensors, shard)))
            store.update(parts, rate, barrier, lambda own: square or own)

    def step(self, gradients: Sequence[torch.Tensor | None], **fields: Any) -> None:
        """One worker's gradients; None where a parameter has none."""
        absent = tuple(index for index, gradient in enumerate(gradients) if gradient is None)
        filled = [
            torch.full(shape, 7.0, dtype=getattr(torch, info.dtype)) if gradient is None else gradient
            for gradient, shape, info in zip(gradients, self.shapes, self.optimizer_spec.tensors, strict=True)
        ]
        self.update((1.0, filled), absent=absent, **fields)

    def state(self) -> list[SegmentState]:
        return [run for store in self.stores for run in store.state()]


class Plain:
    """The same with torch alone."""

    def __init__(self, tensors: Tensors, optimizer: str, hyper: Sequence[dict[str, Any]], groups: Sequence[int]) -> None:
        self.params = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
        described = [
            {**values, "params": [p for p, own in zip(self.params, groups, strict=True) if own == group]}
            for group, values in enumerate(hyper)
        ]
        self.optimizer = getattr(torch.optim, optimizer)(described)

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.params, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.params]
