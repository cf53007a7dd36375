"""How far the samplers of a job are, as parts of epochs that checkpoints hold.

A part says what one job has trained on of an epoch's order, of what the parts before it have left, in one of two ways:

    size, taken     workers took every n-th place: how many samples each of `size` workers has taken
    length, done    batches were dealt out: which of `length` places, in ranges

Workers need not be in the same epoch: one that is in a later epoch has taken all of its share of those before, one that is
in an earlier has taken nothing yet. A job that goes on starts with the first epoch of which something is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from polytempo.sync.sample_queue import Range

EpochPart = Mapping[str, Any]
#: Of each worker its epoch, and the samples taken of it; None: it has not begun.
WorkerPlaces = Sequence[tuple[int, int] | None]

T = TypeVar("T")

#: Of a worker that has done all of its share of an epoch: more than a share has.
WHOLE = 1 << 62


def parts_of(
    samplers: Mapping[str, WorkerPlaces], earlier: Iterable[EpochPart], lost: Mapping[str, Collection[int]] | None = None
) -> list[dict[str, Any]]:
    """The parts of samplers, after those of earlier jobs.

    Args:
        samplers: By name where each worker is; one of them has begun.
        earlier: The parts of earlier jobs.
        lost: For each sampler workers that are lost: the rest of their shares is not made up for, except of the last epoch.
    """
    before = [dict(part) for part in earlier]
    result = [part for part in before if name_of(part) not in samplers]
    for sampler, places in samplers.items():
        own = [part for part in before if name_of(part) == sampler]
        gone = lost[sampler] if lost is not None else ()
        last = max(place[0] for place in places if place is not None)
        going_on = [place[0] for worker, place in enumerate(places) if place is not None and worker not in gone]
        for epoch in range(min(going_on, default=last), last + 1):
            taken = [WHOLE if worker in gone and epoch < last else _taken(one, epoch) for worker, one in enumerate(places)]
            result += [part for part in own if part["epoch"] == epoch]
            result.append({"sampler": sampler, "epoch": epoch, "size": len(places), "taken": taken})
        result += [part for part in own if part["epoch"] > last]
    return result


def name_of(part: EpochPart) -> str:
    """Of its sampler; empty in checkpoints of a version that knew one."""
    return str(part.get("sampler", ""))


def _taken(place: tuple[int, int] | None, epoch: int) -> int:
    if place is None or place[0] < epoch:
        return 0
    return place[1] if place[0] == epoch else WHOLE


def epoch_to_go_on_with(parts: Sequence[EpochPart]) -> int:
    """The first epoch of which these parts may have left something; of epochs whose places were dealt out the last: what is
    left of others is dealt out with it."""
    shared = [part["epoch"] for part in parts if "taken" in part]
    return min(shared) if shared else max((part["epoch"] for part in parts), default=0)


def remaining(order: Iterable[T], parts: Iterable[EpochPart]) -> Iterator[T]:
    """What these parts have left of an epoch's order."""
    for part in parts:
        order = _but(order, part["done"]) if "done" in part else _after(order, part["size"], part["taken"])
    return iter(order)


def _after(order: Iterable[T], size: int, taken: Sequence[int]) -> Iterator[T]:
    return (sample for place, sample in enumerate(order) if place // size >= taken[place % size])


def _but(order: Iterable[T], done: Iterable[Range]) -> Iterator[T]:
    """All but these places, in ranges that ascend."""
    gone = iter([place for start, stop in done for place in range(start, stop)])
    following = next(gone, None)
    for place, sample in enumerate(order):
        if place == following:
            following = next(gone, None)
        else:
            yield sample
