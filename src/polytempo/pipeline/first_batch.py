"""The model and the first batch of a script's pipeline, found by running the script up to its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polytempo.pipeline import pipeline
from polytempo.session.session import is_initialized, shutdown


@dataclass(frozen=True)
class Found:
    """A model, an example of its inputs, and the number of microbatches of a batch where the script sets it."""

    model: Any
    example: Any
    microbatches: int | None = None


class Stepped(BaseException):
    """A pipeline has received its first batch. Not an `Exception`, so that the script does not catch it."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found


class _PipelineProbe:
    """Replaces `pt.Pipeline` while a script is inspected."""

    def __init__(self, model: Any, *_: Any, microbatches: int | None = None, **__: Any) -> None:
        self.microbatches = microbatches
        self._model = model

    def step(self, x: Any = None, y: Any = None) -> None:
        raise Stepped(Found(self._model, _part(x, self.microbatches or 1), self.microbatches))


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
        if is_initialized():
            shutdown()
