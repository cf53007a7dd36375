"""`adacomm:k`: AdaComm (Wang and Joshi, SysML 2019), local SGD whose period shrinks with the loss.

Time is cut into intervals. The first uses the period tau_0 = k; at the end of each, F is the mean loss of the block that has
just closed (over all workers, weighted by samples), eta its learning rate, and

    tau = ceil( sqrt( eta_0 / eta * F / F_0 ) * tau_0 )
    tau = ceil( gamma * the tau before )      where that is not smaller, at the same learning rate: the loss is flat

F_0 and eta_0 are those of the first block. The policy decides once, on its one clock, when a block closes; every worker
learns the period with its release.

    every=60        seconds of an interval
    gamma=0.5       the decay where the loss is flat
    most=K          an upper bound of the period
    hold=1          a fall of the learning rate waits until the period is 1; then it happens, and the period may rise by it
    momentum=, state=   as in `local:k`

Where this departs from the paper: an interval ends with the first block that closes after its time, because a period changes
between blocks only; F_0 is a mean over the first block's steps, of which the first alone is on the initial model; a loss
that is not finite or not above zero leaves the period as it is. Paddle's optimizer, another implementation, has tau_0 inside
the root and no intervals.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from polytempo.options import fraction, positive_number, switch, whole_number
from polytempo.sync.barrier import Barrier, RoundRule, with_data
from polytempo.sync.blocks import Averaging, machine_of_blocks
from polytempo.sync.capabilities import EACH_ROUND, Unsound
from polytempo.sync.events import Pushed
from polytempo.sync.local_sgd import BLOCKS, MEAN_OPTIONS, mean_of_models
from polytempo.sync.mode import Mode

#: Seconds of an interval, as in the paper.
INTERVAL = 60.0
#: Rounding must not add a step to a period that is a whole number.
EPSILON = 1e-9


class LossPeriod(RoundRule):
    """The period of AdaComm."""

    def __init__(self, first: int, every: float = INTERVAL, gamma: float = 0.5, most: int | None = None) -> None:
        self.period = first if most is None else min(first, most)
        self._first, self._every, self._gamma, self._most = first, every, gamma, most
        self._began: float | None = None  # the interval
        self._loss: float | None = None  # F_0
        self._rate: float | None = None  # eta_0
        self._last_rate: float | None = None  # of the interval before

    def saved(self) -> dict[str, float]:
        known = {"loss": self._loss, "rate": self._rate, "last_rate": self._last_rate}
        return {"period": self.period, **{name: value for name, value in known.items() if value is not None}}

    def restore(self, saved: Mapping[str, float]) -> None:
        if not saved:
            return
        self.period = int(saved.get("period", self.period))
        self._loss, self._rate, self._last_rate = saved.get("loss"), saved.get("rate"), saved.get("last_rate")

    def start(self, now: float) -> None:
        self._began = now if self._began is None else self._began

    def close(self, pushes: tuple[Pushed, ...], members: Collection[int], now: float) -> None:
        pushes = with_data(pushes)
        loss, rate = mean_loss(pushes), pushes[0].measured.lr
        if loss is None or rate is None or not rate > 0:
            return
        if self._loss is None or self._rate is None:
            self._loss, self._rate, self._last_rate = loss, rate, rate
        assert self._began is not None  # a worker has started, or nothing would close
        if now - self._began < self._every:
            return
        self._began = now
        self.period = self._next(loss, rate)
        self._last_rate = rate

    def _next(self, loss: float, rate: float) -> int:
        assert self._loss is not None
        assert self._rate is not None
        period = next_period(self._first, loss / self._loss, self._rate / rate)
        if rate == self._last_rate and period >= self.period:
            period = max(1, math.ceil(self._gamma * self.period - EPSILON))
        return period if self._most is None else min(period, self._most)


def next_period(first: int, loss_ratio: float, rate_ratio: float = 1.0) -> int:
    """The period that the loss asks for: `loss_ratio` is F / F_0, `rate_ratio` is eta_0 / eta."""
    return max(1, math.ceil(math.sqrt(rate_ratio * loss_ratio) * first - EPSILON))


def mean_loss(pushes: tuple[Pushed, ...]) -> float | None:
    """The mean loss of these blocks, weighted by samples; None where a worker has none, or it is not above 0 and finite."""
    total = sum(push.samples for push in pushes)
    losses = [push.measured.loss for push in pushes if push.measured.loss is not None]
    if len(losses) < len(pushes) or not total > 0:
        return None
    mean = sum(loss * push.samples for loss, push in zip(losses, pushes, strict=True)) / total
    return mean if 0 < mean < math.inf else None


def _averaging(
    first: int, hold: bool = False, momentum: float = 0.0, state: str | None = None, **of_policy: object
) -> Averaging:
    return mean_of_models(first, momentum, state, loss=True, lr=True, holds_lr=hold)


ADACOMM = Mode(
    "adacomm",
    "adacomm:20",
    "local steps, then the mean of all models; K of them at first, fewer as the loss falls",
    lambda workers, first, every=INTERVAL, gamma=0.5, most=None, **of_worker: Barrier(
        workers, rule=LossPeriod(first, every, gamma, most)
    ),
    argument=whole_number("K", at_least=1),
    options={
        "every": positive_number("every", "60"),
        "gamma": fraction("gamma", "0.5"),
        "most": whole_number("most", at_least=1, example="64"),
        "hold": switch(),
        **MEAN_OPTIONS,
    },
    machine=machine_of_blocks(_averaging),
    capabilities=BLOCKS,
    split=Unsound("each stage would choose a period of its own from what it measures", ("local:8",)),
    averaging=_averaging,
    promises=replace(EACH_ROUND, alone=lambda period, momentum=0.0, **_: momentum == 0),
)
