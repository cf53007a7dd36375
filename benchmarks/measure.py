"""How we measure: ours, the peer and the limit interleaved in one run, medians with spread, ratios beside them."""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from polytempo.report.table import TextTable

#: One thing to measure: does the work and returns how many units of it were done.
Work = Callable[[], int]


@dataclass(frozen=True)
class Sample:
    """Microseconds a unit: median, and half the range between the best and the worst repeat, over the median."""

    median: float
    spread: float


def interleaved(works: Mapping[str, Work], repeats: int) -> dict[str, Sample]:
    """Each work in turn, `repeats` times over: what disturbs the machine disturbs all of them."""
    costs: dict[str, list[float]] = {name: [] for name in works}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=repeats * len(works))
        for _ in range(repeats):
            for name, work in works.items():
                progress.update(task, description=name)
                start = time.perf_counter()
                units = work()
                costs[name].append((time.perf_counter() - start) / units * 1e6)
                progress.advance(task)
    return {name: _sample(values) for name, values in costs.items()}


def _sample(values: list[float]) -> Sample:
    median = statistics.median(values)
    return Sample(median, (max(values) - min(values)) / 2 / median)


def in_a_fresh_process(code: str) -> tuple[float, float]:
    """Seconds and peak megabytes of some Python code, interpreter included, on one core."""
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    subprocess.run(["taskset", "-c", "0", sys.executable, "-c", code], check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return time.perf_counter() - start, max(peak, before) / 1024


def save(folder: Path, name: str, tables: list[TextTable], data: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(f"**{table.title}**\n\n{table.markdown()}" for table in tables)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1, default=asdict) + "\n", encoding="utf-8")
    print(text)


def as_text(data: object) -> str:
    """JSON for a file that people read: a list of numbers is on one line."""
    return re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(data, indent=1)) + "\n"


def fill_in(page: Path, folder: Path, names: Iterable[str]) -> None:
    """Replace what stands between "<!-- NAME -->" and "<!-- end -->" by the table of that case."""
    text = page.read_text(encoding="utf-8")
    for name in names:
        table_of = (folder / f"{name}.md").read_text(encoding="utf-8").strip()
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>\n{table_of}\n\n\2", text, flags=re.S)
    page.write_text(text, encoding="utf-8")
