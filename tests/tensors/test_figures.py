"""`pt.log` takes numbers of any kind, and a record stays JSON whatever they are."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polytempo.errors import UsageError
from polytempo.records.files import RecordWriter, read_events, read_meta
from polytempo.session.script_calls import plain_figures


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, 1),
        ("warm", "warm"),
        (Fraction(1, 2), 0.5),
        (2**70, float(2**70)),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1),
        (np.str_("warm"), "warm"),
        (np.array(2.5), 2.5),
        (np.array([[4]]), 4),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([7]), 7),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(math.inf), math.inf),
    ],
)
def test_numbers_of_any_kind_become_plain_ones(given: Any, taken: float | int | str) -> None:
    (found,) = plain_figures({"x": given}).values()
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "expected a number or a text, got None"),
        ([1.0], "got a list"),
        (1j, "got a complex"),
        (torch.ones(2, 3), r"expected one number, got 2-d data of shape \[2, 3\]; log its mean"),
        (np.zeros(0), r"shape \[0\]"),
        (torch.tensor(1j), "got a complex"),
        (np.datetime64("2020-01-01"), "got a date"),
    ],
)
def test_anything_else_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=rf"log\(loss=...\) .*{words}") as refused:
        plain_figures({"fine": 1, "loss": given})
    assert "\n" not in str(refused.value)


def test_a_record_of_what_is_not_finite_is_json(tmp_path: Path) -> None:
    strict = {"parse_constant": lambda word: pytest.fail(f"{word} is not JSON")}
    with RecordWriter(tmp_path) as record:
        line = {"t": 0.0, "kind": "metric", "worker": 0, "loss": math.nan, "best": -math.inf, "texts": ["a", math.inf]}
        record.write(line)
        record.close({"spec": "bsp", "size": 1, "job": {"spread": math.nan, "steps": 3}})
    text = (tmp_path / "events.jsonl").read_text()
    assert json.loads(text, **strict)["loss"] == "NaN"
    assert json.loads((tmp_path / "meta.json").read_text(), **strict)["job"] == {"spread": "NaN", "steps": 3}
    (read,) = read_events(tmp_path)
    assert (read["best"], read["texts"]) == ("-Infinity", ["a", "Infinity"])
    assert math.isnan(float(read["loss"]))
    assert read_meta(tmp_path)["job"]["steps"] == 3
