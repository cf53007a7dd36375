"""Live jobs in processes: the record keeps every promise, also against clocks that the script wrote itself."""

from __future__ import annotations

import pytest
from live import PACED, SCRIPTS, Bench

MODES = {
    "bsp": 0,
    "bsp+backup:1": None,
    "ssp:2": 2,
    "dssp:1..4": 4,
    "dssp-paper:1..4": None,
    "asp": None,
    "every:3": 2,
    "every:3,wait=2": None,
    "delay:2": None,
}


def most_ahead(bench: Bench, workers: int) -> int:
    """How many steps somebody had started beyond what somebody else had sent, at most, by the scripts' own clocks."""
    moments = sorted((t, kind, step, w) for w in range(workers) for kind, step, t in bench.clock(w))
    last = {w: step for w in range(workers) for kind, step, _ in bench.clock(w)}
    sent = dict.fromkeys(range(workers), 0)
    ahead = 0
    for _, kind, step, worker in moments:
        if kind == "send":
            sent[worker] = step + 1
            if step == last[worker]:  # it is about to leave
                del sent[worker]
        elif sent:
            ahead = max(ahead, step - min(sent.values()))
    return ahead


#: Modes whose gates are those of others in processes; their own orders are walked through in tests/pure.
ALIKE = ("dssp-paper:1..4", "every:3", "delay:2")


@pytest.mark.parametrize("sync", [pytest.param(sync, marks=pytest.mark.proof) if sync in ALIKE else sync for sync in MODES])
def test_a_slow_worker_and_hiccups(sync: str, bench: Bench) -> None:
    flags = ["-n", "3", "--sync", sync, "--slow", "2:3", "--hiccup", "0.1:50ms", "--seed", "5"]
    done = bench.run("run", *flags, "--record", "record", PACED, ".", "steps=25")
    assert done.returncode == 0, done.stderr
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stderr
    bound, ahead = MODES[sync], most_ahead(bench, 3)
    if bound is not None:
        assert ahead <= bound
    if sync == "ssp:2":
        assert ahead == 2
    if sync == "asp":
        assert ahead > 5
    meta = bench.meta()
    assert [worker["state"] for worker in meta["workers"]] == ["finished"] * 3
    if sync != "bsp+backup:1":
        assert [worker["steps"] for worker in meta["workers"]] == [25] * 3
        assert meta["job"]["samples"] == 25 * 3 * 8
    assert 0 < meta["efficiency"] <= 1
    for name in ("server-0", "worker-0", "worker-1", "worker-2"):
        assert (bench.folder / "record" / "logs" / f"{name}.log").exists()
    assert "worker 1 took 25 steps" in (bench.folder / "record/logs/worker-1.log").read_text()
    assert "[1] worker 1 took 25 steps" in done.stdout


def test_a_budget_ends_the_job_for_everybody(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "--steps", "30", "--record", "record", PACED, ".", "steps=1000")
    assert done.returncode == 0, done.stderr
    assert [worker["steps"] for worker in bench.meta()["workers"]] == [15, 15]
    assert "30 steps of 2 workers in " in done.stderr
    assert ", 15 each; " in done.stderr


def test_a_script_alone_is_a_job_of_one(bench: Bench) -> None:
    done = bench.python(PACED, ".", "steps=5", "pace=0")
    assert (done.returncode, done.stdout) == (0, "worker 0 took 5 steps\n"), done.stderr


def test_what_was_chosen_for_each_optimizer_is_said_once_and_goes_on(bench: Bench) -> None:
    """Also with another number of workers, and under a mode in which servers keep it."""
    script, saved = str(SCRIPTS / "own_momentum.py"), ["--checkpoint", "saved"]
    done = bench.run("run", "-n", "3", "--sync", "asp", *saved, "--record", "record", script)
    assert done.returncode == 0, done.stderr
    told = [line.split(": ")[1:] for line in done.stderr.splitlines() if "momentum=" in line]
    assert [text for text, *_ in told] == ["asp,momentum=lookahead,spike=1.5", "asp,momentum=lookahead,scale=n^-0.75"]
    for (_, said), name in zip(told, ("SGD", "Adam"), strict=True):
        assert said.startswith(f"each worker keeps the momentum of its own {name} and pushes its look-ahead; ")
        assert said.endswith("; momentum=server keeps one for all on the servers")
    assert "[0] begins with 0 0" in done.stdout
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stderr
    for flags in (["-n", "2", "--sync", "delay:2"], ["-n", "2", "--sync", "bsp"]):
        again = bench.run("run", *flags, *saved, "--resume", "saved", script)
        assert again.returncode == 0, again.stderr
        assert "[0] begins with 2 2" in again.stdout
