"""`easgd:k`: elastic averaging (Zhang, Choromanska, LeCun 2015). Each worker has a model of its own, tied to a centre.

    block       k steps of the worker's own optimizer on its own values x
    exchange    x = x - a (x - c) and c = c + a (x - c), with both as they were before: a spring pulls worker and centre
                towards each other, and x + c stays what it was
    no barrier  a worker waits for the answer of the servers, and for no other worker

                  x0  o----o----o,        ,o----o----
                                  `exchange             the centre c is what is evaluated, consolidated and saved;
    centre c      ----------------*-------------*-----  workers may wander from it, and from each other
                                                ,
                  x1  o--o--o--o--o--o--o--o--o'

    rho=R       the strength of the spring: a = lr R, with the learning rate of the block's last step; by default
                a = 0.9 / n with n active workers (the paper's beta = n a = 0.9). Never more than 0.9 / n, which is stable
    overlap=S   a worker goes on for S local steps while the exchange is under way, S < k; then its spring pulls as of the
                moment of sending

The momentum form (EAMSGD) is the same exchange under a script whose optimizer has Nesterov momentum: it stays at the worker.

The servers hold c and go the part a of the way to a pushed x; their answer is the new c' = c + a (x - c). The worker knows
x, so it finds x - c = (x - c') / (1 - a), and goes x + pull (c' - x) with pull = a / (1 - a): both made the same exchange.

Where this departs from the paper: n is the number of workers that are active now, so that a worker that is lost does not
slacken the springs of the others. If an answer is lost on its way, the one that is given in its place has a newer c: that
one exchange pulls the worker towards it, and does not keep the sum.
"""

from __future__ import annotations

import math
from dataclasses import replace

from polytempo.errors import SpecError
from polytempo.options import positive_number, whole_number
from polytempo.sync.actions import Action, Apply, Release
from polytempo.sync.blocks import Averaging, BlockMachine
from polytempo.sync.capabilities import Capabilities, MadeOf, Promises, PushedWork, Pushes, Unsound
from polytempo.sync.events import Pushed
from polytempo.sync.fields import Fields, fields
from polytempo.sync.machine import Install, Orders, WorkerEvent
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy

#: The most that all workers together pull the centre, if each makes one exchange.
BETA = 0.9


class ElasticPolicy(Policy):
    """Every exchange is made at once; no worker is held."""

    def __init__(self, workers: int, rho: float | None = None) -> None:
        super().__init__(workers)
        self.rho = rho

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        coupling = self._coupling(push)
        self.progress.move(push.worker, push.step + 1)
        told = fields(pull=coupling / (1 - coupling))
        return [Apply((push,), coupling), Release(push.worker, push.step + 1, self.progress.slowest, told)]

    def _coupling(self, push: Pushed) -> float:
        """The part of the way that both go: none where no step was made."""
        most = BETA / len(self.progress.pushed)
        if not push.samples:
            return 0.0
        return most if self.rho is None or push.measured.lr is None else min(self.rho * push.measured.lr, most)


class ElasticMachine(BlockMachine):
    """Blocks of one worker, which takes of each answer what its release says."""

    def __init__(self, averaging: Averaging, last: float = math.inf) -> None:
        super().__init__(averaging, last)
        self.goes_on = True  # no worker waits for one that comes back, so it takes up its data where it left it
        self._pull = 1.0

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        if isinstance(event, Release) and isinstance(event.directive, Fields):
            self._pull = event.directive.number("pull")
        orders = super().handle(event, now, part)
        return [replace(order, pull=self._pull) if isinstance(order, Install) else order for order in orders]


def _averaging(period: int, rho: float | None = None, overlap: int = 0) -> Averaging:
    if overlap >= period:
        raise SpecError(f"overlap={overlap} must be below the {period} steps of a block; use a smaller one")
    return Averaging(period, lr=rho is not None, overlap=overlap, own=True)


EASGD = Mode(
    "easgd",
    "easgd:8",
    "K local steps, then worker and centre pull each other; no barrier; rho=R: strength of the spring",
    lambda workers, period, rho=None, overlap=0: ElasticPolicy(workers, rho),
    argument=whole_number("K", at_least=1),
    options={"rho": positive_number("rho", "1.0"), "overlap": whole_number("overlap", at_least=0, example="2")},
    machine=lambda worker, last, period, **options: ElasticMachine(_averaging(period, **options), last),
    averaging=_averaging,
    capabilities=Capabilities(Pushes.VALUES, MadeOf.EACH, PushedWork.LOCAL),
    split=Unsound("stages would be pulled towards centres of different moments", ("local:8",)),
    promises=Promises(alone=False),
    tells={"pull": float},
)
