"""The launcher hears what a coordinator has said before it ended, also where the launcher speaks first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wires import Wire

from polytempo.launcher.child_process import ProcessMonitor
from polytempo.launcher.local_job import CoordinatorLink
from polytempo.protocol.messages import Notice, encode


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire("ipc")
    yield made
    made.close()


@pytest.fixture
def monitor() -> Iterator[ProcessMonitor]:
    made = ProcessMonitor()
    yield made
    made.close()


def test_what_it_said_is_read_although_it_is_gone_when_the_launcher_speaks(wire: Wire, monitor: ProcessMonitor) -> None:
    link = CoordinatorLink(monitor)
    assert link.open(f"ipc://{wire.path}")
    assert wire.serve(lambda: wire.received)  # the launcher's Hello
    wire.received[0].peer.send(encode(Notice(text="lab.py:4: OSError: not here", fatal=True)))
    wire.endpoint.forget(wire.received[0].peer)  # type: ignore[attr-defined]
    assert link.request_status() == 1, "it meets a closed connection"
    assert [message.text for message in link.received() if isinstance(message, Notice)] == ["lab.py:4: OSError: not here"]
    assert not link.is_open
