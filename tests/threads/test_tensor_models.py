"""Whole models that are split by the plan found for them equal the unsplit ones; and what they communicate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import TOLERANCE, assert_equal_to_whole, joined, on_ranks, seeded
from torch import Tensor, nn
from torch.nn import functional

from polytempo.errors import RankLost, UsageError
from polytempo.pipeline.partition import cut
from polytempo.session.session import Session
from polytempo.tensor_parallel.cross_entropy import cross_entropy, gather_logits, parallel_loss
from polytempo.tensor_parallel.group import CountingGroup, RankTensorGroup, TensorGroup
from polytempo.tensor_parallel.plan import TensorPlan, find_plan, parallelize
from polytempo.testing.threads import GroupJob

pytestmark = pytest.mark.timeout(60)
SIZES = pytest.mark.parametrize("size", [1, 2, 4])

WIDTH, WORDS, LENGTH, BATCH = 16, 11, 6, 4


def numbers(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def encoder_layer(dropout: float = 0.0, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout, batch_first=True, **options)


# Torch's own stacks.


@SIZES
@pytest.mark.parametrize("training", [True, False])
def test_encoder_stacks(size: int, training: bool) -> None:
    layer = partial(encoder_layer, activation="gelu")
    model = seeded(lambda: nn.TransformerEncoder(layer(), 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False))
    assert_equal_to_whole(model.train(training), [numbers(BATCH, LENGTH, WIDTH)], size)


@SIZES
def test_decoder_stacks(size: int) -> None:
    layer = partial(nn.TransformerDecoderLayer, WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True)
    model = seeded(lambda: nn.TransformerDecoder(layer(), 2))
    assert_equal_to_whole(model, [numbers(BATCH, LENGTH, WIDTH), numbers(BATCH, 3, WIDTH, seed=1)], size)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_whole_transformer_without_biases() -> None:
    model = seeded(lambda: nn.Transformer(WIDTH, 4, 1, 1, 32, 0.0, bias=False))
    assert_equal_to_whole(model, [numbers(LENGTH, BATCH, WIDTH), numbers(3, BATCH, WIDTH, seed=1)], 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [True, False])
def test_evaluation_without_gradients_leaves_the_fast_path(padded: bool) -> None:
    """Torch takes it in evaluation mode, for the layer and (with a padding mask) for the stack: it would read shards."""
    model = seeded(lambda: nn.TransformerEncoder(encoder_layer(), 2)).eval()
    x, mask = numbers(BATCH, LENGTH, WIDTH), None
    if padded:
        mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        mask[1, 4:] = True
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=mask)
    plan = find_plan(model, 2)

    def work(group: RankTensorGroup) -> Tensor:
        mine = copy.deepcopy(model)
        parallelize(mine, plan, group)
        with torch.no_grad():
            result: Tensor = mine(x, src_key_padding_mask=mask)
        return result

    kept = slice(None) if mask is None else ~mask
    for result in on_ranks(2, work):
        torch.testing.assert_close(result[kept], wanted[kept], **TOLERANCE)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from(["linear", "wide", "act", "norm", "drop", "shared", "chain", "layer"]), min_size=1, max_size=7)
)
def test_chains_of_any_layers(kinds: list[str]) -> None:
    def model() -> nn.Module:
        shared = nn.Linear(WIDTH, WIDTH)
        make: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)),
            "act": nn.GELU,
            "norm": lambda: nn.LayerNorm(WIDTH),
            "drop": lambda: nn.Dropout(0.0),
            "shared": lambda: shared,
            "chain": lambda: nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
            "layer": encoder_layer,
        }
        return nn.Sequential(*(make[kind]() for kind in kinds), nn.Linear(WIDTH, 5))

    assert_equal_to_whole(seeded(model), [numbers(BATCH, LENGTH, WIDTH)], 2)


# Models as users write them.


class Positions(nn.Module):
    """Adds a vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def gpt(tied: bool = False, dropout: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        Positions(),
        encoder_layer(dropout, norm_first=True),
        encoder_layer(dropout, norm_first=True),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WORDS, bias=not tied),
    )
    if tied:
        model[5].weight = model[0].weight
    return model


IDS = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
TARGETS = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
LOSS = partial(cross_entropy, dim=-1)


