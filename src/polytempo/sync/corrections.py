"""Corrections for stale gradients: options of every mode without rounds.

Staleness is the number of updates between the weights a gradient was taken on and those it is applied to. One object
decides what follows from it, wherever that is known: on a live server, in a simulation, in training in virtual time.

    lr=staleness     rate / max(1, staleness)                        Zhang et al. 2015
    decay=0.9        rate * 0.9 ** staleness
    drop=8           above 8 the push is not applied; it counts as discarded
    momentum=async   momentum 1 - (1 + s)(1 - m), between 0 and m    Mitliagkas et al. 2016
    dc=0.04          gradient + 0.04 * gradient^2 * (now - read)     DC-ASGD, Zheng et al. 2017
    dca=2            the same, with 2 / sqrt(running mean of gradient^2) in the place of 0.04; dcm=0.95 is its memory

They compose, dc and dca excepted, and every one of them does nothing at staleness 0.

Where this departs from the papers: in `momentum=async` m is the target momentum and s the mean staleness of the
job's pushes so far, where the paper has the number of workers less one. In `asp` with equal workers that is the same; in
bounded modes, or with unequal workers, the mean is what there is to correct. Of softsync, `lr=staleness` has the rate alone;
pushes are applied one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polytempo.errors import SpecError
from polytempo.options import ArgumentReader, fraction, number, whole_number
from polytempo.sync.actions import Apply, Discard

#: The reason of every drop begins with this; the staleness follows.
STALE = "staleness "


@dataclass(frozen=True)
class Compensation:
    """Delay compensation: how strongly a gradient is corrected for the change of the weights since they were read."""

    strength: float
    adaptive: bool = False  #: the strength is divided by the root of a running mean of squares
    memory: float = 0.95  #: of that mean


@dataclass(frozen=True)
class Verdict:
    """The decision on a push: a factor on its rate, or the reason why it is not applied."""

    rate: float
    drop: str = ""


@dataclass(frozen=True)
class Corrections:
    """The corrections of stale gradients of a spec; by default none."""

    by_staleness: bool = False  #: divide the rate by the staleness
    decay: float = 1.0
    most: int | None = None  #: the largest staleness that is applied
    adapts_momentum: bool = False
    compensation: Compensation | None = None

    @property
    def any(self) -> bool:
        """Is any correction set?"""
        return self != NOTHING

    def verdict(self, staleness: int) -> Verdict:
        """The decision on a push of this staleness."""
        if self.most is not None and staleness > self.most:
            return Verdict(0.0, f"{STALE}{staleness} is above {self.most}")
        rate = self.decay**staleness
        return Verdict(rate / max(1, staleness) if self.by_staleness else rate)

    def corrected(self, action: Apply, staleness: int) -> Apply | Discard:
        """An update of a single push of this staleness: slower, or dropped. Live and simulated jobs ask here."""
        verdict = self.verdict(staleness)
        if verdict.drop:
            return Discard(action.pushes[0].worker, action.pushes[0].step, verdict.drop, too_stale=True)
        return Apply(action.pushes, action.rate * verdict.rate, action.weights, action.divisor)

    def gives(self, reason: str) -> bool:
        """Is this a reason for which a push may be dropped?"""
        word = reason.removeprefix(STALE).split(" ")[0] if reason.startswith(STALE) else ""
        return word.isascii() and word.isdigit() and self.verdict(int(word)).drop == reason

    def momentum_for(self, momentum: float, mean_staleness: float) -> float:
        """The momentum to use so that the total is `momentum`, the implicit one of stale gradients included."""
        if not self.adapts_momentum:
            return momentum
        return min(max(1 - (1 + mean_staleness) * (1 - momentum), 0.0), momentum) if mean_staleness > 0 else momentum


NOTHING = Corrections()


class MeanStaleness:
    """The running mean over the pushes of a job."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0

    def add(self, staleness: int) -> float:
        """Count one push; the mean with it."""
        self.count += 1
        self.total += staleness
        return self.total / self.count


def _word(word: str) -> ArgumentReader:
    def read(text: str) -> str:
        if text != word:
            raise ValueError(text)
        return text

    return ArgumentReader(f"the word {word}", read, word)


def _strength(name: str, example: str) -> ArgumentReader:
    return number(f"a number {name} of at least 0", lambda value: value >= 0, example)


#: The options of every mode without rounds, beside `scale`.
OPTIONS: Mapping[str, ArgumentReader] = {
    "lr": _word("staleness"),
    "decay": number("a number decay above 0 and at most 1", lambda value: 0 < value <= 1, "0.9"),
    "drop": whole_number("drop", at_least=0, example="8"),
    "momentum": _word("async"),
    "dc": _strength("dc", "0.04"),
    "dca": _strength("dca", "2"),
    "dcm": fraction("dcm", "0.95"),
}


def corrections_from(options: Mapping[str, Any], adapts_momentum: bool) -> Corrections:
    """The corrections among a spec's options; 0 for dc or dca is no compensation."""
    if "dc" in options and "dca" in options:
        raise SpecError("dc and dca exclude each other; give dc=0.04 for a constant strength or dca=2 for an adaptive one")
    if "dcm" in options and "dca" not in options:
        raise SpecError("dcm is the memory of dca and needs it; write for example dca=2,dcm=0.95")
    strength = options.get("dc", options.get("dca", 0.0))
    compensation = Compensation(strength, "dca" in options, options.get("dcm", Compensation.memory)) if strength else None
    return Corrections("lr" in options, options.get("decay", 1.0), options.get("drop"), adapts_momentum, compensation)
