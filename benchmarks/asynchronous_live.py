"""Live runs of `asynchronous.py`: `polytempo run` of a plain script, worker processes and servers, modes by one word.

A step takes at least some milliseconds, so that it is the mode and not the start of a process that says how stale a push is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytempo.records.files import read_events, read_meta
from polytempo.records.lines import MAIN

if TYPE_CHECKING:
    from asynchronous_runs import Run

COMPUTE = {"digits": 0.005, "cnn": 0.0}  #: seconds that a step takes at least


def run_live(job: Run, folder: Path) -> dict[str, float]:
    """Start a job with its mode as a user writes it, check how it was settled, and read what its first worker logged."""
    plain = job.sync if "momentum=server" in job.sync else job.sync.partition(",")[0]
    settings: dict[str, Any] = {name: getattr(job, name) for name in ("work", "rate", "momentum", "batch", "seed")}
    settings["folder"] = str(folder)
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as place:
        flags = ["-q", "--fork", "-n", str(job.workers), "--sync", plain, "--samples", str(job.samples)]
        flags += ["--slow", f"{job.workers - 1}:3"] if job.cluster == "slow" else []
        command = [sys.executable, "-m", "polytempo", "run", *flags, "--record", f"{place}/record", __file__]
        done = subprocess.run([*command, json.dumps(settings)], capture_output=True, text=True, check=False, timeout=900)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        meta, lines = read_meta(f"{place}/record"), list(read_events(f"{place}/record"))
    settled = meta["job"].get("optimizers", {}).get(MAIN, plain)
    if settled != job.sync:
        raise SystemExit(f"expected a job of {job.sync}, and it was settled as {settled}")
    logged = next(line for line in lines if line["kind"] == "metric" and "accuracy" in line)
    return {**{name: logged[name] for name in ("accuracy", "loss")}, "staleness": round(meta["job"]["staleness_mean"], 2)}


def worker(settings: dict[str, Any]) -> None:
    """The training script."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytempo as pt
    from asynchronous_runs import ended_with, task_of

    torch.set_num_threads(1)
    pt.init()
    seed, work = settings["seed"], settings["work"]
    task = task_of(work, seed, Path(settings["folder"]))
    model = task.model
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"], momentum=settings["momentum"])
    optimizer = pt.DistributedOptimizer(optimizer, model)
    sampler = pt.DistributedSampler(TensorDataset(*task.data[0]), seed=seed)
    loader = DataLoader(TensorDataset(*task.data[0]), settings["batch"], sampler=sampler, drop_last=True)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            began = time.perf_counter()
            optimizer.zero_grad()
            task.loss(model(x), y).backward()
            time.sleep(max(0.0, COMPUTE[work] - (time.perf_counter() - began)))
            optimizer.step(samples=len(x))
            if pt.should_stop():
                break
        if pt.should_stop():
            break
    pt.barrier()  # all have taken their last step
    optimizer.consolidate()
    with pt.evaluation_statistics(model, "merged"):
        if pt.rank() == 0:
            pt.log(**ended_with(model, task))
    pt.shutdown()


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
