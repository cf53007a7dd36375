"""How a push changes rows: rules by name, as a table's `rule` says.

A rule sees the rows of one push (each id once), what it keeps beside them, and one coalesced gradient for each; it knows
nothing of slots, shards or workers. What it keeps begins at zero. `rate` multiplies the learning rate: modes that apply
pushes one by one scale each of them by it. All rules are *lazy*: a row that nobody pushed to does not change, neither do its
moments, and weight decay takes hold of it only when it is pushed to. That is what torch.optim does with sparse gradients,
whose arithmetic `sgd`, `adagrad` and `sparse-adam` follow to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polytempo.errors import UsageError, nearest
from polytempo.tables.adaptive import Hyper, State, adagrad, adam, rowwise_adagrad, sparse_adam
from polytempo.tables.proximal import ftrl, prox

#: Changes rows and state in place: (rows, state, pushed, hyper, rate). `hyper` has all options of the rule, and "step": how
#: many updates the table has had, this one included.
Apply = Callable[[Tensor, State, Tensor, Hyper, float], None]


@dataclass(frozen=True)
class Rule:
    """How one table's rows change."""

    name: str
    combine: str  #: what becomes of the pushes of one round: "sum", "mean", "min", "max" or "last"
    apply: Apply
    defaults: Mapping[str, float] = field(default_factory=dict)  #: all options there are
    rows: tuple[str, ...] = ()  #: kept beside a row, and as long; under the name of an option only where that is not 0
    numbers: tuple[str, ...] = ()  #: kept beside a row, one number each

    def state(self, dim: int, hyper: Hyper) -> dict[str, int]:
        """What is kept beside a row with these options: how many numbers under which name. They begin at 0."""
        rows = {name: dim for name in self.rows if hyper.get(name, 1.0)}
        return rows | dict.fromkeys(self.numbers, 1)


def add(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """row += pushed."""
    rows.add_(pushed)


def assign(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """row = pushed; of several the last."""
    rows.copy_(pushed)


def lower(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """row = min(row, pushed), number by number."""
    rows.copy_(rows.minimum(pushed))


def raise_(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
    """row = max(row, pushed), number by number."""
    rows.copy_(rows.maximum(pushed))


def sgd(rows: Tensor, state: State, pushed: Tensor, hyper: Hyper, rate: float) -> None:
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
