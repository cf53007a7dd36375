"""torch.distributed over polytempo: unmodified scripts give what they give over gloo, and no rank hangs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from live import SCRIPTS, Bench

KNOWN = "assert 'polytempo' in torch.distributed.Backend.backend_list"


def run(bench: Bench, script: str, size: int) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each rank. No GPU is in sight: PowerSGD would synchronise it for CPU tensors."""
    command = [sys.executable, "-W", "error", str(SCRIPTS / script), str(bench.folder / "store")]
    processes = [bench.popen(command, RANK=str(rank), WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="") for rank in range(size)]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_scripts_give_what_they_give_over_gloo(bench: Bench, size: int) -> None:
    for status, out, err in run(bench, "torch_backend.py", size):
        assert status == 0, out + err
        assert out.splitlines()[-1] == "ok again"
        for name in ("DDP", "DDP, PowerSGD", "fully_shard", "DTensor", "the_plain_three", "mean_and_futures"):
            assert f"ok {name}\n" in out
        assert "polytempo:" not in err  # no rank waited for long, and no thread ended with a trace
        assert "Traceback" not in err


@pytest.mark.long
def test_a_killed_peer_is_named_within_seconds(bench: Bench) -> None:
    ranks = run(bench, "torch_killed.py", 3)
    for status, out, err in (ranks[0], ranks[2]):
        assert status == 0, out + err
        in_backward, after, in_new_group, without = out.splitlines()
        assert float(in_backward.split()[0]) < 2
        assert "rank 1 is gone" in in_backward
        assert "rank 1 is gone" in after
        assert "rank 1 is gone" in in_new_group
        assert without == "the others still have 2.0"


@pytest.mark.long
def test_no_method_ends_the_process(bench: Bench) -> None:
    done = bench.python(str(SCRIPTS / "torch_every_method.py"))
    assert (done.returncode, done.stdout) == (0, "seen\n"), done.stderr


TORCHRUN = """
import os, polytempo, torch, torch.distributed as dist
dist.init_process_group("polytempo")
tensor = torch.ones(3)
dist.all_reduce(tensor)
os.write(1, f"{dist.get_rank()} {tensor.tolist()}\\n".encode())  # at once: ranks share the pipe
"""


@pytest.mark.long
def test_torchrun_starts_it(bench: Bench) -> None:
    script = bench.folder / "script.py"
    script.write_text(TORCHRUN)
    flags = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(bench.folder / "logs")]
    done = bench.python("-m", "torch.distributed.run", *flags, str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 [2.0, 2.0, 2.0]", "1 [2.0, 2.0, 2.0]"]


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [
        f"import torch.distributed, polytempo; {KNOWN}",
        f"import sys, polytempo; assert 'torch' not in sys.modules; import torch; {KNOWN}",
        f"import polytempo.torch_backend.register as again; again.register(); import torch; again.register(); {KNOWN}",
    ],
)
def test_torch_knows_the_word_in_either_order_of_imports(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_layers_split_over_processes(bench: Bench) -> None:
    """`parallelize_module` over our back end equals the whole; our own layers keep replicated parameters equal."""
    for status, out, err in run(bench, "tensor_parallel.py", 2):
        assert status == 0, out + err
        assert out.splitlines() == ["ok DTensor", "ok dropout"]
