"""Step times made again from compute durations and the schedule: against a plain reference, and from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import OPS, even, job, noisy, write_operations

from polytempo.errors import UsageError
from polytempo.pipeline.schedules import make
from polytempo.traces.job import BatchSeconds, JobTrace, SyncSeconds, ideal_seconds, job_seconds, replica_ends
from polytempo.traces.operations import read_trace


def by_fixed_point(spec: str, batches: list[BatchSeconds], transfer: tuple[float, ...]) -> list[float]:
    """When each stage ends, by going over all actions until no time changes."""
    stages = len(batches[0])
    lines = [line[0][:-1] for line in make(spec, stages, len(batches)).actions]
    ends = {(stage, action): 0.0 for stage, line in enumerate(lines) for action in line}
    for _ in range(len(ends) + 1):
        for stage, line in enumerate(lines):
            free = 0.0
            for action in line:
                backward = action.kind == "B"
                source = stage + 1 if backward else stage - 1
                arrives = ends[source, action] + transfer[min(stage, source)] if 0 <= source < stages else 0.0
                free = ends[stage, action] = max(free, arrives) + batches[action.microbatch][stage][backward]
    return [ends[stage, line[-1]] for stage, line in enumerate(lines)]


@given(st.data())
def test_a_replica_is_as_long_as_by_the_reference(data: st.DataObject) -> None:
    stages, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    seconds = st.floats(0.01, 3.0)
    batches = data.draw(
        st.lists(st.tuples(*[st.tuples(seconds, seconds)] * stages), min_size=count, max_size=count)  # type: ignore[arg-type]
    )
    transfer = tuple(data.draw(seconds) for _ in range(stages - 1))
    spec = data.draw(st.sampled_from(["1f1b", "gpipe", "sequential"]))
    trace = JobTrace(stages, 1, (), spec, transfer)
    assert replica_ends(trace, batches, SyncSeconds()) == pytest.approx(by_fixed_point(spec, batches, transfer))


def test_the_bubble_of_1f1b() -> None:
    sync = SyncSeconds(before=1.0, own=(0.1, 0.2, 0.2, 0.1), tied=0.5, reduce=(2.0, 2.5, 2.0, 2.0), after=0.25)
    step = (8 + 3) * 0.3  # micro-batches, and one less than stages
    assert job_seconds(job()) == pytest.approx(step)
    assert job_seconds(job(sync=sync)) == pytest.approx(1.0 + max(step + 0.1 + 0.5 + 2.0, step - 0.2 + 0.2 + 2.5) + 0.25)
    assert ideal_seconds(job()) == pytest.approx(step)


def test_all_wait_for_the_slowest_replica_and_the_ideal_is_even() -> None:
    slow = job(lambda step, replica, batch, stage, backward: even(0, 0, 0, 0, backward) * (1 + 2 * (replica == 1)))
    assert job_seconds(slow) == pytest.approx(3 * job_seconds(job()))
    assert ideal_seconds(slow) == pytest.approx(1.5 * job_seconds(job()))  # the mean of 1, 3, 1, 1


def test_a_stage_waits_for_its_own_replicas_alone() -> None:
    """Gradients of a stage are reduced as soon as its last replica has them."""
    uneven = job(lambda step, replica, batch, stage, backward: 0.1, sync=SyncSeconds(reduce=(0.0, 0.0, 0.0, 5.0)))
    last_stage = 0.1 * (2 * 8 + 3)
    assert job_seconds(uneven) == pytest.approx(last_stage + 5.0)


@pytest.mark.parametrize("spec", ["1f1b", "gpipe"])
def test_operations_are_read_and_no_time_stamp_matters(spec: str, tmp_path: Path) -> None:
    seconds = noisy(even)
    found = read_trace(write_operations(tmp_path / "a.npz", seconds, spec=spec))
    stretched = read_trace(write_operations(tmp_path / "b.npz", seconds, spec=spec, clock=lambda n: 7.0 + n**2))
    assert found == stretched
    assert (found.schedule, found.stages, found.replicas) == (spec, 3, 2)
    assert [step.replicas for step in found.steps] == [
        step.replicas for step in job(seconds, replicas=2, stages=3, batches=4, steps=2).steps
    ]
    assert found.transfer == pytest.approx((0.01, 0.01)), "without the receiver's waiting"
    assert found.steps[0].sync.reduce == pytest.approx((0.3, 0.3, 0.3)), "without waiting for the last replica"
    assert (found.steps[1].sync.before, found.steps[1].sync.after) == pytest.approx((0.05, 0.02))


def without(path: Path, **changes: object) -> Path:
    columns = dict(np.load(path)) | changes
    np.savez(path, **{name: column for name, column in columns.items() if column is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"duration": None}, "expected columns .*; duration is missing"),
        ({"ops": np.array(("forwards", *OPS[1:]))}, "unknown operation 'forwards'; known: backward-compute"),
        ({"step": np.zeros(3, int)}, "expected columns of one length"),
    ],
)
def test_columns_that_are_wrong(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        read_trace(without(write_operations(tmp_path / "a.npz"), **changes))


def test_operations_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(UsageError, match="step 1, replica 1, stage 2 lacks one for 3; leave such steps out"):
        read_trace(write_operations(path, leave_out=lambda row: row[:5] == (1, 2, 1, 1, 3)))
    columns = np.load(write_operations(path))
    with pytest.raises(UsageError, match="twice for one micro-batch of a step; interleaved stages"):
        read_trace(without(path, stage=np.zeros_like(columns["stage"])))
    with pytest.raises(UsageError, match=r"the order of computations is that of none of 1f1b, gpipe, sequential; stage 0"):
        read_trace(write_operations(path, clock=lambda number: -float(number)))
    with pytest.raises(UsageError, match="durations must be finite and not negative"):
        read_trace(write_operations(path, lambda *place: -1.0))
    path.write_bytes(b"PK nothing")
    with pytest.raises(UsageError, match=r"a.npz cannot be read as \.npz"):
        read_trace(path)
    with pytest.raises(UsageError, match=r"is a folder, expected a file; the record of a run is read by --like"):
        read_trace(tmp_path)
    with pytest.raises(UsageError, match=r"there is no such file"):
        read_trace(tmp_path / "b.npz")
    with pytest.raises(UsageError, match=r"expected a trace that ends in \.npz"):
        read_trace(Path(__file__))
