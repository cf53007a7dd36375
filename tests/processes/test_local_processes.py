"""Blocks of local steps in processes: a death inside a block, a job of one, and a launcher without a sequencer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fork_server
import torch
from live import Bench

STEPS, PERIOD = 9, 3

#: Arguments: the mode, who dies, and before which step; each worker that lives writes down its weights and its figures.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
import polytempo as pt

sync, who, when, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
pt.init(sync=sync)
torch.manual_seed(0)
model = torch.nn.Linear(40, 30).double()
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, sync=sync)
for step in range(steps):
    if (pt.rank(), step) == (who, when):
        os.kill(os.getpid(), signal.SIGKILL)
    generator = torch.Generator().manual_seed(100 * step + pt.rank())
    optimizer.zero_grad()
    model(torch.randn(8, 40, generator=generator).double()).square().mean().backward()
    optimizer.step(samples=1 + pt.rank())
figures = {name: optimizer.stats[name] for name in ("step", "period", "averages") if name in optimizer.stats}
pt.shutdown()
weights = [p.detach().flatten().tolist() for p in model.parameters()]
Path(f"result-{step}-{os.getpid()}").write_text(json.dumps([weights, figures]))
"""


def results(folder: Path) -> list[tuple[list[list[float]], dict[str, int]]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*"))]


def plain(workers: int, who: int = -1, when: int = -1, steps: int = STEPS) -> list[torch.Tensor]:
    """The same in one loop: a worker that dies before a step is left out of the block of that step and of later ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [torch.nn.Linear(40, 30).double()]
    models += [torch.nn.Linear(40, 30).double() for _ in range(workers - 1)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank)).double()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if (step + 1) % PERIOD == 0 and workers > 1:
            members = [rank for rank in range(workers) if rank != who or step < when]
            total = sum(1 + rank for rank in members)
            with torch.no_grad():
                for params in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([params[rank] * (1 + rank) / total for rank in members]).sum(0)
                    for param in params:
                        param.copy_(mean)
    return [param.detach() for param in models[0].parameters()]


def written(bench: Bench) -> str:
    script = bench.folder / "script.py"
    script.write_text(SCRIPT)
    return str(script)


def test_a_worker_that_dies_inside_a_block_is_left_out_of_its_average(bench: Bench) -> None:
    sync = f"local:{PERIOD}"
    options = ["-n", "3", "--sync", sync, "--min-workers", "2", "--record", "record"]
    done = bench.run("run", *options, written(bench), sync, "1", "4", str(STEPS), timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warning: worker 1 was killed by SIGKILL; going on with 2 of 3" in done.stderr
    found = results(bench.folder)
    assert [figures for _, figures in found] == [{"step": STEPS, "period": PERIOD, "averages": STEPS // PERIOD}] * 2
    assert found[0][0] == found[1][0]
    for got, wanted in zip(found[0][0], plain(3, 1, 4), strict=True):
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted.flatten(), rtol=1e-9, atol=1e-12)
    assert bench.run("check", "record").returncode == 0


def test_a_job_of_one_is_plain_training_bit_for_bit(bench: Bench) -> None:
    done = bench.run("run", "-n", "1", "--sync", "local:4", written(bench), "local:4", "-1", "-1", "10", timeout=60)
    assert done.returncode == 0, done.stderr
    ((weights, _),) = results(bench.folder)
    assert weights == [value.flatten().tolist() for value in plain(1, steps=10)]


def test_torchrun_starts_local_steps_without_a_sequencer(bench: Bench) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sync = "adacomm:3,every=3600"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(bench.folder)}
    line = [*command, written(bench), sync, "-1", "-1", str(STEPS)]
    done = fork_server.run(line, env=environment, cwd=bench.folder)
    assert done.returncode == 0, done.stderr
    found = results(bench.folder)
    assert [figures for _, figures in found] == [{"step": STEPS, "period": PERIOD, "averages": STEPS // PERIOD}] * 2
    assert found[0][0] == found[1][0]
    for got, wanted in zip(found[0][0], plain(2), strict=True):
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted.flatten(), rtol=1e-9, atol=1e-12)
