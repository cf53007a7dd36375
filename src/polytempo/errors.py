"""Every error Polytempo raises, as one tree.

PolytempoError
├── UsageError        the caller's mistake: said in one line, with the fix, before anything starts
│   ├── SpecError     a synchronisation spec that cannot be read, or does not fit the job
│   └── ClusterError  a cluster or experiment description that cannot be read
├── OrderError        a policy was fed an event that cannot happen (a push of a step nobody released)
├── StuckError        nothing can happen any more and somebody still waits; says who waits for whom
├── PeerError         another process sent what cannot be right, or cannot be reached
│   └── RankLost      a rank that others need has ended; says which
├── JobEnded          the job has ended early; the text is the first cause
├── RecordError       a record that cannot be read: file and line are named
└── BrokenInvariant   a record that can be read and breaks a promise: line and promise are named

The text of an error says what was expected, what came, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolytempoError(Exception):
    """The root: `except PolytempoError` catches all that this library raises on purpose."""


class UsageError(PolytempoError):
    """The caller's mistake."""


class SpecError(UsageError):
    """A synchronisation spec that is unknown, malformed or impossible for this job."""


class ClusterError(UsageError):
    """A description of a cluster or an experiment that is malformed."""


class OrderError(PolytempoError):
    """An event that contradicts the events before it."""


class StuckError(PolytempoError):
    """Nothing is left that could happen, and somebody still waits."""


class PeerError(PolytempoError):
    """Another process of the job broke the protocol, is not allowed in, or does not answer."""


class RankLost(PeerError):
    """Ranks that somebody needs have ended, in whatever way."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class JobEnded(PolytempoError):
    """The job has ended early, for a cause that need not lie in this process."""


class RecordError(PolytempoError):
    """A record that cannot be read."""


class BrokenInvariant(PolytempoError):
    """A record that breaks a promise of the contract."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, as '; nearest: X', or an empty text when none is like it."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; nearest: {matches[0]}" if matches else ""


def counted(number: int, thing: str) -> str:
    """A number and what it counts: "1 worker", "2 workers"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
