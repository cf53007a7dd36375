"""The one wait-and-report: what a rank waits for is named after a while, a lost rank ends the wait, and so does a time-out.

A `Deadline` belongs to one wait. Its owner blocks where its events come from (a poller, a condition, a store), for at most
`until_next_look` seconds at a time, and then calls `look` or `report`. The first report comes after `FIRST_REPORT` seconds,
each further one when the wait has doubled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from polytempo.errors import RankLost

#: Seconds before the first report of a wait.
FIRST_REPORT = 10.0
#: Seconds between two checks of what is waited for, while no event arrives.
LOOK_EVERY = 0.5
#: Ranks that a report lists, at most.
LISTED = 8


class Deadline:
    """One wait of a rank.

    Args:
        rank: The rank that waits.
        seconds: The time-out; None waits for ever.
        gone: Returns the ranks that are known to be lost, and why.
    """

    __slots__ = ("_began", "_gone", "_report_at", "rank", "seconds")

    def __init__(self, rank: int, seconds: float | None = None, gone: Callable[[], Mapping[int, str]] | None = None) -> None:
        self.rank, self.seconds, self._gone = rank, seconds, gone
        self.restart()

    def restart(self) -> None:
        """Begin the wait for the next event: the time-out and the reports count from now."""
        self._began = time.monotonic()
        self._report_at = self._began + FIRST_REPORT

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until the time-out; None where there is none."""
        return None if self.seconds is None else max(0.0, self.seconds - self.waited)

    @property
    def over(self) -> bool:
        """Whether the wait has timed out."""
        return self.seconds is not None and self.waited >= self.seconds

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
            self._report_at = now + max(now - self._began, FIRST_REPORT)
            sys.stderr.write(f"polytempo: {self.line(what())}\n")
            sys.stderr.flush()

    def look(self, missing: Sequence[int], action: str = "to join") -> None:
        """Check the ranks that are waited for, and report them if that is due.

        Raises:
            RankLost: One of them is lost.
        """
        gone = self._gone() if self._gone is not None else {}
        if lost := [rank for rank in missing if rank in gone]:
            reasons = "; ".join(f"rank {rank} {gone[rank]}" for rank in lost)
            raise RankLost(f"{reasons}: rank {self.rank} waits for it to join a new group", tuple(lost))
        self.report(lambda: f"for {named(missing)} {action}")


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5, ...`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def listed(ranks: Iterable[int]) -> str:
    """The first ranks of a list, as text."""
    numbers = [str(rank) for rank in ranks]
    return ", ".join(numbers[:LISTED]) + (", ..." if len(numbers) > LISTED else "")
