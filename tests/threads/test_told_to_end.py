"""A worker that ends because its job does is no cause: a rank that hears late can name the one that was lost."""

from __future__ import annotations

import pytest
from helpers import until

from polytempo.testing.threads import GroupJob

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]


def test_who_was_told_to_end_has_not_crashed_whichever_is_seen_first() -> None:
    job = GroupJob(3)
    late, lost, told = job.sessions
    engine = late.world().engine
    told.abandon(told=True)  # its end may be read first
    until(lambda: engine.read_all() or 2 in engine.messages.left, "rank 2 has left")
    lost.abandon()
    until(lambda: engine.read_all() or 1 in engine.messages.left, "rank 1 has left")
    assert engine.messages.crashed.keys() == {1}
    late.close("failed")
