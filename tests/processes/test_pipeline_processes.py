"""Pipelines whose stages are processes: they train as one, who is killed is named by the others, and a rerun goes on."""

from __future__ import annotations

import json
import re
import sys

import pytest
from live import SCRIPTS, Bench

sys.path.insert(0, str(SCRIPTS))
from pipeline_trained import alone

SCRIPT = str(SCRIPTS / "pipeline_trained.py")
STAGES, STEPS, DEATH = 3, 6, 3


def losses(bench: Bench, rank: int) -> list[tuple[int, float]]:
    lines = (bench.folder / f"losses-{rank}").read_text().splitlines()
    return [(step, loss) for step, loss in map(json.loads, lines)]


def assert_as_alone(bench: Bench, first: int = 0) -> None:
    """Every rank was told the losses of the model in one piece, from this step on."""
    wanted = list(enumerate(alone(STEPS)))[first:]
    for rank in range(STAGES):
        told = losses(bench, rank)
        assert [step for step, _ in told] == [step for step, _ in wanted]
        assert [loss for _, loss in told] == pytest.approx([loss for _, loss in wanted], rel=0, abs=1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_train_as_one_process_would(schedule: str, bench: Bench) -> None:
    done = bench.run("run", "-n", str(STAGES), SCRIPT, ".", f"schedule={schedule}", f"steps={STEPS}")
    assert done.returncode == 0, done.stderr
    assert_as_alone(bench)
    last = done.stderr.splitlines()[-1]
    told = (
        rf"polytempo: pipeline of {STAGES} stages, {schedule}, 4 microbatches: {STEPS} steps in [\d.]+ s, [\d.e-]+ s a step"
    )
    assert re.fullmatch(rf"{told}, last loss {alone(STEPS)[-1]:.4g}", last), done.stderr
    assert "ignores" not in done.stderr


def test_what_a_pipeline_ignores_is_said_once(bench: Bench) -> None:
    done = bench.run("run", "-n", str(STAGES), "--sync", "asp", "--servers", "2", SCRIPT, ".", f"steps={STEPS}")
    assert done.returncode == 0, done.stderr
    assert_as_alone(bench)
    said = [line for line in done.stderr.splitlines() if "ignores" in line]
    assert said == ["polytempo: a pipeline pushes nothing to servers: it ignores --sync asp, --servers 2"]


def test_a_budget_ends_all_ranks_after_the_same_step(bench: Bench) -> None:
    done = bench.run("run", "-n", str(STAGES), "--steps", "4", "--record", "out", SCRIPT, ".", "steps=9")
    assert done.returncode == 0, done.stderr
    assert [len(losses(bench, rank)) for rank in range(STAGES)] == [4] * STAGES
    last = done.stderr.splitlines()[-1]
    assert f"pipeline of {STAGES} stages, 1f1b, 4 microbatches: 4 steps in " in last, done.stderr
    assert "ignores" not in done.stderr
    assert done.stderr.count(" steps in ") == 1, "one line says what was done"
    checked = bench.run("check", "out")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("stage", [0, 2])  # not everybody is its neighbour
def test_a_killed_stage_is_named_by_the_others_and_a_rerun_goes_on(stage: int, bench: Bench) -> None:
    steps = f"steps={STEPS}"
    failed = bench.run("run", "-n", str(STAGES), SCRIPT, ".", steps, f"die={stage}:{DEATH}", "checkpoint=saved")
    assert failed.returncode == 1
    for rank in set(range(STAGES)) - {stage}:
        said = [line for line in failed.stderr.splitlines() if line.startswith(f"[{rank}]")]
        assert any(f"stage {stage} (rank {stage})" in line for line in said), failed.stderr
        assert [step for step, _ in losses(bench, rank)] == list(range(DEATH))
    assert f"worker {stage} was killed by SIGKILL" in failed.stderr.splitlines()[-1]
    rerun = bench.run("run", "-n", str(STAGES), SCRIPT, ".", steps, "resume=saved")
    assert rerun.returncode == 0, rerun.stderr
    assert_as_alone(bench, DEATH)
