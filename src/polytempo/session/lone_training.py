"""Workers that train and exchange nothing: N separate models, which a forgotten `DistributedOptimizer` makes.

A hook of torch after every optimizer step sees that a worker trains. It is removed when an optimizer of this library (or a
`KV`) is made, and returns at once when a collective or message was begun between two steps, or torch.distributed is in use.
What was exchanged before the first step, such as the first weights, does not count.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from polytempo.errors import trained_alone

#: Steps without an exchange after which a worker says so, once: a script that averages by hand does so more often.
EARLY = 100


class LoneTraining:
    """Counts the steps that this process trains without an exchange.

    Args:
        calls: Returns the number of collectives and messages that this process has begun.
        said_by: The rank that says so early; None where another rank does.
    """

    def __init__(self, calls: Callable[[], int], said_by: int | None) -> None:
        self._calls, self._said_by = calls, said_by
        self._first: Callable[[], Any] = lambda: None  # the optimizer whose steps are counted
        self._before = 0  # calls until its first step
        self._steps = 0  # that it has made with gradients
        self._together = False  # something was exchanged
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._together or torch.compiler.is_compiling():  # counting would have a compiled step compiled again and again
            return
        if self._steps == 0:
            if not any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
                return
            self._first, self._before = weakref.ref(optimizer), self._calls()
        elif self._first() is not optimizer:
            return
        self._steps += 1
        self._look()
        if self._steps == EARLY and not self._together and self._said_by is not None:
            sys.stderr.write(f"polytempo: warning: {trained_alone(f'rank {self._said_by} has', self._steps)}\n")
            sys.stderr.flush()

    def _look(self) -> None:
        elsewhere = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._together = self._together or elsewhere or self._calls() != self._before

    def count(self) -> int:
        """The steps that were trained alone, at the end; 0 where something was exchanged, or one step cannot tell."""
        self._look()
        return self._steps if self._steps > 1 and not self._together else 0

    def end(self) -> None:
        """Remove the hook: an optimizer of this library is there, or the job is left."""
        self._hook.remove()
