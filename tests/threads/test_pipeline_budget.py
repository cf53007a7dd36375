"""The budget of the job in pipelines: all ranks stop at the same step, the one that uses it up."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import PLAIN, batches, layered, mse
from test_pipeline_data_axis import lane, together

from polytempo.cli.main import run
from polytempo.mesh import Mesh
from polytempo.pipeline.builder import StageHooks
from polytempo.pipeline.pipeline import Pipeline
from polytempo.server.job_plan import Limits
from polytempo.session.script_calls import should_stop
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.communication import new_group

pytestmark = pytest.mark.timeout(120)
MOST = 12


def steps_until_told(pipe: Pipeline, size: int = 4) -> int:
    """Steps of a script that asks after each."""
    x, y = batches(1, size)[0]
    for step in range(1, MOST + 1):
        pipe.step(x, y)
        if should_stop():
            pipe.flush()
            return step
    return 0


def stopped(
    limits: Limits | None, ranks: int = 2, record: Path | None = None, **options: Any
) -> tuple[list[int], dict[str, Any]]:
    """At which step each rank was told to stop, 0 for never; and the summary of the job."""
    models = [layered(5) for _ in range(ranks)]

    def work(session: Session) -> int:
        assert not should_stop()
        pipe = Pipeline(models[session.rank], loss=mse, optimizer=PLAIN, **options)
        return steps_until_told(pipe)

    with ThreadJob(ranks, limits=limits, record=record) as job:
        found = job.run(work)
    return found, job.summary


@settings(max_examples=6, deadline=None)
@given(steps=st.integers(1, 5), schedule=st.sampled_from(["1f1b", "gpipe", "pipedream"]), ranks=st.integers(1, 3))
def test_all_ranks_stop_at_the_step_that_uses_it_up(steps: int, schedule: str, ranks: int) -> None:
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 1 if schedule == "pipedream" else 2}
    found, summary = stopped(Limits(steps=steps), ranks, **options)
    late = ranks - 1 if schedule == "pipedream" else 0  # the loss of a batch is known when it has been through all stages
    assert found == [steps + late] * ranks
    assert (summary["progress"]["steps"], summary["progress"]["counted"]) == (steps + late, True)
    assert schedule == "pipedream" or summary["steps"] == steps


@pytest.mark.parametrize(("replicas", "schedule"), [((1, 2), "1f1b"), ((2, 1), "1f1b"), ((1, 2), "pipedream")])
def test_samples_are_those_of_the_whole_batch(replicas: tuple[int, ...], schedule: str) -> None:
    options: dict[str, Any] = {} if schedule == "pipedream" else {"microbatches": 4}
    found, summary = stopped(Limits(samples=9), 3, schedule=schedule, stages=2, replicas=replicas, **options)
    assert len(set(found)) == 1
    if schedule == "1f1b":
        assert found[0] == 3, "batches of 4"
        assert summary["samples"] == 12
    else:
        assert 3 <= found[0] <= 6


def test_seconds_end_it_too_and_without_a_budget_nothing_is_reported() -> None:
    found, _ = stopped(Limits(seconds=1e-6), microbatches=2)
    assert found == [1, 1]
    found, summary = stopped(None, microbatches=2)
    assert found == [0, 0]
    assert (summary["steps"], summary["progress"]["steps"], summary["progress"]["counted"]) == (0, MOST, False)


def test_the_record_of_counted_steps_can_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped(Limits(steps=3), record=tmp_path, microbatches=2)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    pushes = [(line["worker"], line["step"]) for line in lines if line["kind"] == "push"]
    assert pushes == [(1, 0), (1, 1), (1, 2)], "by the last stage"
    assert run(["check", str(tmp_path)]) == 0, capsys.readouterr().err


def test_a_checkpoint_folder_stays_empty(tmp_path: Path) -> None:
    """Servers hold nothing of a pipeline."""

    def work(session: Session) -> int:
        return steps_until_told(Pipeline(models[session.rank], loss=mse, optimizer=PLAIN, microbatches=2))

    models = [layered(5) for _ in range(2)]
    with ThreadJob(2, limits=Limits(steps=3), checkpoint=tmp_path, checkpoint_every=1) as job:
        assert job.run(work) == [3, 3]
    assert list(tmp_path.iterdir()) == []


def test_pipelines_side_by_side_stop_when_that_of_rank_0_has_used_it_up() -> None:
    models = [layered(5) for _ in range(4)]

    def work(session: Session) -> int:
        groups = [new_group([0, 2]), new_group([1, 3])]
        group = groups[session.rank % 2]
        pipe = Pipeline(models[session.rank], loss=mse, optimizer=PLAIN, microbatches=2, group=group)
        steps = 0
        while not should_stop():
            pipe.step(*batches(1, 4)[0])
            steps += 1
        return steps

    with ThreadJob(4, limits=Limits(steps=3)) as job:
        found = job.run(work)
    assert found[0] == found[2] == 3
    assert found[1] == found[3] > 0


def test_all_lanes_of_a_replica_stop_at_the_same_step() -> None:
    """The last stage of the first lane is told; the other lanes ask it."""
    mesh, model = Mesh(1, 2, 2), layered(5)

    def work(session: Session) -> int:
        shards = session.world().new_group(mesh.tensor_group(session.rank))
        assert shards is not None

        def agree(stop: bool) -> bool:
            told = torch.tensor([float(stop)])
            shards.broadcast([told], 0).wait()
            return bool(told)

        hooks = StageHooks(agree_to_stop=agree)
        own, group = copy.deepcopy(model), lane(session, mesh)
        pipe = Pipeline(own, loss=mse, optimizer=PLAIN, group=group, microbatches=2, _hooks=hooks)
        return steps_until_told(pipe)

    with ThreadJob(mesh.size, limits=Limits(steps=4)) as job:
        assert job.run(work) == [4] * mesh.size


@pytest.mark.parametrize(("sync", "steps"), [("bsp", 6), ("ssp:1", 7), ("local:2", 6)])
def test_all_ranks_of_a_replica_stop_at_the_same_step(sync: str, steps: int) -> None:
    """On the data axis a step of each replica counts."""
    mesh, model = Mesh(2, 2), layered(5)

    def work(session: Session) -> int:
        optimizer = together(session, mesh, PLAIN)
        own = copy.deepcopy(model)
        pipe = Pipeline(own, loss=mse, optimizer=optimizer, group=lane(session, mesh), microbatches=2)
        return steps_until_told(pipe)

    with ThreadJob(mesh.size, sync=sync, limits=Limits(steps=steps)) as job:
        found = job.run(work)
    assert found[0] == found[1]
    assert found[2] == found[3]
    total = found[0] + found[2]
    assert total >= steps
    if sync != "ssp:1":
        assert found[0] == found[2] == (3 if sync == "bsp" else 4)
    assert job.summary["steps"] == total
