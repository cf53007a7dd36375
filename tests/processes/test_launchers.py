"""The same script, started as people start such jobs: polytempo run, torchrun, mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
import torch
from torch import nn

SCRIPT = str(Path(__file__).parent / "scripts" / "launched.py")
BATCHES, ROWS = (6, 4, 5), (3, 5, 2)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root"]
LAUNCHERS = {
    "polytempo run": [sys.executable, "-m", "polytempo", "run", "--fork", "-n", "3"],
    "torchrun": [*TORCHRUN, "--nproc-per-node", "3"],
    "mpirun": [*MPIRUN, "-n", "3", sys.executable],
}


def launch(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if name == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [*LAUNCHERS[name], *arguments]
    return fork_server.run(command, env=environment, cwd=folder)


def one_process(size: int) -> list[torch.Tensor]:
    """On what is there of each joint batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(5)
    for number in range(max(BATCHES)):
        parts = [[torch.randn(rows, width, generator=data).double() for width in (4, 2)] for rows in ROWS[:size]]
        there = [part for rank, part in enumerate(parts) if number < BATCHES[rank]]
        inputs, targets = (torch.cat([part[which] for part in there]) for which in (0, 1))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_runs_and_trains_as_one_process_does(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    wanted = one_process(3)
    for rank in range(3):
        got = torch.load(tmp_path / f"result-{rank}.pt")
        if launcher != "polytempo run" or BATCHES[rank] == max(BATCHES):  # there, who ends is left out and keeps its own
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


ENDS = """
import os, subprocess, sys
import torch
import polytempo as pt

pt.init()
if len(sys.argv) > 1:
    print(f"started: rank {pt.rank()} of {pt.size()}")
    sys.exit(0)
torch.manual_seed(pt.rank())
model = torch.nn.Linear(3, 1)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
other = torch.nn.Linear(3, 1)
second = pt.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.01), other)
for step in range(4 + pt.rank()):
    for part, own in ((model, optimizer), (other, second)):
        own.zero_grad()
        part(torch.randn(2, 3)).sum().backward()
        own.step(samples=2)
    if step == 1:
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        if pt.rank() == 1:
            subprocess.run([sys.executable, __file__, "again"], check=True)
print(f"done {pt.rank()} after {optimizer.stats['step']}")
"""


def test_scripts_without_a_last_word_end_well_whatever_they_start(tmp_path: Path) -> None:
    """No shutdown(), two optimizers, uneven steps, a forked child that exits, a process with this one's variables."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    done = launch("torchrun", tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "polytempo: worker" not in done.stderr
    assert "started: rank 1 of 3" in done.stdout
    for rank in range(3):
        assert f"done {rank} after {4 + rank}" in done.stdout


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_modes_that_need_servers_are_refused_in_one_line(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text("import polytempo as pt\npt.init(sync='ssp:3')\n")
    done = launch(launcher, tmp_path, str(script))
    assert done.returncode != 0
    assert "sync='ssp:3' needs servers" in done.stderr
    assert "use polytempo run" in done.stderr


@pytest.mark.parametrize("launcher", ["polytempo run", "torchrun"])
def test_plain_torch_distributed_code_runs_over_our_back_end(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, str(Path(SCRIPT).parent / "plain_dist.py"))
    assert done.returncode == 0, done.stderr
    assert all(f"done {rank}" in done.stdout for rank in range(3))
