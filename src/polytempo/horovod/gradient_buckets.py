"""Horovod's way for gradients to travel: buckets that are all-reduced, with compression, scaling and sparse gradients.

A bucket holds a copy of the gradients and, behind them, two flags for each parameter: did this rank have a gradient of it,
and was it sparse? After the reduction they are 0 where no rank had one; the gradient is then None as before. Sparse
gradients travel in a bucket only with `sparse_as_dense`, and become sparse again; otherwise they are gathered by themselves
(`rows.py`).

`GradientReducer` launches buckets while backward runs (`reducer/buckets.py`), in one order on all ranks. They have
a group of their own, so that a script may make other calls at any time; in a process set, whose optimizers share a group,
all leave in `step()`. What `step()` announces then (`negotiation.py`) tells ranks that have joined to take part, and
whether a rank has changed gradients after they left, by clipping them, say: then all buckets are reduced again on all ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polytempo.errors import PolytempoError, UsageError
from polytempo.horovod.compression import Compressor
from polytempo.horovod.negotiation import Call, CallKind, digest, negotiator_of, no_body
from polytempo.horovod.ops import Average, Op
from polytempo.horovod.process_sets import ProcessSet, global_process_set, state
from polytempo.horovod.reductions import scale_
from polytempo.horovod.rows import gather_sparse
from polytempo.reducer.buckets import BucketScheduler, group_by_size
from polytempo.train import communication

#: Bytes of a bucket. Small enough to leave early, large enough for few calls.
CAPACITY = 8 << 20


@dataclass(frozen=True)
class ReductionOptions:
    """How buckets are reduced."""

    op: Op
    compression: type[Compressor]
    before: float = 1.0
    after: float = 1.0
    sparse_as_dense: bool = False


class GradientBucket:
    """Some parameters of one dtype on one device."""

    def __init__(self, params: Sequence[torch.Tensor], options: ReductionOptions) -> None:
        self.params, self._options = params, options
        self._allocate()
        self._sent: tuple[torch.Tensor, Any, Any] | None = None

    def _allocate(self) -> None:
        params = self.params
        sizes = [param.numel() for param in params]
        self._buffer = torch.zeros(sum(sizes) + 2 * len(params), dtype=params[0].dtype, device=params[0].device)
        *pieces, self._had, self._had_sparse = self._buffer.split([*sizes, len(params), len(params)])
        self._views = [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]

    def _follow_parameters(self) -> None:
        """Allocate again where the model was cast or moved after wrapping, as Horovod allows."""
        forms = {(param.dtype, param.device) for param in self.params}
        if forms == {(self._buffer.dtype, self._buffer.device)}:
            return
        if len(forms) > 1:
            raise UsageError(
                f"parameters that travel together are now {' and '.join(sorted(str(dtype) for dtype, _ in forms))}; "
                "cast and move a model before DistributedOptimizer()"
            )
        self._allocate()

    def fill(self) -> None:
        """Copy this rank's gradients into the bucket."""
        self._follow_parameters()
        dense = self._options.sparse_as_dense
        grads = [
            (param.grad.to_dense() if dense else None) if is_sparse(param.grad) else param.grad for param in self.params
        ]
        for view, grad in zip(self._views, grads, strict=True):
            _ = view.zero_() if grad is None else view.copy_(grad)
        self._had.copy_(torch.tensor([grad is not None for grad in grads]))
        self._had_sparse.copy_(torch.tensor([is_sparse(param.grad) for param in self.params]))

    def clear(self) -> None:
        """Contribute zeros: for a rank that has joined."""
        self._buffer.zero_()

    def launch(self, group: communication.Group | None) -> None:
        """Start the reduction, after `fill` or `clear`."""
        scale_(self._buffer, self._options.before)
        small, ctx = self._options.compression.compress(self._buffer)
        handle = communication.all_reduce(small, self._options.op.word, group=group, async_op=True)
        self._sent = small, ctx, handle

    def wait(self) -> None:
        """Wait for the reduction."""
        assert self._sent is not None
        small, ctx, handle = self._sent
        self._sent = None
        handle.wait()
        reduced = self._options.compression.decompress(small, ctx)
        if reduced.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(reduced)
        scale_(self._buffer, self._options.after)

    def assign_gradients(self) -> None:
        """Make `.grad` the reduced gradients."""
        numbers = zip(self._had.tolist(), self._had_sparse.tolist(), strict=True)
        for param, view, (had, sparse) in zip(self.params, self._views, numbers, strict=True):
            if had == 0:
                continue
            if sparse and self._options.sparse_as_dense:
                param.grad = view.to_sparse(param.grad.sparse_dim() if is_sparse(param.grad) else 1)
                continue
            if param.grad is None or param.grad.is_sparse:
                param.grad = torch.empty_like(param, requires_grad=False)
            param.grad.copy_(view)

    def sparse_params(self) -> list[torch.Tensor]:
        """Parameters of which a rank has a sparse gradient, which is not in the bucket."""
        if self._options.sparse_as_dense:
            return []
        return [param for param, sparse in zip(self.params, self._had_sparse.tolist(), strict=True) if sparse]

    def had_dense(self, param: torch.Tensor) -> bool:
        """Did a rank have a dense gradient of this parameter?"""
        return any(bool(had) for one, had in zip(self.params, self._had.tolist(), strict=True) if one is param)


def is_sparse(grad: torch.Tensor | None) -> bool:
    """Is there a gradient, and is it sparse?"""
    return grad is not None and grad.is_sparse


def bucket_indices(params: Sequence[torch.Tensor], apart: Iterable[torch.Tensor] = ()) -> list[list[int]]:
    """The parameters of each bucket, in reverse order, which is nearly backward's: the same buckets on all ranks.

    Args:
        params: All parameters.
        apart: Those that travel by themselves.
    """
    left_out = set(apart)
    sized = (
        (index, param.numel() * param.element_size(), (param.dtype, param.device))
        for index, param in reversed(list(enumerate(params)))
        if param not in left_out
    )
    return group_by_size(sized, CAPACITY)


