"""Tables in jobs of processes: who is killed takes nothing with it that was accepted, and a killed server ends the job."""

from __future__ import annotations

import json
import signal

import psutil
import pytest
from live import SCRIPTS, Bench, wait_until

COUNTING = str(SCRIPTS / "counting.py")
STEPS = 12


def rows_of(bench: Bench, rank: int) -> list[float]:
    """The shared row and each worker's own, in steps."""
    return [-number for number in json.loads((bench.folder / f"rows-{rank}").read_text())]


@pytest.mark.parametrize("servers", ["1", "2"])
def test_all_rows_of_all_workers_arrive(servers: str, bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "--sync", "ssp:2,scale=1", "--servers", servers, COUNTING, ".", f"steps={STEPS}")
    assert done.returncode == 0, done.stderr
    last = max((rows_of(bench, rank) for rank in range(2)), key=sum)
    assert last == [2 * STEPS, STEPS, STEPS]


def test_under_asp_the_rows_of_a_killed_worker_stay_and_the_others_finish(bench: Bench) -> None:
    command = ["run", "-n", "3", "--sync", "asp,scale=1", "--servers", "2", "--record", "record"]
    done = bench.run(*command, COUNTING, ".", f"steps={STEPS}", "die=1:5")
    assert done.returncode == 0, done.stderr
    assert "warning: worker 1 was killed by SIGKILL; going on with 2 of 3" in done.stderr
    last = max((rows_of(bench, rank) for rank in (0, 2)), key=sum)
    assert last == [2 * STEPS + 5, STEPS, 5, STEPS]  # its fifth step was accepted, or it could not have begun the next
    assert bench.run("check", "record").returncode == 0


def test_under_bsp_the_rounds_go_on_with_those_who_are_left(bench: Bench) -> None:
    """In a round all count alike: a worker's own row moves by its share, which grows when another is gone."""
    command = ["run", "-n", "2", "--min-workers", "1", "--servers", "2", "--record", "record"]
    done = bench.run(*command, COUNTING, ".", f"steps={STEPS}", "die=1:5")
    assert done.returncode == 0, done.stderr
    assert rows_of(bench, 0) == [STEPS, 5 / 2 + (STEPS - 5), 5 / 2]
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "lost"]
    assert bench.run("check", "record").returncode == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_server_ends_the_job_with_the_cause(which: int, bench: Bench) -> None:
    process = bench.start("run", "-n", "2", "--sync", "asp", "--servers", "2", COUNTING, ".", "steps=100000")
    wait_until(lambda: all((bench.folder / f"step-{rank}").exists() for rank in range(2)))
    servers = [p for p in psutil.Process(process.pid).children() if "polytempo.launcher.server_process" in p.cmdline()]
    servers[which].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"server {which} was killed by SIGKILL: its part of the model is lost" in err.splitlines()[-1]
