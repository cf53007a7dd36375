"""Uneven workers, live: four processes whose steps are sleeps in proportion to their samples, some of them slower.

For each mode: the share of the workers' time in which the mode made them wait, and the samples a second over the sum of what
the workers manage alone. The bars for `bsp+balance` and `anytime:auto`: waiting under 5 %, samples a second within 10 % of
that sum. Then a worker becomes three times slower in the middle of a job: shares, or the deadline, follow within ten rounds,
and the parameters of all workers are the same at the end. Slow-downs of 1.16, 1.40 and 2.03 are those of a study of
production jobs (OSDI 2025).

    python benchmarks/uneven_live.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import save
from polytempo.report.table import TextTable

OUT = Path("out/proof")
WORKERS, BATCH = 4, 64
PER_SAMPLE = 0.002  #: seconds: an even batch takes 128 ms
SCENES: dict[str, dict[int, float]] = {
    "one worker 3x slower": {3: 3.0},
    "1.16, 1.40 and 2.03x slower": {1: 1.16, 2: 1.40, 3: 2.03},
}
MODES = ("bsp", "bsp+balance", "anytime:auto")
WAYS = ("ps", "allreduce")
WAITING, THROUGHPUT, ROUNDS = 0.05, 0.90, 10  #: the bars
CHANGED, FACTOR = 1, 3.0  #: the worker that changes its speed, and by how much


def worker(change_at: str) -> None:
    """The training script: a plain loop. `change_at`: the pass of the data from which on one worker is slower."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytempo as pt

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pt.init()
    model = torch.nn.Linear(8, 8)
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
    data = TensorDataset(torch.randn(4096, 8))
    sampler = pt.DistributedBatchSampler(data, BATCH)
    changed = False
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_sampler=sampler):
            if pt.should_stop():
                _end(model, optimizer)
                return
            if epoch >= int(change_at) and pt.rank() == CHANGED and not changed:
                changed = True
                pt.log(slower=1)
            time.sleep(len(x) * PER_SAMPLE * (FACTOR if changed else 1.0))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step(samples=len(x))


def _end(model: Any, optimizer: Any) -> None:
    import torch

    import polytempo as pt

    pt.barrier()  # all have taken their last step
    optimizer.consolidate()
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    pt.log(checksum=flat.numpy().tobytes().hex()[:512])


def job(sync: str, via: str, slow: dict[int, float], seconds: float, change_at: int = 1000) -> tuple[dict[str, Any], Any]:
    """One job; its meta.json and its events."""
    with tempfile.TemporaryDirectory(prefix="pt-") as place:
        flags = ["-n", str(WORKERS), "--sync", sync, "--via", via, "--seconds", str(seconds), "-q"]
        flags += ["--servers", "1"] if via == "ps" else []
        flags += ["--slow", ",".join(f"{rank}:{factor}" for rank, factor in slow.items())] if slow else []
        command = [sys.executable, "-m", "polytempo", "run", *flags, "--record", place, __file__, "worker", str(change_at)]
        subprocess.run(command, check=True, timeout=seconds + 90, stdout=subprocess.DEVNULL)
        events = [json.loads(line) for line in (Path(place) / "events.jsonl").read_text().splitlines()]
        return json.loads((Path(place) / "meta.json").read_text()), events


def own_rates(slow: dict[int, float]) -> float:
    """Samples a second of all workers if a step were its sleep alone: no forward, backward, loader or timer."""
    return sum(1 / (PER_SAMPLE * slow.get(rank, 1.0)) for rank in range(WORKERS))


