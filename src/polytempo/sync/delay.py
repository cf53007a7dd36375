"""`delay:t`: bounded delay (Parameter Server, Li et al., OSDI 2014), on a worker's own exchanges.

A worker may start step k when its own exchanges (push, and the answer to it) up to step k - t - 1 are finished. It therefore
computes on while up to t exchanges are in flight, which hides latency. It bounds how far a worker runs ahead of its own
answers, not of other workers: that is `ssp`.

The order "you may start step c + t + 1" travels with the answer to push c; the first t + 1 steps are free. So the policy
never holds a worker, and a worker that waits always waits for its own exchange. `delay:0` is `asp`, event for event.

Where this departs from the paper: tasks there may be steps of the whole job; here every push is applied when it comes.
"""

from __future__ import annotations

from polytempo.options import whole_number
from polytempo.sync.actions import Action, Apply, Release
from polytempo.sync.capabilities import NEVER, Capabilities, Promises
from polytempo.sync.events import Pushed
from polytempo.sync.mode import SCALE, Mode, Scale, rate_of
from polytempo.sync.policy import Policy


class Delay(Policy):
    """Each worker up to `delay` steps ahead of its own finished exchanges."""

    def __init__(self, workers: int, delay: int, scale: Scale = None) -> None:
        super().__init__(workers)
        self.delay = delay
        self.scale = scale

    @property
    def joint(self) -> float:
        """The pushes that move the values as far as one joint step."""
        return len(self.progress.pushed)

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        progress = self.progress
        progress.move(push.worker, push.step + 1)
        return [
            Apply((push,), rate_of(self.scale, self.joint)),
            Release(push.worker, push.step + 1 + self.delay, progress.slowest),
        ]

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        return [Release(worker, step + ahead, self.progress.slowest) for ahead in range(self.delay + 1)]


DELAY = Mode(
    "delay",
    "delay:8",
    "a worker runs up to T steps ahead of its own exchanges",
    lambda workers, delay, scale=None: Delay(workers, delay, scale),
    argument=whole_number("T", at_least=0),
    options=SCALE,
    keeps_momentum=True,
    capabilities=lambda delay, **options: Capabilities(waits=delay == 0, ahead=delay),
    split=None,
    promises=Promises(waits=NEVER, alone=lambda delay, **_: delay == 0),
)
