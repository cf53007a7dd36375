"""A server, or the emulated network, that is stopped: it is named in seconds, and the job goes on with it or ends."""

from __future__ import annotations

import re
import subprocess

import pytest
from live import PACED, Bench, finished, said, wait_until
from test_deaths import servers_of


def started(bench: Bench, *flags: str) -> subprocess.Popen[str]:
    """A job with two workers that train."""
    job = bench.start("run", "-n", "2", *flags, PACED, ".", "until=enough", "pace=0.005")
    wait_until(lambda: all((bench.folder / f"clock-{rank}").exists() and len(bench.clock(rank)) > 5 for rank in (0, 1)))
    return job


def test_a_job_goes_on_when_its_stopped_servers_do(bench: Bench) -> None:
    """Each is named long before the time-out, no worker is given up for it, and every step counts once."""
    job = started(bench, "--servers", "2", "--timeout", "600", "--record", "record")
    for server, process in enumerate(servers_of(job.pid)):
        name, before = f"server {server} (process {process.pid})", [len(bench.clock(rank)) for rank in (0, 1)]
        process.suspend()
        told = said(job, "has been stopped for")
        waits = f"ranks 0, 1 cannot go on without it; to continue it: kill -CONT {process.pid}"
        line = rf"polytempo: warning: {re.escape(name)} has been stopped for (\d+) s: {waits}"
        found = re.search(rf"^{line}; after 600 s the job ends \(--timeout\)$", told, re.MULTILINE)
        assert found, told
        assert int(found[1]) < 5
        process.resume()
        said(job, f"{name} goes on")
        wait_until(lambda: all(len(bench.clock(rank)) > before[rank] + 20 for rank in (0, 1)))  # noqa: B023
    (bench.folder / "enough").touch()
    done = finished(job)
    assert done.returncode == 0, done.stderr
    sent = [[step for kind, step, _ in bench.clock(rank) if kind == "send"] for rank in (0, 1)]
    assert all(steps == list(range(len(steps))) for steps in sent)
    assert bench.run("check", "record").returncode == 0


@pytest.mark.parametrize("which", ["server 0", "the emulated network (--link)"])
def test_a_job_ends_when_a_process_that_all_wait_for_is_stopped_for_longer_than_the_timeout(
    which: str, bench: Bench
) -> None:
    saves = which == "server 0"
    flags = ["--servers", "2", "--checkpoint", "saved", "--checkpoint-every", "5"] if saves else ["--link", "1Gb/s"]
    job = started(bench, "--timeout", "1.5", *flags)
    wait_until(lambda: not saves or list(bench.folder.glob("saved/step-*5/manifest.json")) != [])
    (servers_of(job.pid)[0] if saves else bench.child(job.pid, "polytempo.launcher.link_process")).suspend()
    done = finished(job, 30)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"polytempo: {which} was stopped for longer than 1.5 s (--timeout)")
    assert "given up" not in done.stderr
    assert ("resume with --resume saved/step-" in last) == saves
