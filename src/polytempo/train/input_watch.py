"""How long a worker waits for data: the time of the first forward pass after a step, seen by a hook of the model.

From the end of a step to the next forward pass a training loop gets its next batch: these seconds are `Measures.input`. What
the model is given then is counted as well: the elements of its first argument are the work of the step where no sampler says
what samples cost, so that long sequences are not taken for a slow host.

The hook is on the root module from the end of a step to the first forward pass, which removes it: a few microseconds a step.
It is not there when the job's budget is used up, or the worker leaves: a trained model is as it was (TorchScript refuses
hooks that it cannot compile; copies and saved models have an inert one).

Not seen, and counted as computing: input while gradients are accumulated, after the first forward pass; models that are
called without their hooks (`model.forward(x)`, captured CUDA graphs, inside `torch.compile`), and scripted ones.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch


class InputWatch:
    """Sees the first forward pass of a model after each step."""

    __slots__ = ("__weakref__", "_elements", "_first", "_handle", "_model")

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = 0.0  # when the first forward pass since the last step began; 0: there was none
        self._elements = 0  # of what the model was given then
        self._model = weakref.ref(model)
        self._handle: torch.utils.hooks.RemovableHandle | None = None  # of the hook, while it is there
        self.watch()

    def watch(self) -> None:
        """A step has ended: wait for the next forward pass."""
        model = self._model()
        if self._handle is None and model is not None and not isinstance(model, torch.jit.ScriptModule):
            self._handle = model.register_forward_pre_hook(self)

    def stop(self) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # a graph cannot hold a clock
            return
        self._first = time.perf_counter()
        if arguments and isinstance(arguments[0], torch.Tensor):
            self._elements = arguments[0].numel()
        self.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and saved models have a function in its place that returns what it is given: they need no Polytempo."""
        return getattr, ({}, "get")

    def take(self, computed: Callable[[float], float], most: float) -> tuple[float, float | None]:
        """A step is made: its seconds of input, and its work where that was seen.

        Args:
            computed: Seconds of computing up to a moment.
            most: The same up to now.
        """
        first, elements, self._first, self._elements = self._first, self._elements, 0.0, 0
        return (min(max(computed(first), 0.0), most) if first else 0.0), (float(elements) if elements else None)
