"""`dssp-paper:l..u`: dynamic bounded staleness as its listings are printed (Zhao et al., ICDCS 2019, Algorithms 1 and 2).

Kept to reproduce the paper's figures, not to train with: its staleness has no bound. When a worker's credit is used up it is
usually still the fastest and asks again, and nothing compares its lead with u. With two workers and steps of constant length
it behaves like `asp`. Where steps vary, a forecast comes out at 0 now and then: the fastest waits until its whole lead, of
hundreds of steps, is back at l. With more workers all but the fastest are held at l. `dssp` is the mode to use, and its file
lists the differences.

  on a push of p:
      credit left?                      use one, go on
      at most l ahead of the slowest?   go on
      the fastest?                      ask the forecast for r; r > 0: keep r as credit and go on (so r + 1 steps)
      otherwise                         wait until at most l ahead

One thing is mended because the listing cannot run without it: the table of push moments is kept on every push of every
worker, not only when the fastest asks. Intervals are from push to push, waiting included, as printed.
"""

from __future__ import annotations

from polytempo.sync.asynchronous import AsynchronousPolicy
from polytempo.sync.capabilities import Promises
from polytempo.sync.dssp import DynamicBound
from polytempo.sync.mode import SCALE, SPAN, Mode
from polytempo.sync.progress import Progress


class PrintedBound(DynamicBound):
    """The listings' rule, in place of the strict one."""

    def admits(self, worker: int, step: int, progress: Progress, now: float) -> bool:
        credit = self._credit.get(worker, 0)
        if credit > 0:
            self._credit[worker] = credit - 1
            return True
        if step - progress.slowest <= self.lower:
            return True
        if step < progress.fastest:
            return False
        granted = self._forecaster.ask(worker, progress, now, self.upper - self.lower)
        if granted:
            self._credit[worker] = granted
        return granted > 0

    def reason(self, step: int, slowest: int, first: int) -> str:
        return f"{step - slowest} ahead of worker {first}, bound {self.lower} for all but the fastest"

    def observe(self, worker: int, step: int, started: float, now: float) -> None:
        last = self._forecaster.pushes.get(worker)
        self._forecaster.pushes[worker] = (now, now - last[0] if last else 0.0)  # 0: not known yet, so no forecast


DSSP_PAPER = Mode(
    "dssp-paper",
    "dssp-paper:3..15",
    "DSSP as printed, without a bound: for comparison",
    lambda workers, bounds, scale=None: AsynchronousPolicy(workers, PrintedBound(*bounds), scale),
    argument=SPAN,
    options=SCALE,
    keeps_momentum=True,
    split=None,
    promises=Promises(waits=lambda bounds, **_: bounds[0]),
)
