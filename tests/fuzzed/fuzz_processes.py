"""Random scripts in real jobs: several in one, since starting processes takes longer than what they do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fuzz_plain import Outcome
from fuzz_program import Script, Setting, script_of
from fuzz_verdict import Verdict, judge

from polytempo.errors import PolytempoError

WORKER = str(Path(__file__).parent / "fuzz_worker.py")
#: Where jobs with processes run: every way there is.
SETTINGS = (
    Setting("ps", 2, 2),
    Setting("allreduce", 2),
    Setting("ps", 1, 3),
    Setting("group", 2),
)


class Unlike(PolytempoError):
    """What a rank of a real job has said of a script that did not end."""


def seeds_for(setting: Setting, count: int, first: int = 0) -> list[int]:
    """Scripts that are not expected to be refused: one that ends early in one rank may leave others waiting."""
    found: list[int] = []
    seed = first
    while len(found) < count:
        script = script_of(seed, setting)
        if not script.has("group") and not script.has("cast", to="float"):
            found.append(seed)
        seed += 1
    return found


def run_job(
    setting: Setting,
    seeds: Sequence[int],
    folder: Path,
    environment: dict[str, str] | None = None,
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
) -> list[Verdict]:
    """One job; a verdict for each seed. `popen` starts its processes."""
    about = [str(folder), ",".join(map(str, seeds)), setting.way, str(setting.workers), str(setting.servers)]
    known = {**(environment or os.environ), "OMP_NUM_THREADS": "1", "PYTHONPATH": _prepended(environment or os.environ)}
    if setting.way == "group":
        done = _by_hand([sys.executable, WORKER, *about], setting.workers, known, popen)
    else:
        way = ["--via", "allreduce"] if setting.way == "allreduce" else ["--via", "ps", "--servers", str(setting.servers)]
        options = ["-n", str(setting.workers), *way]
        done = _finished([sys.executable, "-m", "polytempo", "run", "--fork", *options, WORKER, *about], known, popen)
    if any(status for status, _ in done):
        return [Verdict("failed", f"the job has failed: {done}") for _ in seeds]
    return [judge(script_of(seed, setting), lambda script: _outcomes(script, folder)) for seed in seeds]


def _prepended(environment: Mapping[str, str]) -> str:
    """Where Python looks for modules: beside the script first, then as before."""
    before = environment.get("PYTHONPATH", "")
    return os.pathsep.join([str(Path(WORKER).parent), *([before] if before else [])])


def _finished(command: list[str], environment: dict[str, str], popen: Callable[..., Any]) -> list[tuple[int, str]]:
    process = popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    _, err = process.communicate(timeout=180)
    return [(process.returncode, err[-2000:])]


def _by_hand(
    command: list[str], workers: int, environment: dict[str, str], popen: Callable[..., Any]
) -> list[tuple[int, str]]:
    """As torchrun starts them on one host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(workers):
        place = {"RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
        variables = {**environment, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables))
    errors = [process.communicate(timeout=180)[1][-2000:] for process in ranks]
    return [(process.returncode, error) for process, error in zip(ranks, errors, strict=True)]


def _outcomes(script: Script, folder: Path) -> list[Outcome]:
    """What the ranks have written; as an error, if one says so."""
    found = []
    for rank in range(script.setting.workers):
        result = torch.load(folder / f"{script.seed}-{rank}.pt", weights_only=True)
        if "refused" in result:
            raise Unlike(result["refused"])
        if "failed" in result:
            raise RuntimeError(f"rank {rank}: {result['failed']}")
        found.append(Outcome(**result["outcome"]))
    return found
