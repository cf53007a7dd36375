"""The joint batches of an epoch: which places of its order each has, whatever the shares of the workers are.

Joint batch k has places k * B to (k + 1) * B. In each of them every worker gets at least one place, so that no loader meets
an empty batch: a rest that is smaller than the number of workers goes with the joint batch before it. Where an epoch, or
what is left of one, has fewer places than workers, places are used twice: `place % count`.
"""

from __future__ import annotations

from collections.abc import Iterable

from polytempo.sync.sample_queue import Range


def joint_batches(count: int, joint: int, workers: int, drop_last: bool = False) -> list[Range]:
    """Cut places into joint batches.

    Args:
        count: How many places there are: samples, or micro-batches.
        joint: Places of a joint batch.
        workers: Each of them gets at least one place in each.
        drop_last: Leave out a last joint batch that is smaller than the others.

    Returns:
        From where to where each goes; beyond `count` only where there are fewer places than workers.
    """
    whole, rest = divmod(count, joint)
    batches = [(number * joint, (number + 1) * joint) for number in range(whole)]
    if not rest or drop_last:
        return batches
    if rest >= workers:
        return [*batches, (whole * joint, count)]
    if batches:
        return [*batches[:-1], (batches[-1][0], count)]
    return [(0, workers)]


def ranges_of(places: Iterable[int]) -> tuple[Range, ...]:
    """Places as few ranges, ascending; one that is given twice counts once."""
    result: list[Range] = []
    for place in sorted(set(places)):
        if result and result[-1][1] == place:
            result[-1] = (result[-1][0], place + 1)
        else:
            result.append((place, place + 1))
    return tuple(result)
