"""Objects that belong to a given session, where no job in threads has bound one to this thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from polytempo.session.session import Session, as_current

P = ParamSpec("P")
T = TypeVar("T")


def under(session: Session, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `make` returns when this session is the current one."""
    with as_current(session):
        return make(*args, **kwargs)


def within(session: Session, work: Callable[[Session], T]) -> T:
    """As a job in threads calls `work`: with the session, which is the current one."""
    return under(session, work, session)
