"""`anytime` over servers with real processes: one worker is stopped and goes on; its samples are lost by none."""

from __future__ import annotations

import json
import os
import signal

from live import SCRIPTS, Bench, wait_until

LENGTH = 600


def test_a_stopped_worker_delays_no_other_and_its_samples_return(bench: Bench) -> None:
    flags = ["-n", "3", "--servers", "1", "--sync", "anytime:0.05", "--record", "record", "--checkpoint", "saved"]
    process = bench.start("run", *flags, str(SCRIPTS / "leasing.py"))
    pid = bench.folder / "pid-2"
    wait_until(pid.exists)
    applied = lambda: [line for line in bench.events() if line["kind"] == "apply"]  # noqa: E731
    wait_until(lambda: sum(2 in line["workers"] for line in applied()) >= 2)
    os.kill(int(pid.read_text()), signal.SIGSTOP)
    before = len(applied())
    wait_until(lambda: len(applied()) >= before + 6)
    assert all(2 not in line["workers"] for line in applied()[before + 2 :])  # a push was under way, maybe
    os.kill(int(pid.read_text()), signal.SIGCONT)
    again = len(applied())
    wait_until(lambda: sum(2 in line["workers"] for line in applied()[again:]) >= 2)
    (bench.folder / "go").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    events = bench.events()
    discarded = [line for line in events if line["kind"] == "discard"]
    assert 2 in {line["worker"] for line in discarded}
    assert any(line.get("behind", 0) >= 4 for line in events if line["kind"] == "release" and line["worker"] == 2)
    checked = bench.run("check", "record")
    assert checked.returncode == 0, checked.stderr
    saved = max((bench.folder / "saved").rglob("manifest.json"), key=lambda path: path.stat().st_mtime)
    done = {part["epoch"]: part["done"] for part in json.loads(saved.read_text())["positions"]}
    assert 0 not in done  # an epoch that is done in full is not kept
    assert bench.meta()["job"]["samples"] == LENGTH + sum(stop - start for start, stop in done[1])  # none was applied twice


#: All ranks are through with the epoch in its first round; then rank 0 waits for the others, in the job's first collective.
AFTER_THE_LOOP = """
import time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import polytempo as pt

torch.set_num_threads(1)
pt.init()
model = torch.nn.Linear(4, 2)
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
data = TensorDataset(torch.randn(96, 4))
for (x,) in DataLoader(data, batch_sampler=pt.DistributedBatchSampler(data, 4)):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step(samples=len(x))
    Path(f"has-{pt.rank()}").touch()
    while len(list(Path().glob("has-*"))) < 3:
        time.sleep(0.001)
if pt.rank():
    time.sleep(2.2)  # rounds end meanwhile
pt.all_reduce(torch.ones(1))
optimizer.consolidate()
"""


def test_samples_count_that_a_worker_has_used_before_it_waits_in_a_first_collective(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(AFTER_THE_LOOP)
    run = bench.run("run", "-n", "3", "--servers", "1", "--sync", "anytime:0.8", "--record", "record", "train.py")
    assert run.returncode == 0, run.stderr
    assert bench.meta()["job"]["samples"] == 96
    assert [line for line in bench.events() if line["kind"] == "discard"] == []
