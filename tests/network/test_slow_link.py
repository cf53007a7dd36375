"""A job whose other host is behind a slow link: each byte crosses it once, and the link is never taken for dead."""

from __future__ import annotations

import subprocess

import pytest
from hosts import Hosts, two_hosts, why_not
from live import SCRIPTS, Bench
from test_two_hosts import key_file, start

REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON or "allowed"), pytest.mark.long]

SIZE, STEPS = 600_000, 2  # a push takes 0.6 s, six retries
SCRIPT = (str(SCRIPTS / "wide.py"), str(SIZE), str(STEPS), "0.1")


def carried(hosts: Hosts) -> tuple[int, int]:
    """Bytes that host b has sent and received, headers and acknowledgements included."""
    command = [*hosts.inside(hosts.b), "cat", "/proc/net/dev"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = next(line for line in table.splitlines() if "ptr" in line).partition(":")[2].split()
    return int(fields[8]), int(fields[0])


def test_a_push_that_takes_longer_than_a_retry_is_sent_once(bench: Bench) -> None:
    with two_hosts("8mbit") as hosts:
        listen = f"{hosts.address}:7077"
        job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", "--listen", listen, "--expect", "1", *SCRIPT)
        join = ["worker", "--join", listen, "--key-file", str(key_file(bench))]
        joined = start(bench, hosts.inside(hosts.b), *join, *SCRIPT)
        out, err = joined.communicate(timeout=60)
        assert joined.returncode == 0, err
        assert f"took {STEPS} steps" in out
        _, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        sent, received = carried(hosts)
    assert STEPS * SIZE <= sent <= 1.2 * STEPS * SIZE
    assert (STEPS + 1) * SIZE <= received <= 1.2 * (STEPS + 1) * SIZE


def test_what_crosses_the_link_falls_with_the_period(bench: Bench) -> None:
    """By all-reduce between hosts, and between neighbours: what host b sends, without what a job sends once at its start."""
    steps, period = 8, 4
    script = (str(SCRIPTS / "wide.py"), str(SIZE), str(steps), "0.01")

    def sent_by(sync: str) -> int:
        before, _ = carried(hosts)
        listen = f"{hosts.address}:7077"
        flags = ["--sync", sync, *(() if sync.startswith("gossip") else ("--via", "allreduce"))]
        flags += ["--listen", listen, "--expect", "1"]
        job = start(bench, hosts.inside(hosts.a), "run", "-n", "1", *flags, *script)
        join = ["worker", "--join", listen, "--key-file", str(key_file(bench))]
        joined = start(bench, hosts.inside(hosts.b), *join, *script)
        _, err = joined.communicate(timeout=60)
        assert joined.returncode == 0, err
        _, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        return carried(hosts)[0] - before

    with two_hosts("100mbit") as hosts:
        bsp, local, gossip = (sent_by(sync) for sync in ("bsp", f"local:{period}", "gossip:ring"))
    fewer = steps - steps // period
    assert fewer * SIZE <= bsp - local <= 1.2 * fewer * SIZE
    assert steps * SIZE <= gossip <= 1.2 * (steps + 1) * SIZE  # to its one neighbour; and its model, handed over at the end
