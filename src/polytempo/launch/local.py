"""`polytempo run`: starts the servers and workers of a job on this host, watches them, and ends them all.

One loop, no threads: children's output and ends, the first server's messages, signals. What follows from an end is decided
by `supervise.py`; what is shown, by `display.py`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from polytempo.errors import PeerError, UsageError, counted
from polytempo.launch.children import Child
from polytempo.launch.crew import Crew, Drew, Event, Exited, Ready, Said, Signalled
from polytempo.launch.display import Display
from polytempo.launch.request import CheckedRequest, split_address
from polytempo.launch.supervise import AllDone, EndJob, Order, Report, Supervisor, described, last_error, waited_too_long
from polytempo.parameter_server.manifest import find_checkpoint
from polytempo.protocol.messages import (
    AnyMessage,
    Expecting,
    Finish,
    Finished,
    Gone,
    Hello,
    Notice,
    Status,
    StatusRequest,
    Stop,
    decode,
    encode,
)
from polytempo.protocol.values import Progress
from polytempo.train.ending import TOLD_TO_END
from polytempo.train.job import JOB_VARIABLE, RANK_VARIABLE, JobFacts
from polytempo.transport.keys import JobKeys, make_keys, write_key_file
from polytempo.transport.pool import Pool
from polytempo.transport.stream import StreamChannel
from polytempo.version import VERSION

STATUS_EVERY = 0.5
#: How long the servers may take to write what is left.
LAST_WORDS = 60.0
INTERRUPTED = 130
#: glibc gives large tensors back to the system and takes them anew, zeroed page by page, in every step: a tenth of the time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}


class LocalJob:
    """One job, from start to end."""

    def __init__(self, checked: CheckedRequest, display: Display) -> None:
        self.checked, self.request, self.plan = checked, checked.request, checked.plan
        self.display = display
        self.summary: dict[str, Any] = {}
        self.progress: Progress | None = None  #: of what trains without pushes
        self.record_lost = ""  #: why the record is cut short
        self.seconds = 0.0  #: from the start of the first process to the end of the last
        self._directory = private_directory()
        self._keys: JobKeys | None = make_keys() if self.request.listen and not self.request.insecure else None
        self._port = free_port()
        self._crew = Crew()
        self._supervisor = Supervisor(self.request.size, self.request.least)
        self._servers: dict[Child, int] = {}
        self._workers: dict[Child, int] = {}
        self._ready: dict[int, list[str]] = {}
        self._control: StreamChannel | None = None
        self._checkpoint = str(checked.resume) if checked.resume else ""
        self._cause: EndJob | None = None
        self._interrupted = False
        self._finished = False
        self._given_up: dict[int, tuple[str, str]] = {}  #: workers ended here, and as what
        self._asked_at = 0.0

    def run(self) -> int:
        """Run the job; its exit status."""
        try:
            begun = time.monotonic()
            self._start()
            while not self._supervisor.ending and not self._interrupted:
                self._turn()
            status = self._status()
            self._finish(status)
            self.seconds = time.monotonic() - begun
            return status
        finally:
            self._crew.close()
            if self._control is not None:
                self._control.close()
            self.display.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def finished(self) -> int:
        """How many workers finished."""
        return len(self._supervisor.finished)

    # Starting.

    def _start(self) -> None:
        self.display.begin(self.request.in_words())
        if self.request.record:
            (self.request.record / "logs").mkdir(parents=True, exist_ok=True)
        paths = [str(self._directory / f"server-{index}") for index in range(self.plan.shards)]
        for index, path in enumerate(paths):
            config = json.dumps(self._server_config(index, path, paths[0])).encode()
            command = [sys.executable, "-m", "polytempo.launch.server_process"]
            variables = {**self._threads(), **keep_memory()}
            child = Child(f"server {index}", command, variables, self._log(f"server-{index}"), config)
            self._servers[child] = index
            self._crew.add(child)
            self.display.detail(f"server {index} is process {child.process.pid}, at {path}")
        keys = asdict(self._keys.workers) if self._keys else None
        facts = self._facts(tuple(f"ipc://{path}" for path in paths), keys)
        job_file = self._directory / "job.json"
        facts.write(job_file)
        for rank in range(self.request.workers):
            variables = {**facts.torch_variables(rank), **self._threads()}
            child = start_worker(self.request.script, self.request.arguments, job_file, rank, variables, self._log)
            self._workers[child] = rank
            self._crew.add(child)
            self.display.detail(f"worker {rank} is process {child.process.pid}")

    def _facts(self, addresses: tuple[str, ...], keys: dict[str, str] | None) -> JobFacts:
        request = self.request
        return JobFacts(
            size=request.size,
            addresses=addresses,
            sync=request.sync,
            seed=request.seed,
            local_size=request.workers,
            slow=request.slow,
            hiccup=request.hiccup,
            positions=tuple(self.plan.resumed.get("positions", ())),
            keys=keys,
            via="auto" if request.via == "auto" and request.way == "allreduce" else request.way,
            meeting="" if request.expect else str(self._directory),
            route=request.listen or "",
            insecure=request.insecure,
            port=self._port,
        )

    def _server_config(self, index: int, path: str, first: str) -> dict[str, Any]:
        request = self.request
        listen = None
        if request.listen:
            host, port = split_address(request.listen, "--listen")
            listen = f"tcp://{host}:{port if index == 0 else '*'}"
        return {
            "index": index,
            "path": path,
            "first": f"ipc://{first}",
            "listen": listen,
            "keys": asdict(self._keys) if self._keys else None,
            "size": self.plan.size,
            "shards": self.plan.shards,
            "sync": self.plan.sync,
            "limits": {name: None if value == float("inf") else value for name, value in asdict(self.plan.limits).items()},
            "checkpoint_every": self.plan.checkpoint_every,
            "resumed": self.plan.resumed,
            "checkpoint": str(request.checkpoint) if request.checkpoint else None,
            "resume": str(self.checked.resume) if self.checked.resume else None,
            "record": str(request.record) if request.record else None,
            "threads": int(self._threads()["OMP_NUM_THREADS"]),
            "facts": self._meta() if index == 0 else {},
        }

    def _meta(self) -> dict[str, Any]:
        versions = {"polytempo": VERSION, "python": platform.python_version(), "torch": installed_version("torch")}
        host = {"name": platform.node(), "cores": os.cpu_count(), "system": platform.platform()}
        return {
            "spec": self.request.sync,
            "size": self.request.size,
            "first_step": self.plan.first_step,
            "options": self.checked.options(),
            "versions": versions,
            "seed": self.request.seed,
            "host": host,
        }

    def _threads(self) -> dict[str, str]:
        """Processes share the cores, unless the user has said otherwise."""
        busy = self.request.workers + (self.request.shards if self.request.way == "ps" else 0)
        share = max(1, (os.cpu_count() or 1) // busy)
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}

    def _log(self, name: str) -> Path | None:
        return self.request.record / "logs" / f"{name}.log" if self.request.record else None

    # The loop.

    def _turn(self) -> None:
        now = time.monotonic()
        if self._control is not None and now - self._asked_at >= STATUS_EVERY:
            self._asked_at = now
            self._send(StatusRequest())
        self.display.tick()
        for child in self._crew.children if not self.record_lost else ():
            if child.log_lost:
                self._tell_lost_record(child.log_lost)
        self._deal(self._crew.turn(STATUS_EVERY))

    def _deal(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Said):
                self._said(event)
            elif isinstance(event, Drew) and event.child in self._workers:
                self.display.draw(str(self._workers[event.child]), event.rows, event.again, event.error)
            elif isinstance(event, Exited):
                self._exited(event)
            elif isinstance(event, Ready):
                self._hear()
            elif isinstance(event, Signalled) and event.number in (signal.SIGINT, signal.SIGTERM):
                self._interrupted = True

    def _said(self, event: Said) -> None:
        if event.child in self._workers:
            if (self._supervisor.ending or self._interrupted) and event.text.startswith(TOLD_TO_END):
                return  # for the cause, which is said last
            self.display.line(str(self._workers[event.child]), event.text, event.error)
        elif not event.error and event.text.startswith('{"ready"'):
            self._server_ready(self._servers[event.child], json.loads(event.text)["ready"])
        elif event.text and not self._supervisor.ending:
            self.display.line(event.child.label, event.text, event.error)

    def _server_ready(self, index: int, addresses: list[str]) -> None:
        self._ready[index] = addresses
        if index == 0:
            self._control = StreamChannel(addresses[0].removeprefix("ipc://"), Pool(), 1 << 40)
            self._control.send(encode(Hello(role="launcher")))
            self._crew.watch(self._control.pollable(), "control")
        if len(self._ready) == self.plan.shards and self.request.listen:
            self._expect()

    def _expect(self) -> None:
        """All servers listen: let workers of other hosts in."""
        ports = [self._ready[index][1].rpartition(":")[2] for index in range(self.plan.shards)]
        facts = self._facts(tuple(f"tcp://HOST:{port}" for port in ports), None)
        ranks = tuple(range(self.request.workers, self.request.size))
        self._send(Expecting(job=json.loads(json.dumps(asdict(facts))), ranks=ranks))
        if self._keys is not None:
            path = self._directory / "workers.key"
            write_key_file(path, self._keys.workers)
            how = f"--key-file {path.name}"
            self.display.say(f"key file for other hosts: {path}")
        else:
            how = "--insecure"
            self.display.say(
                f"--insecure: whoever reaches {self.request.listen} can join and read the model; nothing is encrypted"
            )
        awaited = counted(self.request.expect, "worker")
        self.display.say(f"waiting for {awaited}: polytempo worker --join {self.request.listen} {how} SCRIPT")

    def _exited(self, event: Exited) -> None:
        reason, cause = described(event.status)
        if event.child in self._workers:
            reason, cause = self._given_up.get(self._workers[event.child], (reason, cause))
            self._obey(self._supervisor.exited(self._workers[event.child], reason, cause))
        elif not self._finished:
            self._obey(self._supervisor.server_exited(self._servers[event.child], cause, self._newest()), event.child)

    def _newest(self) -> str:
        """The newest checkpoint there is on the disk."""
        with suppress(UsageError):
            if self.request.checkpoint is not None:
                return str(find_checkpoint(self.request.checkpoint)[0])
        return self._checkpoint

    def _obey(self, orders: list[Order], child: Child | None = None) -> None:
        for order in orders:
            if isinstance(order, Report):
                if order.warning and not self._interrupted:  # ends that were asked for are no news
                    self.display.say(f"warning: {order.warning}")
                self._send(Gone(worker=order.worker, incarnation=0, reason=order.reason, cause=order.cause))
            elif isinstance(order, EndJob):
                self._cause = order
                if child is not None and child.tail:
                    self._cause = EndJob(f"{order.cause}\n" + "\n".join(child.tail))
            elif isinstance(order, AllDone) and not self._supervisor.finished:
                self._cause = EndJob("no worker finished")

    def _tell_lost_record(self, text: str) -> None:
        """Once, and again at the end: a full disk is met by every file there is."""
        if not self.record_lost:
            self.record_lost = text
            self.display.say(f"warning: {text}")

    # The first server.

    def _send(self, message: AnyMessage) -> None:
        if self._control is not None:
            try:
                self._control.send(encode(message))
            except PeerError:
                self._lose_control()

    def _lose_control(self) -> None:
        if self._control is not None:
            self._crew.unwatch(self._control.pollable())
            self._control.close()
            self._control = None

    def _hear(self) -> None:
        try:
            while self._control is not None and (received := self._control.receive()) is not None:
                self._take(decode(received[0]))
        except PeerError:
            self._lose_control()

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, Status):
            self._checkpoint = message.checkpoint or self._checkpoint
            self._take_progress(message.progress)
            self.display.show(message)
            self._watch_patience(message)
        elif isinstance(message, Notice):
            if message.fatal and not self._supervisor.ending:
                self._supervisor.ending = True
                self._cause = EndJob(message.text)
            elif message.about == "record":
                self._tell_lost_record(message.text)
            elif not message.fatal:
                self.display.say(message.text)
        elif isinstance(message, Gone):  # from an agent on another host
            self._obey(self._supervisor.exited(message.worker, message.reason, message.cause))
        elif isinstance(message, Finished):
            self.summary = message.summary
            last = message.summary.get("progress")
            self._take_progress(Progress(**last) if last else None)
            self._checkpoint = message.checkpoint or self._checkpoint
            self._finished = True

    def _take_progress(self, progress: Progress | None) -> None:
        """Say once what of the request has no meaning for what trains without pushes."""
        ignored = self.request.about_pushes()
        if progress is not None and self.progress is None and ignored:
            self.display.say(f"a pipeline pushes nothing to servers: it ignores {', '.join(ignored)}")
        self.progress = progress or self.progress

    def _watch_patience(self, status: Status) -> None:
        """`--timeout`: whoever is waited for too long is given up."""
        limit = self.request.timeout
        late = waited_too_long(status, limit) if limit is not None else None
        if late is None or late in self._given_up:
            return
        self._given_up[late] = "lost", f"was given up: others had waited for it longer than {limit:g} s (--timeout)"
        child = next((c for c, rank in self._workers.items() if rank == late), None)
        if child is not None:
            child.kill(signal.SIGKILL)
        else:
            self._obey(self._supervisor.exited(late, *self._given_up[late]))

    # Ending.

    def _status(self) -> int:
        if self._interrupted:
            return INTERRUPTED
        return 1 if self._cause is not None else 0

    def _finish(self, status: int) -> None:
        """End all processes in order: workers, then servers, which write what is left."""
        cause = self._cause.cause if self._cause else ("interrupted" if self._interrupted else "")
        if cause:
            self._send(Stop(cause=cause))
        self._deal(self._crew.end(self._workers, patience=1.0 if cause else LAST_WORDS))
        self._send(Finish(exit_status=status, cause=cause))
        deadline = time.monotonic() + LAST_WORDS
        while not self._finished and self._control is not None and time.monotonic() < deadline:
            self._deal(self._crew.turn(0.1))
        self._deal(self._crew.end(self._servers, patience=1.0))
        self.display.close()
        if self._interrupted:
            self.display.say("interrupted; all processes have ended")
        elif self._cause is not None:
            self._tell_cause(self._cause)

    def _tell_cause(self, cause: EndJob) -> None:
        """Last; with the worker's error above it, unless that stands there already."""
        child = next((c for c, rank in self._workers.items() if rank == cause.worker), None)
        if child is not None and child.tail and self.display.latest != (str(cause.worker), True):
            self.display.say("\n  ".join([f"the error of worker {cause.worker}:", *last_error(child.tail)]))
        self.display.say(cause.cause)


def private_directory() -> Path:
    """A directory only this user can enter, with a path short enough for a socket."""
    directory = tempfile.mkdtemp(prefix="polytempo-")
    if len(directory) > 80:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="polytempo-", dir="/tmp")
    return Path(directory)


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


def keep_memory() -> dict[str, str]:
    """What makes a process use its memory again, unless the user has settled that."""
    return {} if any(name.startswith("MALLOC_") for name in os.environ) else KEEP_MEMORY


def start_worker(
    script: str, arguments: Iterable[str], job_file: Path, rank: int, variables: dict[str, str], log: Any
) -> Child:
    """Start one worker process."""
    environment = {JOB_VARIABLE: str(job_file), RANK_VARIABLE: str(rank), "PYTHONUNBUFFERED": "1", **variables}
    environment |= keep_memory()
    return Child(f"worker {rank}", [sys.executable, script, *arguments], environment, log(f"worker-{rank}"))
