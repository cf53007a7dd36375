"""How far the samplers of a job are, as parts of epochs that checkpoints hold, where workers take every n-th place.

A part says how many samples each of `size` workers has `taken` of an epoch, of what the parts before it have left. Workers
need not be in the same epoch: one that is in a later epoch has taken all of its share of those before, one that is in an
earlier has taken nothing yet. A job that goes on starts with the first epoch of which something is left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

EpochPart = Mapping[str, Any]

#: Of a worker that has done all of its share of an epoch: more than a share has.
WHOLE = 1 << 62


def parts_of(
    sampler: str, places: Sequence[tuple[int, int] | None], earlier: Sequence[EpochPart], lost: Collection[int] = ()
) -> list[dict[str, Any]]:
    """The parts of one sampler, after those of earlier jobs.

    Args:
        sampler: Its name.
        places: Of each worker its epoch, and the samples taken of it; None: it has not begun. One of them has.
        earlier: The parts of earlier jobs, of any sampler.
        lost: Workers that are lost: the rest of their shares is not made up for, except of the last epoch.
    """
    known = [place for place in places if place is not None]
    last = max(epoch for epoch, _ in known)
    going_on = [place[0] for worker, place in enumerate(places) if place is not None and worker not in lost]
    own = [dict(part) for part in earlier if part.get("sampler", "") == sampler]
    result: list[dict[str, Any]] = []
    for epoch in range(min(going_on, default=last), last + 1):
        taken = [WHOLE if worker in lost and epoch < last else _taken(place, epoch) for worker, place in enumerate(places)]
        result += [part for part in own if part["epoch"] == epoch]
        result.append({"sampler": sampler, "epoch": epoch, "size": len(places), "taken": taken})
    return result + [part for part in own if part["epoch"] > last]


def _taken(place: tuple[int, int] | None, epoch: int) -> int:
    if place is None or place[0] < epoch:
        return 0
    return place[1] if place[0] == epoch else WHOLE


def epoch_to_go_on_with(parts: Sequence[EpochPart]) -> int:
    """The first epoch of which these parts may have left something; of epochs whose places were dealt out the last: what is
    left of others is dealt out with it."""
    shared = [part["epoch"] for part in parts if "taken" in part]
    return min(shared) if shared else max((part["epoch"] for part in parts), default=0)
