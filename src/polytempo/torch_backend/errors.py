"""What goes wrong, as an error of torch and as one of ours: whoever catches either, catches it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistBackendError

from polytempo.errors import PeerError, UsageError


class GroupError(PeerError, DistBackendError):  # type: ignore[misc]
    """Another rank is gone, late, or calls something else."""


class CallError(UsageError, ValueError, RuntimeError):
    """A call that cannot be right. Both errors of torch: its back ends raise now the one, now the other."""


def as_torch_error(error: Exception, ranks: Sequence[int]) -> Exception:
    """The same words. In a group of some ranks, ranks are numbered from 0: it is said which those are."""
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
