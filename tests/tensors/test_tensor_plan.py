"""Plans: what is found by itself, what a dict names, and what is refused before any rank starts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional

from polytempo.errors import UsageError
from polytempo.tensor_parallel.group import CountingGroup
from polytempo.tensor_parallel.plan import TensorPlan, find_plan, limits, parallelize


def styles(plan: TensorPlan) -> dict[str, str]:
    return {name: f"{style}{' gathered' * style.gathers}" for name, style in plan.styles.items()}


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for given, made in pairwise(widths):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def encoder(width: int = 16, heads: int = 4, hidden: int = 32, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True, **options)


# Found by itself.


def test_a_chain_is_paired_from_its_start_and_ends_in_the_output_layer() -> None:
    assert styles(find_plan(mlp(4, 8, 4, 8), 2, loss=functional.cross_entropy)) == {"0": "column", "2": "row", "4": "vocab"}
    assert styles(find_plan(mlp(4, 8, 4, 8), 2)) == {"0": "column", "2": "row", "4": "vocab gathered"}
    assert styles(find_plan(mlp(4, 8, 4, 8, 4), 2)) == {"0": "column", "2": "row", "4": "column", "6": "row"}


def test_chains_inside_chains_are_one_chain() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 4)))
    assert styles(find_plan(model, 2)) == {"0.0": "column", "1.0": "dropout", "1.1": "row"}


def test_what_does_not_work_by_element_separates() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 5))
    assert styles(find_plan(model, 2)) == {"0": "column-gather", "2": "column-gather", "4": "vocab gathered"}


def test_transformer_layers() -> None:
    plan = find_plan(nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False), 4)
    layer = {"self_attn": "heads", "linear1": "column", "dropout": "dropout", "linear2": "row"}
    assert styles(plan) == {f"layers.{index}.{key}": value for index in range(2) for key, value in layer.items()}
    assert sorted(name.removeprefix("layers.0.") for name in plan.sharding if name.startswith("layers.0.")) == [
        *("linear1.bias", "linear1.weight", "linear2.weight", "self_attn.in_proj_bias", "self_attn.in_proj_weight"),
        "self_attn.out_proj.weight",
    ]
    assert plan.words() == [
        "layers.*.self_attn: heads (2 modules)",
        "layers.*.linear1: column (2 modules)",
        "layers.*.dropout: dropout (2 modules)",
        "layers.*.linear2: row (2 modules)",
    ]


def test_an_activation_that_mixes_features_keeps_the_halves_apart() -> None:
    plan = find_plan(nn.Sequential(encoder(activation=lambda x: x.softmax(-1))), 2)
    assert styles(plan) == {"0.self_attn": "heads", "0.linear1": "column-gather", "0.linear2": "column-gather"}


def test_large_embeddings_are_split_and_small_ones_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(5000, 16), nn.Linear(16, 8))
    assert styles(find_plan(model, 2)) == {"0": "vocab", "1": "vocab gathered"}
    plan = find_plan(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8)), 2)
    assert plan.words() == [
        "*: vocab, gathered",
        "*: whole (a table of 50 x 16 is small; 'vocab' splits it)",
    ]


def test_a_tied_table_and_output_layer_are_split_alike_under_both_names() -> None:
    model = nn.Sequential(nn.Embedding(11, 16), nn.LayerNorm(16), nn.Linear(16, 11, bias=False))
    model[2].weight = model[0].weight
    plan = find_plan(model, 4, loss=nn.CrossEntropyLoss())
    assert plan.logits == ("2", 11)
    assert plan.sharding["0.weight"] == plan.sharding["2.weight"]
    parallelize(model, plan, CountingGroup(4))
    assert model[0].weight is model[2].weight
    assert model[0].weight.shape == (3, 16)


class ReadsWeight(nn.Module):
    """A tied output layer as minimal GPTs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"embed": nn.Embedding(5000, 16)})
        self.mlp = mlp(16, 32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classes(self.mlp(self.parts["embed"](ids)))

    def classes(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.parts["embed"].weight)


def test_what_custom_code_reads_directly_stays_whole() -> None:
    plan = find_plan(ReadsWeight(), 2)
    assert styles(plan) == {"mlp.0": "column", "mlp.2": "row"}
    assert "may read its weight directly" in plan.whole["parts.embed"]


class Called(nn.Module):
    """A chain that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = mlp(8, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.chain(x)
        return result


class Iterated(Called):
    """A chain whose members are called by themselves."""

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.chain:
            x = layer(x)
            seen.append(x)
        return torch.cat(seen, -1)


class Indexed(Called):
    """The same in a method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)

    def first(self, x: Tensor) -> Tensor:
        result: Tensor = self.chain[0](x)
        return result


