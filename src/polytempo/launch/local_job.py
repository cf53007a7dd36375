"""`polytempo run`: starts the servers and workers of a job on this host, watches them, and ends them all.

One loop, no threads: children's output and ends, the first server's messages, signals. What follows from an end is decided
by `supervise.py`; what is shown, by `display.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polytempo.errors import PeerError, counted
from polytempo.launch.checkpoint_watch import CheckpointWatch
from polytempo.launch.child_process import ChildProcess
from polytempo.launch.display import Display
from polytempo.launch.forked_process import preload
from polytempo.launch.job_facts import JOB_VARIABLE, RANK_VARIABLE
from polytempo.launch.job_folder import JobFolder
from polytempo.launch.process_configuration import ProcessConfiguration
from polytempo.launch.process_monitor import ENDING, Drew, Exited, MonitorEvent, ProcessMonitor, Ready, Said, Signalled
from polytempo.launch.request import CheckedRequest
from polytempo.launch.script_error import TOLD_TO_END
from polytempo.launch.supervisor import (
    AllDone,
    EndJob,
    FailureReport,
    Supervisor,
    SupervisorAction,
    described,
    last_error,
    waited_too_long,
)
from polytempo.protocol.messages import (
    AnyMessage,
    Expecting,
    Finish,
    Finished,
    Gone,
    Hello,
    Status,
    StatusRequest,
    Stop,
    StoreValue,
    decode,
    encode,
)
from polytempo.protocol.values import TrainingProgress
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.keys import write_key_file
from polytempo.transport.stream import StreamChannel

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
        self.progress: TrainingProgress | None = None  #: of what trains without pushes
        self.record_lost = ""  #: why the record is cut short
        self.seconds = 0.0  #: from the start of the first process to the end of the last
        tolerant = self.request.min_workers is not None
        self._supervisor = Supervisor(self.request.size, self.request.least, tolerant)
        self._servers: dict[ChildProcess, int] = {}
        self._workers: dict[ChildProcess, int] = {}
        self._ready: dict[int, list[str]] = {}
        self._control: StreamChannel | None = None
        self._saves = CheckpointWatch(self.request.checkpoint, checked.resume)
        self._cause: EndJob | None = None
        self._interrupted = False
        self._signals = 0
        self._finished = False
        self._given_up: dict[int, tuple[str, str]] = {}  #: workers ended here, and as what
        self._stopped = ""  # why all were told to end
        self._lost = ""  # how a server died after the workers had ended
        self._unsaved = ""  # why the last checkpoint could not be written
        self._asked_at = 0.0
        self._asked = self._answered = 0  # requests for a status
        self._undecided: list[tuple[int, int, str, str]] = []  # request, worker, reason and cause of its end
        if self.request.fork:
            preload()
        self._crew = ProcessMonitor()  # from here on signals are waited for
        self._folder = JobFolder("launcher")
        self._told = ProcessConfiguration(checked, self._folder.path)

    def run(self) -> int:
        """Run the job; its exit status."""
        with ExitStack() as undo:
            undo.callback(self._crew.close)
            undo.callback(self._folder.remove)  # before a signal can end this process again
            undo.callback(self.display.close)
            undo.callback(self._lose_control)
            undo.callback(self._crew.dismiss)
            begun = time.monotonic()
            self._start()
            while not self._supervisor.ending and not self._interrupted:
                self._turn()
            status = self._finish()
            self.seconds = time.monotonic() - begun
            return status

    @property
    def finished(self) -> int:
        """How many workers finished."""
        return len(self._supervisor.finished)

    # Starting.

    def _start(self) -> None:
        self.display.begin(self.request.in_words())
        if self.checked.note():
            self.display.say(self.checked.note())
        if self.request.record:
            (self.request.record / "logs").mkdir(parents=True, exist_ok=True)
        forks = self.request.fork
        paths = [str(self._folder.path / f"server-{index}") for index in range(self.plan.shards)]
        for index, path in enumerate(paths):
            config = json.dumps(self._told.server_config(index, path, paths[0])).encode()
            command = [sys.executable, "-m", "polytempo.launch.server_process"]
            variables = {**self._told.threads(), **keep_memory(), **self._folder.mark()}
            child = ChildProcess(f"server {index}", command, variables, self._told.log(f"server-{index}"), config, forks)
            self._servers[child] = index
            self._crew.add(child)
            self.display.detail(f"server {index} is process {child.process.pid}, at {path}")
        keys = asdict(self._told.keys.workers) if self._told.keys else None
        facts = self._told.facts(tuple(f"ipc://{path}" for path in paths), keys)
        job_file = self._folder.job_file
        facts.write(job_file)
        for rank in range(self.request.workers):
            variables = {**facts.torch_variables(rank), **self._told.threads()}
            log = self._told.log(f"worker-{rank}")
            child = start_worker(self.request.script, self.request.arguments, job_file, rank, variables, log, forks)
            self._workers[child] = rank
            self._crew.add(child)
            self.display.detail(f"worker {rank} is process {child.process.pid}")

    # The loop.

    def _turn(self) -> None:
        now = time.monotonic()
        if self._control is not None and now - self._asked_at >= STATUS_EVERY:
            self._ask()
        self.display.tick()
        for child in self._crew.children if not self.record_lost else ():
            if child.log_lost:
                self._tell_lost_record(child.log_lost)
        self._deal(self._crew.turn(STATUS_EVERY))

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._asked += 1
        self._send(StatusRequest())

    def _deal(self, events: Iterable[MonitorEvent]) -> None:
        for event in events:
            if isinstance(event, Said):
                self._said(event)
            elif isinstance(event, Drew) and event.child in self._workers:
                self.display.draw(str(self._workers[event.child]), event.rows, event.again, event.error)
            elif isinstance(event, Exited):
                self._exited(event)
            elif isinstance(event, Ready):
                self._hear()
            elif isinstance(event, Signalled) and event.number in ENDING:
                self._signalled(event.number)

    def _signalled(self, number: int) -> None:
        """The first signal ends the job in order; a second one, or SIGQUIT, at once."""
        self._signals += 2 if number == signal.SIGQUIT else 1
        if not self._supervisor.ending:
            self._interrupted = self._supervisor.ending = True  # what ends from now on ends because of it
        elif self._signals == 1:
            self.display.say("the job is ending, servers write what is left; again to end at once")

    def _hurried(self) -> bool:
        return self._signals > 1

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
            try:
                self._control = StreamChannel(addresses[0].removeprefix("ipc://"), Pool(), 1 << 40)
            except PeerError:  # it has died since, as its pidfd will tell
                return
            self._crew.watch(self._control.pollable(), "control")
            self._send(Hello(role="launcher"))
        if len(self._ready) == self.plan.shards and self.request.listen:
            self._expect()

    def _expect(self) -> None:
        """All servers listen: let workers of other hosts in."""
        ports = [self._ready[index][1].rpartition(":")[2] for index in range(self.plan.shards)]
        facts = self._told.facts(tuple(f"tcp://HOST:{port}" for port in ports), None)
        ranks = tuple(range(self.request.workers, self.request.size))
        self._send(Expecting(job=json.loads(json.dumps(asdict(facts))), ranks=ranks))
        if self._told.keys is not None:
            path = self._folder.path / "workers.key"
            write_key_file(path, self._told.keys.workers)
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
            self._worker_ended(self._workers[event.child], reason, cause)
            return
        self._hear()  # its last words may be waiting
        if not self._finished:
            server = self._servers[event.child]
            if self._supervisor.ending and event.status:
                self._lost = self._lost or f"server {server} {cause}"
            self._obey(self._supervisor.server_exited(server, cause, self._saves.newest()), event.child)

    def _worker_ended(self, worker: int, reason: str, cause: str) -> None:
        """Whether a script has failed too early the first server knows, as soon as it is ready.

        When it does not answer it is about to end, as its pidfd will tell: that is the cause then, and this a consequence.
        """
        if reason == "failed" and 0 in self._ready:
            self._ask()
            self._undecided.append((self._asked, worker, reason, cause))
        else:
            self._obey(self._supervisor.exited(worker, reason, cause, accepted=reason != "failed"))

    def _decide(self, status: Status) -> None:
        self._answered += 1
        due = [ended for ended in self._undecided if ended[0] <= self._answered]
        self._undecided = self._undecided[len(due) :]
        if status.trains and not self._supervisor.trains:
            self._obey(self._supervisor.training())
        for _, worker, reason, cause in due:
            self._obey(self._supervisor.exited(worker, reason, cause, status.workers[worker].accepted))

    def _obey(self, orders: list[SupervisorAction], child: ChildProcess | None = None) -> None:
        for order in orders:
            if isinstance(order, FailureReport):
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
            self._decide(message)
            self._take_progress(message.progress)
            self.display.show(message)
            self._watch_patience(message)
        elif isinstance(message, StoreValue):
            if message.fatal and not self._supervisor.ending:
                self._supervisor.ending = True
                self._cause = EndJob(message.text)
            elif message.about == "record":
                self._tell_lost_record(message.text)
            elif message.fatal and message.text != self._stopped:  # else it is our own word, come back
                self._lost = self._lost or message.text
            elif not message.fatal:
                self.display.say(message.text)
        elif isinstance(message, Gone):  # from an agent on another host
            self._worker_ended(message.worker, message.reason, message.cause)
        elif isinstance(message, Finished):
            self.summary = message.summary
            last = message.summary.get("progress")
            self._take_progress(TrainingProgress(**last) if last else None)
            self._unsaved = message.cause
            self._finished = True

    def _take_progress(self, progress: TrainingProgress | None) -> None:
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

    def _finish(self) -> int:
        """End all processes in order: workers, then servers, which write what is left. The job's exit status."""
        if self.progress is not None and not self._supervisor.trains:
            self._saves = CheckpointWatch(None, None)  # a pipeline, whose script saves for itself
        saves = self._interrupted and self._saves.directory is not None and not self._hurried()
        if saves:
            limit = f"at most {self.request.grace:g} s; again to end at once"
            self.display.say(f"interrupted: saving a checkpoint to {self._saves.directory} ({limit})")
        cause = self._cause.cause if self._cause else ("interrupted" if self._interrupted else "")
        if cause:
            self._stopped = cause
            self._send(Stop(cause=cause))
        self._deal(self._crew.end(self._workers, 1.0 if cause else LAST_WORDS, self._hurried))
        status = INTERRUPTED if self._interrupted else int(bool(cause))
        self._send(Finish(exit_status=status, cause=cause, save=saves))
        patience = self.request.grace if saves else LAST_WORDS
        deadline = time.monotonic() + patience
        while not (self._finished or self._lost or self._hurried()) and self._control and time.monotonic() < deadline:
            self._deal(self._crew.turn(0.1))
        if not (self._finished or self._lost or self._hurried()) and self._control is not None:
            self._lost = f"the servers were waited for longer than {patience:g} s"
        self._deal(self._crew.end(self._servers, 1.0, self._hurried))
        self._saves.clear()
        self.display.close()
        if self._interrupted or (self._hurried() and not self._finished):
            trouble = "" if self._hurried() else self._unsaved or self._lost
            self.display.say(f"interrupted; all processes have ended{self._saves.after(trouble)}")
            return INTERRUPTED
        if self._cause is None:
            self._cause = self._unfinished()
        if self._cause is not None:
            self._tell_cause(self._cause)
        return int(self._cause is not None)

    def _unfinished(self) -> EndJob | None:
        """All workers have ended well; whether the servers have is not taken for granted."""
        if self._finished:
            stops = self._unsaved and self.request.checkpoint_errors == "stop"
            return EndJob(self._unsaved) if stops else None
        newest = self._saves.newest()
        resume = f"; go on with --resume {newest}" if newest else ""
        what = self._lost or "the servers ended"
        return EndJob(f"{what} after the workers had finished: what was still to be written is missing{resume}")

    def _tell_cause(self, cause: EndJob) -> None:
        """Last; with the worker's error above it, unless that stands there already."""
        child = next((c for c, rank in self._workers.items() if rank == cause.worker), None)
        if child is not None and child.tail and self.display.latest != (str(cause.worker), True):
            self.display.say("\n  ".join([f"the error of worker {cause.worker}:", *last_error(child.tail)]))
        self.display.say(cause.cause)


def keep_memory() -> dict[str, str]:
    """What makes a process use its memory again, unless the user has settled that."""
    return {} if any(name.startswith("MALLOC_") for name in os.environ) else KEEP_MEMORY


def start_worker(
    script: str,
    arguments: Iterable[str],
    job_file: Path,
    rank: int,
    variables: dict[str, str],
    log: Path | None = None,
    forks: bool = False,
) -> ChildProcess:
    """Start one worker process, by a fork of this one if `forks`; its output goes to the file `log` as well."""
    environment = {JOB_VARIABLE: str(job_file), RANK_VARIABLE: str(rank), "PYTHONUNBUFFERED": "1", **variables}
    environment |= keep_memory()
    return ChildProcess(f"worker {rank}", [sys.executable, script, *arguments], environment, log, forks=forks)
