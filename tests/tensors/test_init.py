"""`init` a second time: a notebook's cell that is run again, a library that makes sure."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator

import pytest

from polytempo.errors import UsageError
from polytempo.session import session


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_session", "_given", "_lives"):
        monkeypatch.setattr(session, name, getattr(session, name))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "exit", sys.exit)
    yield
    session.shutdown()
    atexit.unregister(session._leave)


def test_a_second_call_alone_does_nothing() -> None:
    session.init()
    first, hook = session.current(), sys.excepthook
    session.init()
    assert session.current() is first
    session.init(sync="ssp:3")
    assert session.current() is not first, "other arguments: a new job of one"
    assert session.current().job.sync == "ssp:3"
    assert sys.excepthook is hook, "one hook, however often cells are run"
    with pytest.raises(UsageError, match="nearest: ssp"):
        session.init(sync="sps:3")


def test_in_a_job_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session.init(timeout=5)
    monkeypatch.setattr(session.Session, "together", True)
    first = session.current()
    session.init(timeout=5)
    assert session.current() is first
    with pytest.raises(UsageError, match=r"init\(\) was called before with other arguments; call shutdown\(\) in between"):
        session.init(timeout=6)
    assert session.current() is first
    session.shutdown()
    session.init(timeout=6)
