"""Waiting for ranks that are to come: never in silence, never for one who is known to be gone, and not for ever."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from polytempo.errors import RankLost
from polytempo.transport.local_peers import LOOK_AFTER, SAY_AFTER


class Deadline:
    """So many seconds for each thing that is waited for. `gone`: which ranks cannot come any more, and why."""

    def __init__(self, rank: int, seconds: float, gone: Callable[[], Mapping[int, str]] = dict) -> None:
        self.rank, self.seconds, self._gone = rank, seconds, gone
        self.afresh()

    def afresh(self) -> None:
        """For the next thing."""
        self._began = time.monotonic()
        self._say_at = self._began + SAY_AFTER

    @property
    def over(self) -> bool:
        """Has it been long enough?"""
        return self._left() <= 0

    @property
    def until_next_look(self) -> float:
        """Seconds that may be waited before `look` is due again."""
        return max(0.0, min(LOOK_AFTER, self._left()))

    def _left(self) -> float:
        return self._began + self.seconds - time.monotonic()

    def look(self, missing: Sequence[int]) -> None:
        """While these have not come: `RankLost` if one of them never will; after a while, say who they are."""
        gone = self._gone()
        lost = [rank for rank in missing if rank in gone]
        if lost:
            reasons = "; ".join(f"rank {rank} {gone[rank]}" for rank in lost)
            raise RankLost(f"{reasons}: rank {self.rank} waits for it to join a new group", tuple(lost))
        now = time.monotonic()
        if now >= self._say_at:
            self._say_at = now + (now - self._began)
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            waited = (
                f"rank {self.rank} has waited {now - self._began:.0f} s for rank{'s' * (len(missing) > 1)} {names} to come"
            )
            sys.stderr.write(f"polytempo: {waited}\n")
            sys.stderr.flush()
