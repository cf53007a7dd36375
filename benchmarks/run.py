"""`make bench`: what this library costs, beside its peers and the limit, all started in the same run. Results in out/bench/.

make bench                                        everything, some minutes
make bench ARGS="--quick"                         fewer repeats
make bench ARGS="--only allreduce --only bsp"     some cases
make bench ARGS="--page docs/speed.md"            then put the tables into the page that shows them

allreduce  all-reduce of plain tensors, beside gloo
late       the same where one rank comes late
link       all-reduce between two hosts, beside gloo and the bound of the cable
exchange   push and pull through a parameter server, beside torch.distributed.rpc and Ray (where it is installed)
rows       rows of a table by id, beside a dict of NumPy rows and torch.distributed.rpc
bsp        a training step of two processes, beside DistributedDataParallel
backend    DDP over our back end and over gloo
averaging  local steps and an average, beside torch's PeriodicModelAverager
alone      a training step in a job of one, beside plain PyTorch
momentum   a training step in mode asp, by where momentum is kept
pipelines  a training step of a model in two stages, beside torch.distributed.pipelining
bubble     how much of their time the stages of a pipeline wait
tensor     layers that two ranks split, beside torch's DTensor and the whole layer
mesh       a training step by three strategies on four processes, beside what torch composes for the same mesh
idle       CPU time of an idle server
events     a simulated step, beside SimPy
scale      10,000 simulated workers
training   training in virtual time, beside a plain loop
machines   what a worker's machine and its driver add to a live step
strategies bytes, memory and seconds of a strategy: predicted against counted
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import allreduce
import averaging
import bubble
import exchange
import idle
import late
import link
import mesh
import pipelines
import rows
import steps
import strategies
import tensor_parallel
from cases import Case
from measure import fill_in, save
from rigs import ENVIRONMENT
from runner import run_case
from simulated import SIMULATED
from verdicts import Judged, as_data, judge, last_line, table

OUT = Path("out/bench")
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *(allreduce.CASE, late.CASE, link.CASE, exchange.CASE, rows.CASE),
        *(steps.BSP, steps.BACKEND, averaging.CASE, steps.JOB_OF_ONE, steps.MOMENTUM, idle.CASE),
        *(pipelines.CASE, bubble.CASE, tensor_parallel.CASE, mesh.CASE),
    )
}


#: What makes its own table; the argument is --quick.
OWN_TABLES = {**SIMULATED, "strategies": lambda quick: strategies.strategies(quick=True, out=OUT)}


def bench(case: Case, quick: bool) -> list[Judged]:
    """Measure a case, write its table and its figures."""
    rows = run_case(case, quick)
    save(OUT, case.name, [table(case, rows)], {**as_data(case, rows), "quick": quick, "machine": machine()})
    return judge(case, rows)


def machine() -> dict[str, Any]:
    """What a figure is worth elsewhere."""
    from importlib.metadata import version

    return {"cores": os.cpu_count(), "system": platform.platform(), "torch": version("torch"), "load": os.getloadavg()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*CASES, *OWN_TABLES), action="append", help="this case; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--page", type=Path, help="put the tables into this page, where it asks for them")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started is ended
    wanted = arguments.only or (*CASES, *OWN_TABLES)
    judged = {name: bench(case, arguments.quick) for name, case in CASES.items() if name in wanted}
    for name, own_table in OWN_TABLES.items():
        if name in wanted:
            own_table(arguments.quick)
    if judged:
        print(last_line(judged))
    if arguments.page:
        fill_in(arguments.page, OUT, judged)


if __name__ == "__main__":
    main()
