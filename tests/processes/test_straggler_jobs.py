"""Live jobs with a known trouble: the lines at the end of a run, `polytempo explain`, and the proof over 40 of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live import SCRIPTS, Bench
from straggling_jobs import draw_live_job, run_live_job

#: The share of troubles that must be named.
NAMED = 0.95


def test_a_slow_worker_is_named_at_the_end_of_a_run_and_explained(bench: Bench) -> None:
    """Eight times as slow, by a clock that other load on the host does not move; worth a line."""
    script = json.dumps({"seed": 0, "step": 0.005, "own_clock": True})
    options = ("-n", "2", "--slow", "1:8", "--steps", "100", "--record", "record")
    done = bench.run("run", *options, str(SCRIPTS / "straggling.py"), script)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "worker 1 is slow: computing" in line]
    assert len(told) == 1
    assert "--sync bsp+balance with pt.prepare" in told[0]
    assert told[0].endswith("(more: polytempo explain record)")
    explained = bench.run("explain", "record", "--json", "told.json")
    assert explained.returncode == 0, explained.stderr
    assert "1. worker 1 is slow: computing" in explained.stdout
    assert "Throughput is not convergence" in explained.stdout
    (found,) = json.loads((bench.folder / "told.json").read_text())["stragglers"]
    assert (found["cause"], found["worker"]) == ("computing", 1)
    assert found["factor"] == pytest.approx(8, rel=0.01)
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_40_live_jobs(tmp_path: Path) -> None:
    """Seeds 0 to 39; the rules were tuned on seeds from 1000 on. One at a time: other load on the host is a trouble, too."""
    named = troubled = 0
    wrong = []
    for seed in range(40):
        job = draw_live_job(seed)
        found = run_live_job(job, tmp_path / str(seed))
        right = set() if job.cause == "none" else {(job.cause, job.worker)}
        print(f"{seed}: {job.cause} of {job.worker}, found {found}", flush=True)
        wrong += [(seed, found - right)] if found - right else []
        troubled += bool(right)
        named += bool(right & found)
    print(f"40 live jobs: {named} of {troubled} troubles named; false alarms: {wrong}")
    assert not wrong
    assert named >= NAMED * troubled
