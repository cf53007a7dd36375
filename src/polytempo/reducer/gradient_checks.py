"""A number for a gradient, by which workers that read the same batches are found out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from polytempo.errors import UsageError
from polytempo.reducer.flat_buffer import FlatBuffer

#: Gradients of so many steps are looked at.
LOOKS = 2
#: So many elements of each parameter.
ELEMENTS = 1024


def gradient_digest(params: Iterable[torch.Tensor]) -> int:
    """Differs where gradients do, and is 0 where they say nothing: none, zero, or sparse."""
    found, says = hashlib.blake2b(digest_size=8), False
    for param in params:
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            continue
        part = grad.detach().reshape(-1)[:ELEMENTS].cpu()
        says = says or bool(part.any())
        found.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "little") >> 1 if says else 0


# Gradients that are not finite: counted, or refused with the name of the parameter.


class FiniteWatch:
    """Looks at what one optimizer pushes."""

    def __init__(self, names: Sequence[str], rank: int, nonfinite: str) -> None:
        self._names, self._rank, self._nonfinite = names, rank, nonfinite
        self.seen = 0

    def look_at(self, flat: FlatBuffer, step: int, rows: bool = True) -> bool:
        """Is there something in it that is not finite, or among rows of tables?"""
        if flat.is_finite(everything=self._nonfinite == "refuse") and rows:
            return False
        self.seen += 1
        if self._nonfinite == "refuse":
            wrong = (self._names[index] for index, view in flat.views.items() if not view.isfinite().all())
            name = next(wrong, "a table")
            raise UsageError(
                f"worker {self._rank}, step {step}: {name} has a gradient that is not finite; "
                "lower the learning rate, clip, or count such gradients with nonfinite='count'"
            )
        return True
