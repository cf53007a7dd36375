"""Split layers equal unsplit ones: outputs, gradients of weights, gradients of inputs, for 1, 2 and 4 ranks in float64."""

from __future__ import annotations

import pytest
import torch
from splitting import assert_equal_to_whole, seeded
from torch import Tensor, nn

from polytempo.tensor_parallel.group import CountingGroup
from polytempo.tensor_parallel.plan import find_plan, parallelize

pytestmark = pytest.mark.timeout(60)
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


@SIZES
@pytest.mark.parametrize("bias", [True, False])
def test_a_column_and_a_row_make_an_mlp(size: int, bias: bool) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8, bias), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 5, bias)))
    plan = assert_equal_to_whole(model, [numbers(3, 2, 6)], size)
    assert [str(style) for style in plan.styles.values()] == (["column", "dropout", "row"] if size > 1 else [])


@SIZES
def test_a_lone_layer_gathers_its_outputs(size: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)))
    plan = assert_equal_to_whole(model, [numbers(3, 6)], size)
    assert [str(style) for style in plan.styles.values()] == (["column-gather"] if size > 1 else [])


@SIZES
def test_a_row_layer_splits_an_input_that_is_whole(size: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)))
    assert_equal_to_whole(model, [numbers(3, 8)], size, {"0": "row-split"})


@SIZES
@pytest.mark.parametrize("rows", [8, 9, 5])
def test_an_embedding_is_split_by_rows(size: int, rows: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(rows, 6, padding_idx=3), nn.LayerNorm(6)))
    ids = torch.tensor([[0, 3, 4, 4], [rows - 1, 2, 3, 1]])
    assert_equal_to_whole(model, [ids], size, {"0": "vocab"})


@pytest.mark.parametrize("wrong", [-1, 9])
def test_an_id_outside_the_vocabulary_is_refused(wrong: int) -> None:
    model = nn.Sequential(nn.Embedding(9, 6))
    parallelize(model, find_plan(model, 2, {"0": "vocab"}), CountingGroup(2))
    with pytest.raises(IndexError, match=f"expected ids from 0 to 8, got {wrong}"):
        model(torch.tensor([0, wrong]))
