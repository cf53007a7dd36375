"""Figures and tables of docs/what-a-bound-buys.md. `make figures` writes them; a test checks that the page is up to date.

Everything is in virtual time and seeded, so the numbers are the same on every machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from polytempo.records.lines import RecordLine
from polytempo.report.picture import CurveStyle, curve_styles
from polytempo.report.table import TextTable
from polytempo.simulate.cluster import Cluster, Constant, Duration, Hiccup, Link, Lognormal
from polytempo.simulate.run import simulate_job

HERE = Path(__file__).parent
PAGE = HERE.parent / "what-a-bound-buys.md"

BOUNDS = (0, 1, 3, 7, 15, 31)
DELAYS = (0, 1, 2, 4, 8, 16)
SPEEDS = (1.0, 2.3)
#: Standard deviations of step times, as shares of their means; runs of each.
SPREADS, SEEDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2), 11
#: Of the picture: the spread that is shown, and for how long.
VARYING, SHOWN = 0.05, 1000

#: Where a bound does not help, and where it does.
EVEN = Cluster(workers=8)
ALWAYS_SLOW = replace(EVEN, slow={7: 3.0})
PASSING_STALLS = replace(EVEN, hiccup=Hiccup(0.05, 10.0))

#: Unequal links: the exchange takes from 0.05 to 24 step times, evenly on a logarithmic scale, so that half the time is idle
#: when every exchange is waited for.
UNEQUAL_LINKS = Cluster(
    workers=32,
    step_time=Lognormal(1.0, 0.3),
    model_bytes=1.0,
    links={rank: Link(latency=0.025 * 480 ** (rank / 31)) for rank in range(32)},
)


def pace() -> dict[str, list[float]]:
    """Steps a worker makes in a second, on average, for each mode: with a slow worker, and with passing stalls."""
    modes = [f"ssp:{bound}" for bound in BOUNDS]
    rates: dict[str, list[float]] = {}
    for name, cluster in (("one of 8 always 3x slower", ALWAYS_SLOW), ("stalls: 5 % of steps, +10 s", PASSING_STALLS)):
        outcomes = [simulate_job(cluster, mode, seconds=3000) for mode in ("bsp", *modes, "asp")]
        rates[name] = [outcome.steps / outcome.seconds / cluster.workers for outcome in outcomes]
    return rates


def pace_table() -> TextTable:
    heads = ("steps a second and worker", "bsp", *(f"ssp:{bound}" for bound in BOUNDS), "asp")
    rows = tuple((name, *(f"{rate:.3f}" for rate in rates)) for name, rates in pace().items())
    return TextTable("pace", heads, rows)


def two_workers(spread: float = 0.0) -> Cluster:
    """Steps of constant length, or with a standard deviation of this share of their mean."""
    times: dict[int, Duration] = {
        rank: Lognormal(speed, spread) if spread else Constant(speed) for rank, speed in enumerate(SPEEDS)
    }
    return Cluster(workers=len(SPEEDS), step_times=times)


def leads(mode: str, seconds: float, spread: float = 0.0) -> list[tuple[float, int]]:
    """The lead of the fast worker each time it may start a step."""
    lines: list[RecordLine] = []
    simulate_job(two_workers(spread), mode, seconds=seconds, record=lines.append)
    return [
        (line["t"], line["step"] - line["slowest"]) for line in lines if line["kind"] == "release" and line["worker"] == 0
    ]


DSSP_MODES = ("ssp:3", "ssp:15", "dssp:3..15", "dssp-paper:3..15", "asp")


def dssp_table() -> TextTable:
    rows = []
    for mode in DSSP_MODES:
        outcome = simulate_job(two_workers(), mode, seconds=2000)
        fast, slow = outcome.workers
        rows.append((mode, str(fast.steps), str(slow.steps), str(outcome.max_lead), f"{100 * outcome.waiting:.1f} %"))
    return TextTable("dssp", ("mode", "steps of the fast worker", "of the slow one", "largest lead", "waiting"), tuple(rows))


def spread_table() -> TextTable:
    """DSSP as printed where steps vary: one forecast of 0, and the fast worker waits until its lead is used up."""
    rows = []
    for spread in SPREADS:
        cluster = two_workers(spread)
        runs = [simulate_job(cluster, "dssp-paper:3..15", seconds=2000, seed=seed) for seed in range(SEEDS if spread else 1)]
        steps = sorted(run.workers[0].steps for run in runs)
        waiting = median(100 * run.waiting for run in runs)
        cells = (f"{median(steps):.0f}", f"{steps[0]} to {steps[-1]}", f"{median(run.max_lead for run in runs):.0f}")
        rows.append((f"{100 * spread:g} %", *cells, f"{waiting:.1f} %"))
    return TextTable(
        "spread",
        ("step times vary by", "steps of the fast worker", "least and most", "largest lead", "waiting"),
        tuple(rows),
    )


def idle_shares() -> list[float]:
    return [1 - simulate_job(UNEQUAL_LINKS, f"delay:{delay}", seconds=2000).efficiency for delay in DELAYS]


def delay_table() -> TextTable:
    heads = ("", *(f"delay:{delay}" for delay in DELAYS))
    return TextTable("delay", heads, (("idle", *(f"{100 * share:.1f} %" for share in idle_shares())),))


TABLES = (pace_table, dssp_table, spread_table, delay_table)


def page_with_tables(page: str) -> str:
    """The page, each table between its two marks made anew."""
    for make in TABLES:
        page = make().put_into(page)
    return page


def draw() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_pace(left, curve_styles(2))
    _draw_leads(middle, curve_styles(4))
    _draw_idle(right)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "what-a-bound-buys.png", dpi=110, metadata={"Software": None})


def _draw_pace(axes: Any, styles: list[CurveStyle]) -> None:
    for (name, rates), style in zip(pace().items(), styles, strict=True):
        axes.plot(range(len(BOUNDS)), rates[1:-1], marker="o", label=name, **style._asdict())
        axes.axhline(rates[-1], color=style.color, linestyle="--", linewidth=0.8)
        axes.annotate("asp", (len(BOUNDS) - 1, rates[-1]), color=style.color, ha="right", va="bottom")
    axes.set_xticks(range(len(BOUNDS)), [str(bound) for bound in BOUNDS])
    axes.set_xlabel("bound s of ssp:s")
    axes.set_ylabel("steps a second and worker")
    axes.set_ylim(0, 1.2)
    axes.set_title("A bound absorbs passing stalls,\nnot a worker that is always slow")
    axes.legend(frameon=False, loc="upper left")


def _draw_leads(axes: Any, styles: list[CurveStyle]) -> None:
    curves = (("dssp-paper:3..15", 0.0), ("dssp-paper:3..15", VARYING), ("dssp:3..15", 0.0), ("ssp:3", 0.0))
    for (mode, spread), style in zip(curves, styles, strict=True):
        times, values = zip(*leads(mode, SHOWN, spread), strict=True)
        label = f"{mode}, steps vary by {100 * spread:g} %" if spread else mode
        axes.step(times, values, where="post", label=label, linewidth=1.2, **style._asdict())
    axes.set_yscale("log")
    axes.set_ylim(1, 20_000)
    axes.set_yticks([1, 3, 15, 100, 1000], ["1", "3", "15", "100", "1000"])
    axes.minorticks_off()
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel("lead of the fast worker, steps")
    axes.set_title(f"DSSP as printed has no bound\n(steps of {SPEEDS[0]:g} and {SPEEDS[1]:g} s)")
    axes.legend(frameon=False, loc="upper left")


def _draw_idle(axes: Any) -> None:
    (style,) = curve_styles(1)
    axes.plot(range(len(DELAYS)), [100 * share for share in idle_shares()], marker="o", **style._asdict())
    axes.set_xticks(range(len(DELAYS)), [str(delay) for delay in DELAYS])
    axes.set_xlabel("T of delay:T")
    axes.set_ylabel("idle share of the workers' time, %")
    axes.set_ylim(0, None)
    axes.set_title("Bounded delay hides the exchange\n(32 workers on unequal links)")


def main() -> None:
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw()
    print(f"written: {PAGE.relative_to(HERE.parents[1])} and {HERE.name}/what-a-bound-buys.png")


if __name__ == "__main__":
    main()
