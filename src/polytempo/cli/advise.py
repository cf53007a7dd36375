"""`polytempo advise`: a cluster in, one command out, with its reason: what `polytempo simulate` says in its last line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polytempo.cli.options import Modes, OutputOption, write_json
from polytempo.cli.simulate import (
    BandwidthOption,
    BatchOption,
    ClusterSizeOption,
    FixedTimeOption,
    LatencyOption,
    ModelSizeOption,
    RandomSeedOption,
    ShardsOption,
    SlowWorkersOption,
    SpreadOption,
    StallsOption,
    StepTimeOption,
    load_experiment,
    say_advice,
    say_assumptions,
    settle,
    show,
    simulate_all,
)
from polytempo.errors import UsageError, counted
from polytempo.launcher.program import command_again
from polytempo.records.files import read_meta
from polytempo.report.advice import advice_table, gain_over, run_options, situation_of
from polytempo.report.advice import advise as choose
from polytempo.report.straggler_report import DEALT
from polytempo.simulate.description import Experiment


def advise(
    source: Annotated[
        Path | None,
        typer.Argument(help="A directory written with run --record, or a YAML file with a cluster.", metavar="RECORD|FILE"),
    ] = None,
    workers: ClusterSizeOption = None,
    step_time: StepTimeOption = None,
    fixed_time: FixedTimeOption = None,
    spread: SpreadOption = None,
    slow: SlowWorkersOption = None,
    hiccup: StallsOption = None,
    batch: BatchOption = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    model: ModelSizeOption = None,
    servers: ShardsOption = None,
    mode: Modes = None,
    samples: Annotated[
        float | None, OutputOption(help="Show the time for this number of samples (those simulated).")
    ] = None,
    seed: RandomSeedOption = None,
    json_file: Annotated[Path | None, OutputOption("--json", help="Write all figures to this file.")] = None,
    quiet: Annotated[bool, OutputOption("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Which mode for this cluster? One command to type, its reason, and the runners-up."""
    flags = {name: value for name, value in locals().items() if name not in ("source", "samples", "json_file")}
    if samples is not None and not samples > 0:
        raise UsageError(f"expected --samples above 0, got {samples:g}")
    if source is not None and not source.exists():
        raise UsageError(
            f"there is no {source}; expected a directory written with run --record, or a YAML file with a cluster"
        )
    like = source if source is not None and source.is_dir() else None
    file = source if like is None else None
    recorded: dict[str, Any] = read_meta(like).get("options", {}) if like else {}
    described = Experiment(cluster=load_experiment(file).cluster)  # it may also have modes, a budget and a training task
    settings = settle(described, flags | {"file": file}, like)
    advice = choose(simulate_all(settings, quiet=quiet))
    cluster = settings.cluster
    command = command_again(recorded, run_options(advice.best, cluster))
    found = say_assumptions(settings)
    total = samples or max(outcome.samples for outcome in advice.ranked)
    table = advice_table(
        advice, total, f"{counted(cluster.workers, 'worker')} ({situation_of(cluster, settings.seed).in_words()}):"
    )
    show(table)
    say_advice(settings, advice)
    if advice.best.spec.capabilities.by_speed:
        typer.echo(f"The script must deal its batches {DEALT}.")
    if cluster.model_bytes and recorded.get("runs") != "function":
        typer.echo("Between hosts: add --listen HOST:PORT --expect N.")
    typer.echo(f"\n{command}")
    told: dict[str, Any] = {"use": advice.best.sync, "because": advice.because(), "command": command}
    told |= {"gain": gain_over(advice.best, advice.base), "assumptions": {one.name: one.as_dict() for one in found}}
    write_json(json_file, {**told, "outcomes": [outcome.as_dict() for outcome in advice.ranked]})
