"""The processes of a job on this host: what each is told, and how it is started.

A server reads its configuration from standard input, which stays open as long as the launcher lives. A worker finds the job
file and its rank in its environment, beside the variables that torchrun would set. They meet in a private folder, with
sockets, the job file and the key, that is removed with the job, however that ends.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from polytempo.door import digests_of
from polytempo.launcher import orphan_cleanup
from polytempo.launcher.child_process import WATCHED, ChildProcess, ProcessMonitor, Standing
from polytempo.launcher.debugger import HOOK, SOCKET
from polytempo.launcher.display import Display
from polytempo.launcher.forked_process import preload
from polytempo.launcher.job_facts import (
    BREAKPOINT_VARIABLE,
    DEBUGGER_VARIABLE,
    JOB_VARIABLE,
    RANK_VARIABLE,
    JobFacts,
    chosen_debugger,
)
from polytempo.launcher.program import Program
from polytempo.launcher.request import CheckedRequest, split_address
from polytempo.server.resume_rules import companions_in
from polytempo.transport.keys import Credentials, JobKeys, make_keys, make_secret
from polytempo.transport.link_relay import server_name
from polytempo.version import VERSION

#: glibc gives large tensors back to the system and takes them anew, zeroed page by page, in every step: a tenth of the time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
#: Seconds in which the emulated network starts: it loads little.
LINK_TIMEOUT = 30.0
#: Seconds that the janitor of a folder may take to end when there is nothing to clean up.
JANITOR_PATIENCE = 5.0
#: The event of a worker that asks for the terminal.
DEBUGGER = "debugger"


class JobFolder:
    """A private folder, and a janitor that removes it if this process is killed."""

    def __init__(self, who: str) -> None:
        made = tempfile.mkdtemp(prefix="polytempo-")  # only this user can enter it
        if len(made) > 80:  # too long for a socket
            os.rmdir(made)
            made = tempfile.mkdtemp(prefix="polytempo-", dir="/tmp")
        self.path = Path(made)
        self.job_file = self.path / "job.json"
        command = [sys.executable, "-I", "-S", os.path.abspath(orphan_cleanup.__file__)]
        self._janitor = subprocess.Popen(
            [*command, who, str(os.getpid()), str(self.path), f"{JOB_VARIABLE}={self.job_file}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def mark(self) -> dict[str, str]:
        """The variable by which the janitor finds the processes of the job."""
        return {JOB_VARIABLE: str(self.job_file)}

    def remove(self) -> None:
        """Remove the folder: all processes have ended. The janitor ends too."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._janitor.stdin is not None
        with suppress(BrokenPipeError):
            self._janitor.stdin.write(b"!")
            self._janitor.stdin.close()
        try:
            self._janitor.wait(JANITOR_PATIENCE)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()


