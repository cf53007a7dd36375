"""`anytime:SECONDS`, `anytime:auto`: rounds with a deadline (anytime mini-batches, Ferdinand et al. 2020).

    round       every worker computes micro-batches on the weights of the round until the deadline, then pushes the sum of
                their gradients and the number of their samples
    update      the sum over all workers, divided by the EXPECTED number of samples: a round to which few contributed moves
                less; `divide=actual` divides by the number that came
    deadline    SECONDS; or, with `auto`, such that the expected number of micro-batches is `micro` for each worker, from
                the median speed of each over the last rounds, changed where it is off by more than HYSTERESIS

No gradient is stale and no worker waits for another: one that is stuck contributes what it has finished, or nothing. A round
to which none contributed changes nothing. With equal speeds it is `bsp` with the joint batch. The first round of `auto` has
no deadline: each worker takes `micro` micro-batches, and their time is measured.

`auto` moves the deadline by up to SLACK, to where the workers' last micro-batches end: what is left of a round after a
worker's last micro-batch is lost. The micro-batch that is unfinished at the deadline is abandoned (`late=drop`: its samples
return to the queue) or finished and counted in the next round, one round stale (`late=keep`).

Where this departs from the paper: an exact mean over all workers in place of dual averaging and rounds of consensus, and the
expected number as the divisor. Hyper-parameters of a round are those of its lowest rank that contributed, so schedulers that
are stepped by micro-batch may differ between workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from polytempo.options import ArgumentReader, choice, positive_number, whole_number
from polytempo.sync.barrier import Barrier, RoundRule
from polytempo.sync.events import Pushed
from polytempo.sync.mode import Mode
from polytempo.sync.shares import WorkerSpeeds

#: Micro-batches of a worker in a round, on average, unless `micro` says.
MICRO = 8
#: The deadline, or the expected number of samples, is changed where it is off by more than this.
HYSTERESIS = 0.05
#: `auto` moves the deadline by at most this, to where micro-batches end.
SLACK = 0.1
#: A micro-batch that takes this much longer than usual still fits before the deadline.
MARGIN = 0.02

#: Micro-batches over which a worker's own pace is taken.
LAST = 5


@dataclass(frozen=True)
class AnytimeSpec:
    """What a worker must know of the mode."""

    micro: int = MICRO  #: micro-batches of a round without a deadline; of others on average
    late: str = "drop"  #: what becomes of the micro-batch that is unfinished at the deadline: "drop" or "keep"


class DeadlineRule(RoundRule):
    """The deadline of each round, and what its sum is divided by."""

    compares = False

    def __init__(self, seconds: float | None, micro: int = MICRO, divide: str = "expected") -> None:
        self.deadline = seconds or 0.0
        self._auto, self._micro, self._by_actual = seconds is None, micro, divide == "actual"
        self._speeds = WorkerSpeeds()  # micro-batches a second
        self._each = 0.0  # samples of a micro-batch: the most seen
        self._expected = 0.0  # micro-batches in the next round; 0 while unknown

    def divisor(self, pushes: tuple[Pushed, ...]) -> float:
        return 0.0 if self._by_actual else self._expected * self._each

    def close(self, pushes: tuple[Pushed, ...], members: Collection[int], now: float) -> None:
        for push in pushes:
            if push.samples and push.count:
                self._speeds.add(push.worker, push.count, push.computed)
                self._each = max(self._each, push.samples / push.count)
        self._speeds.forget(members)
        speeds = self._speeds.of(members)
        if not speeds:  # one is unknown, or none is left
            return
        if self._auto:
            wanted = self._micro * len(members)
            deadline = wanted / sum(speeds.values())
            if abs(deadline - self.deadline) > HYSTERESIS * self.deadline:
                self.deadline = aligned(deadline, speeds)
                self._expected = expected_count(self.deadline, speeds)
        expected = expected_count(self.deadline, speeds)
        if abs(expected - self._expected) > HYSTERESIS * self._expected:
            self._expected = expected


class Pace:
    """The seconds that a worker's own micro-batches take: the median of the last ones; one stall does not move it."""

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self._last: list[float] = []
        self.seconds = 0.0  #: of the next one; 0 while unknown

    def add(self, seconds: float) -> None:
        """A micro-batch took this long."""
        last = self._last
        last.append(seconds)
        if len(last) > LAST:
            del last[0]
        self.seconds = sorted(last)[len(last) // 2]


def fits(elapsed: float, pace: float, deadline: float) -> bool:
    """Would a worker's next micro-batch end in time? `elapsed` since the round began; `pace`: seconds that one takes."""
    return elapsed + pace <= latest(deadline)


def latest(deadline: float) -> float:
    """When a worker in the middle of a micro-batch contributes what it has finished, from the start of the round."""
    return deadline * (1 + MARGIN)


def expected_count(deadline: float, speeds: Mapping[int, float]) -> float:
    """Whole micro-batches that all workers finish by the deadline."""
    return float(sum(int(deadline * speed * (1 + MARGIN)) for speed in speeds.values()))


def aligned(deadline: float, speeds: Mapping[int, float]) -> float:
    """The moment near a deadline at which the least of the workers' time is lost in unfinished micro-batches."""
    ends = [
        count / speed
        for speed in speeds.values()
        for count in range(max(1, int(deadline * (1 - SLACK) * speed)), int(deadline * (1 + SLACK) * speed) + 2)
    ]
    near = [end for end in ends if (1 - SLACK) * deadline <= end <= (1 + SLACK) * deadline]
    return min([*near, deadline], key=lambda end: (round(_lost(end, speeds), 3), abs(end - deadline)))


def _lost(deadline: float, speeds: Mapping[int, float]) -> float:
    """The share of the workers' time that is lost in unfinished micro-batches."""
    used = sum(min(int(deadline * speed * (1 + MARGIN)) / speed, deadline) for speed in speeds.values())
    return 1 - used / (deadline * len(speeds))


def _read_deadline(text: str) -> float | None:
    return None if text == "auto" else float(positive_number("SECONDS").read(text))


ANYTIME = Mode(
    "anytime",
    "anytime:auto",
    "rounds end at a deadline, each worker contributes the micro-batches it has finished; auto: about micro=8 each",
    lambda workers, seconds=None, micro=MICRO, late="drop", divide="expected": Barrier(
        workers, rule=DeadlineRule(seconds, micro, divide)
    ),
    argument=ArgumentReader("seconds, or auto,", _read_deadline, "0.5"),
    options={
        "micro": whole_number("micro", at_least=1, example="8"),
        "late": choice("late", ("drop", "keep")),
        "divide": choice("divide", ("expected", "actual")),
    },
    barrier=True,
)
