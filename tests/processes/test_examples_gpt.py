"""The GPT runs as its docs tell: alone, and by one option as two replicas of two stages, with the same loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live import Bench

pytestmark = pytest.mark.long
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "gpt.py")
TINY = ("--steps", "4", "--width", "16", "--blocks", "2", "--heads", "2", "--context", "16", "--megabytes", "0.05")


def validation_loss(said: str) -> float:
    (found,) = re.findall(r"validation loss ([\d.]+) after 4 steps", said)
    return float(found)


def test_one_option_spreads_it_over_four_processes_with_the_same_loss(bench: Bench, tmp_path: Path) -> None:
    """The table comes first; a checkpoint of the four processes is what one process goes on from."""
    saved = ("--checkpoint", str(tmp_path))
    spread = bench.run("run", "--strategy", "data=2,pipe=2", EXAMPLE, *TINY, "--explain", *saved)
    assert spread.returncode == 0, spread.stderr
    assert re.search(r"> data=2,pipe=2 .*1f1b x 2", spread.stdout)
    assert spread.stdout.index("balance") < spread.stdout.index("val_loss")
    alone = bench.python(EXAMPLE, *TINY)
    assert alone.returncode == 0, alone.stderr
    assert validation_loss(alone.stdout) == pytest.approx(validation_loss(spread.stdout), abs=2e-4)
    resumed = bench.python(EXAMPLE, *TINY, *saved)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes from" in resumed.stdout
    assert validation_loss(resumed.stdout) == validation_loss(spread.stdout)
