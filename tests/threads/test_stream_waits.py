"""Waits of streams end when a server is gone, though the host reads nothing; no thread and no descriptor remains."""

from __future__ import annotations

import os
import socket
import threading

from polytempo.client.client import StreamWaits


def test_a_connection_that_ends_releases_all_waits() -> None:
    waits, released = StreamWaits(), threading.Event()
    ours, theirs = socket.socketpair()
    waits.add(released.set, [ours.fileno()])
    theirs.send(b"unread")  # a message does not
    assert not released.wait(0.05)
    theirs.close()
    assert released.wait(10)
    waits.close()
    ours.close()


def test_closing_releases_and_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    waits, released = StreamWaits(), threading.Event()
    ours, theirs = socket.socketpair()
    waits.add(released.set, [ours.fileno()])
    waits.close()
    assert released.is_set()
    assert not any(thread.name == "polytempo-hang-up" for thread in threading.enumerate())
    waits.close()  # once more
    ours.close()
    theirs.close()
    assert len(os.listdir("/proc/self/fd")) == before