class GradientStamp:
    """Which tensor a gradient is, and its version. It holds the tensor, so that no other can have its identity."""

    __slots__ = ("_grad", "_version")

    def __init__(self, grad: torch.Tensor | None) -> None:
        self._grad, self._version = grad, 0 if grad is None else grad._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientStamp) and self._grad is other._grad and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


class GradientReducer:
    """Reduces the gradients of one optimizer over the ranks of a process set.

    Args:
        params: The parameters that need gradients.
        options: How buckets are reduced.
        members: The process set; this rank is in it.
        names: Names of the parameters, where the script has given any.
    """

    def __init__(
        self, params: list[torch.Tensor], options: ReductionOptions, members: ProcessSet, names: dict[torch.Tensor, str]
    ) -> None:
        self._params, self._options, self._members = params, options, members
        self._index = {param: index for index, param in enumerate(params)}
        self._passes: Counter[torch.Tensor] = Counter()
        self._apart: list[torch.Tensor] = []  # parameters with sparse gradients, which have no room in a bucket
        self._make_buckets()
        self._early = members is global_process_set
        self._group = communication.new_group(members.ranks) if self._early else members.gradients
        self._call = _call_of(params, names, options.op)
        state().reducers.append(weakref.ref(self))
        own = weakref.ref(self)  # a parameter that is kept must not keep its optimizer
        self.passes_per_step = 1
        self._hooks = [param.register_post_accumulate_grad_hook(lambda param: _completed(own, param)) for param in params]

    def _make_buckets(self) -> None:
        grouped = bucket_indices(self._params, self._apart)
        self._buckets = [GradientBucket([self._params[index] for index in bucket], self._options) for bucket in grouped]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._scheduler = BucketScheduler(
            grouped, self._launch, lambda index: GradientStamp(self._params[index].grad), in_order=True
        )

    # While backward runs.

    def complete(self, param: torch.Tensor) -> None:
        """A backward pass has made this parameter's gradient."""
        self._passes[param] += 1
        if self._passes[param] > self.passes_per_step:
            raise UsageError(
                f"backward() ran more than {self.passes_per_step} times before step(); give DistributedOptimizer "
                "backward_passes_per_step= the number of passes whose gradients are to be added up"
            )
        if self._early and self._passes[param] == self.passes_per_step:
            self._scheduler.complete(self._index[param])

    def _launch(self, number: int) -> None:
        with torch.no_grad():
            self._buckets[number].fill()
            self._buckets[number].launch(self._group)

    def check_idle(self, call: str) -> None:
        """Refuse a call while buckets are being reduced."""
        if self._scheduler.launched:
            raise UsageError(f"{call} came between backward() and step(), while gradients were being reduced; step first")

    def start_over(self) -> None:
        """Begin a step."""
        self._passes.clear()
        self._scheduler.start_over()

    # At the end of a step.

    def reduce(self) -> None:
        """Make `.grad` of all parameters the reduced gradients."""
        changed = bool(self._scheduler.changed())
        announced = negotiator_of(self._members).start(replace(self._call, own=int(changed)), no_body)
        try:
            self._scheduler.launch_rest()
            calls = announced.wait()
            self._wait()
            if any(call.own for call in calls.values()):
                self._scheduler.start_over()
                self._scheduler.launch_rest()
                self._wait()
            sparse = self._gather_sparse()
        except PolytempoError:
            self._make_buckets()  # a collective may still write to the old ones
            self._passes.clear()  # a script that catches it may go on with the next backward pass
            raise
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.assign_gradients()
            for param, grad in sparse.items():
                mixed = param in self._bucket_of and self._bucket_of[param].had_dense(param)
                param.grad = param.grad + grad if mixed else grad
        self._set_apart(sparse)
        self.start_over()

    def _wait(self) -> None:
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.wait()

    def take_part(self, times: int) -> None:
        """Contribute zeros to a step of the other ranks: this rank has joined."""
        for _ in range(times):
            with torch.no_grad():
                for bucket in self._buckets:
                    bucket.clear()
                    bucket.launch(self._group)
            self._wait()
        self._set_apart(self._gather_sparse(joined=True))

    def _gather_sparse(self, joined: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """The sparse gradients of all ranks, which no bucket holds; all ranks know which parameters have any."""
        found = {param for bucket in self._buckets for param in bucket.sparse_params()}.union(self._apart)
        params = [param for param in self._params if param in found]
        own = [
            None if joined or (param in self._bucket_of and not is_sparse(param.grad)) else param.grad for param in params
        ]
        share = self._members.size() if self._options.op is Average else 1
        return gather_sparse(params, own, self._options.before * self._options.after / share, self._group)

    def _set_apart(self, sparse: Iterable[torch.Tensor]) -> None:
        """From now on these need no room in a bucket: on all ranks, since all have seen the same."""
        more = [param for param in sparse if param in self._bucket_of]
        if more:
            self._apart += more
            self._make_buckets()


def _completed(own: weakref.ref[GradientReducer], param: torch.Tensor) -> None:
    reducer = own()
    if reducer is not None:
        reducer.complete(param)


def _call_of(params: list[torch.Tensor], names: dict[torch.Tensor, str], op: Op) -> Call:
    """What `step()` announces; ranks whose models differ find out from it."""
    about = [(names.get(param, ""), tuple(param.shape), str(param.dtype)) for param in params]
    count = sum(param.numel() for param in params)
    return Call(CallKind.STEP, op.code, 0, count, digest(*about), root=len(state().reducers))
