"""All-reduce over several hosts: shared memory inside, and one stream a host between them.

    inside   add up the tensors of a host, each member some of the chunks
    leader   the first rank of a host fetches the sums, goes around the ring of leaders with them, and puts the result
    inside   the others fetch the result from the leader's slot

There are `hosts * pieces` chunks, so that the ring divides evenly. With fewer chunks than members some have nothing to
add up.
"""

from __future__ import annotations

from polytempo.collectives import ring
from polytempo.collectives.steps import Fetch, Meet, Place, Put, Step, Total


def all_reduce(place: Place, pieces: int, root: int = 0) -> list[Step]:
    """All ranks end with the sum; only leaders send."""
    members, chunks = place.neighbours, range(len(place.hosts) * pieces)
    leader = members[0]
    leaders = [ranks[0] for ranks in place.hosts]
    around = ring.all_reduce_over(leaders, place.host, pieces) if place.rank == leader else []
    if len(members) == 1:
        return around
    if place.rank == leader:
        sums = [Fetch(member, chunk, chunk) for member in members[1:] for chunk in _own(members, member, chunks)]
        return [*_sum(place, chunks), *sums, *around, *map(Put, chunks), Meet(members)]
    return [*_sum(place, chunks), Meet(members), *(Fetch(leader, chunk, chunk) for chunk in chunks)]


def _sum(place: Place, chunks: range) -> list[Step]:
    """Add up my chunks over the host. The leader keeps his sums, the others put theirs where he fetches them."""
    members = place.neighbours
    own = _own(members, place.rank, chunks)
    puts = [Put(chunk) for chunk in chunks if chunk not in own]
    totals: list[Step] = []
    for chunk in own:
        totals += [Total(chunk, members)] if place.rank == members[0] else [Total(chunk, members), Put(chunk)]
    return [*puts, Meet(members), *totals, Meet(members)]


def _own(members: tuple[int, ...], member: int, chunks: range) -> range:
    """The chunks that a member adds up."""
    index, count = members.index(member), len(chunks)
    return range(index * count // len(members), (index + 1) * count // len(members))
