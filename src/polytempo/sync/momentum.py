"""Where momentum lives in modes without rounds: at each worker, whose look-ahead is pushed, or on the servers.

Momentum on servers that apply stale pushes multiplies what staleness spoils: with 4 workers in turn and momentum 0.9 the
largest stable rate on a quadratic falls from 3.8 to 0.138. Kept at each worker it does not, if what is pushed looks ahead
(Hakimi, Barkai, Gabel, Schuster 2019, "Taming Momentum in a Distributed Asynchronous Environment": DANA, in its form without
memory on the servers). With d the change that a worker's own optimizer makes and b its momentum, the worker pushes

    d + b (d - d_before)        momentum=lookahead

d_before is its change of the step before, at the rate of this one. The first change of a rule that divides by the gradient's
size is pushed as it is: it is as large as any, whatever the gradient. (Extrapolated, it costs 0.7 points on digits with
Adam, 16 workers and twice the rate of bsp.)

For SGD, v = m v + g and d = -lr v, so this is -lr (g + m v): Nesterov's form. There g + m v is pushed as a gradient, and the
servers run SGD without momentum. Other rules push the change itself. b is 0 where the rule looks ahead already
(`nesterov=True`, NAdam): `lookahead` and `worker` are one there.

    momentum=lookahead   as above: the default of asp, ssp, dssp, every and delay, where the optimizer has momentum
    momentum=worker      d alone: the momentum of each worker, without the look-ahead
    momentum=server      one momentum on the servers for all pushes, as the textbook has it
    momentum=async       that one, lowered by the staleness (`corrections.py`)
    spike=1.5            with SGD's gradients at each worker: one that is longer than 1.5 times what is usual is shortened to
                         that (`calmed`); chosen with the look-ahead, and not where `momentum=` is given

What a rule does with the size of a gradient says how the push of one of n workers is scaled: by 1/n where the change is
linear in the gradient, by 1/sqrt(n) where the rule divides by the gradient's size (Malladi et al. 2022, for batches). Where
such a rule has momentum, too, 1/sqrt(n) is too much at the best rate of bsp and 1/n too little below it, so it is n^-0.75
(examples/gpt.py, 4 workers, loss against bsp at 2e-3, 4e-3 and its best, 8e-3: +0.5, +0.6, -1.8 %; by 1/sqrt(n) -2.9, -0.8,
+3.6 %).

Defaults are chosen once for each optimizer, and written out: `asp` becomes `asp,momentum=lookahead,spike=1.5` with SGD, and
`asp,momentum=lookahead,scale=n^-0.75` with Adam. A spec that leaves them out means the servers' momentum, gradients as they
are, and 1/n, as records and checkpoints of earlier versions have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from polytempo.errors import UsageError
from polytempo.options import ArgumentReader, number

LOOKAHEAD, WORKER, SERVER, ASYNC = "lookahead", "worker", "server", "async"

_KNOWN = (LOOKAHEAD, WORKER, SERVER, ASYNC)


def _read(text: str) -> str:
    if text not in _KNOWN:
        raise ValueError(text)
    return text


#: The options of every mode that keeps momentum at workers by default.
MOMENTUM: Mapping[str, ArgumentReader] = {
    "momentum": ArgumentReader(f"{', '.join(_KNOWN[:-1])} or {ASYNC}", _read, LOOKAHEAD),
    # At 1 the usual length could fall, and never rise.
    "spike": number("a number above 1", lambda value: 1 < value < math.inf, "1.5"),
}

#: What `spike` is where it is chosen, and how fast the usual length of a gradient follows.
SPIKE, FOLLOWS = 1.5, 0.05

#: What a parameter group has on servers that run SGD without momentum, since each worker keeps its own.
BARE: Mapping[str, Any] = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}

#: Hyper-parameters of one parameter group.
GroupSettings = Mapping[str, Any]


class MomentumForm(Enum):
    """What a worker pushes that keeps momentum of its own."""

    NONE = ""  #: it keeps none
    GRADIENT = "gradient"  #: a look-ahead gradient, with which servers run SGD without momentum
    CHANGE = "change"  #: what its optimizer has changed, extrapolated


@dataclass(frozen=True)
class UpdateRule:
    """What must be known of an optimizer class. Of a class that is not in `RULES` nothing is: servers run it as they did."""

    linear: bool  #: is the change linear in the gradients, so that n pushes of 1/n make one step of their mean?
    momentum: str = ""  #: the hyper-parameter that is its momentum; `betas`: the first of them
    looks_ahead: bool = False  #: without being told to
    decoupled: bool = False  #: is weight decay a change of its own, beside what the gradient makes?

    def momentum_in(self, group: GroupSettings) -> float:
        """The momentum of a parameter group."""
        value = group.get(self.momentum, 0.0)
        return float(value[0] if isinstance(value, tuple | list) else value or 0.0)

    def extrapolation(self, group: GroupSettings) -> float:
        """b: how far the change of a group is extrapolated."""
        return 0.0 if self.looks_ahead or group.get("nesterov") else self.momentum_in(group)

    def decay_in(self, group: GroupSettings) -> float:
        """Weight decay that is no part of the change that is extrapolated: lr times this times the value is taken off."""
        apart = self.decoupled or bool(group.get("decoupled_weight_decay"))
        return float(group.get("weight_decay") or 0.0) if apart else 0.0


RULES: Mapping[str, UpdateRule] = {
    "SGD": UpdateRule(linear=True, momentum="momentum"),
    "ASGD": UpdateRule(linear=True),
    "Adam": UpdateRule(linear=False, momentum="betas"),
    "AdamW": UpdateRule(linear=False, momentum="betas", decoupled=True),
    "Adamax": UpdateRule(linear=False, momentum="betas"),
    "RAdam": UpdateRule(linear=False, momentum="betas"),
    "NAdam": UpdateRule(linear=False, momentum="betas", looks_ahead=True),
    "RMSprop": UpdateRule(linear=False, momentum="momentum"),
    "Adagrad": UpdateRule(linear=False),
    "Adadelta": UpdateRule(linear=False),
    "Adafactor": UpdateRule(linear=False),
}


def form_of(optimizer: str, groups: Sequence[GroupSettings]) -> MomentumForm:
    """What is pushed where workers keep momentum: a gradient of every SGD but one with dampening, a change of all others."""
    plain = optimizer == "SGD" and not any(group.get("dampening") for group in groups)
    return MomentumForm.GRADIENT if plain else MomentumForm.CHANGE


def is_known(optimizer: str) -> bool:
    """Is it known what such a class does with a gradient?"""
    return optimizer in RULES


def check_kept(text: str, optimizer: str, kind: str, why_not: str = "") -> None:
    """Refuse a spec that keeps momentum at each worker where that is not possible.

    Args:
        text: The spec.
        optimizer: The name of the class, where it is torch's own; else empty.
        kind: Its name in any case.
        why_not: Another reason, if there is one.
    """
    if why_not or not is_known(optimizer):
        why = why_not or f"the look-ahead of {kind} is not known"
        raise UsageError(f"{text} keeps momentum at each worker, which is not possible here: {why}; leave it out")


def has_momentum(optimizer: str, groups: Sequence[GroupSettings]) -> bool:
    """Has it momentum, as far as is known? Of a class that is not in `RULES` its options say so."""
    rules = [RULES[optimizer]] if optimizer in RULES else [UpdateRule(False, "momentum"), UpdateRule(False, "betas")]
    return any(rule.momentum_in(group) for rule in rules for group in groups)


def calmed(length: float, usual: float, spike: float) -> tuple[float, float]:
    """What a gradient of this length is multiplied by, and the usual length from then on.

    Args:
        length: Its norm.
        usual: The running mean of norms so far; 0 where none is known.
        spike: A gradient that is longer than this many times the usual one is shortened to that.
    """
    if not usual or not 0 < length < math.inf:  # nothing is learned from no gradient, or from one that is not finite
        return 1.0, usual or (length if length < math.inf else 0.0)
    counted = min(length, spike * usual)
    return counted / length, usual + FOLLOWS * (counted - usual)


def check_spike(text: str, optimizer: str, groups: Sequence[GroupSettings], at_workers: bool, why_not: str = "") -> None:
    """Refuse a spec whose `spike` would have no effect: it shortens gradients that each worker puts into its momentum.

    Args:
        text: The spec.
        optimizer: The name of the class, where it is torch's own; else empty.
        groups: Its parameter groups.
        at_workers: Does each worker keep momentum of its own?
        why_not: The reason for which it does not, if there is one.
    """
    if optimizer in RULES and form_of(optimizer, groups) is MomentumForm.CHANGE:
        why = f"that of {optimizer} is of changes"
    elif at_workers:
        return
    else:
        why = why_not or (f"{optimizer} has none" if optimizer in RULES else "its look-ahead is not known")
    raise UsageError(f"{text}: spike= shortens gradients that go into momentum at each worker, and {why}; leave it out")


#: Steps in which a worker comes in that joins a job under way, where its rule divides by the size of gradients.
COMING_IN = 20


def share_of_joiner(optimizer: str, step: float) -> float:
    """What the push of this step counts for, from 1 on, of a worker that has joined a job under way with a fresh optimizer.

    A rule that divides by the size of gradients knows little of it at first, and makes steps as long as at the start of a
    training: digits with Adam, joined after 1,200 updates, went from a loss of 0.006 to 0.03 with the first push and to 0.19
    soon after; like this to 0.02. A linear one has no such steps, nor has a worker that comes back from a pause with the
    state that it had.
    """
    return 1.0 if RULES[optimizer].linear else min(1.0, step / (COMING_IN + 1))


def chosen_options(
    optimizer: str, groups: Sequence[GroupSettings], given: Mapping[str, Any], *, workers: int, why_not: str = ""
) -> dict[str, str]:
    """The options that a spec leaves out, for this optimizer.

    Args:
        optimizer: The name of its class.
        groups: Its parameter groups.
        given: The options that the spec has.
        workers: Of the job; one alone trains as plain PyTorch does.
        why_not: A reason for which momentum stays on the servers.
    """
    rule = RULES.get(optimizer)
    if rule is None or workers < 2:
        return {}
    chosen = {}
    if "momentum" not in given and has_momentum(optimizer, groups):
        chosen["momentum"] = SERVER if why_not else LOOKAHEAD
        if chosen["momentum"] == LOOKAHEAD and form_of(optimizer, groups) is MomentumForm.GRADIENT and "spike" not in given:
            chosen["spike"] = f"{SPIKE:g}"
    if "scale" not in given and not rule.linear:
        chosen["scale"] = "n^-0.75" if has_momentum(optimizer, groups) else "sqrt"
    return chosen
