"""README's first picture: time to 87 % of all modes on four clusters, from docs/figures/uneven.json.

`make proof` (`benchmarks/uneven.py`) measures, `make figures` draws. Dots are seeds, bars medians; a hatched bar is a
mode that has not reached the target by the horizon, with the best accuracy it came to.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

NAMES = {
    "uniform": "all workers equal",
    "slow": "one worker 3x slower",
    "stalls": "passing stalls",
    "both": "slow worker and stalls",
}
OURS = ("bsp+balance", "anytime:auto")
GREY, GREEN, ORANGE, INK = "#B8BEC6", "#009E73", "#D55E00", "#222222"
COLOURS = {"bsp+balance": GREEN, "anytime:auto": ORANGE}


def draw(data: dict[str, Any], path: Path = HERE / "uneven.png") -> None:
    from matplotlib.figure import Figure

    clusters, horizon = data["clusters"], data["horizon"]
    figure = Figure(figsize=(13, 4.3), layout="constrained")
    panels = figure.subplots(1, len(clusters), sharex=True, sharey=True)
    modes = list(next(iter(clusters.values())))
    for axes, (name, cells) in zip(panels, clusters.items(), strict=True):
        for row, mode in enumerate(reversed(modes)):
            _draw_mode(axes, row, cells[mode], COLOURS.get(mode, GREY), horizon)
        axes.set_title(NAMES[name], fontsize=14, color=INK)
        axes.set_yticks(range(len(modes)), list(reversed(modes)), fontsize=13)
        axes.set_xticks(range(0, int(horizon) + 1, 800))
        axes.tick_params(axis="x", labelsize=11)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlim(0, 1.04 * horizon)
    for label in panels[0].get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in OURS else "normal")
    seeds = f"median of {data['seeds']} seeds" if data["seeds"] > 1 else "one seed"
    figure.suptitle(
        f"Time to {100 * data['target']:g} % accuracy, in steps of an undisturbed worker: shorter is better", fontsize=15
    )
    figure.supxlabel(f"4 workers, Fashion-MNIST, {seeds}, all modes at the rate and momentum of bsp", fontsize=11)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_mode(axes: Any, row: int, cell: dict[str, Any], colour: str, horizon: float) -> None:
    never = cell["median"] >= horizon
    style = {"color": "white", "edgecolor": colour, "hatch": "///"} if never else {"color": colour, "edgecolor": colour}
    axes.barh(row, cell["median"], height=0.66, linewidth=1.2, **style)
    reached = [time for time in cell["times"] if time is not None]
    axes.plot(reached, [row] * len(reached), ".", color=INK, markersize=4, alpha=0.6)
    if never:
        best = math.floor(1000 * statistics.median(cell["accuracies"])) / 10  # rounded up it could read as the target
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(
            horizon / 2,
            row,
            f"not by {horizon:,.0f}: {best:g} %",
            ha="center",
            va="center",
            fontsize=12,
            color=INK,
            bbox=box,
        )
        return
    missed = len(cell["times"]) - len(reached)
    text = f"{cell['median']:,.0f}" + (f" ({missed} not by {horizon:,.0f})" if missed else "")
    at = 40 if cell["median"] > 0.6 * horizon else max([*reached, cell["median"]]) + 30  # in long bars, else beside them
    axes.text(at, row, text, va="center", fontsize=12, color=INK)


def main() -> None:
    file = HERE / "uneven.json"
    if not file.exists():
        print(f"{file.name} is not there; `make proof` makes it")
        return
    draw(json.loads(file.read_text(encoding="utf-8")))
    print(f"written: {HERE.name}/uneven.png")


if __name__ == "__main__":
    main()
