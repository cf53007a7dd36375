"""The table of a strategy: what stands in it, and that it fits a terminal of 100 columns."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from strategy_costs import layer, machine, model

from polytempo.mesh import Mesh
from polytempo.strategy.costs import Machine, MeasuredLink, ModelProfile, TensorCall
from polytempo.strategy.explanation import explain_impossible, explain_plan
from polytempo.strategy.parallel_plan import ParallelPlan
from polytempo.strategy.search import Profiles, SearchSpace, needed_profiles, search

HEADS = "6 heads cannot be split by 4: tensor=1, 2, 3 or 6"
SPACE = SearchSpace(4, 32, problem=lambda mesh: HEADS if mesh.tensor == 4 else None)
LINK = MeasuredLink(1e-4, 1e-9)


def measured(space: SearchSpace, count: int = 3, *more: tuple[int, int]) -> dict[tuple[int, int], ModelProfile]:
    return {
        (shards, samples): replace(
            model(
                *(
                    layer(
                        1e-3 * samples / shards,
                        2e-3 * samples / shards,
                        passes=5e4 * samples,
                        weights=4e6 / shards,
                        made=2e5 * samples / shards,
                        update=1e-4,
                        calls=[TensorCall("all_reduce", 50000 * samples, backward) for backward in (False, True)],
                    )
                    for _ in range(count)
                ),
                tensor=shards,
                microbatch=samples,
            ),
            model="Perceptron",
        )
        for shards, samples in [*needed_profiles(space, count), *more]
    }


def wide(lines: list[str]) -> list[str]:
    return [line for line in lines if len(line) > 100]


def test_the_ways_stand_side_by_side_and_the_impossible_with_their_reason() -> None:
    space, profiles = SPACE, measured(SPACE, 3, (1, 4))
    plan = ParallelPlan(Mesh(2, 2), (2, 1), 32, 4)
    found = explain_plan(space, profiles, machine(4, 2, LINK), plan)
    lines = found.lines()
    assert wide(lines) == []
    assert lines[0] == "Perceptron: 3 layers; 4 workers on 1 host with 2 cores; 32 samples a step"
    assert [row.chosen for row in found.rows] == [False, False, False, True]
    assert lines[5].split()[:3] == ["data=4", "x", "1"]
    assert lines[6] == "  pipe=4         4 stages need 4 layers with parameters, the model has 3"
    assert lines[7] == f"  tensor=4       {HEADS}"
    assert lines[8].startswith("> data=2,pipe=2        1f1b x 4        16  ")
    assert found.chosen is not None
    assert found.chosen.plan == plan
    ranks = [line.split() for line in lines[-4:]]
    assert [(row[0], row[1:6]) for row in ranks] == [
        ("0", ["0", "0", "0", "0-1", "16"]),
        ("1", ["0", "1", "0", "2", "16"]),
        ("2", ["1", "0", "0", "0-1", "16"]),
        ("3", ["1", "1", "0", "2", "16"]),
    ]
    assert ranks[1][6:15] == ["0.80", "-", "4.00", "4.00", "4.00", "8.00", "1.00", "4.00", "21.0"]


def test_what_does_not_fit_is_marked() -> None:
    space = replace(SPACE, memory=50e6)
    profiles = measured(space)
    found = explain_plan(space, profiles, machine(4, 2, LINK), search(space, profiles, machine(4, 2, LINK)))
    text = str(found)
    assert "* more than the 50 MB that a worker has" in text
    assert "why: " in text
    assert wide(text.splitlines()) == []
    data = next(row for row in found.rows if row.name.startswith("data=4"))
    assert data.prediction is not None
    assert data.prediction.largest_memory > 50e6
    assert found.chosen is not None
    assert found.chosen.largest_memory <= 50e6


def test_an_impossible_strategy_has_a_table_too() -> None:
    found = explain_impossible(SPACE, measured(SPACE), machine(4, 2, LINK), "data=1,tensor=4", HEADS)
    assert found.chosen is None
    assert str(found).splitlines()[-1] == f"> data=1,tensor=4  {HEADS}"
    assert found.compare({"seconds": 1.0}) == "the strategy is impossible: there is nothing to compare"


def test_a_large_job_shows_one_replica() -> None:
    hosts = tuple(tuple(range(first, first + 4)) for first in range(0, 32, 4))
    where, space = Machine(hosts, (4,) * 8, LINK, MeasuredLink(1e-3, 1e-8)), SearchSpace(32, 64)
    profiles: Profiles = measured(space, 4, (1, 1))
    found = explain_plan(space, profiles, where, ParallelPlan(Mesh(16, 2), (2, 2), 64, 4))
    assert str(found).splitlines()[-1] == "and 15 replicas like this one"
    assert wide(found.lines()) == []


def test_plain_values_survive_json() -> None:
    found = explain_plan(SPACE, measured(SPACE, 3, (1, 4)), machine(4, 2, LINK), ParallelPlan(Mesh(2, 2), (2, 1), 32, 4))
    data = json.loads(json.dumps(found.as_dict()))
    assert [row["strategy"] for row in data["strategies"]] == [
        *("data=4", "pipe=4", "tensor=4", "data=2,pipe=2,schedule=1f1b,microbatches=4"),
    ]
    assert data["strategies"][2] == {"strategy": "tensor=4", "chosen": False, "problem": HEADS}
    chosen = data["strategies"][3]
    assert chosen["stages"] == [2, 1]
    assert found.chosen is not None
    assert chosen["seconds"] == found.chosen.seconds
    assert [set(row) for row in chosen["bytes"]] == [{"pipe", "tensor", "data"}] * 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["nothing was measured yet"]),
        ({"steps": 0, "seconds": {"computing": 0.0}, "bytes_sent": {"data": 0}}, ["nothing was measured yet"]),
        (
            {
                "rank": 1,
                "steps": 4,
                "seconds": {"computing": 0.75, "waiting": 0.25},
                "bytes_sent": {"data": 16e6, "all": 17e6},
                "memory_bytes": {"activations": 8e5, "other": 1},
            },
            [
                "step time 156 ms 250 ms -37.4 %",
                "bytes moved a step, data 4 MB 4 MB +0.0 %",
                "memory, activations 1 MB 800 kB +25.0 %",
            ],
        ),
    ],
)
def test_predicted_beside_measured(given: dict[str, object], expected: list[str]) -> None:
    found = explain_plan(SPACE, measured(SPACE, 3, (1, 4)), machine(4, 2, LINK), ParallelPlan(Mesh(2, 2), (2, 1), 32, 4))
    lines = found.compare(given).splitlines()
    assert len(lines) == len(expected) + 2 * (len(expected) > 1)
    for line, start in zip(lines[-len(expected) :], expected, strict=True):
        assert " ".join(line.split()).startswith(start)
