"""Elastic averaging against `bsp` in virtual time: what the centre learns, and when, at bsp's own rate and momentum.

Digits, the same samples for each mode; 4, 8 and 16 workers, all equal or one three times slower. The bar, one point for the
mean over the seeds, is that of other modes with local steps (`local_accuracy.py`). `make proof ARGS="--only elastic"`
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from rich.progress import track

from measure import save
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.virtual_training import train_virtually
from polytempo.tasks import digits

OUT = Path("out/proof")
MODES = ("bsp", "local:8", "easgd:8", "easgd:4", "easgd:2", "easgd:1")
SAMPLES, POINTS = 60_000, 1.0


def ends(sync: str, workers: int, slow: dict[int, float], seed: int) -> tuple[float, float]:
    """The accuracy in %, and the virtual seconds."""
    task = digits(seed)
    run = train_virtually(
        task.model,
        task.data,
        task.loss,
        sync=sync,
        cluster=Cluster(workers=workers, batch=32, slow=slow),
        optimizer=lambda params: torch.optim.SGD(params, lr=task.lr, momentum=task.momentum),
        samples=SAMPLES,
        evaluate_every=1e9,
        seed=seed,
    )
    return 100 * run.accuracy, run.outcome.seconds


def elastic(seeds: int) -> bool:
    """All modes on all clusters; whether the bar is met everywhere."""
    torch.set_num_threads(1)
    rows, found, met = [], {}, True
    clusters = [(workers, slow) for workers in (4, 8, 16) for slow in ({}, {workers - 1: 3.0})]
    for workers, slow in track(clusters, description="elastic"):
        runs = {sync: [ends(sync, workers, slow, seed) for seed in range(seeds)] for sync in MODES}
        base, time = (statistics.mean(values) for values in zip(*runs["bsp"], strict=True))
        name = f"{workers} workers" + (", one 3x slower" if slow else "")
        for sync, values in runs.items():
            accuracy, seconds = (statistics.mean(part) for part in zip(*values, strict=True))
            verdict = "ok" if accuracy >= base - POINTS else "MISSED"
            met &= verdict == "ok"
            rows.append((name, sync, f"{accuracy:.1f}", f"{accuracy - base:+.1f}", f"{seconds / time:.2f}", verdict))
        found[name] = runs
    heads = ("cluster", "mode", "accuracy\n(%)", "against\nbsp", "time beside\nbsp's", "bar")
    save(OUT, "elastic", [TextTable(f"Digits after {SAMPLES:,} samples, {seeds} seeds", heads, tuple(rows))], found)
    return met


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    elastic(parser.parse_args().seeds)
