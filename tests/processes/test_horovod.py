"""Horovod scripts, really started: by our own launcher, by torchrun and by mpirun."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from live import SCRIPTS, Bench, finished
from torch.nn import functional

CALLS, OPTIMIZER, MISTAKES, CLASSIC = (
    str(SCRIPTS / f"horovod_{name}.py") for name in ("calls", "optimizer", "mistakes", "classic")
)
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "horovod_style.py")


@pytest.mark.parametrize(
    ("script", "ranks"),
    [(CALLS, 2), (CALLS, 3), (OPTIMIZER, 3), (MISTAKES, 2)],
    ids=["calls-2", "calls-3", "optimizer-3", "mistakes-2"],
)
def test_every_way_of_use(bench: Bench, script: str, ranks: int) -> None:
    done = bench.run("run", "-n", str(ranks), "-q", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all right") == ranks


def trained_alone(folder: Path, steps: int = 18) -> dict[str, torch.Tensor]:
    """What one process makes of the joint batches, from where the ranks began."""
    generator = torch.Generator().manual_seed(7)
    data, target = torch.randn(96, 10, generator=generator), torch.randint(0, 3, (96,), generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model.load_state_dict(torch.load(folder / "start.pt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(steps):
        joint = slice(16 * (step % 6), 16 * (step % 6) + 16)
        optimizer.zero_grad()
        functional.cross_entropy(model(data[joint]), target[joint]).backward()
        optimizer.step()
    return dict(model.state_dict())


def check_trained(folder: Path, tolerance: float) -> None:
    ends = [torch.load(folder / f"end-{rank}.pt") for rank in range(2)]
    for name, expected in trained_alone(folder).items():
        assert torch.equal(ends[0][name], ends[1][name])
        assert torch.allclose(ends[0][name], expected, atol=tolerance), name


def test_the_classic_script_trains_as_one_process_does(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "-q", CLASSIC, str(bench.folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 2") == 1
    check_trained(bench.folder, 1e-5)


def test_the_classic_script_with_numbers_of_16_bits(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "-q", CLASSIC, str(bench.folder), "fp16")
    assert done.returncode == 0, done.stderr
    check_trained(bench.folder, 5e-3)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_the_classic_script_under_another_launcher(bench: Bench, launcher: str) -> None:
    logs = ["--log-dir", str(bench.folder / "logs")]  # else they stay in the temporary directory
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *logs]
    if launcher == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    done = finished(bench.popen([*command, CLASSIC, str(bench.folder)]))
    assert done.returncode == 0, done.stderr
    check_trained(bench.folder, 1e-5)


def test_a_script_alone_is_a_job_of_one(bench: Bench) -> None:
    done = bench.python(CLASSIC, str(bench.folder))
    assert done.returncode == 0, done.stderr


def test_another_mode_is_refused(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "-q", "--sync", "asp", CALLS)
    assert done.returncode != 0
    assert "expected --sync bsp for a Horovod script, got asp" in done.stderr


def test_the_example(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "-q", EXAMPLE, "--epochs", "4")
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("accuracy")[1].split()[0])
    assert accuracy > 80, done.stdout
