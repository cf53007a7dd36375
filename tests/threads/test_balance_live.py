"""`bsp+balance` in live jobs: shares follow the speed, and the update is that of one process on the joint batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from balanced import Seen, one_process, samples_of, trained
from helpers import assert_close
from local_blocks import HostsJob

from polytempo.testing.threads import GroupJob, ThreadJob

pytestmark = pytest.mark.timeout(60)

SYNC = "bsp+balance"


def run(way: str, sync: str, work: Any, workers: int = 3, **options: Any) -> list[Any]:
    """Call `work(session)` on each worker of a job over servers, shared memory, collectives with a sequencer, or ballots."""
    if way == "ballots":
        with GroupJob(workers) as group:
            for session in group.sessions:
                session.job = replace(session.job, sync=sync)
            return group.run(work)
    if way == "hosts":
        with HostsJob(workers, sync, **options) as hosts:
            return hosts.run(work)
    with ThreadJob(workers, 2, sync, via={"servers": "ps", "memory": "allreduce"}[way], **options) as job:
        return job.run(work)


WAYS = ["servers", "memory", "hosts", "ballots"]


@pytest.mark.parametrize("way", WAYS)
def test_shares_follow_the_speed_and_the_update_is_that_of_one_process(way: str) -> None:
    seen: list[Seen] = run(way, SYNC, trained)
    sizes = [[len(batch) for batch in one.rounds] for one in seen]
    assert all(sum(joint) == 18 for joint in list(zip(*sizes, strict=True))[:5])
    assert (sizes[2][0], sizes[2][7]) == (6, 2), "a quarter of the others' speed"
    assert sizes[0][-2] < sizes[2][-2], "after the change the first is the slow one"
    assert samples_of(seen) == sorted([*range(200)] * 2)
    expected = one_process(seen)
    for one in seen:
        assert_close(one.values, expected, 1e-9)
