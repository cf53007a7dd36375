"""Attention by heads has the results of `nn.MultiheadAttention`: masks, weights, separate projections, layouts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from splitting import Call, assert_equal_to_whole, on_ranks, seeded
from torch import Tensor, nn

from polytempo.tensor_parallel.group import RankTensorGroup
from polytempo.tensor_parallel.plan import find_plan, parallelize

pytestmark = pytest.mark.timeout(60)

BATCH, LENGTH, SOURCE, WIDTH = 3, 5, 7, 16


class Attention(nn.Module):
    """An attention inside a custom module, as scripts have it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, **options)

    def forward(self, *inputs: Tensor, **options: Any) -> Any:
        return self.attn(*inputs, **options)


def numbers(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(batch_first: bool, kdim: int = WIDTH, vdim: int = WIDTH) -> list[Tensor]:
    shapes = [(LENGTH, BATCH, WIDTH), (SOURCE, BATCH, kdim), (SOURCE, BATCH, vdim)]
    made = [numbers(*shape, seed=index) for index, shape in enumerate(shapes)]
    return [x.transpose(0, 1).contiguous() for x in made] if batch_first else made


def calling(**options: Any) -> Call:
    def call(module: nn.Module, given: Sequence[Tensor]) -> Any:
        return module(*given, **options)

    return call


def to_itself(module: nn.Module, given: Sequence[Tensor]) -> Any:
    return module(given[0], given[0], given[0])


PADDING = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
PADDING[0, 5:] = PADDING[2, 1:3] = True
CAUSAL = torch.ones(LENGTH, SOURCE, dtype=torch.bool).triu(1)
EACH = numbers(BATCH * 4, LENGTH, SOURCE, seed=4) > 1.2
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no weights": ({}, {"need_weights": False}),
    "weights of heads": ({}, {"average_attn_weights": False}),
    "no bias": ({"bias": False}, {}),
    "separate projections": ({"kdim": 6, "vdim": 10}, {}),
    "separate without bias": ({"kdim": 6, "vdim": 10, "bias": False}, {"need_weights": False}),
    "padding mask": ({}, {"key_padding_mask": PADDING}),
    "padding mask as numbers": ({}, {"key_padding_mask": numbers(BATCH, SOURCE), "need_weights": False}),
    "mask": ({}, {"attn_mask": CAUSAL}),
    "mask as numbers": ({}, {"attn_mask": numbers(LENGTH, SOURCE), "need_weights": False}),
    "mask for each head": ({}, {"attn_mask": EACH}),
    "mask for each head, no weights": ({}, {"attn_mask": EACH, "need_weights": False}),
    "both masks": ({}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING, "need_weights": False}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "causal with weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "causal with padding": (
        {},
        {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING, "need_weights": False},
    ),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_attention_by_heads_equals_the_unsplit_one(case: str, batch_first: bool) -> None:
    options, told = CASES[case]
    model = seeded(lambda: Attention(batch_first=batch_first, **options))
    given = inputs(batch_first, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    assert_equal_to_whole(model, given, 2, call=calling(**told))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("training", [True, False])
def test_self_attention_on_1_2_and_4_ranks(size: int, training: bool) -> None:
    model = seeded(lambda: Attention(batch_first=True)).train(training)
    plan = assert_equal_to_whole(model, inputs(True)[:1], size, call=to_itself)
    assert [f"{name} {style}" for name, style in plan.styles.items()] == ([] if size == 1 else ["attn heads"])


@pytest.mark.parametrize("told", [{}, {"average_attn_weights": False}, {"need_weights": False}])
def test_inputs_without_a_batch(told: dict[str, Any]) -> None:
    model = seeded(lambda: Attention(batch_first=True))
    assert_equal_to_whole(model, [x[0] for x in inputs(True)], 2, call=calling(**told))


def test_a_causal_hint_needs_the_mask() -> None:
    def work(group: RankTensorGroup) -> str:
        model = Attention()
        parallelize(model, find_plan(model, 2), group)
        with pytest.raises(RuntimeError) as refused:
            model(*(x.float() for x in inputs(False)), is_causal=True)
        return str(refused.value)

    assert all("Need attn_mask" in text for text in on_ranks(2, work))


def test_evaluation_without_gradients_reads_no_shard_as_the_whole() -> None:
    model = seeded(lambda: Attention(batch_first=True)).eval()
    x, copies = inputs(True)[0], [copy.deepcopy(model) for _ in range(2)]
    with torch.no_grad():
        wanted = model(x, x, x)[0]

    def work(group: RankTensorGroup) -> Tensor:
        mine = copies[group.rank]
        parallelize(mine, find_plan(mine, 2), group)
        with torch.no_grad():
            result: Tensor = mine(x, x, x)[0]
        return result

    for result in on_ranks(2, work):
        torch.testing.assert_close(result, wanted)
