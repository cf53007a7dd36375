"""torch.distributed over polytempo, and scripts of Horovod's, with tensors on one GPU that two processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def said(script: str, ranks: int) -> list[str]:
    """The lines of all ranks that begin with ok, in the order of their names."""
    command = [sys.executable, "-m", "polytempo", "run", "-q", "-n", str(ranks), str(HERE / script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return sorted(line[line.index("ok ") :] for line in done.stdout.splitlines() if "ok " in line)


def test_torch_over_polytempo_on_a_gpu() -> None:
    """Each call is in order with the streams of its caller; DDP and FSDP2 train as one process; replicas are alike."""
    checks = ("each_call", "on_streams", "objects", "as_one_process", "with_views", "with_a_hook")
    wanted = sorted(f"ok {name}" for name in (*checks, "with_a_hook_of_futures", "sharded") for _ in range(2))
    assert said("backend_on_gpu.py", 2) == wanted


def test_a_script_of_horovod_on_a_gpu() -> None:
    assert said("horovod_on_gpu.py", 2) == ["ok calls", "ok calls", "ok training", "ok training"]


@pytest.mark.parametrize("script", ["mixed_backends_on_gpu.py"])
def test_nccl_beside_polytempo(script: str) -> None:
    """With one rank, since NCCL takes one for each GPU."""
    assert said(script, 1) == ["ok mixed", "ok native"]
