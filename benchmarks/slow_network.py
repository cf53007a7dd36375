"""Time to a target loss on two hosts joined by 100 Mbit/s: local steps against `bsp` by its fastest way.

The hosts are network namespaces (`tests/network/hosts.py`) with `tc tbf` on their cable; each has one worker. The model has
10 MB, a step's computing takes 50 ms (a sleep fills up what the arithmetic leaves). Worker 0 looks at the loss on held-out
digits after an average, at most once a second.

    python benchmarks/slow_network.py MODE...      another choice of modes; `bsp/allreduce` names a way
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import save
from polytempo.report.table import TextTable

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "network"))

OUT = Path("out/proof")
RATE, TARGET, LIMIT = "100mbit", 0.5, 240.0
#: The ways of `bsp` between hosts, and the modes that must be three times sooner there than the faster of them.
WAYS = ("bsp/ps", "bsp/allreduce")
MODES = ("local:8", "adacomm:16,every=5", "diloco:16,outer_lr=1,outer_momentum=0.5")
BAR = 3.0
STEP_SECONDS, BATCH, LR, WIDTH = 0.05, 32, 0.1, 1540


def worker(folder: str) -> None:
    """The training script: plain PyTorch with the lines of Polytempo."""
    import torch

    import polytempo as pt
    from polytempo.tasks import digits

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pt.init()
    task = digits(0)
    train, test = task.data
    model = torch.nn.Sequential(
        torch.nn.Linear(64, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 10),
    )
    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
    order = torch.Generator().manual_seed(pt.rank())
    curve: list[tuple[float, float, int, int]] = []
    began = looked = time.perf_counter()
    steps = 0
    while not pt.should_stop():
        start = time.perf_counter()
        index = torch.randint(len(train[0]), (BATCH,), generator=order)
        optimizer.zero_grad()
        loss_of(model(train[0][index]), train[1][index]).backward()
        time.sleep(max(0.0, start + STEP_SECONDS - time.perf_counter()))
        averaged = optimizer.stats.get("averages", steps)
        optimizer.step(samples=BATCH)
        steps += 1
        now = time.perf_counter()
        if pt.rank() == 0 and optimizer.stats.get("averages", steps) != averaged and now - looked > 1.0:
            with torch.no_grad():
                loss = float(loss_of(model(test[0]), test[1]))
            curve.append((now - began, loss, steps, int(optimizer.stats["bytes_sent"])))
            looked = time.perf_counter()
            Path(folder, "curve.json").write_text(json.dumps(curve), encoding="utf-8")
            if loss <= TARGET:
                Path(folder, "reached").touch()


def measured(sync: str, seconds: float = LIMIT) -> dict[str, Any]:
    """One job on two hosts, until the target is reached or the time is up."""
    from hosts import two_hosts

    mode, _, way = sync.partition("/")
    with two_hosts(RATE) as hosts, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "polytempo"]
        script = [str(Path(__file__).resolve()), "--worker", folder]
        listen = f"{hosts.address}:7077"
        options = ["--sync", mode, "--listen", listen, "--expect", "1", "--seconds", str(seconds)]
        options += ["--via", way] if way else ["--via", "allreduce"]
        job = subprocess.Popen(
            [*hosts.inside(hosts.a), *command, "run", "-q", "-n", "1", *options, *script], env=environment, cwd=folder
        )
        while not (keys := list(Path(folder).glob("polytempo-*/workers.key"))):
            if job.poll() is not None:
                raise RuntimeError(f"{sync}: the job has ended with {job.returncode} before its start")
            time.sleep(0.1)
        join = ["worker", "--join", listen, "--key-file", str(keys[0])]
        other = subprocess.Popen([*hosts.inside(hosts.b), *command, *join, *script], env=environment, cwd=folder)
        deadline = time.monotonic() + seconds + 60
        while job.poll() is None and not Path(folder, "reached").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in (job, other):
            process.terminate()
        for process in (job, other):
            process.wait(30)
        path = Path(folder, "curve.json")
        curve = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    last = curve[-1] if curve else (float("nan"), float("nan"), 0, 0)
    reached = last[1] <= TARGET
    return {"sync": sync, "seconds": last[0] if reached else None, "steps": last[2], "sent": last[3], "curve": curve}


def slow_network(modes: tuple[str, ...] = MODES) -> None:
    """Measure, and write the table."""
    from hosts import why_not

    if reason := why_not():
        print(f"network: left out: {reason}")
        return
    runs = [measured(sync) for sync in (*WAYS, *modes)]
    bsp = min((run["seconds"] for run in runs[: len(WAYS)] if run["seconds"]), default=None)
    rows = []
    for run in runs:
        seconds = run["seconds"]
        ratio = bsp / seconds if bsp and seconds else None
        verdict = "" if run["sync"] in WAYS else "ok" if ratio is not None and ratio >= BAR else "MISSED"
        sent = f"{run['sent'] / max(run['steps'], 1) / 1e6:.2f}"
        rows.append(
            (
                run["sync"],
                f"{seconds:.1f}" if seconds else f"not in {LIMIT:.0f}",
                str(run["steps"]),
                sent,
                f"{ratio:.1f}" if ratio else "-",
                verdict,
            )
        )
    heads = ("mode", f"seconds to\nloss {TARGET:g}", "steps", "MB sent\na step", "times sooner\nthan bsp", "bar (3)")
    save(OUT, "network", [TextTable("Two hosts, 100 Mbit/s, 10 MB, 50 ms a step", heads, tuple(rows))], runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        slow_network(tuple(sys.argv[1:]) or MODES)
