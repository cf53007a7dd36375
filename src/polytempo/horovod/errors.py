"""Horovod's errors by their names, each also an error of Polytempo (`polytempo/errors.py`).

PeerError
└── HorovodInternalError     a call that failed on all ranks; a RuntimeError, as in Horovod
    └── MismatchError        ranks made different calls (a UsageError too); later calls go on
UsageError
├── DuplicateNameError       a second call by the name of one that has not ended; a ValueError
└── NotOffered               what Horovod has and this does not; a RuntimeError too
"""

from __future__ import annotations

from polytempo.errors import PeerError, UsageError


class HorovodInternalError(PeerError):
    """A call that failed on all ranks that made it."""


class MismatchError(HorovodInternalError, UsageError):
    """Ranks made different calls, or a call that cannot go on while a rank has joined."""


class DuplicateNameError(UsageError):
    """A call by the name of one that has not ended."""


class NotOffered(UsageError, RuntimeError):
    """What Horovod has and this does not. Horovod raises a RuntimeError for an operation that a call cannot do."""
