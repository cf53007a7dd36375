"""The ends of a process that others must not misunderstand: a fork is none, and a script that ends well has not crashed."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable

from polytempo.transport.links import BYE, Link, Message


class Links(dict[int, Link]):
    """By rank. (A plain dict cannot be referred to weakly.)"""


def let_go_after_fork(links: Links) -> None:
    """A forked child, such as a data loader's, must not keep its parent's links open: nobody would see the parent die."""
    reference = weakref.ref(links)

    def let_go() -> None:
        inherited = reference()
        if inherited is not None:
            for link in inherited.values():
                link.abandon()
            inherited.clear()

    os.register_at_fork(after_in_child=let_go)


def at_exit(close: Callable[[bool], None]) -> Callable[[], None]:
    """When the process ends, close: politely, unless an error has ended it. Returns what takes this back."""

    def leave() -> None:
        close(not hasattr(sys, "last_value"))

    atexit.register(leave)
    return lambda: atexit.unregister(leave)


def politely_closed(link: Link) -> None:
    """The other end is told that this is no crash."""
    link.send(Message(BYE, 0, 0))
    link.close()


def abruptly_closed(link: Link) -> None:
    """As by a crash."""
    link.close()
