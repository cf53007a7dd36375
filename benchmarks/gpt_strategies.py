"""The GPT of examples/gpt.py under every strategy: its validation loss against one process with the same samples.

Every run makes the same number of steps of the same batches of the whole job. Under a barrier it is the same training, to
rounding. Without one (ssp, asp), and with blocks of local steps, a step of the job is D steps of its replicas on a D-th of
the samples each. The learning rate is the same, but for local steps of four replicas, whose mean moves less than one of
them: half as much again. The bars: each reaches the stated loss, and none is above one process by 2 %.

    python benchmarks/gpt_strategies.py [--steps 300] [--small]
    python benchmarks/proof.py --only gpt
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import track

from measure import save
from polytempo.report.table import TextTable

OUT = Path("out/proof")
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
ALONE = "one process"
BARRIER = ("data=4", "data=2,pipe=2", "pipe=4", "tensor=2", "pipe=2,tensor=2", "data=2,tensor=2")
OTHERS = ("data=2,pipe=2,sync=ssp:1", "data=2,pipe=2,sync=asp", "data=2,pipe=2,sync=local:4", "data=4,sync=local:4")
#: Nats a character that every strategy reaches in STEPS steps, and how much more than one process it may have.
TARGET, STEPS, OVER = 2.2, 300, 0.02
#: A model for a busy machine: the second bar only.
SMALL = ("--width", "32", "--context", "32", "--megabytes", "1")
#: Factors of the learning rate; 1 for all others.
RATES = {"data=4,sync=local:4": 1.5}


def validation_loss(strategy: str, steps: int, *arguments: str) -> tuple[float, float]:
    """The validation loss at the end of a run, and its seconds."""
    command = [sys.executable, "-m", "polytempo", "run", "-q", "--strategy", strategy]
    command = [sys.executable] if strategy == ALONE else command
    given = [*command, str(EXAMPLE), "--steps", str(steps), "--lr", str(2e-3 * RATES.get(strategy, 1.0)), *arguments]
    began = time.monotonic()
    done = subprocess.run(given, capture_output=True, text=True, errors="replace", check=False, timeout=3600)
    found = re.search(r"validation loss ([\d.]+) after (\d+) steps", done.stdout)
    if done.returncode or found is None or int(found[2]) != steps:
        raise SystemExit(f"{' '.join(given)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[1]), time.monotonic() - began


def gpt_strategies(steps: int = STEPS, small: bool = False) -> bool:
    """Print the table and write it; whether all bars hold."""
    results = []
    for strategy in track((ALONE, *BARRIER, *OTHERS), description="gpt"):
        loss, seconds = validation_loss(strategy, steps, *(SMALL if small else ()))
        over = loss / results[0]["loss"] - 1 if results else 0.0
        good = over <= OVER and (loss <= TARGET or steps < STEPS or small)
        results.append({"strategy": strategy, "loss": loss, "over": over, "seconds": seconds, "good": good})
    rows = []
    for r in results:
        figures = f"{r['loss']:.4f}", f"{100 * r['over']:+.2f} %", f"{r['seconds']:.0f}"
        rows.append((r["strategy"], *figures, "ok" if r["good"] else "MISSED"))
    heads = ("strategy", "validation loss", "above one process", "seconds", f"bar: {TARGET} and {100 * OVER:.0f} %")
    save(
        OUT,
        "gpt",
        [TextTable(f"examples/gpt.py{', small' * small}, {steps} steps of 32 windows", heads, tuple(rows))],
        results,
    )
    return all(r["good"] for r in results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--small", action="store_true", help="a smaller model, for a busy machine")
    given = parser.parse_args()
    sys.exit(0 if gpt_strategies(given.steps, given.small) else 1)
