"""What `fit` gives and takes besides the data: the history, the rule for stopping early, and callbacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polytempo.strategy.distributed_model import DistributedModel
    from polytempo.strategy.fit import FitRun


@dataclass(frozen=True)
class EarlyStop:
    """Stop when a figure has not improved for a number of evaluations.

    Args:
        metric: A column of the history: `"val_loss"`, `"val_accuracy"` for the metric `accuracy`, or `"loss"`.
        patience: The number of evaluations without improvement after which the run stops.
        min_delta: The least change that counts as an improvement.
        largest: Larger is better.
    """

    metric: str = "val_loss"
    patience: int = 3
    min_delta: float = 0.0
    largest: bool = False

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far.

        Args:
            value: The value.
            best: The best so far; None for the first.

        Returns:
            False for a value that is not a number.
        """
        change = math.inf if best is None else (value - best if self.largest else best - value)
        return change > self.min_delta and not math.isnan(value)


class Callback:
    """What is called during `fit`, on every rank; override what is needed. Any method may call `run.stop()`.

    Example:
        ```python
        class Target(pt.Callback):
            def on_evaluation(self, run):
                if run.row["val_loss"] < 1.5:
                    run.stop()
        ```
    """

    def on_start(self, run: FitRun) -> None:
        """Before the first step."""

    def on_step(self, run: FitRun) -> None:
        """After a step: `run.step`, `run.loss`."""

    def on_evaluation(self, run: FitRun) -> None:
        """After an evaluation: `run.row` has its figures, the same on all ranks."""

    def on_epoch(self, run: FitRun) -> None:
        """After an epoch: `run.row`, `run.epoch`."""

    def on_end(self, run: FitRun) -> None:
        """After the last step: `run.history`."""


@dataclass
class History:
    """What `fit` returns; `history["val_loss"]` is a column.

    Attributes:
        rows: A dict for each evaluation and each end of an epoch: epoch, step, loss, val_loss, val_* of the metrics,
            seconds of training, samples_per_s.
        stopped: Why the run ended: `"epochs"`, `"max_steps"`, `"budget"` (of the launcher), `"early stop"` or `"callback"`.
        best: The row with the best value so far; by `val_loss` without `early_stop`.
        checkpoint: The folder of the last checkpoint.
        best_checkpoint: The folder of the checkpoint of the best row.
        model: The distributed model, for `evaluate` and `predict`.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    stopped: str = ""
    best: dict[str, float] | None = None
    checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    model: DistributedModel | None = None

    def __getitem__(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]
