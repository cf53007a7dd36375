"""`polytempo simulate`: compare synchronisation modes on a described cluster, in virtual time.

A YAML file describes the experiment; options override it. With `--train` a model is really trained in virtual time, with
`--scaling` the number of workers varies, else only times are simulated. What was not given is said with its value, and the
last line says which mode to use; `polytempo advise` (`advise.py`) is the same with less around it.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from polytempo.cli.options import (
    BudgetOption,
    ClusterOption,
    Modes,
    OutputOption,
    Overwrite,
    SyncOption,
    TrainingOption,
    complete_mode,
    progress_bar,
    write_json,
)
from polytempo.errors import ClusterError, UsageError, counted
from polytempo.records.files import RecordWriter, check_no_record, read_events, read_meta, refused_modes
from polytempo.report.advice import (
    CAVEAT,
    Advice,
    Assumption,
    advise,
    assumption_lines,
    assumptions_of,
    default_modes,
    use_line,
)
from polytempo.report.picture import check_picture, draw_comparison, draw_scaling, draw_training
from polytempo.report.recorded_cluster import cluster_from_record
from polytempo.report.scaling import scaling as measure_scaling
from polytempo.report.table import TextTable, comparison, scaling_table, short_of_bsp, trained_comparison, verdict
from polytempo.simulate.cluster import Cluster, Constant, Hiccup, Hosts, Link, Lognormal
from polytempo.simulate.description import Experiment, experiment_from
from polytempo.simulate.outcome import Budget, Outcome, meta_of
from polytempo.simulate.run import mean_step_time, resolve_via, simulate_job
from polytempo.sync.spec import Spec, parse_spec
from polytempo.units import (
    parse_factors,
    parse_hiccup,
    parse_rate,
    parse_seconds,
    parse_size,
    written_bytes,
    written_rate,
    written_seconds,
)

if TYPE_CHECKING:
    from polytempo.traces.analysis import TraceAnalysis

EVALUATIONS = 120  #: of a training run, about
LIMITS = ("seconds", "steps", "samples", "steps_each")
DEFAULT_STEPS = 100  # of each worker, in runs without training
BLOCKS, FEW = 8, 32  # blocks of local steps there, where there are few workers
SCALING_STEPS = 10  # of each worker, at least, for each number of workers


# The options that describe a cluster, of this command and of `polytempo advise`.
ClusterSizeOption = Annotated[int | None, ClusterOption("--workers", "-n", help="Number of workers (4).")]
StepTimeOption = Annotated[str | None, ClusterOption(help="Time of a step, such as 0.1 or 80ms (1s).")]
FixedTimeOption = Annotated[
    str | None, ClusterOption(help="Of that, what a step or micro-batch takes whatever its samples, such as 20ms (0).")
]
SpreadOption = Annotated[float | None, ClusterOption(help="Standard deviation of step times over their mean (0).")]
SlowWorkersOption = Annotated[str | None, ClusterOption(help="RANK:FACTOR,... slow these workers down by the factor.")]
StallsOption = Annotated[str | None, ClusterOption("--hiccup", help="PROBABILITY:SECONDS of a passing stall in each step.")]
BatchOption = Annotated[int | None, ClusterOption(help="Samples of a step (32).")]
BandwidthOption = Annotated[str | None, ClusterOption(help="Bandwidth of each worker's link, such as 1Gb/s (no limit).")]
LatencyOption = Annotated[str | None, ClusterOption(help="Latency of a message, such as 0.2ms (0).")]
ModelSizeOption = Annotated[
    str | None, ClusterOption("--model", help="Size of the model, such as 100MB (that of the trained one, or 0).")
]
ShardsOption = Annotated[int | None, ClusterOption("--servers", help="Parameter-server shards (1).")]
RandomSeedOption = Annotated[int | None, ClusterOption(help="Seed of all random draws (0).")]


@dataclass(frozen=True)
class Settings:
    """Everything a comparison needs, checked."""

    cluster: Cluster
    jobs: tuple[tuple[Spec, str], ...]  #: modes, each with a way for its bytes to travel
    budget: Mapping[str, Any]
    train: Mapping[str, Any]
    seed: int
    sources: Mapping[str, str]  #: of each figure of the cluster, where it came from (`report/advice.py`)
    note: str = ""  #: what a record could not tell
    chosen: bool = True  #: did the user choose the modes?


def simulate(
    file: Annotated[Path | None, typer.Argument(help="YAML with cluster, sync, budget, train; flags override it.")] = None,
    like: Annotated[
        Path | None, ClusterOption(help="Simulate the machines of a recorded run: a directory written with --record.")
    ] = None,
    trace: Annotated[
        Path | None,
        ClusterOption(
            help="Re-simulate a recorded job and predict modes on it: .npz of operations, .csv or .jsonl of step times."
        ),
    ] = None,
    workers: ClusterSizeOption = None,
    sync: Annotated[
        list[str] | None,
        SyncOption(autocompletion=complete_mode, help="A mode; repeatable (those that may win on this cluster)."),
    ] = None,
    mode: Modes = None,
    via: Annotated[
        list[str] | None, SyncOption(help="ps, allreduce, ring, halving-doubling, tree, hierarchical, peers; repeatable.")
    ] = None,
    step_time: StepTimeOption = None,
    fixed_time: FixedTimeOption = None,
    spread: SpreadOption = None,
    slow: SlowWorkersOption = None,
    hiccup: StallsOption = None,
    batch: BatchOption = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    shared: Annotated[bool, ClusterOption("--shared", help="All links share one medium of that bandwidth.")] = False,
    model: ModelSizeOption = None,
    servers: ShardsOption = None,
    per_host: Annotated[int | None, ClusterOption(help="Workers on each host, for hierarchical all-reduce.")] = None,
    steps: Annotated[int | None, BudgetOption(help="Steps, summed over all workers (100 for each).")] = None,
    samples: Annotated[int | None, BudgetOption(help="Samples, summed over all workers.")] = None,
    seconds: Annotated[float | None, BudgetOption(help="Simulated seconds.")] = None,
    steps_each: Annotated[int | None, BudgetOption(help="Steps of each worker.")] = None,
    train: Annotated[
        str | None,
        TrainingOption(help="Train for real in virtual time: digits, fashion-mnist or fashion-mnist-cnn."),
    ] = None,
    lr: Annotated[float | None, TrainingOption(help="Learning rate of the training (the task's).")] = None,
    target: Annotated[
        float | None, TrainingOption(help="Compare the time until this accuracy is reached (the task's).")
    ] = None,
    seed: RandomSeedOption = None,
    scaling: Annotated[
        bool, ClusterOption("--scaling", help="Throughput for 1 to 64 workers: 1, 2, 4, 8 shards, and ring.")
    ] = False,
    picture: Annotated[Path | None, OutputOption(help="Draw a picture: .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, OutputOption("--json", help="Write all figures to this file.")] = None,
    record: Annotated[
        Path | None, OutputOption(help="Write events.jsonl and meta.json of each mode under this directory.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Annotated[bool, OutputOption("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Compare synchronisation modes on a cluster you describe, in virtual time: the same twice."""
    flags = dict(locals()) | {"task": train}
    if trace:
        _trace(trace, flags)
        return
    settings = settle(load_experiment(file), flags, like)
    if picture:
        check_picture(picture)
    for folder in _record_folders(record, settings).values():
        check_no_record(folder, overwrite)
    if scaling:
        _scaling(settings, picture, json_file, quiet)
    elif "task" in settings.train:
        _training(settings, picture, json_file, record, quiet)
    else:
        _timing(settings, picture, json_file, record, quiet)