def test_a_chain_that_custom_code_takes_apart_is_split_layer_by_layer() -> None:
    assert styles(find_plan(Called(), 2)) == {"chain.0": "column", "chain.2": "row"}
    for model in (Iterated(), Indexed()):
        assert styles(find_plan(model, 2)) == {"chain.0": "column-gather", "chain.2": "column-gather"}


def test_layers_that_share_a_parameter_in_other_ways_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Bilinear(8, 8, 8))
    model[2].bias = model[0].bias

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.mlp = model, mlp(8, 16, 8)

    plan = find_plan(Both(), 2)
    assert styles(plan) == {"mlp.0": "column", "mlp.2": "row"}
    assert "shares a parameter" in plan.whole["inner.0"]


def test_lazy_layers_stay_whole() -> None:
    model = nn.Sequential(mlp(8, 16, 8), nn.LayerNorm(8), nn.LazyLinear(8))
    assert "lazy" in find_plan(model, 2).whole["2"]


def test_a_lone_layer_that_does_not_divide_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.LayerNorm(8))
    plan = find_plan(model, 4)
    assert styles(plan) == {"2": "column-gather"}
    assert plan.whole == {"0": "6 output features do not divide by 4"}


def test_one_rank_splits_nothing() -> None:
    assert find_plan(mlp(4, 8, 4), 1) == TensorPlan(1)


# By a dict.


def test_patterns_name_styles_and_the_first_that_matches_counts() -> None:
    model = nn.Sequential(mlp(8, 16, 8), nn.LayerNorm(8), mlp(8, 16, 8))
    assert styles(find_plan(model, 2, {"0.0": "column", "0.2": "row", "*": "replicate"})) == {"0.0": "column", "0.2": "row"}
    assert styles(find_plan(model, 2, {"0": "replicate"})) == {"2.0": "column", "2.2": "row"}
    assert styles(find_plan(model, 2, {"*.0": "column-gather", "*.2": "row-split"})) == {
        "0.0": "column-gather",
        "0.2": "row-split",
        "2.0": "column-gather",
        "2.2": "row-split",
    }


def test_what_is_inside_a_replicated_module_stays_whole() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList([mlp(8, 16, 8)]), mlp(8, 16, 8)

    assert list(styles(find_plan(Blocks(), 2, {"blocks": "replicate"}))) == ["last.0", "last.2"]
    wanted = {"blocks.0.0": "column", "blocks.0.2": "row", "blocks": "replicate"}
    assert list(styles(find_plan(Blocks(), 2, wanted))) == ["blocks.0.0", "blocks.0.2", "last.0", "last.2"]


