"""The collectives of torch's process groups, as those of `polytempo.collectives`. Roots are numbered within the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polytempo.collectives.tasks import Steps, Task
from polytempo.collectives.tensors import shape_of
from polytempo.errors import UsageError
from polytempo.torch_backend.errors import as_torch_error
from polytempo.torch_backend.messages import MessagingGroup

Tensors = Sequence[Any]


class TorchGroup(MessagingGroup):
    """One process group of torch. Its methods are those of `torch.distributed.ProcessGroup`."""

    # From all to all.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call(tensors, tensors, opts, lambda: self.group.all_reduce(tensors, _op(opts), background=True))

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        self._one_each("all_gather", outputs, inputs)
        touched = [*outputs[0], inputs[0]]
        return self._call(outputs[0], touched, opts, lambda: self.group.all_gather(outputs[0], inputs[0], background=True))

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        pairs = [(self._parts("all_gather", output, tensor), tensor) for output, tensor in _pairs(outputs, inputs)]

        def start() -> list[Task]:
            return [self.group.all_gather(parts, tensor, background=True) for parts, tensor in pairs]

        return self._call(outputs, [*outputs, *inputs], opts, start)

    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        """`outputs[rank]` is a list like `inputs`."""
        lists = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]

        def start() -> list[Task]:
            return [self.group.all_gather(*pair, background=True) for pair in zip(lists, inputs, strict=True)]

        flat = [tensor for of_rank in outputs for tensor in of_rank]
        return self._call(flat, [*flat, *inputs], opts, start)

    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any = None) -> Any:
        self._one_each("reduce_scatter", inputs, outputs)
        output, pieces = outputs[0], inputs[0]
        return self._call(
            outputs,
            [*pieces, output],
            opts,
            lambda: self.group.reduce_scatter(output, pieces, _op(opts), background=True),
        )

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        pairs = [(output, self._parts("reduce_scatter", tensor, output)) for output, tensor in _pairs(outputs, inputs)]

        def start() -> list[Task]:
            return [self.group.reduce_scatter(output, parts, _op(opts), background=True) for output, parts in pairs]

        return self._call(outputs, [*outputs, *inputs], opts, start)

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        return self._call(
            outputs, [*outputs, *inputs], opts, lambda: self.group.all_to_all(outputs, inputs, background=True)
        )

    def all_to_all_single(
        self, output: Any, tensor: Any, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        """Rows go to each rank: so many, or, if no numbers are given on any rank, the same to each."""
        even = not output_sizes and not input_sizes
        outputs, inputs = self._rows(output, output_sizes), self._rows(tensor, input_sizes)
        return self._call(
            [output], [output, tensor], opts, lambda: self.group.all_to_all(outputs, inputs, background=True, even=even)
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._call([], [], opts, lambda: self.group.barrier(background=True))

    # From or to one rank.

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call(tensors, tensors, opts, lambda: self.group.broadcast(tensors, _root(opts), background=True))

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = None, timeout: Any = None) -> Any:
        tensors = _listed(tensors)
        return self._call(
            tensors,
            tensors,
            opts,
            lambda: self.group.reduce(tensors[0], _root(opts), _op(opts if op is None else op), background=True),
        )

    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> Any:
        parts = outputs[0] if outputs else None
        return self._call(
            parts or [],
            [*(parts or ()), *inputs],
            opts,
            lambda: self.group.gather(parts, inputs[0], _root(opts), background=True),
        )

    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> Any:
        parts = inputs[0] if inputs else None
        return self._call(
            outputs,
            [*(parts or ()), *outputs],
            opts,
            lambda: self.group.scatter(outputs[0], parts, _root(opts), background=True),
        )

    # Names of torch before 2.13.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Parts of one tensor.

    def _parts(self, call: str, whole: Any, part: Any) -> list[Any]:
        """A tensor as one part for each rank."""
        if whole.numel() != self.size() * part.numel() or whole.dtype != part.dtype:
            wanted = f"{self.size()} times {shape_of(part)}"
            raise self._wrong(f"{call}: expected a tensor of {wanted}, got {shape_of(whole)}")
        return self._cut(whole, [part.numel()] * self.size())

    def _rows(self, tensor: Any, rows: Sequence[int]) -> list[Any]:
        count = tensor.shape[0] if tensor.dim() else 0
        if not rows and count % self.size():
            raise self._wrong(f"expected a number of rows that {self.size()} ranks can share, got {shape_of(tensor)}")
        rows = rows or [count // self.size()] * self.size()
        if len(rows) != self.size() or sum(rows) != count:
            raise self._wrong(f"expected {self.size()} numbers of rows that add up to {count}, got {list(rows)}")
        each = tensor.numel() // count if count else 0
        return self._cut(tensor, [number * each for number in rows])

    def _cut(self, tensor: Any, sizes: Sequence[int]) -> list[Any]:
        if not tensor.is_contiguous():
            raise self._wrong(f"expected a contiguous tensor, got strides {list(tensor.stride())}; use .contiguous()")
        return list(tensor.detach().view(-1).split(sizes))

    def _one_each(self, call: str, lists: Sequence[Tensors], single: Tensors) -> None:
        if len(lists) != 1 or len(single) != 1:
            raise self._wrong(f"{call}: expected one tensor on this rank, got {len(single)}, and {len(lists)} lists")

    def _wrong(self, text: str) -> Exception:
        return as_torch_error(UsageError(text), self.ranks)

    # Calls.

    def _call(self, results: list[Any], touched: Tensors, opts: Any, start: Callable[[], Task | list[Task]]) -> Any:
        """The progress thread reads tensors in a stream of its own: not before the caller's kernels have made them."""
        for device in {tensor.device for tensor in touched if tensor.device.type == "cuda"}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self.group.before_next("the GPU", _until(event))
        return self._start(results, touched, opts, start)


def _until(event: Any) -> Steps:
    event.synchronize()
    yield from ()


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _pairs(outputs: list[Any], inputs: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(outputs, inputs, strict=True))


def _op(opts: Any) -> Any:
    """The operation, of options or alone. Torch wraps it, and the wrapper says nothing in words."""
    op = getattr(opts, "reduceOp", opts)
    return "sum" if op is None or isinstance(op, int) else getattr(op, "op", op)


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))