def _trace(path: Path, flags: Mapping[str, Any]) -> None:
    from polytempo.strategy.soundness import refusal
    from polytempo.traces.analysis import analyse  # numpy
    from polytempo.traces.analysis import verdict as trace_verdict
    from polytempo.traces.operations import read_trace

    given = {name for name, value in flags.items() if not (value is None or value is False or value == [])}
    if others := sorted(given - {"trace", "sync", "mode", "seed", "json_file", "quiet"}):
        option = others[0].replace("_", "-")
        raise UsageError(
            f"--trace takes --sync, --seed, --json and --quiet only, got {option}; leave it out: the trace is the job"
        )
    with _bar(path.name, flags["quiet"]) as report:
        found = analyse(read_trace(path), flags["sync"] or (), flags["seed"] or 0, report)
    show(_trace_table(found, path.name))
    for line in trace_verdict(found):
        typer.echo(line)
    sync = found.best().mode.split(" ")[0]  # a prediction may add how batches are cut
    reason = refusal(parse_spec(sync), found.stages, 1)
    if reason is not None:
        typer.echo(
            f"note: polytempo run refuses {sync} with pipe={found.stages}: {reason.reason}; there use {reason.instead}"
        )
    write_json(flags["json_file"], found.as_dict())


def _trace_table(found: TraceAnalysis, name: str) -> TextTable:
    rows = [
        (
            mode.mode,
            f"{mode.step_seconds:.2f}",
            f"{found.actual / mode.step_seconds:.2f}",
            f"{100 * mode.waiting:.1f}",
            f"{mode.staleness_mean:.2f}",
            f"{mode.staleness_max}",
            _shares(mode.shares),
        )
        for mode in found.modes
    ]
    stages = f" of {found.stages} stages, {found.schedule}" if found.stages > 1 else ""
    what = counted(found.replicas, "replica" if found.stages > 1 else "worker")
    title = (
        f"{name}: {what}{stages}, {counted(found.steps, 'step')}\n"
        f"a step takes {found.actual:.2f} s (re-simulated), {found.slowdown:.2f}x the ideal {found.ideal:.2f} s"
    )
    heads = ("mode", "joint batch\n(s)", "times\nfaster", "waiting\n(%)", "stale\nmean", "\nmax")
    return TextTable(title, (*heads, "micro-batches\nat the end"), tuple(rows))


