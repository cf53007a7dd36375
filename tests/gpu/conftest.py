"""What all tests on a GPU share: skipped with the reason where there is none, and tests that measure its memory run alone.

Free memory is a figure of the whole GPU. A test marked `alone_on_gpu` has it to itself: it waits until the tests of other
pytest processes are done, and these wait for it (`flock`, so that a killed test holds up no other).
POLYTEMPO_TEST_DEVICE=cpu runs the jobs on the CPU: it tries the tests themselves.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REASON = "there is no CUDA device here"
TRIED = os.environ.get("POLYTEMPO_TEST_DEVICE") == "cpu"
sys.path.append(str(HERE.parent / "processes"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The wait for a place on the GPU is not counted against a test's time."""
    ours = [item for item in items if HERE in item.path.parents]
    usual = float(config.getoption("timeout", None) or config.getini("timeout") or 300)
    for item in ours:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker and marker.args else usual
        item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)
    for item in ours if not torch.cuda.is_available() else ():
        if not (TRIED and "bench" in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason=REASON))


@contextmanager
def held(name: str, how: int) -> Iterator[None]:
    descriptor = os.open(Path(tempfile.gettempdir()) / f"polytempo-gpu-tests-{os.getuid()}-{name}", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture(autouse=True)
def place_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Alone, or beside others. The gate lets no new test begin while one waits to be alone."""
    if not torch.cuda.is_available():
        yield
    elif request.node.get_closest_marker("alone_on_gpu"):
        with held("gate", fcntl.LOCK_EX), held("place", fcntl.LOCK_EX):
            yield
    else:
        with held("gate", fcntl.LOCK_EX):
            place = held("place", fcntl.LOCK_SH)
            place.__enter__()
        try:
            yield
        finally:
            place.__exit__(None, None, None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[object]:
    """Jobs as a user types them (`tests/processes/live.py`), and nothing is left of them."""
    from live import bench_in

    yield from bench_in(tmp_path, forks=False)