def steady(events: list[dict[str, Any]]) -> dict[str, float]:
    """Waiting and samples a second after the first quarter of a job, in which shares and deadlines are measured; and
    the sum of the workers' own rates: their samples over the seconds that they computed."""
    last = max(line["t"] for line in events if line["kind"] == "push")
    first = min(line["t"] for line in events if line["kind"] == "release")
    begin = first + (last - first) / 4
    held: dict[int, float] = {}
    waiting, empty = 0.0, set[tuple[int, int]]()
    for line in events:
        if line["kind"] == "push" and not line["samples"]:
            empty.add((line["worker"], line["step"] + 1))  # by the communication thread: the script computes meanwhile
        if line["kind"] == "hold" and (line["worker"], line["step"]) not in empty:
            held.setdefault(line["worker"], line["t"])
        elif line["kind"] == "release" and line["worker"] in held:
            waiting += max(0.0, line["t"] - max(held.pop(line["worker"]), begin))
    pushes = [line for line in events if line["kind"] == "push" and line["t"] > begin]
    samples = sum(line["samples"] for line in pushes)
    own = 0.0
    for worker in range(WORKERS):
        mine = [line for line in pushes if line["worker"] == worker and line["samples"]]
        own += sum(line["samples"] for line in mine) / sum(line["computed"] for line in mine)
    found = {"waiting": waiting / ((last - begin) * WORKERS), "samples_per_second": samples / (last - begin)}
    return found | {"own_rates": own}


def followed(events: list[dict[str, Any]]) -> int | None:
    """Rounds from a worker's change of speed until the shares, or the deadline, have followed; None: they never did."""
    at = next(line["t"] for line in events if line["kind"] == "metric" and "slower" in line)
    rounds = 0
    before: Any = None
    for line in events:
        if line["kind"] == "apply":
            rounds += line["t"] > at
        if line["kind"] != "release":
            continue
        weight = dict(map(tuple, line.get("weights", ()))).get(CHANGED)
        now = weight if weight is not None else line.get("deadline")
        if now is None:
            continue
        if line["t"] <= at:
            before = now
        elif before and (now < 0.6 * before if weight is not None else now > 1.08 * before):
            return rounds
    return None


def uneven_live(seconds: float = 20.0) -> None:
    """All scenes, modes and ways; then the change of speed."""
    rows, results = [], []
    for scene, slow in SCENES.items():
        for sync in MODES:
            for via in WAYS:
                meta, events = job(sync, via, slow, seconds)
                found = steady(events)
                share = found["samples_per_second"] / found["own_rates"]
                of_sleeps = found["samples_per_second"] / own_rates(slow)
                good = found["waiting"] < WAITING and share >= THROUGHPUT
                verdict = "" if sync == "bsp" else "ok" if good else "MISSED"
                shown = f"{100 * found['waiting']:.1f}", f"{100 * meta['job']['waiting']:.1f}", f"{100 * share:.1f}"
                shown = *shown, f"{100 * of_sleeps:.1f}"
                rows.append((scene, sync, via, *shown, verdict))
                results.append({"scene": scene, "sync": sync, "via": via, **found, "of_own_rates": share, "ok": good})
    heads = ("scene", "mode", "over", "waiting\n(%)", "whole job\n(%)", "of own\nrates (%)", "of sleeps\nalone (%)", "bar")
    tables = [TextTable(f"Four workers whose steps are sleeps, {seconds:g} s each", heads, tuple(rows))]
    changes = []
    for sync in MODES[1:]:
        for via in WAYS:
            _, events = job(sync, via, {}, seconds, change_at=2)
            took = followed(events)
            sums = {line["checksum"] for line in events if line["kind"] == "metric" and "checksum" in line}
            good = took is not None and took <= ROUNDS and len(sums) == 1
            same = "yes" if len(sums) == 1 else "no"
            changes.append((sync, via, "never" if took is None else str(took), same, "ok" if good else "MISSED"))
            results.append({"change": sync, "via": via, "rounds": took, "replicas": len(sums)})
    heads = ("mode", "over", "rounds until\nit followed", "same parameters\non all workers", "bar")
    tables.append(TextTable(f"One worker becomes {FACTOR:g} times slower in the middle", heads, tuple(changes)))
    save(OUT, "uneven_live", tables, results)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "worker":
        worker(sys.argv[2])
    else:
        uneven_live()
