"""The one wait-and-report: what a rank waits for is named after a while, and a time-out ends the wait.

A `Deadline` belongs to one wait. Its owner blocks where its events come from (a poller, a condition, a store), for at most
`until_next_look` seconds at a time, and then calls `look` or `report`. The first report comes after `FIRST_REPORT` seconds,
each further one when the wait has doubled.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

#: Seconds before the first report of a wait. After half of it other ranks are told of the wait, so that each can name both.
FIRST_REPORT = 10.0
#: Seconds after which a wait for other ranks fails, unless the script says otherwise: as in torch.distributed.
TIMEOUT = 1800.0
MORE_TIME = "it may take longer with pt.init(timeout=SECONDS)"
#: What is said of a rank of which nothing is known.
IN_NO_CALL = "waits in no call: it computes, or is outside this library"
#: Seconds between two checks of what is waited for, while no event arrives.
LOOK_EVERY = 0.5
#: Ranks that a report lists, at most.
LISTED = 8


_endless = False


def wait_without_limit() -> None:
    """A rank of the job is debugged: while its user thinks, no wait of this process for other ranks times out."""
    global _endless
    _endless = True


def limit_of(seconds: float | None) -> float | None:
    """A time-out of a wait for other ranks, as it holds in this job; None for one that never comes."""
    return None if _endless else seconds


class Deadline:
    """One wait of a rank.

    Args:
        rank: The rank that waits.
        seconds: The time-out; None waits for ever.
        firm: Does it hold even where a rank is debugged? So it is where the end of the wait is no failure.
    """

    __slots__ = ("_began", "_report_at", "rank", "seconds")

    def __init__(self, rank: int, seconds: float | None = None, firm: bool = False) -> None:
        self.rank, self.seconds = rank, seconds if firm else limit_of(seconds)
        self.restart()

    def restart(self) -> None:
        """Begin the wait for the next event: the time-out and the reports count from now."""
        self._began = time.monotonic()
        self._report_at = self._began + FIRST_REPORT

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until the time-out; None where there is none."""
        return None if self.seconds is None else max(0.0, self.seconds - self.waited)

    @property
    def over(self) -> bool:
        return self.seconds is not None and self.waited >= self.seconds

    @property
    def is_long(self) -> bool:
        """Whether other ranks should know of this wait by now."""
        return self.waited >= min(FIRST_REPORT / 2, self.seconds / 3 if self.seconds is not None else FIRST_REPORT)

    @property
    def until_next_look(self) -> float:
        """Seconds to block before the next `look` or `report`."""
        left = self.left
        return LOOK_EVERY if left is None else min(LOOK_EVERY, left)

    def line(self, what: str) -> str:
        """The sentence of a report or of a time-out."""
        return f"rank {self.rank} has waited {self.waited:.0f} s {what}"

    def report(self, what: Callable[[], str]) -> None:
        """Write `line(what())` to stderr if a report is due."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = math.inf if _endless else now + max(now - self._began, FIRST_REPORT)
            sys.stderr.write(f"polytempo: {self.line(what())}\n")
            sys.stderr.flush()

    def look(self, missing: Sequence[int], action: str = "to join") -> None:
        """Report the ranks that are waited for, if that is due."""
        self.report(lambda: f"for {named(missing)} {action}")


class RankWatch:
    """What is known of other ranks beside what their links say. Here: nothing; a job with a coordinator knows more."""

    def __init__(self) -> None:
        self.ended: Mapping[int, str] = {}  #: ranks that come no more, and why
        self.calls: Mapping[int, str] = {}  #: what other ranks are in, as far as they were asked for

    def look(self, call: str, ranks: Sequence[int]) -> None:
        """Ask where these ranks are, and say that this one is in a call and waits for them; empty: in none any more."""


def said_of(ranks: Sequence[int], calls: Mapping[int, str], otherwise: str = IN_NO_CALL) -> str:
    """What these ranks are in; `otherwise`: of a rank of which nothing is known."""
    return "; ".join(f"rank {rank} {calls.get(rank, otherwise)}" for rank in ranks[:LISTED])


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5, ...`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def listed(ranks: Iterable[int]) -> str:
    """The first ranks of a list, as text."""
    numbers = [str(rank) for rank in ranks]
    return ", ".join(numbers[:LISTED]) + (", ..." if len(numbers) > LISTED else "")
