"""The model and the first batch of a script's pipeline, found by running the script up to its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polytempo.pipeline import pipeline
from polytempo.pipeline.stage_message import rows
from polytempo.session.session import is_initialized, shutdown


@dataclass(frozen=True)
class Found:
    """A model, an example of its inputs, and the number of microbatches of a batch where the script sets it. What follows is
    for plans of strategies: loss, optimizer, an example of the targets, the samples of a step."""

    model: Any
    example: Any
    microbatches: int | None = None
    loss: Any = None
    optimizer: Any = None
    target: Any = None
    batch: int | None = None
    tensor_plan: Any = None


class Stepped(BaseException):
    """A pipeline has received its first batch. Not an `Exception`, so that the script does not catch it."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found


class _PipelineProbe:
    """Replaces `pt.Pipeline` while a script is inspected."""

    def __init__(
        self, model: Any, *_: Any, microbatches: int | None = None, loss: Any = None, optimizer: Any = None, **__: Any
    ) -> None:
        self.microbatches = microbatches
        self._model, self._loss, self._optimizer = model, loss, optimizer

    def step(self, x: Any = None, y: Any = None) -> None:
        count = self.microbatches or 1
        inputs, targets = _part(x, count), _part(y, count)
        raise Stepped(Found(self._model, inputs, self.microbatches, self._loss, self._optimizer, targets, rows(x)))


def _part(value: Any, parts: int) -> Any:
    """One of the microbatches of a batch."""
    if isinstance(value, tuple | list):
        return type(value)(_part(one, parts) for one in value)
    return value[: max(1, len(value) // parts)] if getattr(value, "shape", ()) else value


@contextmanager
def pipelines_stop_at_their_first_batch() -> Iterator[None]:
    """Here `pt.Pipeline` does not train: its first step raises `Stepped`. A job that the script joins is left again."""
    real = pipeline.Pipeline
    pipeline.Pipeline = _PipelineProbe  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        pipeline.Pipeline = real  # type: ignore[misc]
        leave_job()


def leave_job() -> None:
    """End the job that a script has joined, if it has."""
    if is_initialized():
        shutdown()
