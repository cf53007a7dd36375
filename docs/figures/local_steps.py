"""The figure of docs/local-steps.md: loss against time for modes that talk less, on three link speeds.

`make figures` writes it. Everything is in virtual time and seeded, so the curves are the same on every machine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Link

HERE = Path(__file__).parent

#: Mode and way; the same data, samples and learning rate for all.
MODES = (
    ("bsp", "allreduce"),
    ("gossip:ring", "auto"),
    ("gossip:exp", "auto"),
    ("local:8", "auto"),
    ("adacomm:16", "auto"),
    ("diloco:16,outer_momentum=0.5", "auto"),
    ("adpsgd:ring", "auto"),
)
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7")
SPEEDS = (("1 Gb/s", 125e6), ("100 Mb/s", 12.5e6), ("10 Mb/s", 1.25e6))
CLUSTER = Cluster(workers=4, step_time=0.05, model_bytes=10e6)
RATE, STEPS, LOOKS, TARGET = 0.4, 240, 400, 0.25


def curve(sync: str, via: str, bandwidth: float) -> list[tuple[float, float]]:
    """Virtual seconds, and the loss on the test data."""
    import torch

    from polytempo.simulate.run import simulate_job
    from polytempo.simulate.virtual_training import train_virtually
    from polytempo.tasks import digits

    def loss(output: torch.Tensor, target: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(output, target))

    torch.set_num_threads(1)
    cluster, task = replace(CLUSTER, link=Link(bandwidth=bandwidth)), digits(0)
    budget = {"samples": STEPS * cluster.workers * cluster.batch, "via": via}
    length = simulate_job(cluster, sync, **budget).seconds
    run = train_virtually(
        task.model,
        task.data,
        task.loss,
        sync=sync,
        cluster=cluster,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        metric=loss,
        evaluate_every=length / LOOKS,
        **budget,
    )
    return list(run.curve)


def all_curves() -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Of each mode on each link."""
    return {name: {sync: curve(sync, via, bandwidth) for sync, via in MODES} for name, bandwidth in SPEEDS}


def reached(points: list[tuple[float, float]]) -> float | None:
    """The first second at which the loss was seen, or None."""
    return next((at for at, loss in points if loss <= TARGET), None)


def table(curves: dict[str, dict[str, list[tuple[float, float]]]]) -> TextTable:
    """Seconds to the loss, by mode and link."""
    cells = {name: {sync: reached(points) for sync, points in on.items()} for name, on in curves.items()}
    rows = []
    for sync, _ in MODES:
        seconds = [cells[name][sync] for name, _ in SPEEDS]
        rows.append((sync, *("never" if one is None else f"{one:,.0f}" if one >= 100 else f"{one:.1f}" for one in seconds)))
    return TextTable(f"seconds to a loss of {TARGET:g}", ("mode", *(name for name, _ in SPEEDS)), tuple(rows))


def draw(curves: dict[str, dict[str, list[tuple[float, float]]]], path: Path = HERE / "local-steps.png") -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (name, on) in zip(panels, curves.items(), strict=True):
        for (sync, points), colour in zip(on.items(), COLOURS, strict=True):
            _draw_curve(axes, points, sync, colour)
        axes.axhline(TARGET, color="#999999", linestyle="--", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(left=0.8)
        axes.set_yscale("log")
        axes.set_xlabel("simulated seconds")
        axes.set_title(f"links of {name}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss on test data")
    panels[0].set_yticks([0.1, 0.2, 0.5, 1.0, 2.0], ["0.1", "0.2", "0.5", "1", "2"])
    panels[0].minorticks_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle("4 workers, a model of 10 MB, 50 ms a step, equal samples; dots: loss 0.25")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_curve(axes: Any, points: list[tuple[float, float]], name: str, colour: str) -> None:
    seconds, losses = zip(*[point for point in points if point[0] > 0], strict=True)
    axes.plot(seconds, losses, color=colour, label=name, linewidth=2.4 if name == "bsp" else 1.6)
    if (at := reached(points)) is not None:
        axes.plot([at], [TARGET], "o", color=colour, markersize=6, zorder=3)


def main() -> None:
    curves = all_curves()
    draw(curves)
    print(table(curves).markdown())
    print(f"written: {HERE.name}/local-steps.png")


if __name__ == "__main__":
    main()
