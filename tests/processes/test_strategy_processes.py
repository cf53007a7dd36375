"""`polytempo run --strategy`: replicas, stages and shards that are processes; one that is killed is named by all others."""

from __future__ import annotations

import json
import sys

import pytest
from live import SCRIPTS, Bench

sys.path.insert(0, str(SCRIPTS))
from spread import alone

SCRIPT = str(SCRIPTS / "spread.py")


def losses(bench: Bench, rank: int) -> list[float]:
    return [json.loads(line) for line in (bench.folder / f"losses-{rank}").read_text().splitlines()]


def assert_as_alone(bench: Bench, ranks: int, replicas: int, steps: int, first: int = 0) -> None:
    wanted = alone(steps, replicas)
    for rank in range(ranks):
        assert losses(bench, rank) == pytest.approx(wanted[rank * replicas // ranks][first:], rel=0, abs=1e-10)


def test_two_by_two_trains_as_one_process_and_goes_on_as_another_strategy(bench: Bench) -> None:
    """With a budget, a slow worker, a record that is checked, and a checkpoint for another mesh."""
    options = ["--strategy", "data=2,pipe=2,microbatches=2", "--slow", "3:1.5", "--record", "out", "--steps", "8"]
    done = bench.run("run", *options, SCRIPT, ".", "steps=99", "save=saved")
    assert done.returncode == 0, done.stderr
    assert_as_alone(bench, 4, 2, 4)
    assert bench.meta("out")["options"]["strategy"] == "data=2,pipe=2,sync=bsp,microbatches=2"
    assert "starting 4 workers" in done.stderr
    assert "polytempo: pipeline of 2 stages, 1f1b, 2 microbatches: " in done.stderr
    checked = bench.run("check", "out")
    assert checked.returncode == 0, checked.stderr
    done = bench.run("run", "-n", "2", "--strategy", "tensor=2", SCRIPT, ".", "steps=6", "resume=saved")
    assert done.returncode == 0, done.stderr
    assert "polytempo: tensor=2: " in done.stderr, "no pipeline of one stage"
    wanted = alone(6, 2)
    whole = [(one + other) / 2 for one, other in zip(*wanted, strict=True)][4:]
    assert losses(bench, 0) == losses(bench, 1) == pytest.approx(whole, rel=0, abs=1e-10)


@pytest.mark.parametrize(("strategy", "dead"), [("data=2,pipe=2", 3), ("data=2,pipe=2,sync=ssp:1", 1)])
def test_a_killed_rank_is_named_on_all_ranks(strategy: str, dead: int, bench: Bench) -> None:
    failed = bench.run("run", "--strategy", strategy, SCRIPT, ".", "steps=50", f"die={dead}:3", timeout=60)
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    least = 2 if "ssp:1" in strategy else 3  # the other replica may be a step behind
    for rank in {0, 1, 2, 3} - {dead}:
        said = [line for line in lines if line.startswith(f"[{rank}]")]
        told_to_end = not said  # the launcher has ended it, and names the worker below
        assert told_to_end or any(f"rank {dead}" in line or f"worker {dead}" in line for line in said), failed.stderr
        assert least <= len(losses(bench, rank)) < 50
    assert f"worker {dead} was killed by SIGKILL" in lines[-1], failed.stderr
