"""Every error Polytempo raises, as one tree. Each is also the built-in error that Python, PyTorch and Horovod raise there.

PolytempoError
├── UsageError (ValueError)          the caller's mistake: said in one line, with the fix, before anything starts
│   ├── WrongType (TypeError too)    an argument of another type than the call can take
│   ├── SpecError                    a synchronisation spec that cannot be read, or does not fit the job
│   └── ClusterError                 a cluster or experiment description that cannot be read
├── OrderError (RuntimeError)        a policy was fed an event that cannot happen (a push of a step that was not released)
├── StuckError (RuntimeError)        nothing can happen any more and a rank still waits; says which waits for which
├── PeerError (RuntimeError)         another process sent what cannot be right, or cannot be reached
│   └── RankLost                     a rank that others need has ended; says which
├── JobEnded (RuntimeError)          the job has ended early; the text is the first cause
├── RecordError (ValueError)         a record that cannot be read: file and line are named
└── BrokenInvariant (ValueError)     a record that can be read and breaks a promise: line and promise are named

Two rooms add what their users know by name: `horovod/errors.py` and `torch_backend/errors.py`.

An `except ValueError` or `except RuntimeError` around our own calls catches these too: where that is not meant, an
`except PolytempoError: raise` stands before it.

The text of an error says what was expected, what came, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolytempoError(Exception):
    """The root: `except PolytempoError` catches all that this library raises on purpose."""


class UsageError(PolytempoError, ValueError):
    """The caller's mistake."""


class WrongType(UsageError, TypeError):
    """An argument of another type than the call can take."""


class SpecError(UsageError):
    """A synchronisation spec that is unknown, malformed or impossible for this job."""


class ClusterError(UsageError):
    """A description of a cluster or an experiment that is malformed."""


class OrderError(PolytempoError, RuntimeError):
    """An event that contradicts the events before it."""


class StuckError(PolytempoError, RuntimeError):
    """Nothing is left that could happen, and somebody still waits."""


class PeerError(PolytempoError, RuntimeError):
    """Another process of the job broke the protocol, is not allowed in, or does not answer."""


class RankLost(PeerError):
    """Ranks that somebody needs have ended, in whatever way."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class JobEnded(PolytempoError, RuntimeError):
    """The job has ended early, for a cause that need not lie in this process."""


class RecordError(PolytempoError, ValueError):
    """A record that cannot be read."""


class BrokenInvariant(PolytempoError, ValueError):
    """A record that breaks a promise of the contract."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, as '; nearest: X', or an empty text when none is like it."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; nearest: {matches[0]}" if matches else ""


def counted(number: int, thing: str) -> str:
    """A number and what it counts: "1 worker", "2 workers"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
