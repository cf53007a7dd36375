"""The simulator, fitted on one recorded bsp run of sleep-driven workers, against live runs of other modes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.records.files import read_events, read_meta
from polytempo.report.recorded_cluster import cluster_from_record
from polytempo.simulate.run import simulate_job

MODES = ("bsp", "ssp:3", "dssp:3..15", "asp", "every:8")
SCENES: Mapping[str, list[str]] = {
    "one 2.5x slower": ["--slow", "3:2.5"],
    "stalls": ["--hiccup", "0.05:0.3"],
    "both": ["--slow", "3:2.5", "--hiccup", "0.05:0.3"],
}
STEP = 0.04


def live(folder: Path, sync: str, flags: list[str], steps: int) -> tuple[float, float]:
    """Seconds and share of waiting of a live run."""
    script = str(Path(__file__).parent / "sleeper.py")
    command = [sys.executable, "-m", "polytempo", "run", "-q", "-n", "4", "--sync", sync, *flags]
    record = ["--record", str(folder), "--overwrite"]
    subprocess.run([*command, "--steps", str(steps), *record, script, str(STEP)], check=True)
    times = [line["t"] for line in read_events(folder) if line["kind"] in ("release", "push")]
    return max(times) - min(times), read_meta(folder)["job"]["waiting"]


def predict(out: Path, steps: int) -> list[dict[str, Any]]:
    """Every mode in every scene: measured and predicted."""
    results = []
    for scene, flags in SCENES.items():
        folder = out / scene.replace(" ", "-")
        measured = {sync: live(folder / sync.replace(":", "-"), sync, flags, steps) for sync in MODES}
        cluster = cluster_from_record(read_events(folder / "bsp"), 4)
        for sync, (seconds, waiting) in measured.items():
            outcome = simulate_job(cluster, sync, steps=steps)
            results.append(
                {
                    "scene": scene,
                    "sync": sync,
                    "live_s": seconds,
                    "predicted_s": outcome.seconds,
                    "live_waiting": waiting,
                    "predicted_waiting": outcome.waiting,
                }
            )
    return results
