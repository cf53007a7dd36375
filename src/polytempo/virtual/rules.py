"""Which optimizer makes the updates: the user's, or the one that a mode brings along."""

from __future__ import annotations

import torch

from polytempo.errors import UsageError
from polytempo.optim.asup import AsuP
from polytempo.sync.spec import Spec


def optimizer_for(spec: Spec, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`given`, or AsuP with its parameters, rates and weight decays where the mode asks for that."""
    if spec.mode.rule == "AsuP" and not isinstance(given, AsuP):
        names = ("params", "lr", "weight_decay")
        groups = [{name: group[name] for name in names if name in group} for group in given.param_groups]
        given = AsuP(groups, **spec.rule_options)
    elif spec.mode.rule == "AsuP":  # its own options, but for those that the spec names
        for group in given.param_groups:
            group.update({name: value for name, value in spec.rule_options.items() if name in spec.options})
    if spec.corrections.adapts_momentum and not all("momentum" in group for group in given.param_groups):
        kind = type(given).__name__
        raise UsageError(f"momentum=async needs an optimizer with a momentum to correct, got {kind}; use SGD with momentum")
    return given
