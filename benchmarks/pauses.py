"""The longest pause of a worker while another is stopped, and while another is killed: decoupled DiLoCo against rounds.

Four processes; a local step takes 100 ms of sleep, a block has four. Worker 3 is stopped (SIGSTOP) for some seconds and goes
on; then worker 2 is killed (SIGKILL). A pause is what a step takes above its sleep: forward, backward, local update, sending
and what the mode makes it wait. The bar: the others of decoupled DiLoCo pause for no longer than one local step.

    python benchmarks/pauses.py
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import save
from polytempo.report.table import TextTable

OUT = Path("out/proof")
DECOUPLED, ROUNDS = "diloco:4,quorum=2", "diloco:4"
WORKERS, STOPPED, KILLED = 4, 3, 2
STEP_SECONDS, STOP_SECONDS, WIDTH = 0.1, 3.0, 500
BAR = 1.0


def worker(folder: str) -> None:
    """The training script: writes for each step the moment after it, and the seconds above its sleep."""
    import torch

    import polytempo as pt

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pt.init()
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    torch.manual_seed(pt.rank())  # of its data
    here = Path(folder)
    with (here / f"steps-{pt.rank()}").open("w", buffering=1) as log:
        log.write(f"{os.getpid()}\n")
        while not (here / "done").exists():
            time.sleep(STEP_SECONDS)
            began = time.monotonic()
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step(samples=8)
            now = time.monotonic()
            log.write(f"{now} {now - began}\n")


def pauses(sync: str) -> dict[str, Any]:
    """One job; the pauses of the workers that were left alone, in seconds, by what happened to the others meanwhile."""
    with tempfile.TemporaryDirectory(prefix="pt-") as place:
        folder = Path(place)
        flags = [
            "-n",
            str(WORKERS),
            "--servers",
            "1",
            "--min-workers",
            "1",
            "--sync",
            sync,
            "--record",
            str(folder / "record"),
        ]
        command = [sys.executable, "-m", "polytempo", "run", *flags, __file__, "worker", place]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
            _wait(lambda: all(len(_lines(folder, rank)) > 20 for rank in range(WORKERS)), "all workers to train")
            pids = [int(_lines(folder, rank)[0]) for rank in range(WORKERS)]
            marks = {"undisturbed": time.monotonic() - 10 * STEP_SECONDS, "one stopped": time.monotonic()}
            os.kill(pids[STOPPED], signal.SIGSTOP)
            time.sleep(STOP_SECONDS)
            os.kill(pids[STOPPED], signal.SIGCONT)
            marks["it goes on"] = time.monotonic()
            time.sleep(1.0)
            marks["one killed"] = time.monotonic()
            os.kill(pids[KILLED], signal.SIGKILL)
            time.sleep(STOP_SECONDS)
            (folder / "done").touch()
            job.wait(60)
            marks["end"] = time.monotonic()
        meta = json.loads((folder / "record" / "meta.json").read_text())
        return {"sync": sync, "updates": meta["job"]["updates"], "longest": _longest(folder, marks)}


def _longest(folder: Path, marks: dict[str, float]) -> dict[str, float]:
    """The longest pause between each mark and the next, in local steps."""
    alone = [rank for rank in range(WORKERS) if rank not in (STOPPED, KILLED)]
    steps = [tuple(map(float, line.split())) for rank in alone for line in _lines(folder, rank)[1:]]
    step = STEP_SECONDS + statistics.median(pause for _, pause in steps)
    names = list(marks)
    found = {}
    for name, following in pairwise(names):
        inside = [pause for at, pause in steps if marks[name] <= at and at - pause < marks[following]]
        found[name] = max(inside, default=0.0) / step
    return found


def _lines(folder: Path, rank: int) -> list[str]:
    path = folder / f"steps-{rank}"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _wait(condition: Any, what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def longest_pauses() -> None:
    """Decoupled DiLoCo and rounds, one after the other."""
    results = [pauses(sync) for sync in (DECOUPLED, ROUNDS)]
    rows = []
    for found in results:
        longest = found["longest"]
        verdict = ("ok" if max(longest.values()) <= BAR else "MISSED") if found["sync"] == DECOUPLED else "waits"
        rows.append((found["sync"], *(f"{pause:.2f}" for pause in longest.values()), str(found["updates"]), verdict))
    title = f"Longest pause of the other workers, in local steps of {1000 * STEP_SECONDS:.0f} ms"
    heads = ("mode", *results[0]["longest"], "merges", f"bar\n(<= {BAR:g})")
    save(OUT, "pauses", [TextTable(title, heads, tuple(rows))], results)


if __name__ == "__main__":
    worker(sys.argv[2]) if sys.argv[1:2] == ["worker"] else longest_pauses()