def backward(model: nn.Module, plan: TensorPlan | None = None, group: TensorGroup | None = None) -> tuple[Tensor, Any]:
    """Loss and gradients of the GPT."""
    loss = LOSS
    if plan is not None and plan.logits is not None:
        assert group is not None
        loss = parallel_loss(LOSS, group, plan.logits[1])
    value = loss(model(IDS), TARGETS)
    value.backward()
    return value.detach(), {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}


@SIZES
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_whose_logits_stay_split(size: int, tied: bool) -> None:
    model = seeded(lambda: gpt(tied))
    wanted, grads = backward(copy.deepcopy(model))
    plan = find_plan(model, size, {"0": "vocab"}, LOSS)
    assert plan.logits == (None if size == 1 else ("5", WORDS))

    def work(group: RankTensorGroup) -> tuple[Tensor, Any]:
        mine = copy.deepcopy(model)
        parallelize(mine, plan, group)
        assert (mine[5].weight is mine[0].weight) == tied
        return backward(mine, plan, group)

    results = on_ranks(size, work)
    for loss, _ in results:
        torch.testing.assert_close(loss, wanted, **TOLERANCE)
    for name, grad in joined(plan, [grads for _, grads in results]).items():
        torch.testing.assert_close(grad, grads[name], **TOLERANCE)


@pytest.mark.parametrize("loss", [None, functional.mse_loss])
def test_without_cross_entropy_logits_are_gathered(loss: object) -> None:
    plan = assert_equal_to_whole(seeded(lambda: gpt(tied=True)), [IDS], 4, loss=loss)
    assert plan.logits is None
    assert plan.styles["5"].gathers


def test_split_logits_can_be_gathered_for_a_prediction() -> None:
    model = seeded(gpt)
    wanted, plan = model(IDS), find_plan(model, 4, loss=LOSS)

    def work(group: RankTensorGroup) -> Tensor:
        mine = copy.deepcopy(model)
        parallelize(mine, plan, group)
        return gather_logits(mine(IDS), group, WORDS)

    for result in on_ranks(4, work):
        torch.testing.assert_close(result, wanted, **TOLERANCE)


def by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 4)).transpose(1, 2)


class Custom(nn.Module):
    """A model with its own forward, and one attention of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = by_head(q), by_head(k), by_head(v)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        result: Tensor = self.head(self.norm(x + self.mlp(x)))
        return result


@SIZES
def test_a_custom_model_as_it_is_found(size: int) -> None:
    plan = assert_equal_to_whole(seeded(Custom), [IDS], size)
    if size > 1:
        assert {name: str(style) for name, style in plan.styles.items()} == {
            "qkv": "column-gather",
            "proj": "column-gather",
            "mlp.0": "column",
            "mlp.2": "row",
        }
        assert plan.whole.keys() == {"embed", "head"}  # a small table, and 11 classes


@SIZES
def test_a_custom_model_by_a_dict(size: int) -> None:
    styles = {"qkv": "column:3", "proj": "row", "embed": "vocab", "head": "vocab"}
    assert_equal_to_whole(seeded(Custom), [IDS], size, styles)


def test_a_module_that_is_called_at_several_places() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), shared, nn.LayerNorm(8)).double()
    plan = assert_equal_to_whole(model, [numbers(3, 8)], 2)
    assert set(map(str, plan.styles.values())) == {"column-gather"}
    assert "4.weight" in plan.sharding


@pytest.mark.parametrize("stages", [2, 3])
def test_the_parts_of_a_pipeline_are_split_one_by_one(stages: int) -> None:
    model = seeded(lambda: gpt(tied=True))
    wanted, plan = model(IDS), find_plan(model, 2)

    def work(group: RankTensorGroup) -> Tensor:
        x = IDS
        for part in cut(copy.deepcopy(model), stages):
            for prefix, member in part.members:
                parallelize(member, plan, group, prefix)
            x = part.module(x)
        return x

    for result in on_ranks(2, work):
        torch.testing.assert_close(result, wanted, **TOLERANCE)


def test_traced_parts_keep_the_names() -> None:
    model = seeded(Custom)
    wanted, plan = model(IDS), find_plan(model, 2)
    parts = [cut(copy.deepcopy(model), 2) for _ in range(2)]  # torch.fx traces for one thread at a time

    def work(group: RankTensorGroup) -> Tensor:
        x: Any = IDS
        for part in parts[group.rank]:
            for prefix, member in part.members:
                parallelize(member, plan, group, prefix)
            x = part.module(*x) if isinstance(x, tuple) else part.module(x)
        result: Tensor = x
        return result

    for result in on_ranks(2, work):
        torch.testing.assert_close(result, wanted, **TOLERANCE)


def test_an_exported_graph_is_refused() -> None:
    model = seeded(Custom)
    plan = find_plan(model, 2)

    class Exported(nn.Module):
        """What torch.export leaves: parameters under their names, in modules without a class."""

        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Module()
            self.proj.weight = model.proj.weight

    with pytest.raises(UsageError, match=r"proj cannot be split in this part of the model \(column-gather is for nn.Linear"):
        parallelize(Exported(), plan, CountingGroup(2))


# What is communicated.


def test_a_transformer_layer_makes_two_all_reduces_each_way() -> None:
    """Each of b s h numbers, as Megatron's formula says."""
    model = nn.Sequential(encoder_layer())
    group = CountingGroup(4)
    parallelize(model, find_plan(model, 4), group)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    model(x).sum().backward()
    whole = BATCH * LENGTH * WIDTH * 4
    assert sorted(group.calls) == [("all_reduce", whole, False)] * 2 + [("all_reduce", whole, True)] * 2


