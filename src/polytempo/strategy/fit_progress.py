"""What `fit` shows: a bar on a terminal, plain lines elsewhere (a launcher's pipe, a file); on rank 0 only."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

#: Seconds between two plain lines within an epoch.
EVERY = 10.0


class FitProgress:
    """The display of one run.

    Args:
        shown: Whether anything is shown.
        epochs: The number of epochs of the run; infinite where steps end it.
        console: Where; standard output by default.
    """

    def __init__(self, shown: bool, epochs: float, console: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._shown, self._epochs = shown, epochs
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._told = time.monotonic()

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """An epoch begins; `steps`: how many it has left, None where that is not known."""
        if not self._shown or not self._console.is_terminal:
            return
        if self._bar is None:
            columns = (
                *(TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn()),
                *(TextColumn("{task.fields[figures]}"), TimeRemainingColumn(compact=True)),
            )
            self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            self._bar.start()
        elif self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(self._epoch(epoch), total=steps, figures="")

    def step(self, epoch: int, done: int, step: int, loss: float, rate: float) -> None:
        """A step was made: the `done`-th of its epoch."""
        if not self._shown:
            return
        figures = f"loss {loss:.4f}  {rate:,.0f} samples/s"
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, figures=figures)
            if now - self._told >= 0.1:
                self._told = now
                self._bar.refresh()
        elif now - self._told >= EVERY:
            self._told = now
            self._console.print(f"{self._epoch(epoch)}  step {step}  {figures}")

    def row(self, epoch: int, row: Mapping[str, float]) -> None:
        """An evaluation or the end of an epoch: a line that stays."""
        if self._shown:
            hidden = ("epoch", "step", "seconds", "samples_per_s")
            figures = "  ".join(f"{name} {value:.4f}" for name, value in row.items() if name not in hidden)
            rate = f"{row['samples_per_s']:,.0f} samples/s"
            self._told = time.monotonic()
            self._console.print(f"{self._epoch(epoch)}  step {row['step']:.0f}  {figures}  {rate}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._shown:
            self._console.print(text)

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.stop()

    def _epoch(self, epoch: int) -> str:
        if self._epochs == math.inf:
            return f"epoch {epoch + 1}"
        return f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}"
