"""A job that diverges, in processes: with `--on-divergence stop` it ends with the cause and the last checkpoint in its last
line, else its last line has the word; `compare` and `launch` say it as well."""

from __future__ import annotations

import json

import pytest
from live import SCRIPTS, Bench

DIVERGING = str(SCRIPTS / "diverging.py")
LAUNCHED = """
import polytempo as pt

def train(rate):
    import torch

    pt.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model)
    x = torch.randn(16, 5)
    for _ in range(60):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    try:
        pt.launch(train, (40.0,), n=2, quiet=True, on_divergence="stop")
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("sync", ["asp,momentum=server", "bsp"])
def test_a_job_ends_with_the_cause_and_the_last_checkpoint(sync: str, bench: Bench) -> None:
    options = ["--on-divergence", "stop", "--checkpoint", "saved", "--checkpoint-every", "5", "--record", "record"]
    done = bench.run("run", "-n", "2", "--sync", sync, *options, DIVERGING, "after=saved")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("polytempo: diverged at update ")
    assert "and the job ends (--on-divergence stop); likely cause: " in last
    assert f"in {sync}" in last
    assert "the last checkpoint is saved/step-000000" in last
    assert done.stderr.count("diverged at update") == 1
    meta = bench.meta()
    assert (meta["exit_status"], meta["cause"]) == (1, last.removeprefix("polytempo: "))
    assert not meta["diverged"]["recovered"]
    assert meta["options"]["on_divergence"] == "stop"


def test_a_job_that_goes_on_does_not_end_without_the_word(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "--sync", "asp,momentum=server", "--record", "record", DIVERGING)
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert warning.startswith("polytempo: warning: diverged at update ")
    assert ", and the job goes on with it; likely cause: momentum 0.9 on the servers" in warning
    update = bench.meta()["diverged"]["update"]
    (last,) = [line for line in done.stderr.splitlines() if "160 steps of 2 workers" in line]
    assert last.startswith(f"polytempo: asp,momentum=server: diverged at update {update}; 160 steps of 2 workers")
    healthy = bench.run("run", "-n", "2", "--record", "record", "--overwrite", DIVERGING, "rate=0.05")
    assert healthy.returncode == 0, healthy.stderr
    assert "diverged" not in healthy.stderr
    assert bench.meta()["diverged"] == {}


def test_compare_names_the_modes_that_diverged(bench: Bench) -> None:
    arguments = ["--sync", "bsp", "--out", "out", "--json", "all.json", DIVERGING]
    done = bench.run("compare", "-n", "2", *arguments)
    assert done.returncode == 0, done.stderr
    assert "\nbsp: diverged at update " in done.stdout
    (run,) = json.loads((bench.folder / "all.json").read_text())
    assert run["diverged"]["trouble"].startswith("diverged at update ")


def test_launch_raises_the_cause(bench: Bench) -> None:
    (bench.folder / "launched.py").write_text(LAUNCHED)
    done = bench.python("launched.py")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("JobEnded diverged at update ")
    assert "the job ends (--on-divergence stop)" in line
