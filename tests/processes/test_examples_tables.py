"""The examples of tables and arrays run as a user types them, and learn what there is to learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live import Bench

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "examples"


def output(bench: Bench, example: str, sync: str, *arguments: str) -> str:
    flags = ["-n", "2", "--servers", "2", "--sync", sync]
    done = bench.run("run", *flags, str(EXAMPLES / example), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clicks_are_rated_nearly_as_well_as_by_the_truth(bench: Bench) -> None:
    said = output(bench, "clicks.py", "asp", "--steps", "100", "--held-out", "20000")
    figures = re.findall(r"log loss ([\d.]+)  AUC ([\d.]+)", said)
    (loss, area), (best_loss, best_area), (base_loss, _) = ((float(a), float(b)) for a, b in figures)
    assert best_area - 0.05 < area < best_area
    assert best_loss < loss < (best_loss + base_loss) / 2
    kilobytes = int(re.findall(r"(\d+) KB sent a step", said)[0])
    assert kilobytes < 100, "a batch has at most 3 * 512 rows of 8 numbers; the tables have a million"


def test_sparse_weights_are_found_and_filters_save_traffic(bench: Bench) -> None:
    flags = ["--features", "2000", "--examples", "12000", "--matter", "60", "--passes", "20"]
    said = output(bench, "sparse_logistic.py", "delay:4", *flags)
    pattern = (
        r"objective (\d+) \((\d+) at zero\), (\d+) weights not zero, (\d+) of the true (\d+), "
        r"([\d.]+) % of entries skipped, ([\d.]+) MB"
    )
    plain, filtered = ([float(number) for number in line] for line in re.findall(pattern, said))
    for objective, start, nonzero, right, true, *_ in (plain, filtered):
        assert objective < 0.97 * start
        assert right >= 0.95 * true
        assert nonzero - right <= 0.1 * true
    assert abs(plain[0] - filtered[0]) < 0.05 * (plain[1] - plain[0]), "filters do not change what is found"
    assert plain[5] == 0
    assert filtered[5] > 90
    assert filtered[6] < plain[6] / 2
