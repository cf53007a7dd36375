"""ASU-P against bsp on a GPU when machines differ: four workers, one of them three times slower, Fashion-MNIST, three seeds.

    python benchmarks/gpu_asup.py --data FOLDER            under two and a half minutes; results in out/bench-gpu/
    python benchmarks/gpu_asup.py --data FOLDER --write    then put the table into docs/gpu.md

FOLDER has the four files of Fashion-MNIST (Debian's package dataset-fashion-mnist: /usr/share/datasets/fashion-mnist). Both
modes have the same rule and learning rate. `asup` runs twice: with as many samples as `bsp`, and with twice as many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import fill_in, save
from polytempo.report.table import TextTable

SCRIPT = str(Path(__file__).parent / "gpu_asup_script.py")
OUT, PAGE, NAME = Path("out/bench-gpu"), Path(__file__).parents[1] / "docs" / "gpu.md", "asup"
#: Mode, and its samples over those of bsp.
MODES = (("bsp", 1), ("asup", 1), ("asup", 2))
LIMIT = 120.0


def named(sync: str, times: int) -> str:
    return sync if times == 1 else f"{sync}, {times} x the samples"


def one(sync: str, times: int, seed: int, given: argparse.Namespace) -> dict[str, float]:
    """Seconds and accuracy of a job."""
    flags = ["-q", "-n", "4", "--slow", "3:3", "--sync", sync, "--via", "ps", "--samples", str(times * given.samples)]
    arguments = ["--data", str(given.data), "--seed", str(seed), "--device", given.device]
    command = [sys.executable, "-m", "polytempo", "run", *flags, SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    lines = [line.partition("result ")[2] for line in done.stdout.splitlines() if "result " in line]
    if done.returncode or not lines:
        raise SystemExit(f"{sync}, seed {seed}: the job failed: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(lines[0])
    print(
        f"{named(sync, times)}, seed {seed}: {result['seconds']:.1f} s, accuracy {100 * result['accuracy']:.2f} %",
        flush=True,
    )
    return result


def table(results: dict[str, list[dict[str, float]]], machine: str, samples: int) -> TextTable:
    synchronous = statistics.fmean(run["seconds"] for run in results[named(*MODES[0])])
    lines = []
    for sync, runs in results.items():
        seconds, accuracies = [run["seconds"] for run in runs], [100 * run["accuracy"] for run in runs]
        lines.append(
            (
                sync,
                f"{statistics.fmean(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})",
                f"{statistics.fmean(seconds) / synchronous:.2f}",
                f"{statistics.fmean(accuracies):.2f} % ({min(accuracies):.2f} to {max(accuracies):.2f})",
            )
        )
    title = (
        f"4 workers, one 3x slower, {samples} samples of Fashion-MNIST, {len(results[named(*MODES[0])])} seeds, on {machine}"
    )
    return TextTable(title, ("", "time", "of bsp's", "test accuracy"), tuple(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the four files of Fashion-MNIST")
    parser.add_argument("--samples", type=int, default=48_000, help="of a job under bsp")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    given = parser.parse_args()
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu_asup: skipped: there is no CUDA device here (torch.cuda.is_available() is False)")
        return
    results: dict[str, list[dict[str, float]]] = {named(*mode): [] for mode in MODES}
    for seed in range(given.seeds):
        for mode in MODES:
            results[named(*mode)].append(one(*mode, seed, given))
    machine = f"one {torch.cuda.get_device_name(0)}" if given.device == "cuda" else "the CPU"
    data: dict[str, Any] = {"samples": given.samples, "results": results, "machine": machine}
    save(OUT, NAME, [table(results, machine, given.samples)], data)
    if given.write:
        fill_in(PAGE, OUT, [NAME])


if __name__ == "__main__":
    main()
