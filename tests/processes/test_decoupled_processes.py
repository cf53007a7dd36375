"""Decoupled DiLoCo with real processes: one worker is stopped, goes on, and another is killed; the others never wait."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import psutil
from live import PACED, Bench, wait_until

#: Local steps that each of the others makes while one worker stands still or is dead, and merges that are made meanwhile.
STEPS, MERGES = 16, 5


def workers_of(launcher: int) -> dict[int, psutil.Process]:
    """The processes of the workers by rank, which the file shows that each of them writes."""
    found = {}
    for process in psutil.Process(launcher).children():
        names = [file.path.rpartition("/clock-") for file in process.open_files() if "/clock-" in file.path]
        found.update({int(rank): process for _, _, rank in names})
    return found


def test_one_stopped_and_one_killed_in_turn_delay_no_other(bench: Bench) -> None:
    flags = ["-n", "4", "--sync", "diloco:4,quorum=2,grace=0.02", "--record", "record"]
    process = bench.start("run", *flags, PACED, ".", "until=done", "pace=0.005")
    wait_until(lambda: all((bench.folder / f"clock-{rank}").exists() for rank in range(4)))
    made = lambda rank: sum(kind == "send" for kind, _, _ in complete(bench, rank))  # noqa: E731
    merges = lambda: [line for line in bench.events() if line["kind"] == "apply"]  # noqa: E731
    wait_until(lambda: len(merges()) > 2 and all(made(rank) > 4 for rank in range(4)))
    workers = workers_of(process.pid)

    def go_on_without(others: tuple[int, ...], act: Callable[[], object]) -> list[dict[str, Any]]:
        """What is merged while the others make their steps; workers that waited would never come to it."""
        act()
        before, start = len(merges()), {rank: made(rank) for rank in others}
        wait_until(lambda: all(made(rank) >= start[rank] + STEPS for rank in others))
        wait_until(lambda: len(merges()) >= before + MERGES)
        return merges()[before:]

    stopped = go_on_without((0, 1, 2), lambda: workers[3].send_signal(signal.SIGSTOP))
    assert all(3 not in line["workers"] for line in stopped[2:])  # a push was under way, maybe
    again = len(merges())
    workers[3].send_signal(signal.SIGCONT)
    wait_until(lambda: sum(3 in line["workers"] for line in merges()[again:]) >= 2)
    late = next(line for line in merges()[again:] if 3 in line["workers"])
    assert late["staleness"][late["workers"].index(3)] >= len(stopped) - 3  # what it did before the stop is merged
    killed = go_on_without((0, 1, 3), lambda: workers[2].send_signal(signal.SIGKILL))
    assert all(2 not in line["workers"] for line in killed[2:])
    (bench.folder / "done").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "finished", "lost", "finished"]
    assert bench.meta()["job"]["waiting"] == 0
    began = next(line["t"] for line in bench.events() if line["kind"] == "release")
    assert all(line["t"] <= began for line in bench.events() if line["kind"] == "hold")  # the start alone is waited for
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stderr


def complete(bench: Bench, rank: int) -> list[tuple[str, int, float]]:
    """The lines of a clock that is still written to."""
    lines = (bench.folder / f"clock-{rank}").read_text().split("\n")[:-1]
    return [(kind, int(step), float(t)) for kind, step, t in (line.split() for line in lines)]
