"""The picture and the table of docs/asynchronous.md: the largest stable rate against the number of workers.

f(x) = x^2 / 2, n workers in turn with one push in flight each: the push that makes x[t + 1] of x[t] was made of the gradient
at x[t - (n - 1)], and is scaled by 1/n. With z^t for x[t], and H(z) times the gradient for what is pushed,

    z - 1 = -(rate / n) z^-(n - 1) H(z)

    momentum 0                       H = 1
    momentum m on the servers        H = 1 / (1 - m / z)            every push adds to the one velocity
    at each worker                   H = 1 / (1 - m / z^n)          a worker's velocity has every n-th gradient
    at each worker, look-ahead       H = 1 + m / (1 - m / z^n)      g + m v

At a small rate all z lie inside the unit circle. They leave it at the smallest positive rate that the equation gives for a z
on it. `make figures` draws; `tests/tensors/test_stable_rates.py` holds this against `optim/worker_momentum.py` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.report.picture import curve_styles
from polytempo.report.table import TextTable

HERE = Path(__file__).parent
PAGE = HERE.parent / "asynchronous.md"

#: By momentum, workers and z: what is pushed in place of a gradient.
Pushed = Callable[[float, int, np.ndarray], np.ndarray]
PUSHED: dict[str, Pushed] = {
    "none": lambda momentum, workers, z: np.ones_like(z),
    "server": lambda momentum, workers, z: 1 / (1 - momentum / z),
    "worker": lambda momentum, workers, z: 1 / (1 - momentum / z**workers),
    "lookahead": lambda momentum, workers, z: 1 + momentum / (1 - momentum / z**workers),
}
NAMES = {
    "lookahead": "at each worker, look-ahead pushed",
    "worker": "at each worker, without the look-ahead",
    "server": "on the servers",
    "none": "momentum 0",
}
#: Angles on the upper half of the unit circle among which a crossing is looked for.
ANGLES = np.linspace(0, np.pi, 20_001)[1:]
MOMENTA, WORKERS, SHOWN = (0.5, 0.9), range(1, 17), (1, 2, 4, 8, 16)


def rates_on_the_circle(way: str, momentum: float, workers: int, angles: np.ndarray) -> np.ndarray:
    """The rate for which z at an angle is a solution: a stable one where it is real and positive, else none."""
    z = np.exp(1j * angles)
    rates: np.ndarray = -workers * (z - 1) * z ** (workers - 1) / PUSHED[way](momentum, workers, z)
    return rates


def largest_stable_rate(way: str, momentum: float, workers: int) -> float:
    """The rate above which a quadratic of curvature 1 diverges.

    Args:
        way: One of `PUSHED`.
        momentum: Of the rule.
        workers: In turn; 1 is a worker alone, which reads what it has pushed.
    """

    def imaginary(angles: np.ndarray) -> np.ndarray:
        return rates_on_the_circle(way, momentum, workers, angles).imag

    signs = imaginary(ANGLES[:-1]) > 0
    (before,) = np.nonzero(signs[:-1] != signs[1:])
    low, high = ANGLES[before], ANGLES[before + 1]
    for _ in range(50):
        middle = (low + high) / 2
        is_low = (imaginary(middle) > 0) == signs[before]
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    crossings = rates_on_the_circle(way, momentum, workers, np.append(low, np.pi)).real  # at -1 all is real
    return float(crossings[crossings > 0].min())


def stable_rates(way: str, momentum: float) -> list[float]:
    """Of all numbers of workers."""
    return [largest_stable_rate(way, momentum, workers) for workers in WORKERS]


def of_bsp(momentum: float) -> float:
    """One step with the mean gradient of all is that of a worker alone."""
    return largest_stable_rate("server", momentum, 1)


def table() -> TextTable:
    rows = []
    for momentum in MOMENTA:
        same = f"{of_bsp(momentum):.2f}"
        rows.append((f"`bsp`, momentum {momentum:g}", *(same for _ in SHOWN)))
        for way, name in NAMES.items():
            if way != "none":
                rates = (f"{largest_stable_rate(way, momentum, workers):.2f}" for workers in SHOWN)
                rows.append((f"momentum {momentum:g} {name}", *rates))
    rows.append((NAMES["none"], *(f"{largest_stable_rate('none', 0, workers):.2f}" for workers in SHOWN)))
    return TextTable("stable rates", ("", *(f"n = {workers}" for workers in SHOWN)), tuple(rows))


def draw(path: Path = HERE / "stable-rates.png") -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(MOMENTA), sharey=True)
    for axes, momentum in zip(panels, MOMENTA, strict=True):
        _draw_panel(axes, momentum)
    panels[0].set_ylabel("largest stable rate")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Workers in turn on a quadratic of curvature 1, each push scaled by 1/n: where is momentum kept?")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_panel(axes: Any, momentum: float) -> None:
    reference, *styles = curve_styles(1 + len(NAMES))
    axes.plot(WORKERS, [of_bsp(momentum)] * len(WORKERS), label="bsp", linewidth=2.4, **reference._asdict())
    for (way, name), style in zip(NAMES.items(), styles, strict=True):
        axes.plot(WORKERS, stable_rates(way, momentum), marker="o", markersize=4, label=name, **style._asdict())
    axes.set_xscale("log", base=2)
    axes.set_xticks(SHOWN, [str(workers) for workers in SHOWN])
    axes.set_yscale("log")
    axes.set_ylim(0.1, 5)
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
    axes.minorticks_off()
    axes.set_xlabel("workers (staleness + 1)")
    axes.set_title(f"momentum {momentum:g}")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    PAGE.write_text(table().put_into(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw()
    print(f"written: {PAGE.relative_to(HERE.parents[1])} and {HERE.name}/stable-rates.png")


if __name__ == "__main__":
    main()
