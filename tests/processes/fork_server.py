"""One process that has torch loaded, from which tests fork Python programs: torch is imported once for each pytest worker.

`Forked` is a `subprocess.Popen` for commands that begin with `sys.executable`. The fork server is the parent of what it
forks, so it reaps these processes and reports their exit statuses through a socket, one for each.

    pytest --(command, environment, directory; stdin, stdout, stderr, status socket)--> fork server
    fork server --(process id, then wait status)--> pytest
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from functools import partial
from typing import Any

LARGEST = 1 << 20
#: Loaded before the first fork, beside what the launcher preloads; not torch._dynamo, which a test says workers do not load.
MODULES = ("polytempo.cli.main", "polytempo.launcher.local_job", "polytempo.launcher.agent", "polytempo.pipeline.pipeline")
MODULES = (*MODULES, "polytempo.horovod", "polytempo.train.server_embedding", "polytempo.train.sampler", "psutil")


class Forked(subprocess.Popen[str]):
    """A process forked from the fork server of this pytest process; started anew where the command is not Python's."""

    _status: socket.socket | None = None

    def _execute_child(self, *about: Any) -> None:
        command, _, _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = about
        streams = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        namespace, filters, command = _parsed(list(command))
        request = {"command": command, "namespace": namespace, "filters": filters, "cwd": str(cwd or os.getcwd())}
        request["environment"] = dict(os.environ if env is None else env)
        with theirs:
            server().send(json.dumps(request).encode(), [*streams, theirs.fileno()])
        self.pid = struct.unpack("q", self._status.recv(8))[0]
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        assert self._status is not None
        if self._status.fileno() < 0:
            return self.pid, 0
        self._status.setblocking(not wait_flags & os.WNOHANG)
        try:
            told = self._status.recv(8)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        assert told, "the fork server has ended"
        return self.pid, int(struct.unpack("q", told)[0])


class ForkServer:
    """The fork server's process, as pytest has it. It ends when pytest does."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        self._lock = threading.Lock()
        room = "." * 2000  # for the command lines of what is forked
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), room]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def send(self, request: bytes, descriptors: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._socket, [request], descriptors)


_server: ForkServer | None = None


def server() -> ForkServer:
    """The fork server of this process, started at its first use."""
    global _server
    if _server is None:
        _server = ForkServer()
    return _server


def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command as `subprocess.Popen` does; Python's own without importing torch again."""
    return (Forked if _parsed(command)[2] else subprocess.Popen)(command, **options)


def _parsed(command: list[str]) -> tuple[str, str, list[str]]:
    """The network namespace, the filter of warnings and the Python command in a command; empty where it has none."""
    namespace = filters = ""
    if command[:3] == ["ip", "netns", "exec"]:
        namespace, command = command[3], command[4:]
    if command[0] != sys.executable:
        return "", "", []
    if command[1] == "-W":
        filters, command = command[2], [command[0], *command[3:]]
    known = command[1] in ("-m", "-c") or not command[1].startswith("-")
    return (namespace, filters, command) if known else ("", "", [])


def run(command: list[str], timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(command, capture_output=True, text=True)`."""
    with popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def main(control: socket.socket) -> None:
    """Fork what is asked for, report the ends, until pytest has ended."""
    from polytempo.launcher.forked_process import PRELOADED, fork_python, preload

    preload((*PRELOADED, *MODULES))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                data, descriptors, _, _ = socket.recv_fds(control, LARGEST, 4)
                if not data:
                    return
                request = json.loads(data)
                *streams, status = descriptors
                prepare = partial(_prepare, request["namespace"], request["filters"])
                pid = fork_python(request["command"], request["environment"], request["cwd"], tuple(streams), prepare)
                for descriptor in streams:
                    os.close(descriptor)
                reporter = socket.socket(fileno=status)
                reporter.send(struct.pack("q", pid))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, reporter))
            else:
                pid, reporter = key.data
                selector.unregister(key.fd)
                os.close(key.fd)
                ended = os.waitpid(pid, 0)[1]
                with reporter, suppress(OSError):  # of a test that does not ask any more
                    reporter.send(struct.pack("q", ended))


def _prepare(namespace: str, filters: str) -> None:
    """In the forked process: what `ip netns exec` and `python -W` would do."""
    if namespace:
        with open(f"/run/netns/{namespace}", "rb") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0, f"cannot enter the namespace {namespace}"
    if filters:
        warnings.simplefilter(filters)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
