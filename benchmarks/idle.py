"""The cost of an idle server: CPU seconds of its process, by the system's clock (ticks of 10 ms)."""

from __future__ import annotations

import time

import psutil

from cases import Bar, Case, Cell, Ratio, Subject
from exchange import start_ours
from rigs import Rig

WATCHED, SETTLE = 5.0, 0.5


def server_cpu(rig: Rig, work: str, variant: str) -> float:
    """A few exchanges, a moment to settle, then the given seconds without a message."""
    rig.measure(work, variant)
    time.sleep(SETTLE)
    before = _used(rig)
    time.sleep(WATCHED)
    return round(_used(rig) - before, 2)


def _used(rig: Rig) -> float:
    times = [psutil.Process(server.pid).cpu_times() for server in rig.servers]
    return float(sum(of_server.user + of_server.system for of_server in times))


CELL = Cell(f"1 worker, 1 server, {WATCHED:g} s after exchanges of 1 MB", "1 MB", workers=1, servers=1)
USED = Ratio("CPU seconds", ("server",))

CASE = Case(
    name="idle",
    title="CPU seconds of an idle server",
    cells=(CELL,),
    subjects=(Subject("server", start_ours, meter=server_cpu),),
    ratios=(),
    bars=(Bar(USED, (CELL.name,), most=0.0),),
    unit="s",
    repeats=(3, 1),
)
