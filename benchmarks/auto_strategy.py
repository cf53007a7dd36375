"""`strategy="auto"` against every other choice: all factorisations of 4 x {gpipe, 1f1b} x two microbatch counts, under bsp.

Three models: a wide MLP, a deep transformer, and one huge embedding. For each, one job of 4 processes makes all strategies
side by side, and takes some steps of each in turn, again and again: what disturbs the machine disturbs all of them. Then
`auto`, from the figures that it measures in the same job, and its choice measured among the others. The bar: the median step
of its choice is within 15 % of the best. Beside each figure stands what was predicted.

    python benchmarks/auto_strategy.py [--model mlp|transformer|embedding] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import save
from polytempo.report.table import TextTable
from polytempo.units import written_seconds

OUT = Path("out/proof")
WORKERS, MICROBATCHES, SCHEDULES = 4, (4, 8), ("1f1b", "gpipe")
ROUNDS, STEPS, BAR, PATIENCE = 7, 2, 0.15, 900.0
MODELS = ("mlp", "transformer", "embedding")


@dataclass(frozen=True)
class Case:
    """A model with a batch for all replicas together."""

    model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    x: Any
    y: Any


def case(name: str) -> Case:
    """By name."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    def cross_entropy(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out.flatten(0, -2), target.flatten())

    if name == "mlp":
        width = 1024
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        mlp = nn.Sequential(*layers, nn.Linear(width, 10))
        return Case(lambda: mlp, cross_entropy, torch.randn(64, width), torch.randint(10, (64,)))
    if name == "transformer":
        width, words = 128, 64
        blocks = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(8)]
        deep = nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words))
        return Case(lambda: deep, cross_entropy, torch.randint(words, (32, 32)), torch.randint(words, (32, 32)))
    rows, width = 40_000, 64
    tail = [nn.Flatten(), nn.Linear(8 * width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    huge = nn.Sequential(nn.Embedding(rows, width), *tail)
    return Case(lambda: huge, cross_entropy, torch.randint(rows, (64, 8)), torch.randint(10, (64,)))


def grid() -> list[str]:
    """All strategies. Without stages the schedule changes nothing but what is recomputed."""
    counts = [(d, k, WORKERS // d // k) for d in (1, 2, 4) for k in (1, 2, 4) if WORKERS % (d * k) == 0]
    return [
        f"data={d},pipe={k},tensor={t},schedule={schedule},microbatches={count}"
        for d, k, t in counts
        for schedule in SCHEDULES
        for count in MICROBATCHES
    ]


# Predictions.


def _figures_of(strategies: Iterable[Any], planned: Any, session: Any, batch: int) -> Any:
    """What predictions of these strategies need, measured in a job. All ranks call it."""
    from polytempo.strategy.planning import measured_together, search_space
    from polytempo.strategy.strategy import Strategy

    pairs = []
    for strategy in strategies:
        resolved = strategy.resolved(session.size, session.job.sync)
        mesh = resolved.mesh(session.size)
        pairs.append((mesh.tensor, batch // mesh.data // (resolved.microbatches or resolved.pipe)))
    space = search_space(Strategy(), planned, session.size, batch, None, session.job.spec)
    return measured_together(planned, session, dict.fromkeys(pairs), space, planned.trained_layers())


def _predicted(strategy: Any, planned: Any, figures: Any, batch: int, stages: tuple[int, ...] | None) -> Any:
    """What is predicted of a strategy that is possible, as `distribute` would make it."""
    from polytempo.strategy.planning import given_plan, search_space
    from polytempo.strategy.prediction import predict

    space = search_space(strategy, planned, sum(map(len, figures.machine.hosts)), batch, None, strategy.spec)
    plan, problem = given_plan(strategy, planned, space, planned.trained_layers(), stages)
    assert plan is not None, problem
    return predict(plan, figures.profiles[plan.mesh.tensor, plan.microbatch], figures.machine)


# The job.


def worker(name: str, rounds: int, file: str) -> None:
    """What each process runs."""
    import copy

    import torch

    import polytempo as pt
    from polytempo.session.session import current
    from polytempo.strategy.planning import PlannedModel, choose, chosen_strategy
    from polytempo.strategy.strategy import Strategy

    pt.init()
    session, given = current(), case(name)
    make = lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)  # noqa: E731
    planned = PlannedModel(given.model(), (given.x,), given.loss, make, given.y)
    began = time.perf_counter()
    result = choose(Strategy.auto(), planned, session)
    chosen_in = time.perf_counter() - began
    strategies = {text: (Strategy.parse(text), None) for text in grid()}
    strategies["auto"] = (chosen_strategy(Strategy.auto(), result), result.best.plan.layers)
    spread, refused = {}, {}
    for text, (strategy, stages) in strategies.items():
        try:
            model = copy.deepcopy(given.model())
            spread[text] = strategy.distribute(
                model, loss=given.loss, optimizer=make, example=(given.x,), stages=stages, tensor_plan=None
            )
        except pt.UsageError as error:
            refused[text] = str(error)
    found = _figures_of([strategies[text][0] for text in spread], planned, session, len(given.x))
    times: dict[str, list[float]] = {text: [] for text in spread}
    for number in range(1 + rounds):
        for text, model in spread.items():
            part = len(given.x) // model.mesh.data
            mine = slice(model.point.data * part, (model.point.data + 1) * part)
            pt.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                model.step(given.x[mine], given.y[mine])
            pt.barrier()
            if number:
                times[text].append((time.perf_counter() - began) / STEPS)
    if pt.rank() == 0:
        told = {
            text: _predicted(strategies[text][0], planned, found, len(given.x), strategies[text][1]).seconds
            for text in spread
        }
        data = {"seconds": times, "predicted": told, "refused": refused, "chosen": str(strategies["auto"][0])}
        Path(file).write_text(json.dumps(data | {"why": result.why, "chosen_in": chosen_in}), encoding="utf-8")
    pt.shutdown()


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One job."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        script = [__file__, "--model", name, "--rounds", str(rounds), "--worker", str(file)]
        command = [sys.executable, "-m", "polytempo", "run", "-n", str(WORKERS), "-q", *script]
        subprocess.run(command, check=True, timeout=PATIENCE)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def short(text: str) -> str:
    """Without axes of one."""
    return ",".join(item for item in text.split(",") if item not in ("data=1", "pipe=1", "tensor=1"))


def report(name: str, found: dict[str, Any]) -> tuple[TextTable, float]:
    """A table, and how much longer than the best the choice of auto takes."""
    medians = {text: statistics.median(times) for text, times in found["seconds"].items()}
    others = {text: median for text, median in medians.items() if text != "auto"}
    best = min(others, key=lambda text: others[text])
    over = medians["auto"] / others[best] - 1
    rows = []
    for text in sorted(medians, key=lambda text: medians[text]):
        times, told = found["seconds"][text], found["predicted"][text]
        spread = (max(times) - min(times)) / 2 / medians[text]
        label = f"auto: {short(found['chosen'])}" if text == "auto" else short(text)
        share = f"{100 * (told / medians[text] - 1):+.0f} %"
        rows.append((label, written_seconds(medians[text]), f"±{100 * spread:.0f} %", written_seconds(told), share))
    verdict = "kept" if over <= BAR else "NOT kept"
    title = f"{name}: auto {100 * over:+.1f} % against the best, {short(best)} (bar: +{100 * BAR:.0f} %: {verdict})"
    heads = ("strategy", "measured\nmedian", "\nspread", "\npredicted", "\ndifference")
    return TextTable(title, heads, tuple(rows)), over


def auto_strategy(rounds: int = ROUNDS, models: tuple[str, ...] = MODELS) -> None:
    """All models; results in out/proof/."""
    overs = {}
    for name in models:
        began = time.monotonic()
        found = measured(name, rounds)
        table, overs[name] = report(name, found)
        save(OUT, f"auto-{name}", [table], found)
        for text, reason in found["refused"].items():
            print(f"{short(text)}: refused: {reason}")
        print(f"auto: {found['why']}\n({found['chosen_in']:.1f} s to choose, {time.monotonic() - began:.0f} s in all)\n")
    kept = all(over <= BAR for over in overs.values())
    print("auto against the best:", ", ".join(f"{name} {100 * over:+.1f} %" for name, over in overs.items()))
    print(f"the bar of {100 * BAR:.0f} % is {'kept' if kept else 'NOT kept'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.model, options.rounds, options.worker)
    else:
        auto_strategy(options.rounds, (options.model,) if options.model else MODELS)
