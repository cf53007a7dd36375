"""A table of 20 million rows on two servers, trained by two workers, all of them processes of `polytempo run`.

Every row is pushed to once, so that all of them exist; then come some hundreds of steps with ids by Zipf's law. What is to
be shown: servers hold the rows and little else, a worker's memory does not depend on the rows of the table (the same job
with 20 thousand rows is beside it), and a step's bytes are in proportion to the ids of its batch. Then the job is resumed
from its checkpoint, and rows are what they were. As a script with --rows, this file is the worker.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from measure import save
from polytempo.report.table import TextTable

OUT = Path("out/proof")
LARGE, SMALL = 20_000_000, 20_000
DIM, CHUNK, STEPS, WORKERS, SERVERS = 16, 10_000, 300, 2, 2
DRAWS = (1_000, 10_000, 100_000)
LOOKED_AT = 1_000
#: What a row takes: its numbers, Adagrad's sum, and a byte that says that it exists.
BYTES_OF_A_ROW = 4 * DIM + 4 + 1
MEGA = 1e6


# The worker.


def work(rows: int, folder: Path, resumed: bool) -> None:
    import torch

    import polytempo as pt

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pt.init()
    dice = torch.Generator().manual_seed(pt.rank())
    model = torch.nn.Sequential(pt.tables.ServerEmbedding(rows, DIM, lr=0.05), torch.nn.Linear(DIM, 1))
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    looked_at = torch.arange(LOOKED_AT) * (rows // LOOKED_AT)

    def zipf(draws: int) -> Any:
        return (float(rows) ** torch.rand(draws, generator=dice, dtype=torch.float64)).long() - 1

    def share(number: int) -> Any:
        """The next of this worker's rows; all of them at once would be memory that depends on the table."""
        first = number * CHUNK * pt.size() + pt.rank()
        return torch.arange(first, min(first + CHUNK * pt.size(), rows), pt.size())

    def steps(count: int, batch: Callable[[int], Any]) -> dict[str, float]:
        """Each batch is fetched while the one before is pushed; what they cost."""
        before, start, unique, ids = optimizer.stats, time.perf_counter(), 0, batch(0)
        for number in range(1, count + 1):
            unique += ids.unique().numel()
            optimizer.zero_grad()
            model(ids).sub(1.0).square().mean().backward()
            if number < count:
                ids = batch(number)
                model[0].prefetch(ids)
            optimizer.step()
        after = optimizer.stats
        moved = sum(after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "rows": unique, "unique": unique / count, "bytes": moved / count}

    def traffic(draws: int) -> dict[str, float]:
        return steps(5, lambda _: zipf(draws))

    result: dict[str, Any] = {}
    if not resumed:
        result["touching"] = steps(math.ceil(rows / CHUNK / pt.size()), share)
        result["training"] = steps(STEPS, lambda _: zipf(2 * CHUNK))
        result["rss"] = psutil.Process().memory_info().rss
        result["traffic"] = [traffic(draws) for draws in DRAWS]
    pt.barrier()
    result["values"] = model[0].pull(looked_at).double().sum(1).tolist()
    pt.barrier()
    (folder / f"worker-{pt.rank()}.json").write_text(json.dumps(result))
    pt.shutdown()


# The proof.


def run_job(rows: int, folder: Path, flags: list[str], resumed: bool = False) -> dict[str, Any]:
    """One job: what its workers say, what its servers held at most, and seconds to the end of its workers and of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"worker-{rank}.json" for rank in range(WORKERS)]
    for file in files:
        file.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "polytempo",
        "run",
        "-q",
        "-n",
        str(WORKERS),
        "--servers",
        str(SERVERS),
        "--sync",
        "asp",
    ]
    script = [__file__, "--rows", str(rows), "--folder", str(folder), *(["--resumed"] if resumed else [])]
    start, trained = time.perf_counter(), 0.0
    job = subprocess.Popen([*command, *flags, *script])
    held: dict[int, int] = {}
    held_at_the_end: dict[int, int] = {}
    while job.poll() is None:
        _look(job.pid, held_at_the_end if trained else held)
        if not trained and all(file.exists() for file in files):
            trained = time.perf_counter() - start
        time.sleep(0.1)
    if job.returncode:
        raise SystemExit(f"the job with {rows:,} rows ended with status {job.returncode}")
    return {
        "workers": [json.loads(file.read_text()) for file in files],
        "servers": list(held.values()),
        "servers_saving": list(held_at_the_end.values()),
        "trained_s": trained,
        "whole_s": time.perf_counter() - start,
    }


def _look(launcher: int, held: dict[int, int]) -> None:
    """Note the memory of each server, where it is more than before."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            if any("server_process" in part for part in child.cmdline()):
                held[child.pid] = max(held.get(child.pid, 0), child.memory_info().rss)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tables() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as name:
        folder = Path(name)
        small = run_job(SMALL, folder / "small", [])
        checkpoint = folder / "checkpoint"
        large = run_job(LARGE, folder / "large", ["--checkpoint", str(checkpoint)])
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        again = run_job(LARGE, folder / "large", ["--resume", str(checkpoint)], resumed=True)
    same = all(worker["values"] == large["workers"][0]["values"] for worker in again["workers"])
    data = {"small": small, "large": large, "checkpoint_bytes": size, "resumed_s": again["whole_s"], "same_rows": same}
    for one in (small, large, again):
        for worker in one["workers"]:
            del worker["values"]
    save(OUT, "tables", [jobs_table(small, large), traffic_table(large), checkpoint_table(large, again, size, same)], data)


