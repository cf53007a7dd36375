"""`polytempo simulate`: which mode on my cluster? Several modes side by side, in virtual time."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from polytempo.cli.simulate_settings import Settings, load_experiment, settle
from polytempo.errors import counted
from polytempo.records.files import RecordWriter
from polytempo.report.picture import check_picture, draw_comparison, draw_scaling, draw_training
from polytempo.report.table import TextTable, comparison, scaling_table, trained_comparison, verdict
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import Outcome, meta_of
from polytempo.simulate.run import scaling as measure_scaling
from polytempo.simulate.run import simulate_job

Option = typer.Option
ReportProgress = Callable[[float], None]

#: A training run is evaluated about so often.
EVALUATIONS = 120


def simulate(
    file: Annotated[Path | None, typer.Argument(help="YAML with cluster, sync, budget, train; flags override it.")] = None,
    like: Annotated[Path | None, Option(help="The machines of a recorded run: a directory made with --record.")] = None,
    workers: Annotated[int | None, Option("--workers", "-n", help="Number of workers (4).")] = None,
    sync: Annotated[list[str] | None, Option(help="A mode; repeat it to compare (bsp, ssp:3, dssp:3..15, asp).")] = None,
    via: Annotated[
        list[str] | None, Option(help="ps, allreduce, ring, halving-doubling, tree, hierarchical; repeatable.")
    ] = None,
    step_time: Annotated[str | None, Option(help="Time of a step, such as 0.1 or 80ms (1s).")] = None,
    spread: Annotated[float | None, Option(help="Deviation of step times over their mean (0).")] = None,
    slow: Annotated[str | None, Option(help="RANK:FACTOR,... workers that are always slower.")] = None,
    hiccup: Annotated[str | None, Option(help="PROBABILITY:SECONDS of a passing stall in each step.")] = None,
    batch: Annotated[int | None, Option(help="Samples a step (32).")] = None,
    bandwidth: Annotated[str | None, Option(help="Of each worker's link, such as 1Gb/s (no limit).")] = None,
    latency: Annotated[str | None, Option(help="Of a message, such as 0.2ms (0).")] = None,
    shared: Annotated[bool, Option("--shared", help="All share one medium of that bandwidth.")] = False,
    model: Annotated[str | None, Option(help="Bytes that travel, such as 100MB (that of the trained model, or 0).")] = None,
    servers: Annotated[int | None, Option(help="Parameter-server shards (1).")] = None,
    per_host: Annotated[int | None, Option(help="Workers a host, for hierarchical all-reduce.")] = None,
    steps: Annotated[int | None, Option(help="Budget: steps, summed over all workers (100 a worker).")] = None,
    samples: Annotated[int | None, Option(help="Budget: samples, summed over all workers.")] = None,
    seconds: Annotated[float | None, Option(help="Budget: simulated seconds.")] = None,
    steps_each: Annotated[int | None, Option(help="Budget: steps of each worker.")] = None,
    train: Annotated[str | None, Option(help="Train for real in virtual time: digits or fashion-mnist.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate of the training (the task's).")] = None,
    target: Annotated[float | None, Option(help="Accuracy whose time is compared (the task's).")] = None,
    seed: Annotated[int | None, Option(help="Of everything random (0).")] = None,
    scaling: Annotated[
        bool, Option("--scaling", help="Throughput for 1 to 64 workers: 1, 2, 4, 8 shards, and ring.")
    ] = False,
    picture: Annotated[Path | None, Option(help="Draw it, to this .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write all figures to this file.")] = None,
    record: Annotated[
        Path | None, Option(help="Write events.jsonl and meta.json of each mode below this directory.")
    ] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Compare synchronisation modes on a cluster you describe, in virtual time: the same twice."""
    flags = dict(locals()) | {"task": train}
    settings = settle(load_experiment(file), flags, like)
    if picture:
        check_picture(picture)
    if scaling:
        _scaling(settings, picture, json_file, quiet)
    elif "task" in settings.train:
        _training(settings, picture, json_file, record, quiet)
    else:
        _timing(settings, picture, json_file, record, quiet)


def _timing(settings: Settings, picture: Path | None, json_file: Path | None, record: Path | None, quiet: bool) -> None:
    outcomes: list[Outcome] = []
    for sync, via in settings.jobs:
        with _Bar(sync, quiet) as report, _recording(record, sync, via, settings) as recorder:
            outcome = simulate_job(
                settings.cluster,
                sync,
                via=via,
                seed=settings.seed,
                record=recorder.write if recorder else None,
                progress=report,
                **dict(settings.budget),
            )
            if recorder:
                recorder.close(meta_of(outcome, settings.cluster, settings.seed))
            outcomes.append(outcome)
    _print(comparison(outcomes, _title(settings)))
    _write_json(json_file, [outcome.as_dict() for outcome in outcomes])
    if picture:
        draw_comparison(outcomes, picture, _title(settings))
        _say(f"picture: {picture}")


