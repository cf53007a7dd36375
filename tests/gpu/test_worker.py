"""Workers on a GPU over servers on it: what scripts expect, in two jobs of many checks each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(200),
]

SCRIPT = str(Path(__file__).parent / "worker_on_gpu.py")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polytempo", "run", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    print(done.stdout, done.stderr)
    return done


def test_two_workers_on_one_gpu() -> None:
    done = run("-n", "2", "--via", "ps", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("what_the_servers_hold_can_be_read_and_replaced") == 2
    assert "exchanges through the CPU" not in done.stderr


def test_one_worker_over_two_servers_with_a_compiled_model_and_no_memory_left() -> None:
    """The last thing it does is to ask for too much memory: the error names the rank, the GPU and what is free."""
    done = run("-n", "1", "--servers", "2", "--via", "ps", SCRIPT, "compiled", "short of memory")
    assert "a_compiled_model" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "rank 0 was on cuda:0" in done.stderr + done.stdout
    assert "GiB are free now" in done.stderr + done.stdout
    assert "worker 0 failed with exit status 1" in done.stderr
