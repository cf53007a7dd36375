"""Ranks that share one GPU reduce in its memory: equal to the host, bit for bit again, no torn read, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

RANK = str(Path(__file__).parent / "cuda_ipc_rank.py")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.timeout(150)
def test_collectives_of_ranks_on_one_gpu(size: int) -> None:
    name = f"gpu-{os.getpid()}-{size}"
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, name, str(rank), str(size)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    print(outputs[0])
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)[-4000:]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17])
def test_the_weighted_sum_of_one_pass(count: int) -> None:
    """As torch's, to the bit where weights are 1; also where memory is not aligned, and where the result is a term."""
    from polytempo.device.cuda_device import CudaDevice

    device = CudaDevice(0)
    generator = torch.Generator("cuda").manual_seed(count)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for length, start in ((0, 0), (1, 0), (1027, 0), (4096, 1), (3_000_001, 0)):
            memory = [torch.randn(length + 8, device="cuda", generator=generator).to(dtype) for _ in range(count)]
            terms = [piece[start : start + length] for piece in memory]
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            wanted = terms[0].to(wide)
            for term in terms[1:]:
                wanted = wanted + term.to(wide)
            out = torch.full_like(terms[0], 7.0)
            device.weighted_sum(terms, [1.0] * count, out, 3.0)
            three = torch.full_like(wanted, 3.0)  # by a number torch multiplies with its inverse
            assert torch.equal(out, (wanted / three).to(dtype)), (dtype, length, start)
            weights = [0.25 + index for index in range(count)]
            heavy = sum(weight * term.double() for weight, term in zip(weights, terms, strict=True))
            device.weighted_sum(terms, weights, terms[-1])
            tolerance = {"rtol": 2e-2 if dtype.itemsize == 2 else 1e-5, "atol": 1e-2 if dtype.itemsize == 2 else 1e-4}
            torch.testing.assert_close(terms[-1].double(), heavy, **tolerance)


@pytest.mark.parametrize(("workers", "launcher"), [(2, "polytempo"), (4, "polytempo"), (2, "torchrun")])
@pytest.mark.timeout(150)
def test_bsp_without_servers_stays_on_the_gpu(workers: int, launcher: str) -> None:
    script = str(Path(__file__).parent / "bsp_on_gpu.py")
    command = [sys.executable, "-m", "polytempo", "run", "-n", str(workers), "--via", "allreduce", script]
    if launcher == "torchrun":
        options = ["--standalone", f"--nproc-per-node={workers}"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, script, launcher]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    print(done.stdout[-2000:])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "as one process" in done.stdout
