"""The launcher hears why a job has ended, however early, and whoever speaks first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wires import Wire

from polytempo.launcher.child_process import ProcessMonitor
from polytempo.launcher.local_job import CoordinatorLink
from polytempo.protocol.messages import Hello, Leave, Notice, Stopped, encode
from polytempo.server.coordinator import Coordinator
from polytempo.server.effects import EndLoop, ToLauncher, ToServers
from polytempo.server.job_plan import JobPlan, Limits
from polytempo.server.sequencer import Sequencer

CAUSE = "lab.py:4: OSError: not here"


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
    wire.received[0].peer.send(encode(Notice(text=CAUSE, fatal=True)))
    wire.endpoint.forget(wire.received[0].peer)  # type: ignore[attr-defined]
    assert link.request_status() == 1, "it meets a closed connection"
    assert [message.text for message in link.received() if isinstance(message, Notice)] == [CAUSE]
    assert not link.is_open


@pytest.mark.parametrize("comes", [True, False], ids=["it connects", "it has been killed"])
def test_servers_end_when_the_launcher_has_been_told_why_or_is_gone(comes: bool) -> None:
    """A worker's mode may fail before the launcher has connected to the coordinator."""
    coordinator = Coordinator(Sequencer(JobPlan(1, 2, "asp", Limits())))
    failing = Hello(role="worker", rank=0)
    stopped = coordinator.handle(failing, Leave(worker=0, incarnation=0, reason="failed", fault=CAUSE), 0.0)
    assert not any(isinstance(effect, EndLoop | ToServers | ToLauncher) for effect in stopped)
    then = coordinator.launcher_connected() if comes else coordinator.launcher_gone()
    assert ToServers(Stopped(cause=CAUSE if comes else "the launcher is gone")) in then
    assert isinstance(then[-1], EndLoop)
    assert (ToLauncher(Notice(text=CAUSE, fatal=True)) in then) is comes
