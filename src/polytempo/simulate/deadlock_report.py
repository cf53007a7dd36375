"""Who waits for whom, when nothing can happen any more."""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.simulate.worker import Worker
from polytempo.sync.actions import NAMED_AT_MOST, Hold
from polytempo.sync.policy import Policy


def who_waits(policy: Policy, workers: Sequence[Worker]) -> str:
    """All holds, and the dead whom nobody has missed yet."""
    holds = policy.holds()
    waits = "; ".join(_wait_text(hold) for hold in holds[:NAMED_AT_MOST]) or "nobody is held"
    more = f" and {len(holds) - NAMED_AT_MOST} more wait" if len(holds) > NAMED_AT_MOST else ""
    gone = [rank for rank in policy.members if not workers[rank].alive]
    crashed = f"; crashed and not noticed: {', '.join(map(str, gone[:NAMED_AT_MOST]))}" if gone else ""
    return f"{waits}{more}{crashed}"


def _wait_text(hold: Hold) -> str:
    others = hold.waiting_count - len(hold.waiting_for)
    names = ", ".join(map(str, hold.waiting_for)) + (f" and {others} more" if others else "")
    return f"worker {hold.worker} waits for {names} ({hold.reason})"