def _shares(shares: Sequence[float]) -> str:
    if not shares:
        return "as recorded"
    if min(shares) == max(shares):
        return f"{shares[0]:g} each"
    text = " ".join(f"{share:g}" for share in shares)
    return text if len(text) <= 24 else f"{min(shares):g} to {max(shares):g}"


def _timing(settings: Settings, picture: Path | None, json_file: Path | None, record: Path | None, quiet: bool) -> None:
    outcomes = simulate_all(settings, record, quiet)
    say_assumptions(settings)
    show(comparison(outcomes, _title(settings)))
    write_json(json_file, [outcome.as_dict() for outcome in outcomes])
    if picture:
        draw_comparison(outcomes, picture, _title(settings))
        typer.echo(f"picture: {picture}")
    say_advice(settings, advise(outcomes))


def simulate_all(settings: Settings, record: Path | None = None, quiet: bool = False) -> list[Outcome]:
    """The outcome of each mode."""
    outcomes: list[Outcome] = []
    for spec, via in settings.jobs:
        with _bar(spec.text, quiet) as report, _recording(record, spec, via, settings) as recorder:
            outcome = simulate_job(
                settings.cluster,
                spec.text,
                via=via,
                seed=settings.seed,
                record=recorder.write if recorder else None,
                progress=report,
                **dict(settings.budget),
            )
            if recorder:
                recorder.close(meta_of(outcome, settings.cluster, settings.seed))
            outcomes.append(outcome)
    return outcomes


def say_assumptions(settings: Settings) -> list[Assumption]:
    """Print what the predictions rest on, and where it came from."""
    found = assumptions_of(settings.cluster, settings.sources)
    typer.echo("Predictions rest on:")
    for line in assumption_lines(found):
        typer.echo(line)
    if settings.note:
        typer.echo(_folded(settings.note))
    typer.echo("")
    return found


