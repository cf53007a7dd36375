"""What a worker does when it leaves comes in one order, and less of it where it has not finished."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from polytempo.launcher.job_facts import JobFacts
from polytempo.session.leaving import LeavingStep
from polytempo.session.session import Session


def leaving(end: str, *given: Any) -> list[str]:
    """What is done when a session ends so."""
    done: list[str] = []
    client = SimpleNamespace(leave=lambda *_, **__: done.append("leave"), close=lambda: done.append("close"))
    session = Session(cast("Any", client), JobFacts(2, ()), 0)
    session.use(cast("Any", SimpleNamespace(close=lambda politely, told: done.append(f"links {politely}"))))
    for step in reversed(LeavingStep):
        session.on_leave(step, lambda step=step: done.append(step.name))  # type: ignore[misc]
    getattr(session, end)(*given)
    return done


@pytest.mark.parametrize(
    ("end", "given", "order"),
    [
        ("close", (), ["FLUSH", "REPORT", "CLOSE", "leave", "JOIN", "UNDO", "links True"]),
        ("close", ("lost",), ["CLOSE", "leave", "JOIN", "UNDO", "links False"]),
        ("fail", ("no",), ["CLOSE", "leave"]),
        ("abandon", (), ["CLOSE", "UNDO", "links False", "close"]),
    ],
)
def test_a_worker_leaves_in_this_order(end: str, given: tuple[Any, ...], order: list[str]) -> None:
    assert leaving(end, *given) == order
