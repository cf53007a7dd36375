"""A job that listens at all addresses of its host prints one by which it can be joined, with IPv4 and with IPv6."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from live import PACED, Bench


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("everywhere", "via"),
    [
        ("0.0.0.0", "ps"),
        pytest.param("[::]", "allreduce", marks=pytest.mark.skipif(not has_ipv6(), reason="this kernel has no IPv6")),
        pytest.param("[::1]", "ps", marks=pytest.mark.skipif(not has_ipv6(), reason="this kernel has no IPv6")),
    ],
)
def test_the_printed_address_can_be_joined(everywhere: str, via: str, bench: Bench) -> None:
    options = ["--via", via, "--listen", f"{everywhere}:0", "--expect", "1"]
    job = bench.start("run", "-n", "1", *options, PACED, ".", "steps=3")
    assert job.stderr is not None
    key = join = ""
    for line in job.stderr:
        key = line.partition("key file for other hosts: ")[2].strip() or key
        if found := re.search(r"worker --join (\S+) --key-file workers\.key", line):
            join = found[1]
            break
    assert join.rpartition(":")[0] not in ("", "0.0.0.0", "[::]")
    assert int(join.rpartition(":")[2]) > 0, "the port that the kernel chose"
    assert Path(key).name == "workers.key"
    joined = bench.run("worker", "--join", join, "--key-file", key, PACED, ".", "steps=3")
    assert joined.returncode == 0, joined.stderr
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "1 worker joined from another host: rank 1" in err
