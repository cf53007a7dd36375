"""Neighbours as processes: a slow and a dying member, and the others end, have learnt, and hold one mean."""

from __future__ import annotations

import re

import pytest
from live import SCRIPTS, Bench

SCRIPT = str(SCRIPTS / "neighbours.py")
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
    assert len({after for _, after in found.values()}) == 1  # the mean of all models
    assert all(after < before / 20 for before, after in found.values())
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "replay gives the same" in checked.stdout
    assert bench.meta()["options"]["via"] == "peers"
