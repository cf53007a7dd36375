"""`RoundExchange`: how a worker takes part in rounds with deadlines (`sync/anytime.py`), over servers or among workers.

Two threads of a worker meet here. The script's thread adds up gradients of micro-batches; the communication thread of
`train/deadline_rounds.py` hands the sum over and hears how the round ended, also while the script computes:

    exchange    communication thread: this worker's part of a round goes out, and the answer is waited for
    install     script's thread, inside `step()`: what rounds brought goes into the parameters, never under a backward

Sums are made in flat buffers of the reducer's layout. A buffer that was handed over is left alone until `exchange` returns;
so there are two, used in turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polytempo.protocol.push import Measures
from polytempo.protocol.values import ClosedRound
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.reducer.reducer import GroupValues, Reducer
from polytempo.sync.directives import NextDeadline


@dataclass(frozen=True)
class RoundOutcome:
    """How a round ended for this worker."""

    step: int  #: the round that starts, as the sequencer numbers them
    starts: NextDeadline  #: what is said of that round
    closed: ClosedRound | None  #: and of the one that has ended
    content: Any = None  #: what `install` needs; of no meaning to others


def deadline_of(reducer: Reducer) -> NextDeadline:
    """What the last release has said of the round that starts."""
    return reducer.directive if isinstance(reducer.directive, NextDeadline) else NextDeadline()


class RoundExchange(ABC):
    """The rounds of one optimizer.

    Args:
        reducer: The optimizer's reducer, with which this worker takes part in the job.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.given_up = False  #: this worker leaves the job: no answer is waited for any more

    @property
    def has_room(self) -> bool:
        """May this worker take part in another round before `install` is called? If not, it lets rounds pass without it,
        and catches up."""
        return True

    @abstractmethod
    def buffers(self) -> tuple[FlatBuffer, FlatBuffer]:
        """The two flat buffers in which sums of gradients are made, in turn."""

    @abstractmethod
    def exchange(
        self, total: FlatBuffer | None, hyper: GroupValues, measures: Measures, absent: Sequence[int]
    ) -> RoundOutcome:
        """Take part in a round, and wait until it has ended. Called in the communication thread, once for each round.

        Args:
            total: The sum of `samples * gradient` over the micro-batches; it may be written to. None where there is none.
            hyper: The hyper-parameters of all groups, as of the last micro-batch.
            measures: Of all micro-batches; with None there are no samples.
            absent: The indices of the parameters for which none has a gradient, ascending.

        Returns:
            What the script's thread installs, and the next round.

        Raises:
            PolytempoError: The job has ended or this worker was refused; the script's next `step()` raises it.
        """

    @abstractmethod
    def install(self, results: Sequence[RoundOutcome]) -> None:
        """Bring the parameters to the newest of these results. Called in the script's thread, inside `step()`.

        Args:
            results: Of the rounds since the last call, in order; at least one.
        """

    def look(self) -> None:
        """Before a step, in the script's thread: `UsageError` where the script has written to parameters and may not."""

    def reload(self) -> None:
        """Put the newest values that were installed into the parameters again: the script has written to them. Called in the
        script's thread."""

    def close(self) -> None:
        """No further round comes."""
