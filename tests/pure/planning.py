"""Plans of all ranks, for the tests."""

from __future__ import annotations

import pytest

from polytempo.collectives.check import PlanError, check
from polytempo.collectives.plans import plan_for
from polytempo.collectives.steps import HostRanks, Place, Step

ROOTED = ("broadcast", "reduce", "gather", "scatter")

Plans = list[list[Step]]


def one_host(size: int) -> HostRanks:
    return (tuple(range(size)),)


def apart(size: int) -> HostRanks:
    return tuple((rank,) for rank in range(size))


def plans_of(collective: str, algorithm: str, hosts: HostRanks, pieces: int = 1, root: int = 0) -> tuple[int, Plans]:
    """The number of chunks, and the plan of each rank."""
    size = sum(map(len, hosts))
    made = [plan_for(collective, algorithm, Place(rank, hosts), pieces, root) for rank in range(size)]
    return made[0][0], [list(steps) for _, steps in made]


def checked(collective: str, algorithm: str, hosts: HostRanks, pieces: int = 1, root: int = 0) -> None:
    chunks, plans = plans_of(collective, algorithm, hosts, pieces, root)
    check(plans, collective, hosts, chunks, root)


def complaint(plans: Plans, collective: str, hosts: HostRanks, chunks: int, root: int = 0) -> str:
    with pytest.raises(PlanError) as caught:
        check(plans, collective, hosts, chunks, root)
    text = str(caught.value)
    assert "\n" not in text
    return text
