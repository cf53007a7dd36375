"""What a server and a worker keep: counted in megabytes of a 48 MB model, by the kernel.

Memory that several processes map is counted in equal shares, so each bound below says what there is and who shares it. A
worker starts with its parameters and gradients; then its gradients live in the bucket, and what they had is given back.
"""

from __future__ import annotations

import re

import pytest
from live import SCRIPTS, Bench

pytestmark = pytest.mark.new_interpreters
MODEL = 48
SLACK = 24  # sockets, allocator, and the share of a process in values that were copied because they were on loan


def measured(bench: Bench, workers: int, *flags: str) -> tuple[list[int], int]:
    """Megabytes that each worker, and the server, took beyond the start."""
    done = bench.run("run", "-n", str(workers), *flags, str(SCRIPTS / "big.py"))
    assert done.returncode == 0, done.stderr
    used = [(kind, int(megabytes)) for kind, megabytes in re.findall(r"(worker|server) (-?\d+)", done.stdout)]
    of_workers = [megabytes for kind, megabytes in used if kind == "worker"]
    assert len(of_workers) == workers
    (of_server,) = (megabytes for kind, megabytes in used if kind == "server")
    return of_workers, of_server


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_a_worker_keeps_its_bucket_and_a_server_its_shard_and_one_mean(workers: int, bench: Bench) -> None:
    of_workers, of_server = measured(bench, workers, "--via", "ps", "--servers", "1")
    given_back = MODEL  # the gradients that the worker started with
    half_a_bucket = MODEL / 2  # worker and server both map it
    share_of_values = MODEL / (workers + 1)  # the server and all workers map them
    mean = MODEL if workers > 1 else 0  # of one push it is the push itself
    for of_worker in of_workers:
        assert of_worker <= half_a_bucket + share_of_values - given_back + SLACK
    assert of_server <= share_of_values + mean + workers * half_a_bucket + SLACK


def test_an_all_reduce_takes_a_slot_for_each_worker_and_one_result(bench: Bench) -> None:
    workers = 2
    of_workers, of_server = measured(bench, workers, "--via", "allreduce")
    given_back = MODEL
    share_of_board = MODEL * (workers + 1) / workers  # all slots, in which the gradients live, and the result
    for of_worker in of_workers:
        assert of_worker <= share_of_board - given_back + SLACK
    assert of_server <= SLACK, "it decides, and holds nothing"
