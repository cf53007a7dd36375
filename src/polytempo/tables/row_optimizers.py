"""Row optimizers: how a push changes the rows of a table, by the name of its `rule`.

A rule gets the rows of one push (each id once), their state, and one coalesced gradient for each; it knows nothing of slots,
shards or workers. State begins at zero. `rate` multiplies the learning rate: modes that apply single pushes scale each of
them by it. All rules are *lazy*: a row without a push does not change, nor do its moments, and weight decay applies to it
only when it is pushed to. That is what torch.optim does with sparse gradients, whose arithmetic `sgd`, `adagrad` and
`sparse-adam` follow bit for bit.

`adam` counts the pushes of each row: a rare row's first steps are corrected as the first steps of Adam are. `sparse_adam`
counts the updates of the whole table, as torch.optim.SparseAdam does. The rules for an L1 penalty make numbers exactly zero:
the proximal gradient step and FTRL-proximal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polytempo.errors import UsageError, nearest

RowState = dict[str, Tensor]
RowHyper = Mapping[str, float]


def adagrad(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """sum += g^2; row -= lr / (sqrt(sum) + eps) * g, number by number, in the order of torch.optim.Adagrad."""
    total, first = state["sum"], hyper["initial_accumulator_value"]
    if first:  # a sum is 0 only before its first push, and never after one that began above 0
        total.masked_fill_(total == 0, first)
    total.add_(pushed.pow(2))
    lr = hyper["lr"] * rate / (1 + (hyper["step"] - 1) * hyper["lr_decay"])
    rows.add_(pushed / total.sqrt().add_(hyper["eps"]), alpha=-lr)


def rowwise_adagrad(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """sum += mean of g^2 over the row; row -= lr / (sqrt(sum) + eps) * g: one number beside a row instead of a row."""
    total = state["sum"].add_(pushed.pow(2).mean(1, keepdim=True))
    rows.addcmul_(pushed, hyper["lr"] * rate / total.sqrt().add_(hyper["eps"]), value=-1)


def adam(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """Adam on the rows of a push, with the bias correction of each row's own pushes.

    The correction 1 - beta^t is kept as the running mean of ones: it needs no power, and is right when a beta changes.
    """
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    mean = state["mean"].mul_(beta1).add_(pushed, alpha=1 - beta1)
    square = state["square"].mul_(beta2).add_(pushed.pow(2), alpha=1 - beta2)
    correct1 = state["mean_of_ones"].mul_(beta1).add_(1 - beta1)
    correct2 = state["square_of_ones"].mul_(beta2).add_(1 - beta2)
    bottom = (square / correct2).sqrt_().add_(hyper["eps"])
    rows.add_(mean / correct1 / bottom, alpha=-hyper["lr"] * rate)


def sparse_adam(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """torch.optim.SparseAdam, operation by operation: its bias correction counts the updates of the table."""
    beta1, beta2, step = hyper["beta1"], hyper["beta2"], hyper["step"]
    top = _approach(state["exp_avg"], pushed, 1 - beta1)
    bottom = _approach(state["exp_avg_sq"], pushed.pow(2), 1 - beta2).sqrt_().add_(hyper["eps"])
    size = hyper["lr"] * rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    rows.add_(-size * top.div_(bottom))


def _approach(average: Tensor, new: Tensor, part: float) -> Tensor:
    """Move a running average a part of the way; a copy of it, rounded as torch's is."""
    change = new.sub(average).mul_(part)
    result: Tensor = torch.add(change, average)
    average.add_(change)
    return result


def shrink(values: Tensor, by: float) -> Tensor:
    """Each number moved towards 0, and no further."""
    return values - values.clamp(-by, by)


