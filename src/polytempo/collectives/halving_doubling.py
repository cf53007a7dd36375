"""Halving and doubling (Rabenseifner): few rounds and little data, among a power of two of ranks.

With q the largest power of two of ranks, there are q parts of `pieces` chunks each. Halving: partners at distance q/2,
q/4, ... 1 hand each other the half that they will not own, so that number v ends with the sum of part v. Doubling goes
back the same way. The ranks beyond q, the odd ones of the first 2 (size - q), hand theirs to a neighbour, sit out, and
receive the result.

A round sends several chunks to one partner in a row, which an executor may join into one message.
"""

from __future__ import annotations

from polytempo.collectives.steps import Combine, Place, Receive, Send, Step


def core_size(size: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (size.bit_length() - 1)


def all_reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """All ranks end with the sum."""
    core = core_size(place.size)
    everything = range(core * pieces)
    if place.rank >= 2 * (place.size - core):
        return _exchange(place, pieces)
    if place.rank % 2:
        partner = place.rank - 1
        return [*(Send(partner, chunk) for chunk in everything), *(Receive(partner, chunk) for chunk in everything)]
    partner = place.rank + 1
    taken_in = [Combine(partner, chunk) for chunk in everything]
    return [*taken_in, *_exchange(place, pieces), *(Send(partner, chunk) for chunk in everything)]


def _exchange(place: Place, pieces: int) -> list[Step]:
    """Halving and doubling among the numbers 0 to q - 1, which the ranks that do not sit out have in order."""
    core = core_size(place.size)
    extra = place.size - core
    number = place.rank // 2 if place.rank < 2 * extra else place.rank - extra
    steps: list[Step] = []
    distances = [1 << level for level in range(core.bit_length() - 1)]
    for distance in reversed(distances):
        peer = _rank_of(number ^ distance, extra)
        steps += [Send(peer, chunk) for chunk in _block(number ^ distance, distance, pieces)]
        steps += [Combine(peer, chunk) for chunk in _block(number, distance, pieces)]
    for distance in distances:
        peer = _rank_of(number ^ distance, extra)
        steps += [Send(peer, chunk) for chunk in _block(number, distance, pieces)]
        steps += [Receive(peer, chunk) for chunk in _block(number ^ distance, distance, pieces)]
    return steps


def _rank_of(number: int, extra: int) -> int:
    return 2 * number if number < extra else number + extra


def _block(number: int, parts: int, pieces: int) -> range:
    """The chunks of the aligned block of this many parts in which this number's part lies."""
    first = number // parts * parts
    return range(first * pieces, (first + parts) * pieces)
