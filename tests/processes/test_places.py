"""A rank is one process: what that process starts takes no part, and how it ends is what its exit status says."""

from __future__ import annotations

import re
import sys

import fork_server
import pytest
from live import SCRIPTS, Bench


@pytest.mark.long
def test_processes_that_a_worker_starts_take_no_part_in_the_job(bench: Bench) -> None:
    """A spawned loader, a forked child that exits, a script that inherits the variables, and one that claims the rank."""
    done = bench.run("run", "-n", "2", "--record", "record", str(SCRIPTS / "children.py"), timeout=200)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        refused = (
            rf"\[{rank}\] forked, rank {rank} of 2: process \d+ was started by worker {rank}, process \d+, and takes no"
        )
        assert re.search(refused, done.stdout), done.stdout
    workers = re.findall(r"\[\d\] worker (\d+) took 4 steps", done.stdout)
    assert len(workers) == 2, done.stdout
    inherits = re.search(
        r"\[0\] inherits: 0 rank 0 of 2 took 1 step polytempo: process \d+ was started by .* (\d+), and", done.stdout
    )
    claims = re.search(r"\[0\] claims: 1 .*process (\d+) is worker 0 already, so process \d+ cannot be", done.stdout)
    assert inherits, done.stdout
    assert claims, done.stdout
    assert {inherits[1], claims[1]} <= set(workers)
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "finished"]


@pytest.mark.long
def test_who_exits_with_a_status_has_failed(bench: Bench) -> None:
    done = bench.run("run", "-n", "4", "--sync", "asp", "--record", "record", str(SCRIPTS / "endings.py"))
    assert done.returncode == 0, done.stderr
    assert "a hook of my own" in done.stderr
    for rank, status in ((1, 3), (2, 4), (3, 1)):
        assert f"warning: worker {rank} failed with exit status {status}; going on" in done.stderr
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "failed", "failed", "failed"]
    leaves = {event["worker"]: event["reason"] for event in bench.events() if event["kind"] == "leave"}
    figures = [(event["loss"], event["best"]) for event in bench.events() if event["kind"] == "metric"]
    assert figures == [("NaN", 1.0)] * 4
    assert (leaves[0], leaves[1], leaves[3]) == ("finished", "failed", "failed")
    assert bench.run("check", "record").returncode == 0


@pytest.mark.parametrize(
    ("ending", "badly"),
    [
        ("pass", False),
        ("sys.exit()", False),
        ("sys.exit(0)", False),
        ("sys.exit(3)", True),
        ("sys.exit('no data')", True),
        ("sys.excepthook = print; raise ValueError", True),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", False),
    ],
)
def test_what_is_known_at_the_end_of_a_process(ending: str, badly: bool) -> None:
    program = (
        "import atexit, sys, threading\n"
        "from polytempo.collectives.shutdown import ended_badly, watch_exit\n"
        "atexit.register(lambda: print('badly', ended_badly()))\n"
        f"watch_exit(); watch_exit()\n{ending}\n"
    )
    done = fork_server.run([sys.executable, "-c", program])
    assert done.stdout.splitlines()[-1] == f"badly {badly}", done.stderr
