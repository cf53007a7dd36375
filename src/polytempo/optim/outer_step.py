"""The outer step: a common model, the anchor, moves towards the mean of models that were trained from it.

The outer gradient is anchor - mean, and the step is torch's SGD on it. The modes differ in its settings alone:

    averaging       rate 1, no momentum: the anchor becomes the mean (no step is made then, the mean is taken as it is)
    block momentum  the momentum B, in units of the learning rate lr: u = B u + (anchor - mean) / lr; anchor -= lr u
    DiLoCo          rate 0.7, Nesterov momentum 0.9: m = mu m + delta; anchor -= rate (delta + mu m)

Servers run the same SGD on the same gradient (`OuterRule.hyper`, `OuterRule.unit`), so both ways make the same step. Where
the learning rate is 0, block momentum has no unit: that step is an average, and the momentum stays as it is.

A model may be cut into fragments, whose outer steps are made one after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.errors import UsageError


@dataclass(frozen=True)
class OuterRule:
    """The settings of an outer step."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    in_lr: bool = False  #: block momentum: the outer step is made in units of the learning rate

    def unit(self, lr: float) -> float:
        """What the outer gradient is divided by, at this learning rate of the local steps."""
        return lr if self.in_lr and lr else 1.0

    def hyper(self, lr: float) -> dict[str, Any]:
        """The hyper-parameters of torch's SGD, at this learning rate of the local steps."""
        plain = self.in_lr and not lr
        return {
            "lr": self.unit(lr) if self.in_lr else self.lr,
            "momentum": 0.0 if plain else self.momentum,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": self.nesterov,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }


#: The rule of what is averaged and nothing else.
PLAIN = OuterRule()


class OuterStep:
    """The anchor and the outer momentum of some tensors, with a rule for each group of them.

    Args:
        anchor: The tensors, which are changed in place.
        groups: The group of each.
        rules: The rule of each group.
    """

    def __init__(self, anchor: Sequence[torch.Tensor], groups: Sequence[int], rules: Sequence[OuterRule]) -> None:
        self.anchor, self._groups, self._rules = list(anchor), list(groups), list(rules)
        self._params = [torch.nn.Parameter(tensor) for tensor in anchor]
        members = [[p for p, group in zip(self._params, groups, strict=True) if group == g] for g in range(len(rules))]
        described = [{**rule.hyper(1.0), "params": own} for rule, own in zip(rules, members, strict=True)]
        self._optimizer = torch.optim.SGD(described)
        self._plain_step = inspect.unwrap(torch.optim.SGD.step)  # torch's wrappers import its compiler

    def step(self, mean: Sequence[torch.Tensor], rates: Sequence[float]) -> None:
        """Move the anchor.

        Args:
            mean: The mean of all models, a tensor for each of the anchor.
            rates: The learning rate of the local steps, of each group.
        """
        units = [rule.unit(lr) for rule, lr in zip(self._rules, rates, strict=True)]
        for group, rule, lr in zip(self._optimizer.param_groups, self._rules, rates, strict=True):
            group.update(rule.hyper(lr))
        for param, value, number in zip(self._params, mean, self._groups, strict=True):
            outer_gradient = param.detach() - value
            param.grad = outer_gradient if units[number] == 1.0 else outer_gradient.div_(units[number])
        with torch.no_grad():
            self._plain_step(self._optimizer)
        for param in self._params:
            param.grad = None

    def momentum(self) -> list[torch.Tensor | None]:
        """The momentum of each tensor; None where it has none."""
        return [self._optimizer.state.get(param, {}).get("momentum_buffer") for param in self._params]

    def load(self, anchor: Sequence[torch.Tensor], momentum: Sequence[torch.Tensor | None]) -> None:
        """Go on from an anchor and a momentum."""
        with torch.no_grad():
            for param, value, own in zip(self._params, anchor, momentum, strict=True):
                param.copy_(value)
                kept: Mapping[str, Any] = {} if own is None else {"momentum_buffer": own.to(param).clone()}
                self._optimizer.state[param] = dict(kept)


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut a model into fragments, runs of parameters in their order, about equal in bytes, and none of them empty.

    Args:
        sizes: Bytes of each parameter.
        fragments: Their number.

    Returns:
        The parameters of each fragment.

    Raises:
        UsageError: There are fewer parameters than fragments.
    """
    if len(sizes) < fragments:
        raise UsageError(f"expected at most {len(sizes)} fragments, one a parameter, got {fragments}; use fewer")
    cuts: list[range] = []
    start, left = 0, sum(sizes)
    for rest in range(fragments, 0, -1):
        wanted, stop, taken = left / rest, start + 1, sizes[start]
        last = len(sizes) - (rest - 1)  # each of the others needs one
        while stop < last and (rest == 1 or taken + sizes[stop] / 2 <= wanted):
            taken += sizes[stop]
            stop += 1
        cuts.append(range(start, stop))
        start, left = stop, left - taken
    return cuts
