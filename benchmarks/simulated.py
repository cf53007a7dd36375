"""The costs of deciding and simulating, beside a peer and the limit: what needs no processes of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measure import Work, in_a_fresh_process, interleaved, save
from peers import STEP, bare_heap, plain_training, simpy_ssp
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Lognormal
from polytempo.simulate.run import simulate_job

OUT = Path("out/bench")
SIZES = (100, 1_000, 10_000)
MODES = ("bsp", "bsp+backup:1", "ssp:3", "dssp:3..15", "dssp-paper:3..15", "asp", "every:8", "every:8,wait=2", "delay:8")


def simulated(sync: str, workers: int, steps: int) -> int:
    return simulate_job(Cluster(workers=workers, step_time=Lognormal(*STEP)), sync, steps_each=steps).steps


def events(quick: bool) -> None:
    """The cost of a step at 100, 1,000 and 10,000 workers, for every mode, with SimPy and a bare heap beside them."""
    total, repeats = (100_000, 1) if quick else (500_000, 3)
    works: dict[str, Work] = {}
    for name, work in _subjects().items():
        for workers in SIZES:
            works[f"{name} / {workers}"] = partial(work, workers, total // workers)
    costs = interleaved(works, repeats)
    allowed = math.log(SIZES[-1]) / math.log(SIZES[0])
    rows = []
    for name in _subjects():
        few, _, many = (costs[f"{name} / {workers}"].median for workers in SIZES)
        cells = [f"{costs[f'{name} / {n}'].median:.2f} ±{100 * costs[f'{name} / {n}'].spread:.0f} %" for n in SIZES]
        rows.append((name, *cells, f"{many / few:.2f}"))
    heads = ("microseconds a step", *(f"{n:,} workers" for n in SIZES), f"growth (log n: {allowed:.2f})")
    save(OUT, "events", [TextTable("Cost of a simulated step", heads, tuple(rows))], costs)


def _subjects() -> dict[str, Callable[[int, int], int]]:
    ours = {sync: partial(simulated, sync) for sync in MODES}
    return {**ours, "SimPy, ssp:3 by hand": partial(simpy_ssp, bound=3), "limit: a bare heap": bare_heap}


def scale(quick: bool) -> None:
    """10,000 workers x 1,000 steps under ssp:3, recording off, in a process of its own on one core."""
    steps = 50 if quick else 1_000
    code = (
        "from polytempo.simulate.cluster import Cluster; from polytempo.simulate.cluster import Lognormal\n"
        "from polytempo.simulate.run import simulate_job\n"
        f"simulate_job(Cluster(workers=10_000, step_time=Lognormal{STEP}), 'ssp:3', steps_each={steps})"
    )
    seconds, megabytes = in_a_fresh_process(code)
    row = (f"10,000 workers x {steps:,} steps, ssp:3", f"{seconds:.1f} s", f"{megabytes:.0f} MB", "90 s, 1,000 MB")
    table = TextTable("Scale", ("run", "time", "peak memory", "bar (1,000 steps)"), (row,))
    save(OUT, "scale", [table], {"steps": steps, "seconds": seconds, "megabytes": megabytes})


def training(quick: bool) -> None:
    """A gradient in virtual time against a gradient in a plain loop."""
    import torch

    from polytempo.simulate.virtual_training import train_virtually
    from polytempo.tasks import digits

    torch.set_num_threads(1)
    task, steps = digits(), 500 if quick else 4_000

    def virtual(sync: str) -> int:
        cluster = Cluster(workers=4, slow={3: 3.0})
        run = train_virtually(task.model, task.data, task.loss, sync=sync, cluster=cluster, evaluate_every=1e9, steps=steps)
        return run.outcome.steps

    works: dict[str, Work] = {"limit: a plain loop": partial(plain_training, steps)}
    works |= {sync: partial(virtual, sync) for sync in ("bsp", "ssp:3", "asp")}
    plain_training(1)  # the first step of an optimizer imports much of torch
    costs = interleaved(works, 1 if quick else 5)
    limit = costs["limit: a plain loop"].median
    rows = tuple(
        (name, f"{cost.median:.0f} ±{100 * cost.spread:.0f} %", f"{cost.median / limit:.2f}") for name, cost in costs.items()
    )
    save(OUT, "training", [TextTable("Training on digits", ("microseconds a gradient", "", "over the limit"), rows)], costs)


def machines(quick: bool) -> None:
    """What a worker's machine and its driver add to a live step, of whose orders nothing comes."""
    from polytempo.protocol.push import no_steps
    from polytempo.sync.machine import PushStep
    from polytempo.sync.spec import parse_spec
    from polytempo.train.driver import LivePerforms, MachineUpdate, StepRequest

    class Released:
        """A reducer whose answers are there at once."""

        step, client_state = 0, SimpleNamespace(released=0)
        directive = None
        session = SimpleNamespace(rank=0)

        def finish(self) -> None:
            """Nothing to wait for."""

    class Nothing(MachineUpdate):
        def performs(self) -> LivePerforms:
            return {PushStep: self._push}

        def _push(self, order: PushStep) -> None:
            self._reducer.step += 1
            self._reducer.client_state.released += 1

    def stepped(sync: str, steps: int) -> int:
        update: Any = Nothing(parse_spec(sync).machine(0), Released())  # type: ignore[arg-type]
        update.start()
        request = StepRequest(no_steps(), skip=False, agreed=False)
        for _ in range(steps):
            update.step(request)
        return steps

    works: dict[str, Work] = {sync: partial(stepped, sync, 20_000 if quick else 200_000) for sync in ("bsp", "ssp:3", "asp")}
    costs = interleaved(works, 3 if quick else 7)
    rows = tuple((sync, f"{cost.median:.2f} ±{100 * cost.spread:.0f} %", "5") for sync, cost in costs.items())
    save(
        OUT,
        "machines",
        [TextTable("A machine and its driver in a live step", ("microseconds", "a step", "bar"), rows)],
        costs,
    )


#: Each makes its own table; the argument is --quick.
SIMULATED: dict[str, Callable[[bool], None]] = {
    "events": events,
    "scale": scale,
    "training": training,
    "machines": machines,
}