class JobProcesses:
    """Servers and workers, the monitor that watches them, and the folder in which they meet."""

    def __init__(self, checked: CheckedRequest) -> None:
        self._checked, self._request, self._plan = checked, checked.request, checked.plan
        away = bool(self._request.listen) and not self._request.insecure
        self.keys: JobKeys | None = make_keys() if away or self._request.link else None
        self._secret = make_secret()  # of the servers alone
        with socket.create_server(("", 0)) as free:
            self._port = int(free.getsockname()[1])  # free now, for scripts that call torch.distributed
        self.servers: dict[ChildProcess, int] = {}  #: with their shards
        self.workers: dict[ChildProcess, int] = {}  #: with their ranks
        self.link: ChildProcess | None = None  #: the emulated network
        if self._request.fork:
            preload()
        self.monitor = ProcessMonitor()  # from here on signals are waited for
        self.folder = JobFolder("launcher")
        self._debugger: socket.socket | None = None
        if self._request.reader is not None:
            self._debugger = socket.socket(socket.AF_UNIX)
            self._debugger.bind(str(self.folder.path / SOCKET))
            self._debugger.listen()
            self.monitor.watch(self._debugger, DEBUGGER)

    def start(self, display: Display) -> None:
        """Start all servers, then all workers."""
        request = self._request
        if request.record:
            logs = request.record / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            names = ("worker-*.log", "server-*.log", "link.log") if request.overwrite else ()
            for earlier in [log for name in names for log in logs.glob(name)]:  # of a job that may have had more processes
                earlier.unlink()
        paths = [str(self.folder.path / f"server-{index}") for index in range(self._plan.shards)]
        for index, path in enumerate(paths):
            config = json.dumps(self._server_config(index, path, paths[0])).encode()
            command = [sys.executable, "-m", "polytempo.launcher.server_process"]
            variables = {**self._threads(), **keep_memory(), **self.folder.mark()}
            child = ChildProcess(f"server {index}", command, variables, self._log(f"server-{index}"), config, request.fork)
            self.servers[child] = index
            self.monitor.add(child)
            display.detail(f"server {index} is process {child.process.pid}, at {path}")
        addresses = tuple(f"ipc://{path}" for path in paths)
        facts = self.facts(addresses, asdict(self.keys.workers) if self.keys else None)
        if request.link is not None:
            facts = self._emulated(facts, *request.link, [network_path(path) for path in paths])
            assert self.link is not None
            display.detail(f"the emulated network is process {self.link.process.pid}")
        facts.write(self.folder.job_file)
        request.program.place(self.folder.path)
        for rank in range(request.workers):
            variables = {**facts.torch_variables(rank), **self._threads()}
            log = self._log(f"worker-{rank}")
            file = self.folder.job_file
            standing = WATCHED
            if rank == request.reader:  # it has the launcher's standard input, and with --debug its output as well
                standing = Standing(reads=True, direct=request.debug is not None, in_foreground=os.isatty(0))
            child = start_worker(request.program, file, rank, variables, log, request.fork, standing)
            self.workers[child] = rank
            self.monitor.add(child)
            display.detail(f"worker {rank} is process {child.process.pid}")

    def _emulated(self, facts: JobFacts, bandwidth: float, latency: float, sockets: list[str]) -> JobFacts:
        """Start the emulated network (`--link`): all that workers send goes through it. The facts that tell them so."""
        config = {"bandwidth": bandwidth, "latency": latency, "workers": self._request.workers, "servers": sockets}
        config["own"] = list(self._request.own_links.items())
        command, log = [sys.executable, "-m", "polytempo.launcher.link_process"], self._log("link")
        self.link = ChildProcess("link", command, self.folder.mark(), log, json.dumps(config).encode(), self._request.fork)
        self.monitor.add(self.link)
        proxies = self.link.ready_line(LINK_TIMEOUT)
        ranks, credentials = range(self._request.workers), Credentials(self._secret)
        return replace(
            facts,
            addresses=tuple(f"tcp://{server_name(index)}:1" for index in range(len(sockets))),
            meeting="",
            link=(bandwidth, latency),
            tokens={rank: credentials.token("worker", rank, facts.incarnation) for rank in ranks},
            proxies=dict(zip(ranks, proxies, strict=True)),
        )

    @property
    def in_foreground(self) -> bool:
        """Whether a worker is in this process's group, so that the terminal sends it Ctrl-C, too."""
        return any(child.standing.in_foreground for child in self.workers)

    def accept_debugger(self) -> socket.socket:
        """The connection of a worker that asks for the terminal."""
        assert self._debugger is not None
        return self._debugger.accept()[0]

    def close(self) -> None:
        """Remove the folder: all processes have ended."""
        if self._debugger is not None:
            self._debugger.close()
        self.folder.remove()

    def worker(self, rank: int | None) -> ChildProcess | None:
        """The process of a worker of this host; None for a worker of another."""
        return next((child for child, own in self.workers.items() if own == rank), None)

    def facts(self, addresses: tuple[str, ...], keys: dict[str, str] | None) -> JobFacts:
        """The job file of workers that reach the servers at these addresses, with these keys."""
        request = self._request
        return JobFacts(
            size=request.size,
            addresses=addresses,
            sync=request.sync,
            modes=self._checked.modes,
            seed=request.seed,
            local_size=request.workers,
            slow=request.slow,
            hiccup=request.hiccup,
            positions=tuple(self._plan.resumed.get("positions", ())),
            keys=keys,
            via="auto" if request.via == "auto" and request.way != "ps" else request.way,
            meeting="" if request.expect else str(self.folder.path),
            route=request.listen or "",
            insecure=request.insecure,
            strategy=request.strategy,
            replica=request.replica,
            budgeted=self._plan.limits.any,
            host_timeout=request.host_timeout,
            saves=request.checkpoint is not None,
            resumed=self._checked.resume is not None,
            reader=request.reader,
            debugged=request.debug is not None,
            companions=companions_in(self._plan.resumed),
            port=self._port,
        )

    def _server_config(self, index: int, path: str, first: str) -> dict[str, Any]:
        """Of one server, which listens at `path`; server 0 listens at `first`."""
        request, plan = self._request, self._plan
        listen = None
        if request.listen:
            host, port = split_address(request.listen, "--listen")
            listen = f"tcp://{host}:{port if index == 0 else '*'}"
        elif request.link is not None:
            listen = f"ipc://{network_path(path)}"
        return {
            "index": index,
            "path": path,
            "first": f"ipc://{first}",
            "listen": listen,
            "keys": asdict(self.keys) if self.keys else None,
            "size": plan.size,
            "shards": plan.shards,
            "sync": plan.sync,
            "modes": [asdict(source) for source in self._checked.modes],
            "limits": {name: None if value == float("inf") else value for name, value in asdict(plan.limits).items()},
            "checkpoint_every": plan.checkpoint_every,
            "resumed": plan.resumed,
            "checkpoint": str(request.checkpoint) if request.checkpoint else None,
            "resume": str(self._checked.resume) if self._checked.resume else None,
            "record": str(request.record) if request.record else None,
            "threads": int(self._threads()["OMP_NUM_THREADS"]),
            "host_timeout": request.host_timeout,
            "secret": self._secret,
            "device": request.server_device,
            "go_on_unsaved": request.checkpoint_errors == "continue",
            "ends_diverged": request.on_divergence == "stop",
            "facts": self._meta() if index == 0 else {},
        }

    def _meta(self) -> dict[str, Any]:
        versions = {"polytempo": VERSION, "python": platform.python_version(), "torch": installed_version("torch")}
        host = {"name": platform.node(), "cores": os.cpu_count(), "system": platform.platform()}
        return {
            "spec": self._request.sync,
            **({"modes": digests_of(self._checked.modes)} if self._checked.modes else {}),
            "size": self._request.size,
            "first_step": self._plan.first_push,
            "options": self._checked.options(),
            "versions": versions,
            "seed": self._request.seed,
            "host": host,
        }

    def _threads(self) -> dict[str, str]:
        """The processes share the cores, unless the user has set OMP_NUM_THREADS."""
        busy = self._request.workers + (self._request.shards if self._request.way == "ps" else 0)
        share = max(1, (os.cpu_count() or 1) // busy)
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}

    def _log(self, name: str) -> Path | None:
        return self._request.record / "logs" / f"{name}.log" if self._request.record else None


def network_path(path: str) -> str:
    """Where a server listens for workers of the emulated network, beside its own socket at `path`."""
    return f"{path}-link"


def keep_memory() -> dict[str, str]:
    """Variables that make malloc keep freed memory; none where the user has set any of malloc's."""
    return {} if any(name.startswith("MALLOC_") for name in os.environ) else KEEP_MEMORY


def start_worker(
    program: Program,
    job_file: Path,
    rank: int,
    variables: dict[str, str],
    log: Path | None = None,
    forks: bool = False,
    standing: Standing = WATCHED,
) -> ChildProcess:
    """Start one worker process, by a fork of this one if `forks`; its output goes to the file `log` as well."""
    environment = {JOB_VARIABLE: str(job_file), RANK_VARIABLE: str(rank), "PYTHONUNBUFFERED": "1", **variables}
    environment |= keep_memory()
    if (debugger := chosen_debugger()) != "0":  # which turns breakpoint() off
        environment |= {DEBUGGER_VARIABLE: debugger, BREAKPOINT_VARIABLE: HOOK}
    folder = job_file.parent
    body = program.body(folder, rank)
    return ChildProcess(
        f"worker {rank}", program.command(folder), environment, log, forks=forks, standing=standing, body=body
    )
