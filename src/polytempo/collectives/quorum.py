"""Which ranks may go on without others, so that never two sides of a broken network do. Pure.

A rank that is only silent may be alive beyond a link that is down, and think the same of this one. So ranks go on without
others in three cases only:

    ended      every missing rank's process is known to have ended: its kernel has said so, over a link that was not silent
    word       the coordinator says that it has given the missing ranks up, and has not given up one of these
    majority   there is no coordinator, and these are more than half of the ranks that made the last round

Two sides cannot both do so (`tests/pure/test_quorum.py`): what has ended is on no side, the coordinator has one word for
all, and two majorities have a rank in common, which takes part in one group at a time. Ranks that have ended are not taken
from the number of which a majority is needed: they may have gone on without these before they ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def objection(
    members: Collection[int], present: Collection[int], ended: Collection[int], word: Collection[int] | None
) -> str:
    """Why these ranks may not go on without the others; empty where they may.

    Args:
        members: The ranks that made the last round together.
        present: Those of them that want to go on.
        ended: Ranks whose process is known to have ended.
        word: Ranks that the coordinator has given up; None where the job has no coordinator.

    Returns:
        A sentence that names the ranks.
    """
    missing = sorted(set(members) - set(present))
    unknown = [rank for rank in missing if rank not in ended and rank not in (word or ())]
    out = sorted(set(present) & set(word or ()))
    if out:
        return f"the coordinator has given up {of_ranks(out)}, and the job goes on without"
    if not unknown:
        return ""
    heard = f"nothing is heard of {of_ranks(unknown)}, which may be alive behind a broken link"
    if word is not None:
        return f"{heard}, and the coordinator has not given up {of_ranks(unknown)}: {of_ranks(present)} cannot go on without"
    if 2 * len(present) > len(members):
        return ""
    here = f"{len(present)} of {len(members)} ranks are here ({', '.join(map(str, sorted(present)))}), not more than half"
    return f"{heard}, and {here}: going on, two sides might train apart"


def of_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 2`."""
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
