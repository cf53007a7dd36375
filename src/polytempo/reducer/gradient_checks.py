"""Checks of gradients before they are pushed: equal batches on two workers, and values that are not finite.

On a device the host does not wait for a check: the stream writes the largest magnitude of a push into host memory, before it
says that the push is there. So it can be read when that push was answered, and counts with the push after it. Only
`nonfinite="refuse"` waits, since it must know before it pushes.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from polytempo.errors import UsageError
from polytempo.protocol.training_troubles import Circumstances, goes_on, not_finite
from polytempo.reducer.device_moves import largest
from polytempo.reducer.flat_buffer import FlatBuffer

#: Steps of which gradients are digested.
DIGESTED_STEPS = 2
#: Elements of each parameter that are digested.
ELEMENTS = 1024


def gradient_digest(params: Iterable[torch.Tensor]) -> int:
    """A digest by which workers that read the same batches are found; 0 where gradients are missing, zero or sparse."""
    grads = [p.grad.detach() for p in params if p.grad is not None and p.grad.layout == torch.strided]
    parts = [grad.reshape(-1)[:ELEMENTS] for grad in grads]
    if parts and parts[0].is_cuda:  # by one transfer
        together = torch.cat([part.contiguous().view(torch.uint8) for part in parts]).cpu()
        pieces = together.split([part.numel() * part.element_size() for part in parts])
        parts = [piece.clone().view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    nonzero = any(bool(part.any()) for part in parts)
    return int.from_bytes(digest.digest(), "little") >> 1 if nonzero else 0


class DelayedCheck:
    """Of the pushes of one flat buffer on a device: one that was made is looked at once it was answered."""

    def __init__(self, buffer: FlatBuffer) -> None:
        self._flats = list(buffer.tensors.values())
        pinned = any(flat.is_cuda for flat in self._flats)
        self._largest = [torch.zeros((), dtype=flat.dtype, pin_memory=pinned) for flat in self._flats]
        self._done = torch.cuda.Event() if pinned else None
        self._waiting = False

    def start(self) -> None:
        """Look at the flat buffer as it is now, on the current stream."""
        for to, flat in zip(self._largest, self._flats, strict=True):
            to.copy_(largest(flat), non_blocking=True)
        if self._done is not None:
            self._done.record()
        self._waiting = True

    def take(self) -> bool:
        """Was the push not finite that was looked at last? It must be answered. Asked again, it says False."""
        waiting, self._waiting = self._waiting, False
        if waiting and self._done is not None:
            self._done.synchronize()  # it is there, if the push was answered
        return waiting and not all(math.isfinite(found.item()) for found in self._largest)


class OwnReport:
    """Where there is no coordinator, a worker says itself, once, that its training goes wrong.

    Args:
        rank: Its rank.
        params: What it trains.
        circumstances: How it trains now.
    """

    def __init__(self, rank: int, params: Sequence[torch.Tensor], circumstances: Callable[[], Circumstances]) -> None:
        self.rank, self.circumstances = rank, circumstances
        self._params = list(params)
        self._said = False

    def not_finite(self, step: int, what: str) -> None:
        """Say it, unless a gradient is so because the parameters are: then it began with another worker, or before."""
        if what == "model" or all(bool(param.isfinite().all()) for param in self._params):
            self.say(not_finite(self.rank, step, what), self.circumstances().advice_on_nonfinite)
        self._said = True

    def say(self, trouble: str, advice: str) -> None:
        """Say what is wrong, if nothing was said before."""
        if not self._said:
            sys.stderr.write(f"polytempo: {goes_on(trouble, advice)}\n")
            sys.stderr.flush()
        self._said = True


class FiniteWatch:
    """Counts pushes of one optimizer that are not finite, or refuses them with the name of the parameter."""

    def __init__(self, names: Sequence[str], rank: int, nonfinite: str, report: OwnReport | None = None) -> None:
        """`report`: where there is no coordinator, which would name the first worker of the job."""
        self._names, self._rank, self._nonfinite = names, rank, nonfinite
        self._report = report
        self.seen = 0
        self._delayed: dict[int, DelayedCheck] = {}  # by flat buffer on a device

    def take(self) -> bool:
        """Were pushes not finite that a device has looked at, and were answered since?"""
        found = sum([check.take() for check in self._delayed.values()])
        self.seen += found
        return found > 0

    def check(self, buffer: FlatBuffer, step: int, rows_finite: bool = True, names: Sequence[str] = ()) -> bool:
        """Is a number in it, or among the rows of tables, not finite? With `names` it holds values of these parameters. On a
        device: was one in the push before, which must be answered?"""
        if buffer.on_device and self._nonfinite != "refuse":
            found = self.take()
            if id(buffer) not in self._delayed:
                self._delayed[id(buffer)] = DelayedCheck(buffer)
            self._delayed[id(buffer)].start()
            if found and self._report is not None:
                self._report.not_finite(step - 1, "model" if names else "gradient")
            return found
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
        if self._report is not None:
            self._report.not_finite(step, "model" if names else "gradient")
        return True
