"""Neighbours as processes: a slow and a dying member, and the others end, have learnt, and hold one mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live import SCRIPTS, Bench

SCRIPT = str(SCRIPTS / "neighbours.py")
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
LINE = re.compile(r"worker (\d): error ([\d.]+) before, ([\d.]+) after 60 steps")


@pytest.mark.parametrize(
    ("sync", "workers"), [("adpsgd:ring", 2), ("adpsgd:ring", 3), ("adpsgd:ring", 4), ("gossip:ring", 4)]
)
def test_the_others_learn_beside_a_slow_and_a_dying_worker(sync: str, workers: int, bench: Bench) -> None:
    options = ["--sync", sync, "--slow", "0:3", "--record", "record"]
    done = bench.run("run", "-n", str(workers), *options, SCRIPT, "steps=60", "die=1:20")
    assert done.returncode == 0, done.stderr
    assert "warning: worker 1 was killed by SIGKILL" in done.stderr
    found = {int(rank): (float(before), float(after)) for rank, before, after in LINE.findall(done.stdout)}
    assert sorted(found) == [rank for rank in range(workers) if rank != 1]
    if sync == "gossip:ring":  # workers that have made the same steps see the same mean
        assert len({after for _, after in found.values()}) == 1
    assert all(after < before for before, after in found.values())
    assert min(after / before for before, after in found.values()) < 1 / 5  # of the last to end
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "replay gives the same" in checked.stdout
    assert bench.meta()["options"]["via"] == "peers"


@pytest.mark.parametrize("sync", ["gossip:ring", "adpsgd:ring"])
def test_a_script_that_looks_at_the_model_on_one_worker_alone_learns(sync: str, bench: Bench) -> None:
    """The example evaluates on rank 0, every few steps and at the end, when others may have left."""
    done = bench.run("run", "-n", "3", "--sync", sync, "--samples", "6144", DIGITS, "--compute", "0.002")
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy ([\d.]+) %", done.stdout)
    assert found is not None
    assert float(found[1]) > 80
