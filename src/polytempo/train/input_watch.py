"""How long a worker waits for data: the time of the first forward pass after a step, seen by a hook of the model.

From the end of a step to the next forward pass a training loop gets its next batch: these seconds are `Push.input`. What the
model is given is counted as well: the elements of its first argument are the work of the step where no sampler says what
samples cost, so that long sequences are not taken for a slow host. One hook of the root module, two microseconds a call.

Not seen, and counted as computing: input while gradients are accumulated, after the first forward pass; models that are
called without their hooks (`model.forward(x)`, captured CUDA graphs, inside `torch.compile`).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

#: Figures of single steps that a push of several steps holds the sums of.
SUMMED = ("input", "work")


class InputWatch:
    """Sees the forward passes of a model."""

    __slots__ = ("_elements", "_first")

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = 0.0  # when the first forward pass since the last step began; 0: there was none
        self._elements = 0  # of what the model was given since, in training
        model.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # a graph cannot hold a clock
            return
        if not self._first:
            self._first = perf_counter()
        if arguments and module.training and isinstance(arguments[0], torch.Tensor):
            self._elements += arguments[0].numel()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and saved models have a function in its place that returns what it is given: they need no Polytempo."""
        return getattr, ({}, "get")

    def take(self, computed: Callable[[float], float], most: float) -> dict[str, float]:
        """A step is made: fields of its push.

        Args:
            computed: Seconds of computing up to a moment.
            most: The same up to now.
        """
        first, elements, self._first, self._elements = self._first, self._elements, 0.0, 0
        figures = {"input": min(max(computed(first), 0.0), most)} if first else {}
        return figures | {"work": float(elements)} if elements else figures


def add_figures(sums: dict[str, Any], about: dict[str, Any]) -> None:
    """Add the figures of one more step, which are taken out of `about`."""
    for name in SUMMED:
        if about.get(name) is not None:
            sums[name] = sums.get(name, 0.0) + about.pop(name)
