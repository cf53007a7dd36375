"""Jobs one after another leave nothing: not on the GPU, not in shared memory. In `make test-gpu` a few; 50 with --proof."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from device_memory import Holdings

if TYPE_CHECKING:
    from live import Bench

pytestmark = [pytest.mark.alone_on_gpu, pytest.mark.timeout(900)]
DEVICE = os.environ.get("POLYTEMPO_TEST_DEVICE", "cuda")
SCRIPT = str(Path(__file__).parent / "pushing_on_gpu.py")
#: Jobs at one time: the start of a process is most of what a job takes.
AT_ONCE = 5
WAYS = (
    ("--sync", "asp"),
    ("--via", "ps"),
    ("--via", "allreduce"),
    ("--sync", "ssp:2", "--servers", "2"),
    ("--sync", "local:4"),
)


def jobs_in_a_row(bench: Bench, count: int) -> None:
    from live import finished, nothing_left

    before = Holdings.now()
    for _ in range(count // AT_ONCE):
        arguments = (SCRIPT, DEVICE, "32", "steps=10")
        started = [bench.start("run", "-n", "2", *flags, *arguments) for flags in WAYS]
        for process in started:
            done = finished(process, 150)
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.count(" 0 torn or stale reads") == 2, done.stdout
        nothing_left(bench)
        before.assert_returned()


def test_jobs_in_a_row_leave_nothing(bench: Bench) -> None:
    jobs_in_a_row(bench, AT_ONCE)


@pytest.mark.proof
def test_50_jobs_in_a_row_leave_nothing(bench: Bench) -> None:
    jobs_in_a_row(bench, 50)
