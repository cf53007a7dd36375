"""CUDA parameters, where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2)])
def test_parameters_on_a_gpu(workers: int, servers: int) -> None:
    script = str(Path(__file__).parent / "on_gpu.py")
    command = [sys.executable, "-m", "polytempo", "run", "-n", str(workers), "--servers", str(servers), script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as one process") == workers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize(("workers", "said"), [(1, "native: NCCL"), (2, "as one process")])
def test_collectives_of_tensors_on_a_gpu(workers: int, said: str) -> None:
    script = str(Path(__file__).parent / "collectives_on_gpu.py")
    command = [sys.executable, "-m", "polytempo", "run", "-n", str(workers), script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(said) == workers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize(
    "options",
    [
        ("--sync", "local:4"),
        ("--sync", "local:4", "--servers", "2"),
        ("--sync", "adacomm:4"),
        ("--sync", "diloco:4,fragments=2,overlap=1"),
        ("--sync", "diloco:4,quorum=1,grace=0"),
        ("--sync", "gossip:ring"),
        ("--sync", "adpsgd:ring"),
    ],
    ids=" ".join,
)
def test_models_on_a_gpu_are_averaged(options: tuple[str, ...]) -> None:
    script = str(Path(__file__).parent / "local_on_gpu.py")
    command = [sys.executable, "-m", "polytempo", "run", "-n", "2", *options, script, options[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as a plain loop") == 2
