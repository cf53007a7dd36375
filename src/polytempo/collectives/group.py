"""Processes of one host that all-reduce tensors of their own: `open_group(directory, rank, size).all_reduce(tensor)`.

A tensor goes through the board piece by piece: the memory this needs is the same however large the tensor is.
"""

from __future__ import annotations

import os

import torch

from polytempo.collectives.board import Board
from polytempo.collectives.execute import all_reduce
from polytempo.errors import UsageError, nearest
from polytempo.transport.mesh import Mesh

#: Bytes of a piece: it stays in the cache; where processes must take turns on the cores, meeting seldom counts for more.
PIECE = 4 << 20
PIECE_IN_TURNS = 16 << 20
OPERATIONS = ("sum", "mean")


class Group:
    """All processes that were opened with one directory."""

    def __init__(self, mesh: Mesh, size: int, number: int = 0) -> None:
        self._mesh = mesh
        self.rank, self.size = mesh.rank, size
        mesh.meet(range(size))
        self._piece = PIECE if size <= (os.cpu_count() or 1) else PIECE_IN_TURNS
        self._board = Board(mesh, range(size), number, self._piece)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Make the tensor, in place, the sum or the mean over all processes. All must call it, with the same shape."""
        if op not in OPERATIONS:
            raise UsageError(f"expected op to be {' or '.join(OPERATIONS)}, got {op!r}{nearest(op, OPERATIONS)}")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise UsageError(f"all_reduce takes dense tensors on the CPU so far; this one is on {tensor.device}")
        if op == "mean" and not tensor.is_floating_point():
            raise UsageError(f"expected floating point numbers for a mean, got {tensor.dtype}; use op='sum'")
        whole = tensor.detach()
        flat = whole.view(-1) if whole.is_contiguous() else whole.reshape(-1)
        step = self._piece // flat.element_size()
        factor = 1 / self.size if op == "mean" else 1.0
        for start in range(0, flat.numel(), step):
            all_reduce(self._board, flat[start : start + step], factor)
        if not whole.is_contiguous():
            whole.copy_(flat.view(whole.shape))

    def close(self) -> None:
        """Leave."""
        self._mesh.close()


def open_group(directory: str, rank: int, size: int) -> Group:
    """Meet the others at a directory that only this user can enter."""
    if not 0 <= rank < size:
        raise UsageError(f"expected a rank between 0 and {size - 1}, got {rank}")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    return Group(Mesh(directory, rank), size)
