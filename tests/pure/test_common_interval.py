"""Images a second of ranks that do not start and end together: what `examples/resnet50.py` and `make bench-gpu` count."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

settled = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resnet50", Path(__file__).parents[2] / "examples" / "resnet50.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


resnet50 = load()


@settled
@given(
    starts=st.lists(st.floats(0, 3), min_size=1, max_size=4),
    pace=st.floats(0.01, 0.3),
    warm_up=st.integers(1, 5),
)
def test_ranks_of_one_pace_have_its_rate_wherever_they_start(starts: list[float], pace: float, warm_up: int) -> None:
    count = int(4 / pace) + warm_up + 1
    times = [[start + pace * step for step in range(1, count)] for start in starts]
    assert resnet50.common_rate(times, warm_up) == pytest.approx(len(starts) / pace, rel=1e-6)


def test_what_a_rank_does_while_another_warms_up_or_has_finished_does_not_count() -> None:
    alone, together = 0.1, 0.2  # seconds a step, of the first rank
    first = list(itertools.accumulate([alone] * 10 + [together] * 10 + [alone] * 10))
    second = [1.0 + 0.5 * step for step in range(1, 5)]  # from 1.5, when it has warmed up, until 3.0
    assert resnet50.common_rate([first, second], 1) == pytest.approx(1 / together + 2)


def test_ranks_that_never_work_together_are_refused() -> None:
    with pytest.raises(SystemExit, match="give more --steps"):
        resnet50.common_rate([[1.0, 2.0], [3.0, 4.0]], 1)


def test_the_own_definition_is_resnet50() -> None:
    assert sum(param.numel() for param in resnet50.resnet50().parameters()) == 25_557_032
