"""Errors of the back end: each is an error of torch and one of Polytempo, so that either `except` clause catches it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistBackendError

from polytempo.errors import PeerError, UsageError


class GroupError(PeerError, DistBackendError):  # type: ignore[misc]
    """Another rank is lost, late, or made a different call."""


class CallError(UsageError, ValueError, RuntimeError):
    """A call with wrong arguments: a ValueError and a RuntimeError, since torch's back ends raise either."""


def as_torch_error(error: Exception, ranks: Sequence[int]) -> Exception:
    """The same text as an error of torch; in a group of some ranks with their ranks in the job, since numbers are the
    group's.
    """
    text = str(error)
    if list(ranks) != list(range(len(ranks))):
        text += f" (in the group of ranks {', '.join(map(str, ranks))}, where they count from 0)"
    if " has waited " in text:
        text += "; that was the timeout of the group or of the call"
    if isinstance(error, PeerError):
        return GroupError(text)
    if isinstance(error, UsageError):
        return CallError(text)
    return error