def prox(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """row = shrink(row - lr * gradient, lr * l1): a gradient step, then the proximal operator of l1 * |row|."""
    lr = hyper["lr"] * rate
    rows.add_(pushed, alpha=-lr)
    rows.copy_(shrink(rows, lr * hyper["l1"]))


def ftrl(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """FTRL-proximal (McMahan et al., KDD 2013). The row follows from `z` and `n`, so it must start at zeros.

    sigma = (sqrt(n + g^2) - sqrt(n)) / alpha;  z += g - sigma * row;  n += g^2
    row = -shrink(z, l1) / ((beta + sqrt(n)) / alpha + l2)
    """
    alpha, z, n = hyper["alpha"] * rate, state["z"], state["n"]
    before = n.sqrt()
    n.add_(pushed.pow(2))
    root = n.sqrt()
    z.add_(pushed).sub_((root - before).div_(alpha).mul_(rows))
    bottom = (root + hyper["beta"]).div_(alpha).add_(hyper["l2"])
    # bottom is 0 only where all that was ever pushed is 0
    rows.copy_(torch.where(bottom > 0, -shrink(z, hyper["l1"]) / bottom, 0.0))


#: Changes rows and state in place: (rows, state, pushed, hyper, rate). `hyper` has all options of the rule, and "step": how
#: many updates the table has had, this one included.
RowUpdate = Callable[[Tensor, RowState, Tensor, RowHyper, float], None]


@dataclass(frozen=True)
class Rule:
    """How one table's rows change."""

    name: str
    combine: str  #: what becomes of the pushes of one round: "sum", "mean", "min", "max" or "last"
    apply: RowUpdate
    defaults: Mapping[str, float] = field(default_factory=dict)  #: all options there are
    rows: tuple[str, ...] = ()  #: kept beside a row, and as long; under the name of an option only where that is not 0
    numbers: tuple[str, ...] = ()  #: kept beside a row, one number each

    def state(self, dim: int, hyper: RowHyper) -> dict[str, int]:
        """What is kept beside a row with these options: how many numbers under which name. They begin at 0."""
        rows = {name: dim for name in self.rows if hyper.get(name, 1.0)}
        return rows | dict.fromkeys(self.numbers, 1)


def add(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """row += pushed."""
    rows.add_(pushed)


def assign(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """row = pushed; of several the last."""
    rows.copy_(pushed)


def lower(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """row = min(row, pushed), number by number."""
    rows.copy_(rows.minimum(pushed))


def raise_(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """row = max(row, pushed), number by number."""
    rows.copy_(rows.maximum(pushed))


def sgd(rows: Tensor, state: RowState, pushed: Tensor, hyper: RowHyper, rate: float) -> None:
    """row -= lr * gradient, with lazy weight decay and momentum."""
    gradient = pushed.add(rows, alpha=hyper["weight_decay"]) if hyper["weight_decay"] else pushed
    if hyper["momentum"]:
        gradient = state["momentum"].mul_(hyper["momentum"]).add_(gradient)
    rows.add_(gradient, alpha=-hyper["lr"] * rate)


ADAM = {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
ADAGRAD = {"lr": 0.01, "lr_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0}
RULES = {
    one.name: one
    for one in (
        Rule("add", "sum", add),
        Rule("assign", "last", assign),
        Rule("min", "min", lower),
        Rule("max", "max", raise_),
        Rule("sgd", "mean", sgd, {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.0}, rows=("momentum",)),
        Rule("adagrad", "mean", adagrad, ADAGRAD, rows=("sum",)),
        Rule("rowwise-adagrad", "mean", rowwise_adagrad, {"lr": 0.01, "eps": 1e-10}, numbers=("sum",)),
        Rule("adam", "mean", adam, ADAM, rows=("mean", "square"), numbers=("mean_of_ones", "square_of_ones")),
        Rule("sparse-adam", "mean", sparse_adam, ADAM, rows=("exp_avg", "exp_avg_sq")),
        Rule("prox", "mean", prox, {"lr": 0.01, "l1": 0.0}),
        Rule("ftrl", "mean", ftrl, {"alpha": 0.1, "beta": 1.0, "l1": 0.0, "l2": 0.0}, rows=("z", "n")),
    )
}

POSITIVE = ("eps", "alpha")  # divisors; a learning rate may be 0, as schedules begin there
BELOW_ONE = ("beta1", "beta2", "momentum")


def rule(name: str) -> Rule:
    """The rule of this name."""
    if name not in RULES:
        raise UsageError(f"expected a rule of {', '.join(RULES)}, got {name!r}{nearest(name, RULES)}")
    return RULES[name]


def checked_hyper(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """A rule's options, the missing ones filled in; refused where one is unknown or cannot be."""
    defaults = rule(name).defaults
    for option, value in given.items():
        if option not in defaults:
            known = f"the options {', '.join(defaults)}" if defaults else "no options"
            raise UsageError(f"rule {name!r} has {known}, not {option!r}{nearest(option, defaults)}")
        if not _fits(option, value):
            above, below = "above 0" if option in POSITIVE else "from 0 on", " below 1" if option in BELOW_ONE else ""
            raise UsageError(f"rule {name!r}: expected {option} to be a finite number {above}{below}, got {value!r}")
    return {**defaults, **{option: float(value) for option, value in given.items()}}


def _fits(option: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return (value > 0 if option in POSITIVE else value >= 0) and (value < 1 or option not in BELOW_ONE)