def jobs_table(small: dict[str, Any], large: dict[str, Any]) -> TextTable:
    rss = [mean([worker["rss"] for worker in job["workers"]]) / MEGA for job in (small, large)]
    held = [mean(job["servers"]) / MEGA for job in (small, large)]
    data = LARGE * BYTES_OF_A_ROW / SERVERS / MEGA
    lines = [
        ("memory of a worker (MB)", *(f"{value:.0f}" for value in rss), "within 10 %", _met(rss[1] <= 1.1 * rss[0])),
        (
            "memory of a server (MB)",
            *(f"{value:.0f}" for value in held),
            f"{data:.0f} MB of rows more, + 10 %",
            _met(held[1] - held[0] <= 1.1 * data),
        ),
    ]
    for phase in ("touching", "training"):
        costs = [[worker[phase] for worker in job["workers"]] for job in (small, large)]
        speeds = [mean([one["rows"] / one["seconds"] for one in of_job]) / 1e3 for of_job in costs]
        kilobytes = [mean([one["bytes"] for one in of_job]) / 1e3 for of_job in costs]
        lines.append((f"{phase}: thousand rows a second of a worker", *(f"{value:.0f}" for value in speeds), "", ""))
        lines.append((f"{phase}: KB a step of a worker", *(f"{value:.0f}" for value in kilobytes), "", ""))
    heads = ("two workers, two servers", f"{SMALL:,} rows", f"{LARGE:,} rows", "bar", "met")
    return TextTable(f"A table of rows of {DIM} numbers, row-wise Adagrad, `asp`", heads, tuple(lines))


def traffic_table(large: dict[str, Any]) -> TextTable:
    lines = []
    first = large["workers"][0]["traffic"]
    per_id = [one["bytes"] / one["unique"] for one in first]
    for draws, one, each in zip(DRAWS, first, per_id, strict=True):
        met = _met(abs(each / per_id[-1] - 1) <= 0.1)
        lines.append(
            (f"{draws:,}", f"{one['unique']:,.0f}", f"{one['bytes'] / 1e3:,.0f}", f"{each:.0f}", "within 10 %", met)
        )
    heads = ("ids of a batch", "different ones", "KB a step", "bytes for each", "bar", "met")
    return TextTable(f"Bytes of a step of a table of {LARGE:,} rows", heads, tuple(lines))


def checkpoint_table(large: dict[str, Any], again: dict[str, Any], size: int, same: bool) -> TextTable:
    lines = (
        ("size (MB)", f"{size / MEGA:,.0f}"),
        ("saved after training, to the end of the job (s)", f"{large['whole_s'] - large['trained_s']:.1f}"),
        ("a server meanwhile (MB)", f"{max(large['servers_saving'], default=0) / MEGA:,.0f}"),
        ("resumed, until rows are pulled (s)", f"{again['trained_s']:.1f}"),
        (f"{LOOKED_AT:,} rows are what they were", _met(same)),
    )
    return TextTable("Checkpoint of that table", ("", ""), lines)


def _met(yes: bool) -> str:
    return "ok" if yes else "MISSED"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="be a worker; without it, the proof")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--resumed", action="store_true")
    arguments = parser.parse_args()
    if arguments.rows:
        work(arguments.rows, arguments.folder, arguments.resumed)
    else:
        tables()
