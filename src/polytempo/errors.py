"""Every error that Polytempo raises, as one tree. Each is also the built-in error that Python, PyTorch or Horovod would
raise.

PolytempoError
├── UsageError (ValueError)          a mistake of the caller: one line with the fix, before anything starts
│   ├── WrongType (TypeError too)    an argument of another type than the call can take
│   ├── HyperDiffer                  workers that step together were given different hyper-parameters
│   ├── SpecError                    a synchronisation spec that cannot be read, or does not fit the job
│   ├── ModeError                    a mode that a user has brought does what no mode may do; file and line are named
│   └── ClusterError                 a cluster or experiment description that cannot be read
├── OrderError (RuntimeError)        a policy was fed an event that cannot happen (a push of a step that was not released)
├── StuckError (RuntimeError)        deadlock: no event is left and a rank still waits; names both
├── PeerError (RuntimeError)         another process broke the protocol, timed out or cannot be reached
│   └── RankLost                     a rank that others need has ended; `ranks` names it
├── JobEnded (RuntimeError)          the job has ended early; the text is the first cause
├── RecordError (ValueError)         a record that cannot be read: file and line are named
└── BrokenInvariant (ValueError)     a record that can be read and breaks a promise: line and promise are named

`polytempo.horovod` and `polytempo.torch_backend` add the errors that their users know by name.

`except ValueError` or `except RuntimeError` around calls of this library catches these too; where that is not meant, put
`except PolytempoError: raise` before it.

The text of an error says what was expected, what was found, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolytempoError(Exception):
    """The base class: `except PolytempoError` catches every error that this library raises on purpose."""


class UsageError(PolytempoError, ValueError):
    """A mistake of the caller: an argument, a mode or an order of calls that cannot work. The text says the fix."""


class WrongType(UsageError, TypeError):
    """An argument of another type than the call can take."""


class HyperDiffer(UsageError):
    """A push whose hyper-parameters are not those of the others in its round."""


class SpecError(UsageError):
    """A synchronisation spec that is unknown, malformed or impossible for this job."""


class ModeError(UsageError):
    """A mode that a user has brought cannot be loaded, or does what no mode may do. The text begins with file and line."""

    about: object = None  #: the action or order that it may not answer with, where it is one


class ClusterError(UsageError):
    """A description of a cluster or an experiment that is malformed."""


class OrderError(PolytempoError, RuntimeError):
    """An event that contradicts the events before it."""


class StuckError(PolytempoError, RuntimeError):
    """A deadlock: no event is left that could happen, and a rank still waits."""


class PeerError(PolytempoError, RuntimeError):
    """Another process of the job broke the protocol, made a different call, was refused, or did not answer in time."""


class RankLost(PeerError):
    """Ranks that a call needs have ended, by an exit or by a crash. `reform()` makes a group of the ranks that are left.

    Args:
        text: The message.
        ranks: The ranks of the job that are lost; an attribute of the error.
    """

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.ranks)


class JobEnded(PolytempoError, RuntimeError):
    """The job was ended early; the text is the first cause, which need not lie in this process."""


class RecordError(PolytempoError, ValueError):
    """A record that cannot be read."""


class BrokenInvariant(PolytempoError, ValueError):
    """A record that breaks a promise of the contract."""


def closest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`; an empty text when none is like it."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)), "")


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, as '; nearest: X', or an empty text when none is like it."""
    match = closest(word, known)
    return f"; nearest: {match}" if match else ""


def counted(number: int, thing: str) -> str:
    """A number and what it counts: "1 worker", "2 workers"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def trained_alone(who: str, steps: int) -> str:
    """What workers are told that train, and exchange nothing: what is wrong, and the line that is missing."""
    return (
        f"{who} trained a model of its own for {steps} steps and exchanged nothing with other workers; to train one model "
        "together, wrap the optimizer: optimizer = pt.DistributedOptimizer(optimizer)"
    )
