"""`asup`: ASU-P, asynchronous pushes into RMSProp with momentum on the servers.

As a policy it is `asp`, or with `bound=S` it is `ssp:S`. What makes it a mode of its own is the update rule, one state of
which serves all workers: `rule` names it (polytempo.optim), and momentum, rho, eps and initial are passed on to it. In

    s = rho * s + (1 - rho) * g^2        v = momentum * v + lr * g / sqrt(s + eps)        w = w - v

`initial` is s before the first push. The source is a description without a paper: defaults are TensorFlow's for RMSProp.

`momentum=` is a number here. The correction that other modes call `momentum=async` is `momentum=async` for the default 0.9
and `momentum=async:0.8` for another number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polytempo.options import ArgumentReader, fraction, number, positive_number, whole_number
from polytempo.sync.asynchronous import AsynchronousPolicy, Unbounded
from polytempo.sync.capabilities import NEVER, Promises, Unsound
from polytempo.sync.mode import SCALE, Mode
from polytempo.sync.ssp import Bound

DEFAULTS: dict[str, Any] = {"momentum": 0.9, "rho": 0.9, "eps": 1e-10, "initial": 0.0}


class Momentum(NamedTuple):
    """A momentum, and whether it is corrected for staleness."""

    value: float
    adapts: bool


def _read_momentum(text: str) -> Momentum:
    word, colon, rest = text.partition(":")
    if word != "async":
        return Momentum(_FRACTION.read(text), False)
    return Momentum(_FRACTION.read(rest) if colon else DEFAULTS["momentum"], True)


_FRACTION = fraction("momentum")


ASUP = Mode(
    "asup",
    "asup",
    "asynchronous RMSProp with momentum on the servers; bound=S: as in ssp",
    lambda workers, bound=None, scale=None: AsynchronousPolicy(
        workers, Unbounded() if bound is None else Bound(bound), scale
    ),
    options={"bound": whole_number("bound", at_least=0, example="3"), **SCALE},
    rule="AsuP",
    split=Unsound("each stage would choose momentum and rate by the staleness that it sees itself", ("asp",)),
    rule_options={
        "momentum": ArgumentReader(f"{_FRACTION.expected}, async, or async:NUMBER", _read_momentum, "0.9"),
        "rho": fraction("rho"),
        "eps": positive_number("eps", "1e-10"),
        "initial": number("a number initial of at least 0", lambda value: value >= 0, "1"),
    },
    promises=Promises(
        lead=lambda bound=None, **_: bound,
        waits=lambda bound=None, **_: NEVER if bound is None else bound,
        alone=False,
        even=False,
    ),
)