def say_advice(settings: Settings, advice: Advice) -> None:
    """Print the doubts, and last what to use and why."""
    typer.echo(_folded(CAVEAT))
    assumed = settings.sources["step time"].startswith(ASSUMED)
    if assumed and settings.cluster.model_bytes and not settings.chosen:  # would another mode be advised for short steps?
        step = mean_step_time(settings.cluster) / 10
        cluster = replace(settings.cluster, step_time=step, fixed_time=settings.cluster.fixed_time / 10)
        jobs = tuple(_jobs(default_modes(cluster, settings.seed), (), cluster, default=True))
        other = advise(simulate_all(replace(settings, cluster=cluster, jobs=jobs), quiet=True)).best.sync
        short = written_seconds(step)
        if other != advice.best.sync:
            doubt = f"The step time was assumed; with {short} it would be {other}: measure yours and give --step-time."
            typer.echo(_folded(doubt))
    typer.echo(_folded(use_line(advice)))


def _training(settings: Settings, picture: Path | None, json_file: Path | None, record: Path | None, quiet: bool) -> None:
    import torch

    from polytempo.simulate.virtual_training import model_bytes, train_virtually
    from polytempo.tasks import find_task

    torch.set_num_threads(1)  # small matrices: more threads are slower, and bits could depend on their number
    task = find_task(settings.train["task"])(settings.seed)
    target = settings.train.get("target", task.target)
    optimizer = partial(torch.optim.SGD, lr=settings.train.get("lr", task.lr), momentum=task.momentum)
    budget: dict[str, Any] = dict(settings.budget) or {"steps": task.steps * settings.cluster.workers}
    cluster, sources = settings.cluster, settings.sources
    if not cluster.model_bytes:
        cluster = replace(cluster, model_bytes=model_bytes(task.model))
        sources = {**sources, "model": "the task's"}
    runs = []
    for spec, via in settings.jobs:
        every = settings.train.get("evaluate_every")
        if not every:  # a timing run of the same job costs little and tells how long it will take
            every = simulate_job(cluster, spec.text, via=via, seed=settings.seed, **budget).seconds / EVALUATIONS
        with _bar(spec.text, quiet) as report, _recording(record, spec, via, settings) as recorder:
            run = train_virtually(
                task.model,
                task.data,
                task.loss,
                sync=spec.text,
                cluster=cluster,
                via=via,
                optimizer=optimizer,
                evaluate_every=every,
                seed=settings.seed,
                record=recorder.write if recorder else None,
                progress=report,
                **budget,
            )
            if recorder:
                recorder.close(meta_of(run.outcome, cluster, settings.seed))
            runs.append(run)
    title = f"{settings.train['task']}: {_title(settings)}"
    say_assumptions(replace(settings, cluster=cluster, sources=sources))
    show(trained_comparison(runs, target, title))
    typer.echo(verdict(runs, target))
    if short := short_of_bsp(runs):
        typer.echo(short)
    write_json(json_file, [run.as_dict() for run in runs])
    if picture:
        draw_training(runs, target, picture, title)
        typer.echo(f"picture: {picture}")


