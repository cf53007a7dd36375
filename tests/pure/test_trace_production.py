"""Three production jobs: published step times made again, and the modes of the data axis on them.

Actual and ideal as published in "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from polytempo.traces.analysis import TraceAnalysis, analyse, verdict
from polytempo.traces.operations import read_trace

FOLDERS = [parent / "shared" / "data" / "stragglers" for parent in Path(__file__).parents[3:]]
FOLDER = next((folder for folder in FOLDERS if folder.is_dir()), None)
pytestmark = pytest.mark.skipif(FOLDER is None, reason="the production traces are not beside the repository")

PUBLISHED = {"AR": (46.34, 23.48), "SE": (9.07, 5.90), "ST": (2.17, 1.84)}


def analysed(name: str) -> tuple[TraceAnalysis, dict[str, float]]:
    """What the trace says, and the time of each mode; actual and ideal are the published ones."""
    assert FOLDER is not None
    found = analyse(read_trace(FOLDER / f"{name}.npz"))
    actual, ideal = PUBLISHED[name]
    assert found.actual == pytest.approx(actual, rel=0.05)
    assert found.ideal == pytest.approx(ideal, rel=0.05)
    return found, {mode.mode: mode.step_seconds for mode in found.modes}


def test_one_slow_worker() -> None:
    found, seconds = analysed("AR")
    assert found.causes == ("worker",)
    assert [(one.replica, one.stage) for one in found.slow] == [(0, 0)]
    assert found.slow[0].factor == pytest.approx(2.4, abs=0.1)
    assert seconds["bsp+balance"] <= 27, "the steps before speeds are known among them"
    assert seconds["anytime:auto,micro=32"] <= 27
    assert seconds["ssp:3"] > 0.95 * found.actual, "a bound settles at the pace of the slow"
    assert found.best().mode == "bsp+balance"


def test_uneven_sequences() -> None:
    found, seconds = analysed("SE")
    assert found.causes[0] == "cost"
    assert not found.slow
    assert seconds["bsp+balance"] > 0.95 * found.actual, "no replica is slow"
    assert seconds["bsp+balance by cost"] <= 7.35
    assert seconds["bsp+balance by cost, in order"] <= 7.3


def test_a_heavy_last_stage() -> None:
    found, seconds = analysed("ST")
    assert found.causes == ("stage",)
    assert found.heaviest_stage == 3
    assert all(found.actual < 1.02 * mode for mode in seconds.values())
    assert "no mode of the data axis helps" in verdict(found)[-1]
    assert "polytempo plan" in verdict(found)[-1]
