"""Every row rule against its formula in plain Python, number by number, and against torch.optim where torch has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from sharded_tables import Sharded, same, some

from polytempo.errors import UsageError
from polytempo.protocol.values import TableInfo
from polytempo.tables.row_optimizers import RULES, checked_hyper, rule

Row = list[float]
Kept = dict[str, Any]

# The formulas, for one row. `kept` is empty before the row's first push; `step` counts the updates of the table.


def plain_add(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    return [a + b for a, b in zip(w, g, strict=True)]


def plain_assign(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    return g


def plain_min(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    return [min(a, b) for a, b in zip(w, g, strict=True)]


def plain_max(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    return [max(a, b) for a, b in zip(w, g, strict=True)]


def plain_sgd(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    decayed = [b + h["weight_decay"] * a for a, b in zip(w, g, strict=True)]
    kept["v"] = [h["momentum"] * v + b for v, b in zip(kept.get("v", [0.0] * len(w)), decayed, strict=True)]
    return [a - h["lr"] * rate * v for a, v in zip(w, kept["v"], strict=True)]


def plain_adagrad(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    before = kept.get("s", [h["initial_accumulator_value"]] * len(w))
    kept["s"] = [s + b * b for s, b in zip(before, g, strict=True)]
    lr = h["lr"] * rate / (1 + (step - 1) * h["lr_decay"])
    return [a - lr * b / (math.sqrt(s) + h["eps"]) for a, b, s in zip(w, g, kept["s"], strict=True)]


def plain_rowwise(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    kept["s"] = kept.get("s", 0.0) + sum(b * b for b in g) / len(g)
    return [a - h["lr"] * rate / (math.sqrt(kept["s"]) + h["eps"]) * b for a, b in zip(w, g, strict=True)]


def moments(g: Row, kept: Kept, h: Mapping[str, float]) -> None:
    m, v = kept.get("m", [0.0] * len(g)), kept.get("v", [0.0] * len(g))
    kept["m"] = [h["beta1"] * a + (1 - h["beta1"]) * b for a, b in zip(m, g, strict=True)]
    kept["v"] = [h["beta2"] * a + (1 - h["beta2"]) * b * b for a, b in zip(v, g, strict=True)]


def plain_adam(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    moments(g, kept, h)
    t = kept["t"] = kept.get("t", 0) + 1
    one, two = 1 - h["beta1"] ** t, 1 - h["beta2"] ** t
    pairs = zip(w, kept["m"], kept["v"], strict=True)
    return [a - h["lr"] * rate * (m / one) / (math.sqrt(v / two) + h["eps"]) for a, m, v in pairs]


def plain_sparse_adam(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    moments(g, kept, h)
    size = h["lr"] * rate * math.sqrt(1 - h["beta2"] ** step) / (1 - h["beta1"] ** step)
    return [a - size * m / (math.sqrt(v) + h["eps"]) for a, m, v in zip(w, kept["m"], kept["v"], strict=True)]


def soft(value: float, by: float) -> float:
    return math.copysign(max(abs(value) - by, 0.0), value)


def plain_prox(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    lr = h["lr"] * rate
    return [soft(a - lr * b, lr * h["l1"]) for a, b in zip(w, g, strict=True)]


def plain_ftrl(w: Row, g: Row, kept: Kept, h: Mapping[str, float], rate: float, step: int) -> Row:
    alpha, result = h["alpha"] * rate, []
    z, n = kept.setdefault("z", [0.0] * len(w)), kept.setdefault("n", [0.0] * len(w))
    for i, (a, b) in enumerate(zip(w, g, strict=True)):
        sigma = (math.sqrt(n[i] + b * b) - math.sqrt(n[i])) / alpha
        z[i], n[i] = z[i] + b - sigma * a, n[i] + b * b
        small = abs(z[i]) <= h["l1"]
        bottom = (h["beta"] + math.sqrt(n[i])) / alpha + h["l2"]
        result.append(0.0 if small else -(z[i] - math.copysign(h["l1"], z[i])) / bottom)
    return result


CASES: list[tuple[str, Callable[..., Row], dict[str, float]]] = [
    ("add", plain_add, {}),
    ("assign", plain_assign, {}),
    ("min", plain_min, {}),
    ("max", plain_max, {}),
    ("sgd", plain_sgd, {"lr": 0.3}),
    ("sgd", plain_sgd, {"lr": 0.3, "weight_decay": 0.1, "momentum": 0.9}),
    ("adagrad", plain_adagrad, {"lr": 0.3}),
    ("adagrad", plain_adagrad, {"lr": 0.3, "lr_decay": 0.5, "eps": 0.1, "initial_accumulator_value": 0.7}),
    ("rowwise-adagrad", plain_rowwise, {"lr": 0.3, "eps": 0.01}),
    ("adam", plain_adam, {"lr": 0.3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}),
    ("sparse-adam", plain_sparse_adam, {"lr": 0.3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}),
    ("prox", plain_prox, {"lr": 0.3, "l1": 0.5}),
    ("ftrl", plain_ftrl, {"alpha": 0.3, "beta": 0.5, "l1": 0.4, "l2": 0.1}),
]
ROUNDS = [[0, 3, 5], [3], [], [5, 1, 0, 7], [3, 0], [3, 5, 7]]


def table(name: str, shards: int = 1, rows: int = 9) -> Sharded:
    return Sharded(TableInfo("t", rows, 4, "float64", "zeros" if name == "ftrl" else "uniform", rule=name), shards)


def test_every_rule_has_its_formula_here() -> None:
    assert {name for name, _, _ in CASES} == set(RULES)


@pytest.mark.parametrize("rate", [1.0, 0.25])
@pytest.mark.parametrize("rows", [9, 0], ids=["bounded", "unbounded"])
@pytest.mark.parametrize(("name", "plain", "given"), CASES)
def test_a_rule_does_what_its_formula_says(
    name: str, plain: Callable[..., Row], given: dict[str, float], rows: int, rate: float
) -> None:
    ours, hyper = table(name, 2, rows), checked_hyper(name, given)
    rows_now: dict[int, Row] = dict(enumerate(ours.pull(list(range(9))).tolist()))
    kept: dict[int, Kept] = {one: {} for one in range(9)}
    for step, ids in enumerate(ROUNDS, start=1):
        values = some(len(ids), 4, seed=step)
        ours.push((ids, values), hyper=given, rate=rate)
        for one, g in zip(ids, values.tolist(), strict=True):
            rows_now[one] = plain(rows_now[one], g, kept[one], hyper, rate, step)
        wanted = torch.tensor([rows_now[one] for one in range(9)], dtype=torch.float64)
        assert torch.allclose(ours.pull(list(range(9))), wanted, rtol=1e-12, atol=1e-13)


# By hand.


def test_rowwise_adagrad_by_hand() -> None:
    ours = Sharded(TableInfo("t", 3, 2, "float64", rule="rowwise-adagrad"))
    gradient, tiny = torch.tensor([[1.0, -1.0]], dtype=torch.float64), {"lr": 0.1, "eps": 1e-300}
    ours.push(([1], gradient), hyper=tiny)
    assert ours.tables[0].saved()["state.sum"].tolist() == [[1.0]]
    assert ours.pull([1]).tolist() == [[-0.1, 0.1]]
    ours.push(([1], gradient), hyper=tiny)
    step = ours.pull([1])[0, 0].item() + 0.1
    assert step == pytest.approx(-0.1 / math.sqrt(2), rel=1e-14)


def test_prox_and_ftrl_make_small_numbers_exactly_zero() -> None:
    prox = Sharded(TableInfo("t", 3, 3, "float64", rule="prox"))
    prox.push(([0], torch.tensor([[-0.9, 0.0, 3.0]], dtype=torch.float64)), hyper={"lr": 0.5, "l1": 1.0})
    assert prox.pull([0]).tolist() == [[0.0, 0.0, -1.0]]
    ftrl = Sharded(TableInfo("t", 3, 3, "float64", rule="ftrl"))
    ftrl.push(([0], torch.tensor([[-0.9, 0.0, 3.0]], dtype=torch.float64)), hyper={"alpha": 1.0, "beta": 0.0, "l1": 1.0})
    assert ftrl.pull([0]).tolist() == [[0.0, 0.0, -2 / 3]]


def test_a_learning_rate_of_nothing_changes_nothing() -> None:
    for name in ("sgd", "adagrad", "rowwise-adagrad", "adam", "sparse-adam", "prox"):
        ours = table(name)
        before = ours.pull([2, 4])
        ours.push(([2, 4], some(2, 4)), hyper={"lr": 0.0})
        assert same(ours.pull([2, 4]), before)


@pytest.mark.parametrize("name", ["add", "assign", "min", "max"])
def test_rules_without_a_learning_rate_ignore_the_rate(name: str) -> None:
    one, other = table(name), table(name)
    one.push(([2], some(1, 4)))
    other.push(([2], some(1, 4)), rate=0.1)
    assert same(one.pull([2]), other.pull([2]))


def test_rows_pushed_twice_at_once_or_one_after_the_other() -> None:
    """The same for SGD, which is linear; not for Adagrad, whose sum sees (a + b)^2 instead of a^2 + b^2."""
    values = torch.tensor([[1.0] * 4, [2.0] * 4], dtype=torch.float64)
    for name, alike in (("sgd", True), ("adagrad", False)):
        once, twice = table(name), table(name)
        once.push(([5, 5], values))
        twice.push(([5], values[:1]))
        twice.push(([5], values[1:]))
        assert torch.allclose(once.pull([5]), twice.pull([5]), rtol=1e-12) is alike


# torch.optim.

TORCH: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "sgd": ("SGD", {"lr": 0.3}, {"lr": 0.3}),
    "adagrad": ("Adagrad", {"lr": 0.3}, {"lr": 0.3}),
    "adagrad with all": (
        "Adagrad",
        {"lr": 0.3, "lr_decay": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.2},
        {"lr": 0.3, "lr_decay": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.2},
    ),
    "sparse-adam": ("SparseAdam", {"lr": 0.03, "betas": (0.8, 0.99)}, {"lr": 0.03, "beta1": 0.8, "beta2": 0.99}),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizers cause it
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, pytest.param(16, marks=pytest.mark.proof), 19])
@pytest.mark.parametrize("case", TORCH)
def test_a_sparse_embedding_trained_by_torch_is_the_same_to_the_bit(case: str, dim: int, dtype: str, shards: int) -> None:
    optimizer, theirs, ours = TORCH[case]
    kind = getattr(torch, dtype)
    info = TableInfo("t", 50, dim, dtype, "uniform", rule=case.split()[0])
    mine = Sharded(info, shards)
    embedding = torch.nn.Embedding(50, dim, sparse=True, dtype=kind)
    with torch.no_grad():
        embedding.weight.copy_(mine.pull(range(50)))
    steps = getattr(torch.optim, optimizer)([embedding.weight], **theirs)
    for step in range(1, 8):
        ids = torch.randint(0, 40, (25,), generator=torch.Generator().manual_seed(step))
        steps.zero_grad()
        (embedding(ids) * some(25, dim, seed=step, dtype=kind)).sum().backward()
        gradient = embedding.weight.grad = embedding.weight.grad.coalesce()  # in an order of torch's own
        steps.step()
        mine.push((gradient.indices()[0].tolist(), gradient.values()), hyper=ours)
        assert same(mine.pull(range(50)), embedding.weight.detach())


# Options.


@pytest.mark.parametrize("name", RULES)
def test_missing_options_are_filled_in(name: str) -> None:
    assert checked_hyper(name, {}) == rule(name).defaults


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        (
            "sgd",
            {"momentun": 0.9},
            "rule 'sgd' has the options lr, weight_decay, momentum, not 'momentun'; nearest: momentum",
        ),
        ("add", {"lr": 0.1}, "rule 'add' has no options, not 'lr'"),
        ("sgd", {"lr": float("nan")}, "expected lr to be a finite number from 0 on, got nan"),
        ("sgd", {"lr": -0.1}, "expected lr to be a finite number from 0 on, got -0.1"),
        ("sgd", {"lr": float("inf")}, "got inf"),
        ("sgd", {"lr": True}, "got True"),
        ("sgd", {"lr": "0.1"}, "got '0.1'"),
        ("adam", {"beta1": 1.0}, "expected beta1 to be a finite number from 0 on below 1, got 1.0"),
        ("adagrad", {"eps": 0.0}, "expected eps to be a finite number above 0, got 0.0"),
        ("ftrl", {"alpha": 0}, "expected alpha to be a finite number above 0, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        checked_hyper(name, given)
    assert words in str(refusal.value)


def test_an_unknown_rule_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"expected a rule of add, .*, got 'row-adagrad'; nearest: rowwise-adagrad"):
        rule("row-adagrad")
