"""A dead worker's sockets may live on in a process that it has forked: then the job says that it is gone."""

from __future__ import annotations

import os

import pytest
from sharing import Place, nothing_is_left, place

from polytempo.transport.local_peers import LocalPeers

__all__ = ["nothing_is_left", "place"]
pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.timeout(20)]


def die_with_sockets_kept(mesh: LocalPeers) -> list[int]:
    kept = [os.dup(link.fileno) for link in mesh._links.values()]
    mesh.close()
    return kept


def test_nobody_waits_for_one_who_is_said_to_be_gone(place: Place) -> None:
    first, second = place.met(2)
    kept = die_with_sockets_kept(second)
    read, write = os.pipe()
    os.write(write, b"x")
    first.wait([1], 1, 0, 0, also=[(read, lambda: first.forget(1))])
    assert first.lost == {1}
    for descriptor in (read, write, *kept):
        os.close(descriptor)


def test_what_it_said_before_counts(place: Place) -> None:
    first, second = place.met(2)
    second.tell([0], 1, 0, 7)
    kept = die_with_sockets_kept(second)
    first.forget(1)
    assert first.heard(1, 1, 0) == 7
    assert first.lost == {1}
    for descriptor in kept:
        os.close(descriptor)
