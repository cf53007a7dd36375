"""What `fit` shows: lines where there is no terminal, a bar where there is one, nothing on other ranks."""

from __future__ import annotations

import io
import math

from rich.console import Console

from polytempo.strategy import fit
from polytempo.strategy.fit import FitProgress

ROW = {"epoch": 1, "step": 10, "loss": 0.5, "val_loss": 0.25, "seconds": 3.0, "samples_per_s": 1234.5}


def shown(terminal: bool, visible: bool = True, epochs: float = 12) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, no_color=True)
    progress = FitProgress(visible, epochs, console)
    progress.begin_epoch(1, 5)
    progress._told -= 1  # a bar is drawn ten times a second
    progress.step(1, 4, 9, 0.75, 99.0)
    progress.row(1, ROW)
    progress.begin_epoch(2, None)
    progress.say("resumes from there")
    progress.close()
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    assert shown(terminal=False).splitlines() == [
        "epoch  2/12  step 10  loss 0.5000  val_loss 0.2500  1,234 samples/s",
        "resumes from there",
    ]


def test_a_line_now_and_then_within_a_long_epoch() -> None:
    out = io.StringIO()
    progress = FitProgress(True, math.inf, Console(file=out, width=100))
    progress._told -= fit.SHOWN_EVERY
    progress.step(0, 4, 9, 0.75, 99.0)
    progress.step(0, 5, 10, 0.75, 99.0)
    assert out.getvalue().splitlines() == ["epoch 1  step 9  loss 0.7500  99 samples/s"]


def test_a_bar_on_a_terminal() -> None:
    said = shown(terminal=True)
    assert "4/5" in said
    assert "loss 0.7500  99 samples/s" in said
    assert "epoch  2/12  step 10  loss 0.5000  val_loss 0.2500" in said


def test_nothing_on_other_ranks() -> None:
    assert shown(terminal=True, visible=False) == shown(terminal=False, visible=False) == ""
