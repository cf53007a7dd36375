"""What happens when a worker leaves its job, step by step. `Session.on_leave` adds to a step, `Session.close` runs them:

    FLUSH   what is outstanding is sent, in the order in which it was added; only of a worker that has finished
    REPORT  the state of the script is reported, now that the last push is made; only then, too
    CLOSE   threads that use the client end
            (here the client leaves: the servers go on without this worker)
    JOIN    without servers: this rank takes part in what the others still need of it, all at once: ranks differ in order
    UNDO    what optimizers have changed in this process is undone
            (here the links to other workers are closed)

A worker that fails ends its threads before it says so, and one that is abandoned (its process has failed) undoes what was
changed as well. Neither sends or joins.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from polytempo.collectives.shutdown import ExitThread


class LeavingStep(Enum):
    """When something is done, as the head of this file says."""

    FLUSH = "flush"
    REPORT = "report"
    CLOSE = "close"
    JOIN = "join"
    UNDO = "undo"


class LeavingCalls:
    """What one worker does in each step."""

    def __init__(self) -> None:
        self.of: dict[LeavingStep, list[Callable[[], None]]] = {step: [] for step in LeavingStep}
        self.standbys: list[ExitThread] = []  #: a thread for each call of JOIN but the first

    def add(self, step: LeavingStep, call: Callable[[], None]) -> None:
        """In this step, do this, too."""
        if step is LeavingStep.JOIN and self.of[step]:
            self.standbys.append(ExitThread())
        self.of[step].append(call)

    def run(self, step: LeavingStep) -> None:
        """Take a step, once."""
        for call in self.of[step]:
            call()
        self.of[step].clear()

    def join(self) -> None:
        """Make all calls of JOIN at once."""
        joins = self.of[LeavingStep.JOIN]
        for standby, join in zip(self.standbys, joins[1:], strict=False):
            standby.begin(join)
        for join in joins[:1]:
            join()
        for standby in self.standbys:
            standby.end()

    def forget_joins(self, kept: int = 0) -> None:
        """Drop the calls of JOIN behind the first few, and their threads."""
        del self.of[LeavingStep.JOIN][kept:]
        while len(self.standbys) > max(0, kept - 1):
            self.standbys.pop().end()
