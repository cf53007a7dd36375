"""How much of their time stages wait: measured, beside (K - 1) / (M + K - 1), with stages that sleep instead of computing.

Each of K stages sleeps 17 ms in a forward and 33 ms in a backward; what passes between them is tiny. So nothing but the
schedule and our runtime counts, however many cores there are. The *bubble* of a step is the share of all ranks' time, from
the first action of any to the end of the last, in which they do nothing, by the log of every rank (a host has one clock).
Without flushes there is no end of a step: counted is from the first backward of the first stage to its last forward.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cases import Bar, Case, Cell, Ratio, Subject
from jobs import start_job
from rigs import Rig, Round, answer

STAGES, WIDTH = 4, 4
FORWARD, BACKWARD = 0.017, 0.033
#: Schedule and microbatches of a work; without flushes, minibatches that go through.
WORKS = {f"{name}, {count} microbatches": (name, count) for name in ("gpipe", "1f1b") for count in (4, 8, 32)}
STEADY = "pipedream, steady state"
WORKS[STEADY] = ("pipedream", 40)
SPECS = {"gpipe": "gpipe,recompute=0", "1f1b": "1f1b", "pipedream": "pipedream"}
#: Start, end, and the word for the action.
Span = tuple[float, float, str]


def sleeping() -> Any:
    """A model of layers that sleep, forward and backward."""
    import time

    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            time.sleep(FORWARD)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            time.sleep(BACKWARD)
            return gradient

    class Sleeper(nn.Linear):
        def forward(self, x: Any) -> Any:
            return Sleep.apply(super().forward(x))

    return nn.Sequential(*[Sleeper(WIDTH, WIDTH) for _ in range(STAGES)])


def worker(pipe: Connection, rank: int, job_file: str, directory: str) -> None:
    """After each round its log is in a file."""
    import torch

    import polytempo as pt

    def make(work: str, variant: str) -> Round:
        name, count = WORKS[work]
        flushes = work != STEADY
        options = {"microbatches": count} if flushes else {}
        made = pt.Pipeline(
            sleeping(),
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
            stages=[1] * STAGES,
            schedule=SPECS[name],
            **options,
        )
        batch = torch.ones(count if flushes else 1, WIDTH)

        def one_round() -> None:
            before = len(made.log)
            for _ in range(1 if flushes else count):
                made.step(batch, batch)
            made.flush()
            spans = [(done.start, done.end, str(done.action)) for done in made.log[before:]]
            (Path(directory) / f"log-{rank}.json").write_text(json.dumps(spans), encoding="utf-8")

        return one_round

    pt.init(job_file, rank)
    answer(pipe, make)
    pt.shutdown()


def start(rig: Rig, workers: int, servers: int) -> None:
    job_file = start_job(rig, workers, servers, "bsp", via="allreduce")
    rig.add_workers(worker, workers, job_file, str(rig.directory))


def measured(rig: Rig, work: str, variant: str) -> float:
    """The bubble of one more round."""
    rig.measure(work, variant)
    logs = [json.loads((rig.directory / f"log-{rank}.json").read_text(encoding="utf-8")) for rank in range(STAGES)]
    return bubble(logs, *(steady(logs[0]) if work == STEADY else whole(logs)))


def whole(logs: list[list[Span]]) -> tuple[float, float]:
    return min(span[0] for log in logs for span in log), max(span[1] for log in logs for span in log)


def steady(first: list[Span]) -> tuple[float, float]:
    """While the first stage has both forwards and backwards."""
    return next(span[0] for span in first if span[2][0] == "B"), next(
        span[0] for span in reversed(first) if span[2][0] == "F"
    )


def bubble(logs: list[list[Span]], start: float, end: float) -> float:
    """The share of this time in which a rank does nothing, over all ranks."""
    busy = sum(max(0.0, min(until, end) - max(since, start)) for log in logs for since, until, _ in log)
    return 1 - busy / (len(logs) * (end - start))


def formula(work: str) -> float:
    """Nothing is expected without flushes."""
    return 0.0 if work == STEADY else (STAGES - 1) / (WORKS[work][1] + STAGES - 1)


def _bars() -> list[Bar]:
    """Within two points; without flushes less than 5 %."""
    figure = Ratio("measured", ("measured",))
    bars = [Bar(figure, (STEADY,), most=0.05)]
    for work in WORKS:
        if work != STEADY:
            low, high = round(formula(work) - 0.02, 3), round(formula(work) + 0.02, 3)
            bars += [Bar(figure, (work,), least=low), Bar(figure, (work,), most=high)]
    return bars


CASE = Case(
    name="bubble",
    title=f"The bubble of {STAGES} stages that sleep {1000 * (FORWARD + BACKWARD):g} ms a microbatch, of their time",
    cells=tuple(Cell(work, work, workers=STAGES, servers=1) for work in WORKS),
    subjects=(
        Subject("measured", start, meter=measured),
        Subject("(K-1)/(M+K-1)", start, meter=lambda rig, work, variant: formula(work)),
    ),
    ratios=(),
    bars=tuple(_bars()),
    unit="%",
    repeats=(5, 1),
)