def test_cross_entropy_makes_three_all_reduces_of_a_number_for_each_sample() -> None:
    group = CountingGroup(2)
    loss = parallel_loss(LOSS, group, WORDS)
    loss(torch.randn(BATCH, LENGTH, 6, requires_grad=True), TARGETS.clamp(max=5)).backward()
    assert group.calls == [("all_reduce", BATCH * LENGTH * 4, False)] * 3


# Dropout.


def test_dropout_inside_split_regions_leaves_replicated_parameters_equal() -> None:
    """Dropout outside needs generators in the same state, which threads do not have: tests/processes has both."""
    model = seeded(lambda: gpt(tied=True, dropout=0.3))
    for name, module in model.named_modules():
        if name.endswith(("dropout1", "dropout2")):
            module.p = 0.0
    plan = find_plan(model, 2, loss=LOSS)
    assert [name for name, style in plan.styles.items() if style.word == "dropout"] == ["2.dropout", "3.dropout"]

    def work(group: RankTensorGroup) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        parallelize(mine, plan, group)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            backward(mine, plan, group)
            optimizer.step()
        return {name: param.detach() for name, param in mine.named_parameters()}

    after = joined(plan, on_ranks(2, work))  # which compares them
    assert after.keys() - plan.sharding.keys() >= {"2.norm1.weight", "2.linear2.bias", "1.table"}
    assert not torch.equal(after["2.norm1.weight"], model[2].norm1.weight)


def test_ranks_drop_other_elements_and_the_common_generator_goes_on_alike() -> None:
    drawn, after = [], []
    for rank in range(2):
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        parallelize(layer, find_plan(layer, 2), CountingGroup(2, rank))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            drawn.append(layer[1](torch.ones(64)))
            after.append(torch.rand(3))
    assert not torch.equal(*drawn)
    assert torch.equal(*after)
    assert all(0.2 < float((mask == 0).float().mean()) < 0.8 for mask in drawn)


# A rank that is lost.


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_lost_rank_is_named_on_the_others(in_backward: bool) -> None:
    plan = find_plan(nn.Sequential(encoder_layer()), 4)

    def work(session: Session) -> str:
        model = nn.Sequential(encoder_layer())
        parallelize(model, plan, RankTensorGroup(session.world().all_ranks))
        x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        if session.rank == 2 and not in_backward:
            session.abandon()
            return "gone"
        try:
            output = model(x)
            if session.rank == 2:
                session.abandon()
                return "gone"
            output.sum().backward()
        except RankLost as lost:
            return f"lost {lost.ranks}"
        return "no error"

    with GroupJob(4) as job:
        assert job.run(work) == ["lost (2,)", "lost (2,)", "gone", "lost (2,)"]
