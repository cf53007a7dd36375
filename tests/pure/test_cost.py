"""What a step costs does not grow with the number of workers. Counted in bytecodes, which are the same every time."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from clusters import MODES

from polytempo.simulate.cluster import Cluster, Lognormal
from polytempo.simulate.run import simulate_job

pytestmark = pytest.mark.long  # half a minute: `make test` counts, `make check` does not


def bytecodes(sync: str, workers: int, steps: int) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    cluster = Cluster(workers=workers, step_time=Lognormal(1.0, 0.3))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        simulate_job(cluster, sync, steps_each=steps, record=lambda line: None)  # the record's cost is counted with it
    finally:
        sys.settrace(before)
    return count


#: These have the engine and the policy of others in the list: left to `make proof`.
ALIKE = (
    *("local:4,after=4", "adacomm:2", "diloco:3", "gossip:ring,overlap=1", "gossip:exp", "asp,drop=3,lr=staleness"),
    *("asp", "ssp:0", "dssp-paper:1..6", "every:4,wait=1", "delay:0", "downpour:push=2,fetch=3,warm=7", "asup"),
)


@pytest.fixture(scope="module", autouse=True)
def counted_before() -> None:
    """Python 3.12 counts bytecodes of a frame only once it was asked to in another: the first count is too low."""
    bytecodes("bsp", 2, 1)


@pytest.mark.parametrize("sync", [pytest.param(sync, marks=pytest.mark.proof) if sync in ALIKE else sync for sync in MODES])
def test_a_step_costs_the_same_for_ten_times_the_workers(sync: str) -> None:
    few, many = ((bytecodes(sync, workers, 6) - bytecodes(sync, workers, 3)) / (3 * workers) for workers in (20, 200))
    assert many < 1.35 * few  # log n would allow 1.77; a walk over all workers would give 5 and more
