"""The example of a pipeline runs as its docs tell: in one process, and by one flag in four, with every schedule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live import Bench

pytestmark = pytest.mark.long
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "pipeline.py")
TINY = ("--blocks", "4", "--width", "32", "--batch", "32", "--epochs", "4")


def accuracy(said: str, stages: int) -> float:
    (found,) = re.findall(rf"{stages} stages: loss [\d.]+, accuracy ([\d.]+) %", said)
    return float(found)


def cut(bench: Bench, stages: int, *arguments: str) -> float:
    done = bench.run("run", "-n", str(stages), EXAMPLE, *arguments)
    assert done.returncode == 0, done.stderr
    return accuracy(done.stdout, stages)


def test_one_flag_splits_it_over_four_processes_and_it_learns_the_same(bench: Bench) -> None:
    alone = bench.python(EXAMPLE)
    assert alone.returncode == 0, alone.stderr
    assert accuracy(alone.stdout, 1) > 95
    assert cut(bench, 4) == pytest.approx(accuracy(alone.stdout, 1), abs=1)  # rounding may turn one picture or two


@pytest.mark.parametrize("schedule", ["gpipe", "sequential", "pipedream"])
def test_every_other_schedule_learns(schedule: str, bench: Bench) -> None:
    assert cut(bench, 2, *TINY, "--schedule", schedule) > 80