def _scaling(settings: Settings, picture: Path | None, json_file: Path | None, quiet: bool) -> None:
    spec, can = settings.jobs[0][0], settings.jobs[0][0].capabilities
    rings = ["ring"] if can.reduces else ["peers"] if can.neighbours else []
    if settings.cluster.hosts and "ring" in rings:
        rings.append("hierarchical")
    shards = () if can.neighbours else (1, 2, 4, 8)
    steps = -(-SCALING_STEPS // spec.period) * spec.period  # whole blocks
    with _bar(f"{spec.text}, 1 to 64 workers", quiet) as report:
        series = measure_scaling(
            settings.cluster, spec, shards=shards, rings=rings, steps_each=steps, seed=settings.seed, progress=report
        )
    way = "among peers" if can.neighbours else f"over parameter-server shards{' and ring' * bool(rings)}"
    title = f"{spec.text} {way}: {_machines(settings)}"
    say_assumptions(settings)
    show(scaling_table(series, title))
    write_json(json_file, [asdict(one) for one in series])
    if picture:
        draw_scaling(series, picture, title)
        typer.echo(f"picture: {picture}")


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
    """Flags win over the file, the file over the defaults. Settings that cannot work are refused here.

    Args:
        experiment: Of the file.
        flags: Options by name; those without a value were not given.
        like: A record whose machines are simulated; modes that its job would refuse are not compared unless asked for.
    """
    given = {name: value for name, value in flags.items() if not (value is None or value is False or value == [])}
    described = cluster_from_record(read_events(like), read_meta(like)["size"]) if like else experiment.cluster
    cluster = _cluster(described, given)
    sources, note = _sources(described, given, like, flags.get("file"))
    if like and set(cluster.batches.values()) == {1}:  # plain step() says nothing of samples, and a batch of 1 has no shares
        cluster = replace(cluster, batches={})
        sources["batch"] = f"{ASSUMED}: no step says its own (--batch)"
    budget: dict[str, Any] = {name: given[name] for name in LIMITS if name in given}
    train = dict(experiment.train) | {name: given[name] for name in ("task", "lr", "target") if name in given}
    sync = given.get("sync") or experiment.sync
    refused = refused_modes(read_meta(like)) if like and not sync else ()
    modes = sync or [mode for mode in default_modes(cluster, given.get("seed", 0)) if mode not in refused]
    if not modes:
        raise UsageError(
            f"the job of {like} would take none of the modes that are compared; ask for some with simulate --sync"
        )
    jobs = tuple(_jobs(modes, given.get("via") or experiment.via, cluster, default=not sync))
    budget = budget or dict(experiment.budget)
    if not budget and "task" not in train:
        # of modes that average models now and then several blocks, or the last one decides too much
        periods = [spec.period for spec, _ in jobs if spec.capabilities.averages and cluster.workers <= FEW]
        budget = {"steps": max([DEFAULT_STEPS, *(BLOCKS * period for period in periods)]) * cluster.workers}
    if budget:
        Budget(**budget)
    return Settings(cluster, jobs, budget, train, given.get("seed", experiment.seed or 0), sources, note, bool(sync))


#: How the source of a figure begins that was not given.
ASSUMED = "assumed"
#: The figures that predictions rest on, and the options that give them.
FIGURES = {
    "step time": ("step_time", "spread"),
    "fixed time": ("fixed_time",),
    "batch": ("batch",),
    "model": ("model",),
    "links": ("bandwidth", "latency", "shared"),
}
CANNOT_TELL = (
    "This record cannot tell the fixed time of a step from its time a sample, as the samples of its steps hardly differ, so "
    "modes that cut batches in another way (bsp+balance, anytime) may be predicted wrong: record some 30 steps with half "
    "the batch in the same run, or give --fixed-time."
)


def _sources(
    described: Cluster, given: Mapping[str, Any], like: Path | None, file: Path | None
) -> tuple[dict[str, str], str]:
    """Where each figure came from: an option, the record, the file, or nowhere; and what the record could not tell."""
    plain = Cluster()
    of_file = {
        "step time": (described.step_time, dict(described.step_times)) != (plain.step_time, {}),
        "fixed time": (described.fixed_time, dict(described.fixed_times)) != (0.0, {}),
        "batch": (described.batch, dict(described.batches)) != (plain.batch, {}),
        "model": described.model_bytes > 0,
        "links": (described.link, dict(described.links)) != (plain.link, {}),
    }
    in_record = {"step time", "batch", "links"} | ({"fixed time"} if described.fixed_times else set())
    found: dict[str, str] = {}
    for name, options in FIGURES.items():
        if any(option in given for option in options):
            found[name] = "given"
        elif like and name in in_record:
            found[name] = "from the record"
        elif not like and of_file[name]:
            found[name] = f"from {file}" if file else "described"
        elif not like or name != "model":
            found[name] = f"{ASSUMED} (--{options[0].replace('_', '-')})"
    return found, CANNOT_TELL if like and found["fixed time"].startswith(ASSUMED) else ""


def _jobs(sync: Iterable[str], vias: Sequence[str], cluster: Cluster, default: bool = False) -> Iterator[tuple[Spec, str]]:
    """Each mode over the server; where bytes take time, those that need no server over all-reduce too, unless told. Modes
    that send models have a way of their own. Of modes that the user did not choose (`default`) bsp alone is there twice."""
    timed = cluster.workers > 1 and cluster.link != Link()
    for text in sync:
        spec = parse_spec(text)
        spec.policy(cluster.workers)
        choices, can = list(vias), spec.capabilities
        if not choices and can.averages and cluster.links and not cluster.model_bytes:
            choices = ["ps"]  # of a record: an exchange is a latency to the servers and back
        if not choices and (can.averages or can.neighbours):
            choices = ["auto"]
        if not choices:
            both = timed and can.reduces
            choices = ["ps", "allreduce"] if both else ["ps"]
            if both and default and spec.mode.name != "bsp":
                choices = ["allreduce"]
        for via in choices:
            yield spec, resolve_via(spec, via, cluster)


def _cluster(cluster: Cluster, given: Mapping[str, Any]) -> Cluster:
    changes: dict[str, Any] = {name: given[name] for name in ("workers", "batch") if name in given}
    if "batch" in given:
        changes["batches"] = {}
    if "fixed_time" in given:
        changes |= {"fixed_time": parse_seconds(given["fixed_time"], "--fixed-time"), "fixed_times": {}}
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
    if link and cluster.links and not cluster.model_bytes:
        changes["links"] = {}  # of a record: what is given takes the place of what was measured
    return replace(cluster, **changes, link=replace(cluster.link, **link))


# Output.


def _title(settings: Settings) -> str:
    slow = Counter(factor for _, factor in sorted(settings.cluster.slow.items()))
    odd = [f"{'one' if count == 1 else count} of them {factor:g}x slower" for factor, count in slow.items()]
    return ", ".join(part for part in (counted(settings.cluster.workers, "worker"), *odd, _machines(settings)) if part)


def _machines(settings: Settings) -> str:
    link, bytes_ = settings.cluster.link, settings.cluster.model_bytes
    parts = []
    if link.bandwidth:
        parts.append(f"{written_rate(link.bandwidth)}{' shared' if link.shared else ''}")
    if bytes_:
        parts.append(written_bytes(bytes_))
    if settings.cluster.servers.shards > 1:
        parts.append(f"{settings.cluster.servers.shards} shards")
    return ", ".join(parts)


def show(table: TextTable) -> None:
    """Print a table as wide as the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 140
    typer.echo(f"{table.text(width)}\n")


def _folded(text: str) -> str:
    """Prose as wide as the terminal; in a pipe on one line."""
    return textwrap.fill(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def _recording(
    directory: Path | None, spec: Spec, via: str, settings: Settings
) -> AbstractContextManager[RecordWriter | None]:
    folders = _record_folders(directory, settings)
    return RecordWriter(folders[spec.text, via]) if folders else nullcontext()


def _record_folders(directory: Path | None, settings: Settings) -> dict[tuple[str, str], Path]:
    """Where each mode is recorded, by mode and way: of several each has a folder of its own; empty without --record."""
    if directory is None:
        return {}
    jobs = [(spec.text, via) for spec, via in settings.jobs]
    names = {job: "-".join(job).replace(":", "-").replace(",", "-") for job in jobs}
    return {job: directory / name if len(names) > 1 else directory for job, name in names.items()}


@contextmanager
def _bar(name: str, quiet: bool) -> Iterator[Callable[[float], None] | None]:
    with progress_bar(quiet) as bar:
        task = bar.add_task(name, total=1.0)
        yield None if bar.disable else lambda share: bar.update(task, completed=share)
