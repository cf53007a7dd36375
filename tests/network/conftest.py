"""What all tests on two hosts need: the hosts, and a place from which jobs are started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, two_hosts

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))

from live import Bench, bench_in


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts("1gbit") as made:
        yield made


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from bench_in(tmp_path, forks=request.node.get_closest_marker("new_interpreters") is None)
