"""Live jobs with one known trouble, or none, drawn by a seed, and what the report of their records says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SCRIPT = Path(__file__).parent / "scripts" / "straggling.py"
TROUBLES = ("none", "computing", "uneven", "stalls", "input", "network")


@dataclass
class LiveJob:
    """A job, and the finding that its record must lead to."""

    cause: str
    worker: int | None
    arguments: list[str]
    script: dict = field(default_factory=dict)


def draw_live_job(seed: int, seconds: float = 5.0) -> LiveJob:
    """3 or 4 workers with steps of 15 to 40 ms, in a mode with and without a barrier, over servers or by all-reduce."""
    dice = Random(f"a live job, {seed}")
    trouble, workers = TROUBLES[seed % len(TROUBLES)], dice.choice((3, 4))
    who = dice.randrange(workers)
    step = dice.uniform(0.015, 0.04)
    script: dict = {"seed": seed, "step": step}
    run = ["-n", str(workers), "--seconds", str(seconds), "--seed", str(seed), "--fork", "-q"]
    sync = dice.choice(("bsp", "bsp", "ssp:3", "asp"))
    run += ["--sync", sync] + (["--via", "ps"] if sync != "bsp" or dice.random() < 0.5 or trouble == "network" else [])
    whose: int | None = who
    if trouble == "computing":
        run += ["--slow", f"{who}:{dice.uniform(1.4, 3.0):.2f}"]
    elif trouble == "uneven":
        script["sigma"], whose = dice.uniform(0.3, 0.6), None
    elif trouble == "stalls" and dice.random() < 0.5:
        run, whose = [*run, "--hiccup", f"{dice.uniform(0.06, 0.1):.3f}:{dice.uniform(4, 8) * step:.3f}"], None
    elif trouble == "stalls":
        script |= {"worker": who, "stalls": dice.uniform(0.07, 0.12), "stall": dice.uniform(4, 8) * step}
    elif trouble == "input":
        script |= {"worker": who, "wait": dice.uniform(0.4, 1.5) * step}
    elif trouble == "network":  # 160 kB each way, of which what 10 ms carry is a burst, in a share of a step
        run += ["--link", f"400Mb/s,{who}:{8 * 0.32 / (dice.uniform(0.5, 1.5) * step + 0.02):.1f}Mb/s"]
    else:
        whose = None
    return LiveJob(trouble, whose, run, script)


def run_live_job(job: LiveJob, folder: Path) -> set[tuple[str, int | None]]:
    """Run it and explain its record; causes and workers that were found."""
    command = [sys.executable, "-m", "polytempo", "run", *job.arguments, "--record", str(folder), str(SCRIPT)]
    subprocess.run([*command, json.dumps(job.script)], check=True, timeout=120)
    told = folder / "stragglers.json"
    subprocess.run(
        [sys.executable, "-m", "polytempo", "explain", str(folder), "--json", str(told)],
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )
    return {(one["cause"], one["worker"]) for one in json.loads(told.read_text())["stragglers"]}
