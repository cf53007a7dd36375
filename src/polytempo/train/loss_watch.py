"""The loss of local steps, without a change of the script: it is what `.backward()` is called on.

While a session has an optimizer that takes steps with others, `torch.autograd.backward` is wrapped: modes like `adacomm` and
the guard against divergence (`vital_signs.py`) need the loss. The value of a root that is
one number, and that backward starts from without a given gradient, is noted for the optimizers of the calling session.
Between two steps these values are summed: losses of several micro-batches are, as their gradients are. The last such session
takes the wrapper away when it ends. `step(loss=...)` and the value of a closure come before what was noted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.session.session import Session, current, is_initialized


class LossWatch:
    """What backward was called on since the last step of one optimizer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: torch.Tensor | None = None
        _install(self)
        session.ending.append(self.close)

    def close(self) -> None:
        """The session ends: nothing is noted any more."""
        _watches.discard(self)
        _remove()

    def note(self, session: Session, loss: torch.Tensor) -> None:
        """Backward was called on this, by a thread of that session."""
        if session is self._session:
            value = wide(loss)
            self._seen = value if self._seen is None else self._seen + value

    def take(self) -> torch.Tensor | None:
        """The sum since the last call; None where there was none."""
        seen, self._seen = self._seen, None
        return seen


class BlockLoss:
    """The mean loss of a block of local steps, weighted by their samples; read from the device once a block."""

    def __init__(self, watch: LossWatch) -> None:
        self._watch = watch
        self._sum: torch.Tensor | None = None
        self._samples = 0.0
        self._ever = False

    def add(self, given: Any, samples: float, scale: Any, unscaled: bool) -> None:
        """A local step was made.

        Args:
            given: The loss, where the script gave it or a closure returned it.
            samples: The step's weight.
            scale: What a GradScaler has multiplied the loss by.
            unscaled: A GradScaler has multiplied it, and the script has divided the gradients already: by what is not known.
        """
        seen = self._watch.take()
        if given is not None:
            seen = wide(torch.as_tensor(given))
        elif seen is not None and unscaled:
            raise UsageError("the loss was scaled by a GradScaler, and unscale_() hides by how much; call step(loss=loss)")
        elif seen is not None and scale is not None:
            seen = seen / scale
        if seen is not None:
            weighted = seen * samples
            self._sum = weighted if self._sum is None else self._sum.to(weighted.device) + weighted
            self._samples += samples

    def skip(self) -> None:
        """A step was skipped: its loss does not count."""
        self._watch.take()

    def take(self, sync: str) -> float | None:
        """The mean of the block that ends; None where no step had a loss."""
        total, samples, self._sum, self._samples = self._sum, self._samples, None, 0.0
        if total is None or not samples:
            if not self._ever:
                raise UsageError(f"{sync} sets its period by the loss, and has seen none; call optimizer.step(loss=loss)")
            return None
        self._ever = True
        return float(total) / samples


_watches: set[LossWatch] = set()
_lock = threading.RLock()
_original: Callable[..., None] | None = None
_ours: Callable[..., None] | None = None


def _install(watch: LossWatch) -> None:
    global _original, _ours
    with _lock:
        _watches.add(watch)
        if _original is None:
            _original = torch.autograd.backward
            _ours = _wrapper(_original)
            torch.autograd.backward = _ours


def _remove() -> None:
    """A session has ended; the last takes the wrapper away, unless another library has wrapped it in turn."""
    global _original, _ours
    with _lock:
        if _original is not None and not _watches and torch.autograd.backward is _ours:
            torch.autograd.backward = _original
            _original = _ours = None


def _wrapper(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        original(tensors, grad_tensors, *args, **kwargs)
        if grad_tensors is None and kwargs.get("grad_variables") is None and is_initialized():
            _note([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))

    return backward


def _note(roots: Sequence[torch.Tensor]) -> None:
    session = current()
    for root in roots:
        if root.numel() == 1 and root.is_floating_point():
            for watch in list(_watches):
                watch.note(session, root)


def wide(loss: torch.Tensor) -> torch.Tensor:
    """A loss as one number, detached; of two bytes it is summed in four."""
    value = loss.detach().reshape(())
    return value.float() if value.element_size() < 4 else value
