"""The janitor of a job folder: cleans up after a killed launcher or agent. `orphan_cleanup.py WHO PROCESS FOLDER MARK`

Its standard input is a pipe whose other end only the launcher holds, so that the kernel reports the launcher's end, whatever
the signal was. A byte in that pipe means that there is nothing to clean up. Otherwise the processes of the job, found by a
variable in their environment (MARK), get a moment to end by themselves, since servers notify other hosts; then they are
killed, and the job folder, with its key, is removed.

A program of its own: it imports nothing of this library and starts without site-packages, in milliseconds. It is in a
session of its own, so that signals of the terminal do not reach it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress

#: Seconds that processes may take to end by themselves.
GRACE = 3.0


def processes_with(*marks: str) -> list[int]:
    """Pidfds of the processes started with these entries in their environment.

    The pidfd is opened before the entry is read, so that no other process can be signalled.
    """
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                belongs = {os.fsencode(mark) for mark in marks} <= set(file.read().split(b"\0"))
        except OSError:  # it has ended, or is another user's
            belongs = False
        if belongs:
            found.append(pidfd)
        else:
            os.close(pidfd)
    return found


def all_ended(pidfds: list[int], seconds: float) -> bool:
    """Wait at most `seconds` for these processes to end."""
    waiting, deadline = set(pidfds), time.monotonic() + seconds
    poll = select.poll()
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            waiting.discard(pidfd)
    return not waiting


def end_processes(mark: str) -> None:
    """Wait for all processes with this mark to end, then kill them; also those that they start meanwhile."""
    seconds = GRACE
    while pidfds := processes_with(mark):
        ended = all_ended(pidfds, seconds)
        for pidfd in pidfds:
            if not ended:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        all_ended(pidfds, GRACE)
        for pidfd in pidfds:
            os.close(pidfd)
        seconds = 0.0


def kill_processes(*marks: str) -> None:
    """Kill the processes with these marks at once."""
    for pidfd in processes_with(*marks):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def main(who: str, process: str, folder: str, mark: str) -> None:
    """Wait for the end of the launcher, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a scheduler signals every process
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read(1):
        return
    end_processes(mark)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # the reader may be gone as well
        sys.stderr.write(f"polytempo: the {who} (process {process}) was killed; its processes have ended too\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
