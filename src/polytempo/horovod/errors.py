"""Horovod's errors by their names, each also one of ours (`polytempo/errors.py`).

PeerError
└── HorovodInternalError     a call that went wrong on all ranks: `hvd.HorovodInternalError`, a RuntimeError as there
    └── MismatchError        ranks call different things (a UsageError too: the script's mistake); later calls go on
UsageError
└── DuplicateNameError       a name that is under way already; a ValueError as there
"""

from __future__ import annotations

from polytempo.errors import PeerError, UsageError


class HorovodInternalError(PeerError):
    """A call that went wrong on all ranks that made it."""


class MismatchError(HorovodInternalError, UsageError):
    """Ranks call different things, or something that cannot go on while a rank has joined."""


class DuplicateNameError(UsageError):
    """A call by the name of one that is still under way."""