def _training(settings: Settings, picture: Path | None, json_file: Path | None, record: Path | None, quiet: bool) -> None:
    import torch

    from polytempo.simulate.datasets import find_task
    from polytempo.simulate.virtual_training import model_bytes, train_virtually

    torch.set_num_threads(1)  # small matrices: more threads are slower, and bits could depend on their number
    task = find_task(settings.train["task"])(settings.seed)
    target = settings.train.get("target", task.target)
    optimizer = partial(torch.optim.SGD, lr=settings.train.get("lr", task.lr))
    budget: dict[str, Any] = dict(settings.budget) or {"steps": task.steps * settings.cluster.workers}
    cluster = settings.cluster
    if not cluster.model_bytes:
        cluster = replace(cluster, model_bytes=model_bytes(task.model))
    every = settings.train.get("evaluate_every")
    runs = []
    for sync, via in settings.jobs:
        with _Bar(sync, quiet) as report, _recording(record, sync, via, settings) as recorder:
            run = train_virtually(
                task.model,
                task.data,
                task.loss,
                sync=sync,
                cluster=cluster,
                via=via,
                optimizer=optimizer,
                evaluate_every=every or _evaluate_every(settings, cluster, sync, via, budget),
                seed=settings.seed,
                record=recorder.write if recorder else None,
                progress=report,
                **budget,
            )
            if recorder:
                recorder.close(meta_of(run.outcome, cluster, settings.seed))
            runs.append(run)
    title = f"{settings.train['task']}: {_title(settings)}"
    _print(trained_comparison(runs, target, title))
    _say(verdict(runs, target))
    _write_json(json_file, [run.as_dict() for run in runs])
    if picture:
        draw_training(runs, target, picture, title)
        _say(f"picture: {picture}")


def _scaling(settings: Settings, picture: Path | None, json_file: Path | None, quiet: bool) -> None:
    sync = settings.jobs[0][0]
    rings = ["ring"] if sync == "bsp" else []
    if settings.cluster.hosts and rings:
        rings.append("hierarchical")
    with _Bar(f"{sync}, 1 to 64 workers", quiet) as report:
        series = measure_scaling(settings.cluster, sync, rings=rings, seed=settings.seed, progress=report)
    title = f"{sync} over parameter-server shards{' and ring' * bool(rings)}: {_machines(settings)}"
    _print(scaling_table(series, title))
    _write_json(json_file, [one.as_dict() for one in series])
    if picture:
        draw_scaling(series, picture, title)
        _say(f"picture: {picture}")


def _evaluate_every(settings: Settings, cluster: Cluster, sync: str, via: str, budget: dict[str, Any]) -> float:
    """A timing run of the same job costs little and tells how long it will take."""
    timing = simulate_job(cluster, sync, via=via, seed=settings.seed, **budget)
    return timing.seconds / EVALUATIONS


# Words and files.


def _title(settings: Settings) -> str:
    odd = ", ".join(f"{_ranks(ranks)} {factor:g}x slower" for factor, ranks in _by_factor(settings.cluster.slow).items())
    return ", ".join(part for part in (counted(settings.cluster.workers, "worker"), odd, _machines(settings)) if part)


def _by_factor(slow: Any) -> dict[float, list[int]]:
    groups: dict[float, list[int]] = {}
    for rank, factor in sorted(slow.items()):
        groups.setdefault(factor, []).append(rank)
    return groups


def _ranks(ranks: Sequence[int]) -> str:
    return "one of them" if len(ranks) == 1 else f"{len(ranks)} of them"


def _machines(settings: Settings) -> str:
    link, bytes_ = settings.cluster.link, settings.cluster.model_bytes
    parts = []
    if link.bandwidth:
        parts.append(f"{8 * link.bandwidth / 1e9:g} Gb/s{' shared' if link.shared else ''}")
    if bytes_:
        parts.append(f"{bytes_ / 1e6:g} MB")
    if settings.cluster.servers.shards > 1:
        parts.append(f"{settings.cluster.servers.shards} shards")
    return ", ".join(parts)


def _print(table: TextTable) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 140
    _say(f"{table.text(width)}\n")


def _say(text: str) -> None:
    typer.echo(text)


def _write_json(path: Path | None, results: list[dict[str, Any]]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _recording(
    directory: Path | None, sync: str, via: str, settings: Settings
) -> AbstractContextManager[RecordWriter | None]:
    if directory is None:
        return nullcontext()
    if len(settings.jobs) == 1:
        return RecordWriter(directory)
    name = f"{sync}-{via}".replace(":", "-").replace(",", "-")
    return RecordWriter(directory / name)


class _Bar(AbstractContextManager[ReportProgress | None]):
    """A progress bar on a terminal's standard error, and nothing elsewhere."""

    def __init__(self, name: str, quiet: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._name = name
        self._shown = console.is_terminal and not quiet

    def __enter__(self) -> ReportProgress | None:
        if not self._shown:
            return None
        self._progress.start()
        task = self._progress.add_task(self._name, total=1.0)
        return lambda share: self._progress.update(task, completed=share)

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._progress.stop()
