"""`polytempo simulate`: compare synchronisation modes on a described cluster, in virtual time.

A YAML file describes the experiment; options override it. With `--train` a model is really trained in virtual time, with
`--scaling` the number of workers varies, else only times are simulated.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
import yaml

from polytempo.cli.options import Option, progress_bar
from polytempo.errors import ClusterError, UsageError, counted
from polytempo.records.files import RecordWriter, read_events, read_meta
from polytempo.report.picture import check_picture, draw_comparison, draw_scaling, draw_training
from polytempo.report.table import TextTable, comparison, scaling_table, trained_comparison, verdict
from polytempo.simulate.cluster import Cluster, Hiccup, Hosts, Link
from polytempo.simulate.description import Experiment, cluster_from_record, experiment_from
from polytempo.simulate.durations import Constant, Lognormal, as_duration
from polytempo.simulate.outcome import Budget, Outcome, meta_of
from polytempo.simulate.run import resolve_via, simulate_job
from polytempo.simulate.run import scaling as measure_scaling
from polytempo.summation import in_order
from polytempo.sync.spec import parse_spec
from polytempo.units import parse_factors, parse_hiccup, parse_rate, parse_seconds, parse_size

ReportProgress = Callable[[float], None]

EVALUATIONS = 120  #: of a training run, about
DEFAULT_MODES = ("bsp", "ssp:3", "dssp:3..15", "asp")
LIMITS = ("seconds", "steps", "samples", "steps_each")
DEFAULT_STEPS = 100  # of each worker, in runs without training
SCALING_STEPS = 10  # of each worker, at least, for each number of workers


@dataclass(frozen=True)
class Settings:
    """Everything a comparison needs, checked."""

    cluster: Cluster
    jobs: tuple[tuple[str, str], ...]  #: modes, each with a way for its bytes to travel
    budget: Mapping[str, Any]
    train: Mapping[str, Any]
    seed: int


def simulate(
    file: Annotated[Path | None, typer.Argument(help="YAML with cluster, sync, budget, train; flags override it.")] = None,
    like: Annotated[
        Path | None, Option(help="Simulate the machines of a recorded run: a directory written with --record.")
    ] = None,
    trace: Annotated[
        Path | None,
        Option(help="Re-simulate a recorded job and predict modes on it: .npz of operations, .csv or .jsonl of step times."),
    ] = None,
    workers: Annotated[int | None, Option("--workers", "-n", help="Number of workers (4).")] = None,
    sync: Annotated[list[str] | None, Option(help="A mode; repeatable (bsp, ssp:3, dssp:3..15, asp).")] = None,
    via: Annotated[
        list[str] | None, Option(help="ps, allreduce, ring, halving-doubling, tree, hierarchical, peers; repeatable.")
    ] = None,
    step_time: Annotated[str | None, Option(help="Time of a step, such as 0.1 or 80ms (1s).")] = None,
    spread: Annotated[float | None, Option(help="Standard deviation of step times over their mean (0).")] = None,
    slow: Annotated[str | None, Option(help="RANK:FACTOR,... slow these workers down by the factor.")] = None,
    hiccup: Annotated[str | None, Option(help="PROBABILITY:SECONDS of a passing stall in each step.")] = None,
    batch: Annotated[int | None, Option(help="Samples of a step (32).")] = None,
    bandwidth: Annotated[str | None, Option(help="Bandwidth of each worker's link, such as 1Gb/s (no limit).")] = None,
    latency: Annotated[str | None, Option(help="Latency of a message, such as 0.2ms (0).")] = None,
    shared: Annotated[bool, Option("--shared", help="All links share one medium of that bandwidth.")] = False,
    model: Annotated[str | None, Option(help="Size of the model, such as 100MB (that of the trained model, or 0).")] = None,
    servers: Annotated[int | None, Option(help="Parameter-server shards (1).")] = None,
    per_host: Annotated[int | None, Option(help="Workers on each host, for hierarchical all-reduce.")] = None,
    steps: Annotated[int | None, Option(help="Budget: steps, summed over all workers (100 for each).")] = None,
    samples: Annotated[int | None, Option(help="Budget: samples, summed over all workers.")] = None,
    seconds: Annotated[float | None, Option(help="Budget: simulated seconds.")] = None,
    steps_each: Annotated[int | None, Option(help="Budget: steps of each worker.")] = None,
    train: Annotated[str | None, Option(help="Train for real in virtual time: digits or fashion-mnist.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate of the training (the task's).")] = None,
    target: Annotated[float | None, Option(help="Compare the time until this accuracy is reached (the task's).")] = None,
    seed: Annotated[int | None, Option(help="Seed of all random draws (0).")] = None,
    scaling: Annotated[
        bool, Option("--scaling", help="Throughput for 1 to 64 workers: 1, 2, 4, 8 shards, and ring.")
    ] = False,
    picture: Annotated[Path | None, Option(help="Draw a picture: .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write all figures to this file.")] = None,
    record: Annotated[
        Path | None, Option(help="Write events.jsonl and meta.json of each mode under this directory.")
    ] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Compare synchronisation modes on a cluster you describe, in virtual time: the same twice."""
    flags = dict(locals()) | {"task": train}
    if trace:
        _trace(trace, flags)
        return
    settings = settle(load_experiment(file), flags, like)
    if picture:
        check_picture(picture)
    if scaling:
        _scaling(settings, picture, json_file, quiet)
    elif "task" in settings.train:
        _training(settings, picture, json_file, record, quiet)
    else:
        _timing(settings, picture, json_file, record, quiet)


