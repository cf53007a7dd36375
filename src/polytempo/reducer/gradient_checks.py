"""Checks of gradients before they are pushed: equal batches on two workers, and values that are not finite."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from polytempo.errors import UsageError
from polytempo.reducer.flat_buffer import FlatBuffer

#: Steps of which gradients are digested.
DIGESTED_STEPS = 2
#: Elements of each parameter that are digested.
ELEMENTS = 1024


def gradient_digest(params: Iterable[torch.Tensor]) -> int:
    """A digest by which workers that read the same batches are found; 0 where gradients are missing, zero or sparse."""
    digest, nonzero = hashlib.blake2b(digest_size=8), False
    for param in params:
        grad = param.grad
        if grad is None or grad.layout != torch.strided:
            continue
        part = grad.detach().reshape(-1)[:ELEMENTS].cpu()
        nonzero = nonzero or bool(part.any())
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1 if nonzero else 0


class FiniteWatch:
    """Counts pushes of one optimizer that are not finite, or refuses them with the name of the parameter."""

    def __init__(self, names: Sequence[str], rank: int, nonfinite: str) -> None:
        self._names, self._rank, self._nonfinite = names, rank, nonfinite
        self.seen = 0

    def check(self, buffer: FlatBuffer, step: int, rows_finite: bool = True, names: Sequence[str] = ()) -> bool:
        """Is a number in it, or among the rows of tables, not finite? With `names` it holds values of these parameters."""
        if buffer.is_finite(everything=self._nonfinite == "refuse") and rows_finite:
            return False
        self.seen += 1
        if self._nonfinite == "refuse":
            wrong = ((names or self._names)[index] for index, view in buffer.views.items() if not view.isfinite().all())
            name = next(wrong, "a table")
            raise UsageError(
                f"worker {self._rank}, step {step}: {name} has a {'value' if names else 'gradient'} that is not finite; "
                "lower the learning rate, clip, or count such gradients with nonfinite='count'"
            )
        return True
