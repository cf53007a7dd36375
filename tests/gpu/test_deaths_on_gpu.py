"""SIGKILL of a worker, a server and the launcher, each in the middle of a push on the GPU: others end or go on as promised,
no push is applied in part, and memory returns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from device_memory import Holdings

if TYPE_CHECKING:
    from live import Bench

pytestmark = [
    pytest.mark.alone_on_gpu,
    pytest.mark.timeout(150 if os.environ.get("POLYTEMPO_TEST_DEVICE", "cuda") == "cuda" else 290),
]
DEVICE = os.environ.get("POLYTEMPO_TEST_DEVICE", "cuda")
SCRIPT = str(Path(__file__).parent / "pushing_on_gpu.py")
MEGABYTES, STEPS, DEATH = "64" if DEVICE == "cuda" else "1", 30, 5
#: Seconds after which a job is thought to hang.
LONG = 60 if DEVICE == "cuda" else 200


@contextmanager
def job(bench: Bench, folder: str, *flags: str) -> Iterator[tuple[Bench, subprocess.Popen[str]]]:
    """A job in a folder of its own; jobs of one test run at the same time."""
    from live import Bench as Place

    place = Place(bench.folder / folder, bench.temporary, forks=False)
    place.folder.mkdir()
    command = [*flags[: flags.index("--")], SCRIPT, DEVICE, MEGABYTES, *flags[flags.index("--") + 1 :]]
    process = place.start("run", *command)
    try:
        yield place, process
    finally:
        for left in place.processes():
            left.kill()


def output(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out, err


def values(out: str) -> list[str]:
    return re.findall(r"0 torn or stale reads in \d+ steps, values \[(\S+)\]", out)


def servers_of(launcher: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(launcher).children() if "polytempo.launcher.server_process" in p.cmdline()]


def test_kills_in_the_middle_of_a_push(bench: Bench) -> None:
    """Seven jobs at once; each has its own processes, and the GPU is looked at before and after all of them."""
    from live import nothing_left, wait_until

    before = Holdings.now()
    dies, pause = (f"steps={STEPS}", f"die=1:{DEATH}"), (f"steps={STEPS}", f"pause={DEATH}")
    with ExitStack() as stack:
        begin = lambda *arguments: stack.enter_context(job(bench, *arguments))  # noqa: E731
        _, asp = begin("asp", "-n", "2", "--sync", "asp", "--", *dies)
        _, bsp = begin("bsp", "-n", "2", "--sync", "bsp", "--via", "ps", "--", *dies)
        _, fewer = begin("fewer", "-n", "3", "--sync", "bsp", "--via", "ps", "--min-workers", "2", "--", *dies)
        _, ring = begin("ring", "-n", "2", "--via", "allreduce", "--", *dies)
        _, fewer_ring = begin("fewer-ring", "-n", "3", "--via", "allreduce", "--min-workers", "2", "--", *dies)
        at_server, server = begin("server", "-n", "2", "--sync", "asp", "--", *pause)
        at_launcher, launcher = begin("launcher", "-n", "2", "--sync", "asp", "--", *pause)

        wait_until(lambda: (at_server.folder / "middle-0").exists(), LONG)
        for process in servers_of(server.pid):
            process.send_signal(signal.SIGKILL)
        wait_until(lambda: (at_launcher.folder / "middle-0").exists(), LONG)
        launcher.send_signal(signal.SIGKILL)

        status, out, err = output(asp)  # goes on; the five whole pushes of the dead worker count, its sixth does not at all
        assert status == 0, err[-3000:]
        assert "worker 1 was killed by SIGKILL; going on with 1 of 2" in err
        (value,) = values(out)  # a push counts by one half while there are two workers, then whole
        assert -500.0 * DEATH - STEPS <= float(value) <= -500.0 * DEATH - STEPS / 2

        for ended in (bsp, ring):  # and name the rank
            status, out, err = output(ended)
            assert status == 1
            assert err.splitlines()[-1].startswith("polytempo: worker 1 was killed by SIGKILL; 1 of 2 workers are left")

        for going_on in (fewer, fewer_ring):  # with the mean of the others
            status, out, err = output(going_on)
            assert status == 0, err[-3000:]
            assert "going on with 2 of 3" in err
            found = values(out)
            assert len(found) == 2
            assert len(set(found)) == 1
            assert float(found[0]) == pytest.approx(-DEATH * 1002.0 / 3 - (STEPS - DEATH), rel=1e-5)

        status, out, err = output(server)
        assert status == 1
        assert "server 0 was killed by SIGKILL" in err.splitlines()[-1]
        assert output(launcher)[0] == -signal.SIGKILL
        for place in (at_server, at_launcher):
            wait_until(lambda place=place: not place.processes(), 30)
    nothing_left(bench)
    before.assert_returned()