def _trace(path: Path, flags: Mapping[str, Any]) -> None:
    from polytempo.cli.trace import analyse_file, trace_table  # numpy
    from polytempo.traces.analysis import verdict as trace_verdict

    given = {name for name, value in flags.items() if not (value is None or value is False or value == [])}
    if others := sorted(given - {"trace", "sync", "seed", "json_file", "quiet"}):
        option = others[0].replace("_", "-")
        raise UsageError(
            f"--trace takes --sync, --seed, --json and --quiet only, got {option}; leave it out: the trace is the job"
        )
    with _bar(path.name, flags["quiet"]) as report:
        found = analyse_file(path, flags["sync"] or (), flags["seed"] or 0, report)
    _print(trace_table(found, path.name))
    for line in trace_verdict(found):
        _say(line)
    _write_json(flags["json_file"], found.as_dict())


def _timing(settings: Settings, picture: Path | None, json_file: Path | None, record: Path | None, quiet: bool) -> None:
    outcomes: list[Outcome] = []
    for sync, via in settings.jobs:
        with _bar(sync, quiet) as report, _recording(record, sync, via, settings) as recorder:
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
        with _bar(sync, quiet) as report, _recording(record, sync, via, settings) as recorder:
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
    spec = parse_spec(sync)
    rings = ["ring"] if spec.mode.barrier and spec.mode.all_reduce else ["peers"] if spec.gossip else []
    if settings.cluster.hosts and "ring" in rings:
        rings.append("hierarchical")
    shards = () if spec.gossip else (1, 2, 4, 8)
    block = spec.averaging.period if spec.averaging else 1
    steps = -(-SCALING_STEPS // block) * block  # whole blocks
    with _bar(f"{sync}, 1 to 64 workers", quiet) as report:
        series = measure_scaling(
            settings.cluster, sync, shards=shards, rings=rings, steps_each=steps, seed=settings.seed, progress=report
        )
    way = "among peers" if spec.gossip else f"over parameter-server shards{' and ring' * bool(rings)}"
    title = f"{sync} {way}: {_machines(settings)}"
    _print(scaling_table(series, title))
    _write_json(json_file, [one.as_dict() for one in series])
    if picture:
        draw_scaling(series, picture, title)
        _say(f"picture: {picture}")


def _evaluate_every(settings: Settings, cluster: Cluster, sync: str, via: str, budget: dict[str, Any]) -> float:
    """A timing run of the same job costs little and tells how long it will take."""
    timing = simulate_job(cluster, sync, via=via, seed=settings.seed, **budget)
    return timing.seconds / EVALUATIONS


# The settings: the file, overridden by the flags.


def load_experiment(path: Path | None) -> Experiment:
    """The experiment a YAML file describes; an empty one without a file."""
    if path is None:
        return Experiment()
    try:
        return experiment_from(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def settle(experiment: Experiment, flags: Mapping[str, Any], like: Path | None = None) -> Settings:
    """Flags win over the file, the file over the defaults. Settings that cannot work are refused here."""
    given = {name: value for name, value in flags.items() if not (value is None or value is False or value == [])}
    cluster = _cluster(cluster_like(like) if like else experiment.cluster, given)
    budget: dict[str, Any] = {name: given[name] for name in LIMITS if name in given}
    train = dict(experiment.train) | {name: given[name] for name in ("task", "lr", "target") if name in given}
    sync = given.get("sync") or experiment.sync or DEFAULT_MODES
    jobs = tuple(_jobs(sync, given.get("via") or experiment.via, cluster))
    budget = budget or dict(experiment.budget)
    if not budget and "task" not in train:
        budget = {"steps": DEFAULT_STEPS * cluster.workers}
    if budget:
        Budget(**budget)
    return Settings(cluster, jobs, budget, train, given.get("seed", experiment.seed or 0))


def cluster_like(directory: Path) -> Cluster:
    """The cluster of a recorded run."""
    return cluster_from_record(read_events(directory), read_meta(directory)["size"])


def mean_step_time(cluster: Cluster) -> float:
    """Seconds of a step on a worker that is not slow, on average."""
    draws = as_duration(cluster.step_time).draw(Random(0), 0, 64)
    return in_order(draws) / len(draws)


def _jobs(sync: Iterable[str], vias: Sequence[str], cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Each mode over the server; where bytes take time, those that need no server over all-reduce too, unless told. Modes
    that send models have a way of their own."""
    for text in sync:
        spec = parse_spec(text)
        spec.policy(cluster.workers)
        choices = list(vias)
        if not choices and (spec.averaging is not None or spec.gossip is not None):
            choices = ["auto"]
        if not choices:
            choices = ["ps"]
            if spec.mode.barrier and spec.mode.all_reduce and cluster.workers > 1 and cluster.link != Link():
                choices.append("allreduce")
        for via in choices:
            yield text, resolve_via(spec, via, cluster)


def _cluster(cluster: Cluster, given: Mapping[str, Any]) -> Cluster:
    changes: dict[str, Any] = {name: given[name] for name in ("workers", "batch") if name in given}
    if "step_time" in given or "spread" in given:
        seconds = parse_seconds(given["step_time"], "--step-time") if "step_time" in given else mean_step_time(cluster)
        changes["step_time"] = Lognormal(seconds, given["spread"]) if "spread" in given else Constant(seconds)
    if "slow" in given:
        changes["slow"] = parse_factors(given["slow"])
    if "hiccup" in given:
        changes["hiccup"] = Hiccup(*parse_hiccup(given["hiccup"]))
    if "model" in given:
        changes["model_bytes"] = parse_size(given["model"], "--model")
    if "servers" in given:
        changes["servers"] = replace(cluster.servers, shards=given["servers"])
    if "per_host" in given:
        changes["hosts"] = replace(cluster.hosts, size=given["per_host"]) if cluster.hosts else Hosts(given["per_host"])
    link = {name: given[name] for name in ("shared",) if name in given}
    if "bandwidth" in given:
        link["bandwidth"] = parse_rate(given["bandwidth"], "--bandwidth")
    if "latency" in given:
        link["latency"] = parse_seconds(given["latency"], "--latency")
    return replace(cluster, **changes, link=replace(cluster.link, **link))


# Output.


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


def _write_json(path: Path | None, results: list[dict[str, Any]] | dict[str, Any]) -> None:
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


@contextmanager
def _bar(name: str, quiet: bool) -> Iterator[ReportProgress | None]:
    """A progress bar on a terminal's standard error, and nothing elsewhere."""
    with progress_bar(quiet) as bar:
        task = bar.add_task(name, total=1.0)
        yield None if bar.disable else lambda share: bar.update(task, completed=share)
