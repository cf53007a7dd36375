"""Every test of a live job checks that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Bench, bench_in


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from bench_in(tmp_path, forks=request.node.get_closest_marker("new_interpreters") is None)
