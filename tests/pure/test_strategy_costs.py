"""Measured figures survive JSON, and a reduction is found for a group like the one that was measured."""

from __future__ import annotations

import json

import pytest

from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Layer
from polytempo.strategy.costs import (
    Machine,
    MeasuredLink,
    MeasuredReduction,
    ModelProfile,
    ShardedLayer,
    TensorCall,
    TiedWeights,
    as_data,
    from_data,
)

LAYER = ShardedLayer(Layer("0", 0.1, 0.2, 64, 128, 32, 0.01), (TensorCall("all_reduce", 64, True),), 0.3, 256, 0.5, 128)
PROFILE = ModelProfile("gpt", 2, 8, (LAYER, LAYER), (TiedWeights((0, 1), 64, 64, 128),), LAYER, 16)
LINK = MeasuredLink(1e-5, 1e-9)
MACHINE = Machine(
    ((0, 1), (2, 3)),
    (2, 2),
    LINK,
    between=LINK,
    data_inside=LINK,
    contention=1.25,
    reductions=(MeasuredReduction("tensor", 2, 1, LINK), MeasuredReduction("data", 2, 2, MeasuredLink(1e-4, 1e-8))),
)


def test_measured_figures_survive_json() -> None:
    assert from_data(json.loads(json.dumps(as_data([PROFILE], MACHINE)))) == ([PROFILE], MACHINE)
    bare = ModelProfile("m", 1, 1, (ShardedLayer(Layer("0", 0, 0, 0, 0)),)), Machine(((0,),), (1,), LINK)
    assert from_data(json.loads(json.dumps(as_data([bare[0]], bare[1])))) == ([bare[0]], bare[1])


def test_other_files_are_refused() -> None:
    for data in ({}, {"profiles": [{}], "machine": {}}, {**as_data([PROFILE], MACHINE), "profiles": [{"layers": 1}]}):
        with pytest.raises(UsageError, match="measure again"):
            from_data(data)


def test_a_reduction_is_that_of_a_group_with_as_many_ranks_on_as_many_hosts() -> None:
    assert MACHINE.reduction("tensor", [2, 3]) == LINK
    assert MACHINE.reduction("data", (0, 2)) == MeasuredLink(1e-4, 1e-8)
    assert MACHINE.reduction("data", (0, 1)) is None
    assert MACHINE.reduction("tensor", range(4)) is None
