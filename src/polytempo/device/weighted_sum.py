"""The weighted sum of n flat tensors in one pass: each is read once, and the result is written once.

torch has no such call: its `add` takes two, so of n tensors all but two cost a further reading and writing of the result.
The kernel is in `weighted_sum.cu`; the driver loads its PTX, so no compiler is needed where it runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from polytempo.device.driver import CudaDriver

#: Terms of one call, and bytes that a thread takes at once, as in `weighted_sum.cu`.
TERMS = 16
PACK = 16
THREADS, BLOCKS = 256, 4096
DTYPES = ("float32", "float64", "float16", "bfloat16")


class _Terms(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64 * TERMS),
        ("weight", ctypes.c_double * TERMS),
        ("into", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("divisor", ctypes.c_double),
        ("count", ctypes.c_int),
    )


class WeightedSum:
    """The kernels, loaded for one device.

    Args:
        driver: Of the device.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        names = [f"{dtype}_{form}" for dtype in DTYPES for form in ("packed", "single")]
        self._functions = driver.functions(Path(__file__).with_suffix(".ptx").read_bytes(), names)

    def launch(
        self, stream: int, terms: Sequence[torch.Tensor], weights: Sequence[float], divisor: float, out: torch.Tensor
    ) -> None:
        """`out` becomes (w0 x0 + w1 x1 + ...) / divisor, added in this order."""
        item, length = out.element_size(), out.numel()
        addresses = [term.data_ptr() for term in terms]
        whole = (
            0 if any(address % PACK for address in (*addresses, out.data_ptr())) else length * item // PACK * PACK // item
        )
        for form, start, stop in (("packed", 0, whole), ("single", whole, length)):
            if start < stop:
                table = _Terms(into=out.data_ptr() + start * item, length=stop - start, divisor=divisor, count=len(terms))
                for index, (address, weight) in enumerate(zip(addresses, weights, strict=True)):
                    table.source[index], table.weight[index] = address + start * item, weight
                threads = (stop - start) // (PACK // item) if form == "packed" else stop - start
                blocks = min(BLOCKS, -(-threads // THREADS))
                name = f"{str(out.dtype).removeprefix('torch.')}_{form}"
                self._driver.launch(self._functions[name], stream, blocks, THREADS, table)


def sum_by_torch(terms: Sequence[torch.Tensor], weights: Sequence[float], divisor: float, out: torch.Tensor) -> None:
    """The same by torch's own calls: for the stand-in, and for what the kernel does not take."""
    narrow = out.element_size() == 2 and out.dtype.is_floating_point
    total = terms[0].float() if narrow else terms[0].clone()
    if weights[0] != 1.0:
        total.mul_(weights[0])
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        if weight == 1.0:
            total.add_(term)
        else:
            total.add_(term, alpha=weight)
    if divisor != 1.0:
        total.div_(
            total.new_full((), divisor)
        )  # by a plain number, CUDA multiplies by its inverse, which rounds differently
    out.copy_(total)