def test_torchs_styles_are_read_with_their_layouts() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), mlp(8, 16, 8), nn.LayerNorm(8), mlp(8, 16, 8))
    plan = find_plan(
        model,
        2,
        {
            "0": RowwiseParallel(input_layouts=Replicate()),
            "1.0": ColwiseParallel(),
            "1.2": RowwiseParallel(),
            "3.0": ColwiseParallel(output_layouts=Replicate()),
            "3.2": RowwiseParallel(input_layouts=Replicate()),
        },
    )
    assert list(styles(plan).values()) == ["vocab", "column", "row", "column-gather", "row-split"]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"0": ColwiseParallel(input_layouts=Shard(0))}, r"expected layouts that can be used for '0'"),
        (
            {"0": RowwiseParallel(output_layouts=Shard(1))},
            r"from whole to whole\), got RowwiseParallel from split to S\(1\)",
        ),
        ({"0": SequenceParallel()}, r"expected ColwiseParallel\(\) or RowwiseParallel\(\) for '0', got SequenceParallel"),
        ({"0": 3}, "expected a word or torch's ColwiseParallel"),
        ({"0": "colum"}, "expected a style for '0' .*got 'colum'; nearest: column"),
        ({"0": "row:3"}, "expected a style for '0'"),
        ({"block.*": "column"}, "got 'block.*', which matches none; nearest: blocks.0"),
        ({"0": "heads"}, "the tensor plan names 0: heads is for nn.MultiheadAttention, and it is Linear; use 'replicate'"),
        ({"0": "column:3"}, "the tensor plan names 0: 16 outputs are not 3 blocks"),
    ],
)
def test_mistakes_in_a_dict(wanted: dict[str, Any], text: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model.add_module("blocks", nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(UsageError, match=text):
        find_plan(model, 2, wanted)


def test_a_tied_parameter_that_is_named_in_two_ways_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    with pytest.raises(UsageError, match="expected one split for the parameter that 0 shares with 2"):
        find_plan(model, 2, {"0": "column", "2": "row"})


# What does not divide.


@pytest.mark.parametrize(
    ("make", "size", "text"),
    [
        (lambda: nn.Sequential(encoder(12, 6, 24)), 4, "but 0.self_attn has 6 heads; nearest: tensor=3"),
        (lambda: nn.Sequential(encoder(16, 4, 30)), 4, r"0.linear1 has 30 output features, 0.linear2 has 30 .*: tensor=2"),
        (lambda: mlp(8, 9, 8), 2, "but 0 has 9 output features, 2 has 9 input features; nearest: tensor=1"),
        (lambda: mlp(8, 12, 8), 8, "but 0 has 12 output features, 2 has 12 input features; nearest: tensor=6"),
        (lambda: nn.Sequential(*[encoder(12, 6, 24) for _ in range(5)]), 4, "and 2 more; nearest: tensor=3"),
        (
            lambda: nn.Sequential(nn.Conv1d(2, 2, 3)),
            2,
            "expected layers that tensor=2 can split .* got Sequential with none",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_number(
    make: Callable[[], nn.Module], size: int, text: str
) -> None:
    with pytest.raises(UsageError, match=text) as refused:
        find_plan(make(), size)
    assert "\n" not in str(refused.value)


def test_a_named_vocabulary_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="0 has 3 rows; nearest: tensor=3"):
        find_plan(nn.Sequential(nn.Embedding(3, 8), nn.Tanh()), 4, {"0": "vocab"})


def test_limits_are_what_plans_can_be_made_for() -> None:
    models = [
        nn.Sequential(encoder(24, 12, 36)),
        mlp(8, 12, 8),
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5)),
    ]
    for model in models:
        possible = []
        for size in range(1, 40):
            try:
                find_plan(model, size)
            except UsageError:
                continue
            possible.append(size)
        assert [size for size in limits(model) if size < 40] == possible
    assert limits(models[0]) == (1, 2, 3, 4, 6, 12)
    assert limits(models[2]) == (1, 2, 3, 6)


def test_embeddings_that_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="an embedding with max_norm"):
        find_plan(nn.Sequential(nn.Embedding(10, 4, max_norm=1.0)), 2, {"0": "vocab"})
    plan = find_plan(nn.Sequential(nn.Embedding(10000, 16, sparse=True), nn.Linear(16, 8)), 2)
    assert "sparse" in plan.whole["0"]


def test_attention_that_cannot_be_split() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = nn.MultiheadAttention(8, 2, add_bias_kv=True), mlp(8, 16, 8)

    assert "add_bias_kv" in find_plan(Holder(), 2).whole["attn"]
    with pytest.raises(UsageError, match="the tensor plan names attn: attention with add_bias_kv"):
        find_plan(Holder(), 2, {"attn": "heads"})


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a group of 2 ranks as in the plan, got 3"):
        parallelize(mlp(8, 12, 8), find_plan(mlp(8, 12, 8), 2), CountingGroup(3))


def test_shards_are_cut_from_the_whole_weights_and_keep_their_names() -> None:
    whole, models = mlp(8, 16, 8), [mlp(8, 16, 8) for _ in range(2)]
    plan = find_plan(whole, 2)
    for rank, model in enumerate(models):
        model.load_state_dict(whole.state_dict())
        parallelize(model, plan, CountingGroup(2, rank))
        assert model.state_dict().keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        parts = [model.state_dict()[name] for model in models]
        assert torch.equal(plan.sharding[name].join(parts) if name in plan.sharding else parts[0], value)
