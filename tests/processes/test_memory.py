"""What a server and a worker keep: counted in megabytes of a 48 MB model, by the kernel."""

from __future__ import annotations

import re

import pytest
from live import SCRIPTS, Bench

MODEL = 48
SLACK = 24  # interpreter, sockets, allocator


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_keeps_one_extra_copy_and_a_server_its_shard_and_the_rounds_gradients(workers: int, bench: Bench) -> None:
    done = bench.run("run", "-n", str(workers), str(SCRIPTS / "big.py"))
    assert done.returncode == 0, done.stderr
    used = {kind: int(megabytes) for kind, megabytes in re.findall(r"(worker|server) (\d+)", done.stdout)}
    assert used["worker"] <= MODEL + SLACK
    assert used["server"] <= (1 + workers) * MODEL + SLACK
