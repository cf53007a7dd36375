"""Gradients of some parameters, which travel as one.

A bucket holds a copy of the gradients and, behind them, two numbers for each parameter: did this rank have a gradient of it,
and a sparse one? After the reduction they are 0 where no rank had one; the gradient is then None as before. Sparse gradients
travel here only with `sparse_as_dense`, and are handed out sparse again; else they travel by themselves (`sparse.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.horovod.compression import Compressor
from polytempo.horovod.ops import Op
from polytempo.horovod.reductions import scale_
from polytempo.train import communication

#: Bytes of a bucket. Small enough to be under way early, large enough not to be many.
CAPACITY = 8 << 20


@dataclass(frozen=True)
class Travel:
    """How buckets travel."""

    op: Op
    compression: type[Compressor]
    before: float = 1.0
    after: float = 1.0
    sparse_as_dense: bool = False


class GradientBucket:
    """Some parameters of one dtype on one device."""

    def __init__(self, params: Sequence[torch.Tensor], travel: Travel) -> None:
        self.params, self._travel = params, travel
        self.missing = set(params)  #: whose gradients are not there yet
        self._make()
        self._sent: tuple[torch.Tensor, Any, Any] | None = None
        self._seen: list[tuple[torch.Tensor | None, int]] = []

    def _make(self) -> None:
        params = self.params
        sizes = [param.numel() for param in params]
        self._buffer = torch.zeros(sum(sizes) + 2 * len(params), dtype=params[0].dtype, device=params[0].device)
        *pieces, self._had, self._had_sparse = self._buffer.split([*sizes, len(params), len(params)])
        self._views = [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]

    def _follow(self) -> None:
        """A model that is cast or moved after wrapping takes its gradients along, as with Horovod."""
        forms = {(param.dtype, param.device) for param in self.params}
        if forms == {(self._buffer.dtype, self._buffer.device)}:
            return
        if len(forms) > 1:
            raise UsageError(
                f"parameters that travel together are now {' and '.join(sorted(str(dtype) for dtype, _ in forms))}; "
                "cast and move a model before DistributedOptimizer()"
            )
        self._make()

    def fill(self) -> None:
        """With this rank's gradients."""
        self._follow()
        grads = [self._dense(param.grad) for param in self.params]
        for view, grad in zip(self._views, grads, strict=True):
            _ = view.zero_() if grad is None else view.copy_(grad)
        self._had.copy_(torch.tensor([grad is not None for grad in grads]))
        self._had_sparse.copy_(torch.tensor([is_sparse(param.grad) for param in self.params]))
        self._seen = [_state_of(param.grad) for param in self.params]

    def is_outdated(self) -> bool:
        """Has somebody changed a gradient since it was filled: clipped it, say?"""
        now = [_state_of(param.grad) for param in self.params]
        return any(a is not b or old != new for (a, old), (b, new) in zip(self._seen, now, strict=True))

    def empty(self) -> None:
        """Nothing to add: for a rank that has joined."""
        self._buffer.zero_()

    def launch(self, group: communication.Group | None) -> None:
        """Send it on its way; `fill` or `empty` it before."""
        scale_(self._buffer, self._travel.before)
        small, ctx = self._travel.compression.compress(self._buffer)
        handle = communication.all_reduce(small, self._travel.op.word, group=group, async_op=True)
        self._sent = small, ctx, handle

    def wait(self) -> None:
        """Until it is reduced."""
        assert self._sent is not None
        small, ctx, handle = self._sent
        self._sent = None
        handle.wait()
        reduced = self._travel.compression.decompress(small, ctx)
        if reduced.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(reduced)
        scale_(self._buffer, self._travel.after)

    def hand_out(self) -> None:
        """Make everybody's gradients this rank's."""
        numbers = zip(self._had.tolist(), self._had_sparse.tolist(), strict=True)
        for param, view, (had, sparse) in zip(self.params, self._views, numbers, strict=True):
            if had == 0:
                continue
            if sparse and self._travel.sparse_as_dense:
                param.grad = view.to_sparse(param.grad.sparse_dim() if is_sparse(param.grad) else 1)
                continue
            if param.grad is None or param.grad.is_sparse:
                param.grad = torch.empty_like(param, requires_grad=False)
            param.grad.copy_(view)
        self.missing, self._seen = set(self.params), []

    def sparse_params(self) -> list[torch.Tensor]:
        """Those of which a rank has a sparse gradient, which is not in here."""
        if self._travel.sparse_as_dense:
            return []
        return [param for param, sparse in zip(self.params, self._had_sparse.tolist(), strict=True) if sparse]

    def had_dense(self, param: torch.Tensor) -> bool:
        """Has a rank had a dense gradient of it?"""
        return any(bool(had) for one, had in zip(self.params, self._had.tolist(), strict=True) if one is param)

    def _dense(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None or not grad.is_sparse:
            return grad
        return grad.to_dense() if self._travel.sparse_as_dense else None


def is_sparse(grad: torch.Tensor | None) -> bool:
    """Is it there, and sparse?"""
    return grad is not None and grad.is_sparse


def _state_of(grad: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    return grad, 0 if grad is None else grad._version


def buckets_of(params: Iterable[torch.Tensor], travel: Travel) -> list[GradientBucket]:
    """Buckets in reverse order of the parameters, which is nearly backward's order: the same buckets on all ranks."""
    full: list[list[torch.Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param in reversed(list(params)):
        key = param.dtype, param.device
        bucket = filling.setdefault(key, [])
        bucket.append(param)
        if sum(some.numel() * some.element_size() for some in bucket) >= CAPACITY:
            full.append(filling.pop(key))
    return [GradientBucket(some, travel) for some in (*full, *filling.values())]
