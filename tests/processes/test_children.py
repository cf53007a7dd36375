"""The life of a child process and of a launcher's folder, without a job around them: each takes milliseconds."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import wait_until

from polytempo.launcher.child_process import ChildProcess, Exited, ProcessMonitor, Signalled
from polytempo.launcher.job_processes import JobFolder

SHELL = ["/bin/sh", "-c"]


@pytest.fixture
def crew() -> Iterator[ProcessMonitor]:
    made = ProcessMonitor()
    yield made
    made.close()


def ended(child: ChildProcess) -> int:
    assert select.select([child.pidfd], [], [], 20)[0], "it has not ended"
    return child.ended()


@pytest.mark.parametrize(("how", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
def test_the_number_of_an_ended_child_is_its_own_until_it_is_closed(
    how: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = ChildProcess("it", [*SHELL, how], {})
    assert ended(child) == status
    assert Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    child.kill(signal.SIGTERM)  # goes to nobody
    child.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(child.process.pid, 0)
    asked: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda *who: asked.append(who))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *who: asked.append(who))
    child.kill(signal.SIGKILL)  # its number may be another's by now
    child.close()
    assert asked == []


def test_what_an_ended_child_has_started_is_ended_with_it() -> None:
    child = ChildProcess("it", [*SHELL, "sleep 1000 & exit 0"], {})
    assert ended(child) == 0
    held = os.dup(next(iter(child.pipes)))
    assert not select.select([held], [], [], 0)[0], "sleep has ended before"
    child.close()
    wait_until(lambda: bool(select.select([held], [], [], 0)[0]) and os.read(held, 1) == b"")
    os.close(held)


def test_a_child_that_has_left_its_group_is_signalled_too() -> None:
    away = f"import os, sys; os.setpgid(0, {os.getpgrp()}); print('away', flush=True); sys.stdin.read()"
    child = ChildProcess("it", [sys.executable, "-I", "-S", "-c", away], {}, None, b"")
    out = next(descriptor for descriptor, stream in child.pipes.items() if stream == 1)
    assert select.select([out], [], [], 20)[0]
    child.kill(signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    child.close()


def test_a_stopped_child_is_told_from_a_busy_one() -> None:
    child = ChildProcess("it", [*SHELL, "while :; do :; done"], {})
    assert not child.is_stopped
    for _ in range(2):
        child.kill(signal.SIGSTOP)
        wait_until(lambda: child.is_stopped)
        assert child.is_stopped, "also when it is asked again"
        child.kill(signal.SIGCONT)
        wait_until(lambda: not child.is_stopped)
    child.kill(signal.SIGSTOP)
    child.kill(signal.SIGKILL)
    assert select.select([child.pidfd], [], [], 20)[0], "it has not ended"
    assert not child.is_stopped, "it has ended, and nobody has looked yet"
    assert ended(child) == -signal.SIGKILL
    assert not child.is_stopped
    child.close()
    assert not child.is_stopped


def test_a_server_sees_the_end_of_its_launcher_as_the_end_of_its_input() -> None:
    child = ChildProcess("it", [*SHELL, "read line; cat; exit 7"], {}, None, b"configuration")
    assert not select.select([child.pidfd], [], [], 0.05)[0]
    child.ask_to_end()
    assert ended(child) == 7
    child.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_heard_before_the_ends_it_may_have_caused(number: signal.Signals, crew: ProcessMonitor) -> None:
    child = ChildProcess("it", [*SHELL, "exit 0"], {})
    crew.add(child)
    assert select.select([child.pidfd], [], [], 20)[0]
    os.kill(os.getpid(), number)
    heard = [type(event) for event in crew.turn(1) if isinstance(event, Signalled | Exited)]
    assert heard == [Signalled, Exited]


def test_who_was_started_with_nohup_goes_on_ignoring_a_hangup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        crew = ProcessMonitor()
        os.kill(os.getpid(), signal.SIGHUP)
        assert list(crew.turn(0)) == []
        crew.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_status_is_known_also_where_ended_children_are_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        crew = ProcessMonitor()
        child = ChildProcess("it", [*SHELL, "exit 5"], {})
        crew.add(child)
        assert select.select([child.pidfd], [], [], 20)[0]
        assert [event.status for event in crew.turn(1) if isinstance(event, Exited)] == [5]
        crew.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


KILLED = """
import os, signal, subprocess, sys
from polytempo.launcher.job_processes import JobFolder
folder = JobFolder("launcher")
(folder.path / "job.json").write_text("a key")
for command in (["sleep", "1000"], ["setsid", "sleep", "1000"]):
    started = subprocess.Popen(command, env={**os.environ, **folder.mark()}, stderr=subprocess.DEVNULL)
other = subprocess.Popen(["sleep", "1000"], stderr=subprocess.DEVNULL)
print(folder.path, other.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_janitor_ends_what_has_the_mark_and_nothing_else(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    path, other = launcher.stdout.readline().split()
    pidfd = os.pidfd_open(int(other))
    try:
        assert launcher.stderr is not None
        said = launcher.stderr.read()  # until the janitor, which inherits it, has ended too
        assert said == f"polytempo: the launcher (process {launcher.pid}) was killed; its processes have ended too\n"
        assert not Path(path).exists()
        assert not select.select([pidfd], [], [], 0)[0], "it ended what was not of the job"
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        launcher.wait(20)
        launcher.stdout.close()
        launcher.stderr.close()


def test_a_janitor_goes_without_a_word_when_all_was_removed(capfd: pytest.CaptureFixture[str]) -> None:
    folder = JobFolder("launcher")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert not folder.path.exists()
    assert capfd.readouterr().err == ""
