"""`polytempo run`: starts the servers and workers of a job on this host, watches them, and ends them all.

One loop without threads handles the output and ends of child processes, the messages of the coordinator, and signals:

    JobProcesses     starts the processes and holds the monitor that watches them
    CoordinatorLink  the connection to server 0: the job's status, failures on other hosts, the summary
    Supervisor       decides what follows from the end of a process (pure)
    JobEnd           why the job ends: a cause, a signal, a server that was lost; from it comes the exit status
    Display          shows it
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from polytempo.checkpoints import (
    has_all_files,
    newest_since,
    partial_checkpoints,
    remove_checkpoint,
    stamp_of,
    step_of,
    whole_checkpoints,
)
from polytempo.door import without_paths
from polytempo.errors import PeerError, counted
from polytempo.launcher.child_process import (
    ENDING,
    INTERRUPTED,
    ChildProcess,
    Exited,
    MonitorEvent,
    OutputLine,
    OutputRows,
    ProcessMonitor,
    Readable,
    Signalled,
)
from polytempo.launcher.display import Display
from polytempo.launcher.job_processes import DEBUGGER, JobProcesses
from polytempo.launcher.request import CheckedRequest
from polytempo.launcher.script_error import TOLD_TO_END
from polytempo.launcher.supervisor import (
    AllDone,
    EndJob,
    FailureReport,
    LostServer,
    StoppedProcesses,
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
    Notice,
    Status,
    StatusRequest,
    Stop,
    decode,
    encode,
)
from polytempo.protocol.values import TrainingProgress
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.deadline import named
from polytempo.transport.host_addresses import joined_by, own_addresses
from polytempo.transport.keys import write_key_file
from polytempo.transport.stream import StreamChannel

#: Seconds that the servers may take to write the record and the last checkpoint.
SERVERS_END = 60.0
#: SIGINT (Ctrl-C) this often ends a job at once, without its checkpoint. SIGTERM and SIGHUP never do, however often they
#: come: a scheduler sends them to every process of a job, and a shell that it runs in may pass them on.
ENOUGH = 3
INSIST = "Ctrl-C three times, or SIGQUIT, ends at once"

STATUS_EVERY = 0.5  #: seconds between two requests for the coordinator's status
LARGEST_MESSAGE = 1 << 40
#: Requests that may be unanswered: more of them would fill the socket of a coordinator that is stopped, and block a sender.
UNANSWERED = 8


class CoordinatorLink:
    """Closed until the coordinator listens, and again when it is gone: then messages are dropped, as its pidfd tells."""

    def __init__(self, monitor: ProcessMonitor) -> None:
        self._monitor = monitor
        self._channel: StreamChannel | None = None
        self._requested_at = 0.0
        self.requested = self.answered = 0  #: requests for a status, and answers; they come in order

    @property
    def is_open(self) -> bool:
        """Whether the coordinator can be reached."""
        return self._channel is not None

    def open(self, address: str) -> bool:
        """Connect; false when the coordinator has ended since it was ready."""
        try:
            self._channel = StreamChannel(address.removeprefix("ipc://"), Pool(), LARGEST_MESSAGE)
        except PeerError:
            return False
        self._monitor.watch(self._channel.pollable(), "coordinator")
        self.send(Hello(role="launcher"))
        return True

    def send(self, message: AnyMessage) -> None:
        """Send, if the coordinator is there."""
        # One that has ended may have said why: that is yet to be read, and `received` closes behind it.
        with suppress(PeerError):
            if self._channel is not None:
                self._channel.send(encode(message))

    def request_status(self) -> int:
        """Ask for the status; the number of this request."""
        self._requested_at = time.monotonic()
        self.requested += 1
        self.send(StatusRequest())
        return self.requested

    def request_status_when_due(self) -> None:
        """Twice a second, while they are answered."""
        is_due = time.monotonic() - self._requested_at >= STATUS_EVERY
        if self.is_open and is_due and self.requested - self.answered < UNANSWERED:
            self.request_status()

    def received(self) -> Iterator[AnyMessage]:
        """All messages that have come."""
        try:
            while self._channel is not None and (received := self._channel.receive()) is not None:
                message = decode(received[0])
                self.answered += isinstance(message, Status)
                yield message
        except PeerError:
            self.close()

    def close(self) -> None:
        """Give the connection back."""
        if self._channel is not None:
            self._monitor.unwatch(self._channel.pollable())
            self._channel.close()
            self._channel = None


class CheckpointWatch:
    """The checkpoints of a running job, read from the disk: a process that has died cannot report what it wrote."""

    def __init__(self, directory: Path | None, resumed: Path | None) -> None:
        self.directory = directory
        self._resumed = resumed
        there = whole_checkpoints(directory) if directory is not None else []
        self._before = {checkpoint: stamp_of(checkpoint) for checkpoint in there}
        self._begun = partial_checkpoints(directory) if directory is not None else set()

    def newest(self) -> Path | None:
        """The checkpoint to resume from: the job's newest, else the one it was resumed from; None when there is none."""
        found = newest_since(self.directory, self._before) if self.directory is not None else None
        if found is None and self._resumed is not None and has_all_files(self._resumed):
            found = self._resumed
        return found

    def hint(self) -> str:
        """How to go on from the newest, for the end of a line; empty when there is none."""
        newest = self.newest()
        return f"; go on with --resume {shlex.quote(str(newest))}" if newest is not None else ""

    def clear(self) -> None:
        """All servers have ended: remove the partial checkpoints of this job."""
        for partial in partial_checkpoints(self.directory) - self._begun if self.directory is not None else ():
            remove_checkpoint(partial)

    def after(self, trouble: str) -> str:
        """The last line of an interrupted job about its checkpoints; `trouble`: why the last was not written."""
        if self.directory is None:
            return ""
        resume = self.hint() or "; there is no checkpoint to go on from"
        return f"; {trouble}{resume}" if trouble else resume


@dataclass
class JobEnd:
    """Why and how a job ends."""

    cause: EndJob | None = None
    interrupted: bool = False
    signals: int = 0  #: how many have come
    ended_by: signal.Signals | None = None  #: the first of them
    insisted: int = 0  #: how many of them were SIGINT; SIGQUIT counts as `ENOUGH` of them
    finished: bool = False  #: the coordinator has sent the summary: all is written
    dismissed: bool = False  #: the servers have been waited for, and end now; one that is still starting is too late
    stopped: str = ""  #: the cause that the servers were told
    lost: str = ""  #: how a server was lost after the workers had ended; the first one counts
    unsaved: str = ""  #: why the last checkpoint could not be written

    @property
    def at_once(self) -> bool:
        """Whether a person wants all processes to end at once, and the checkpoint to be given up."""
        return self.insisted >= ENOUGH

    @property
    def keeps_values(self) -> bool:
        """Whether the job ends early though nothing is wrong with the values that servers hold: they are worth saving."""
        if self.at_once or self.cause is None:
            return self.interrupted and not self.at_once
        return self.cause.worker is not None and (self.cause.lost or self.signals > 0)  # else a server is lost

    @property
    def in_words(self) -> str:
        """The cause that all processes are told; empty when all workers have finished."""
        return self.cause.cause if self.cause else ("interrupted" if self.interrupted else "")

    def unfinished(self, stop_when_unsaved: bool, hint: str) -> EndJob | None:
        """All workers have finished; the cause if the servers have not, or if the last checkpoint is missing."""
        if self.finished:
            return EndJob(self.unsaved) if self.unsaved and stop_when_unsaved else None
        what = self.lost or "the servers ended"
        return EndJob(f"{what} after the workers had finished: what was still to be written is missing{hint}")


class LocalJob:
    """One job, from start to end."""

    def __init__(self, checked: CheckedRequest, display: Display, collect: Callable[[Path], object] | None = None) -> None:
        """Args: `collect`: takes what workers have left in the job's folder, before that is removed, for a caller that goes
        on when the job has ended, also by a signal."""
        self._collect = collect
        self.checked, self.request, self.plan = checked, checked.request, checked.plan
        self.display = display
        self.summary: dict[str, Any] = {}
        self.paces: tuple[tuple[float, ...], ...] = ()  #: what steps took of their workers (`records/step_figures.py`)
        self.progress: TrainingProgress | None = None  #: of a script that trains without pushes
        self.record_lost = ""  #: why the record is cut short
        self.seconds = 0.0  #: from the start of the first process to the end of the last
        tolerant = self.request.min_workers is not None
        self._supervisor = Supervisor(self.request.size, self.request.least, tolerant)
        self._checkpoints = CheckpointWatch(self.request.checkpoint, checked.resume)
        self._end = JobEnd()
        self._ready: dict[int, list[str]] = {}  #: addresses of the servers that listen, by shard
        self._asked: set[int] = set()  #: workers that a signal like SIGTERM has ended: soon it may come to this process, too
        self._step = 0  #: of the worker that is farthest
        self._holds = self.request.way == "ps"  #: do servers hold the model?
        self._given_up: dict[int, tuple[str, str]] = {}  #: reason and cause of workers given up by --timeout
        self._debugged = False  #: is a worker in its debugger, which then has Ctrl-C?
        self._undecided: list[tuple[int, int, str, str]] = []  # status request, worker, reason and cause of its end
        self._stopped: StoppedProcesses[ChildProcess] = StoppedProcesses(self.request.timeout)
        self._processes = JobProcesses(checked)
        self._monitor = self._processes.monitor
        self._coordinator = CoordinatorLink(self._monitor)
        self._handlers: dict[type, Callable[[Any], None]] = {
            OutputLine: self._on_line,
            OutputRows: self._on_drawing,
            Exited: self._on_exit,
            Readable: self._on_readable,
            Signalled: self._on_signal,
            Status: self._on_status,
            Notice: self._on_notice,
            Gone: self._on_gone,
            Finished: self._on_finished,
        }

    def run(self) -> int:
        """Run the job; its exit status."""
        with ExitStack() as undo:
            undo.callback(lambda: self._monitor.close(told_to_end=self._told_to_end and self._collect is None))
            undo.callback(self._processes.close)  # before a signal can end this process again
            undo.callback(self.display.close)
            undo.callback(self._coordinator.close)
            undo.callback(self._monitor.dismiss)
            begun = time.monotonic()
            self.display.begin(self.request.in_words())
            if self.request.debug is not None:
                self.display.make_room()
                self.display.say(f"worker {self.request.debug} has the terminal; no time-out gives up a worker (--debug)")
            if self.checked.note():
                self.display.say(self.checked.note())
            for warning in self.checked.warnings:
                self.display.say(f"warning: {warning}")
            if self.request.link is not None:
                self.display.note(self.request.link_in_words())
            self._processes.start(self.display)
            while not self._supervisor.ending and not self._end.interrupted:
                self._turn()
            status = self._finish()
            self.seconds = time.monotonic() - begun
            if self._collect is not None:
                self._collect(self._processes.folder.path)
            return status

    @property
    def finished(self) -> set[int]:
        """The workers that finished."""
        return self._supervisor.finished

    @property
    def ended_by(self) -> signal.Signals | None:
        """The signal that has ended the job; None where none has."""
        return self._end.ended_by if self._told_to_end else None

    @property
    def cause(self) -> EndJob | None:
        """Why the job has failed; None where it has not, or was interrupted."""
        return None if self._end.interrupted else self._end.cause

    @property
    def _told_to_end(self) -> bool:
        return self._end.signals > 0 and (self._end.interrupted or self._end.cause is not None)

    # The loop.

    def _turn(self) -> None:
        self._coordinator.request_status_when_due()
        self.display.tick()
        for child in self._monitor.children if not self.record_lost else ():
            if child.log_lost:
                self._warn_lost_record(child.log_lost)
        self._look_for_stopped()
        self._handle(self._monitor.turn(STATUS_EVERY))

    def _look_for_stopped(self) -> None:
        """Name servers, and the emulated network, that are stopped: all workers wait for them. `--timeout` gives them up."""
        now, processes = time.monotonic(), self._processes
        watched = {child: child.label for child in processes.servers}
        if processes.link is not None:
            watched[processes.link] = "the emulated network (--link)"
        due, again, over = self._stopped.look([child for child in watched if child.is_stopped], now)
        for child in due:
            pid, waiting, limit = child.process.pid, self._supervisor.active(), self._stopped.limit
            waits = f"{named(waiting)} cannot go on without it" if waiting else "the job cannot end without it"
            until = "" if limit is None else f"; after {limit:g} s the job ends (--timeout)"
            stopped = f"{watched[child]} (process {pid}) has been stopped for {now - self._stopped.since[child]:.0f} s"
            self.display.say(f"warning: {stopped}: {waits}; to continue it: kill -CONT {pid}{until}")
        for child in again:
            self.display.say(f"{watched[child]} (process {child.process.pid}) goes on")
        for child in over:
            cause = f"was stopped for longer than {self._stopped.limit:g} s (--timeout)"
            child.kill(signal.SIGKILL)
            if self._supervisor.ending:
                self._end.lost = self._end.lost or f"{child.label} {cause}"
            elif child is processes.link:
                self._link_lost(cause)
            else:
                self._apply(self._supervisor.server_exited(processes.servers[child], cause, self._lost_server()))

    def _lost_server(self) -> LostServer:
        """What is lost with a server: the coordinator said last whether servers hold the model; before, the options do."""
        return LostServer(self._holds, str(self._checkpoints.newest() or ""), self.request.how_to_save())

    def _link_lost(self, cause: str) -> None:
        self._supervisor.ending = True
        self._end.cause = EndJob(f"the emulated network (--link) {cause}")

    def _handle(self, events: Iterable[MonitorEvent]) -> None:
        for event in events:
            self._handlers[type(event)](event)

    def _receive(self) -> None:
        for message in self._coordinator.received():
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)

    def _on_readable(self, event: Readable) -> None:
        if event.key != DEBUGGER:
            self._receive()
            return
        # a worker has come to its first `breakpoint()`, and waits until the terminal is free
        asks = self._processes.accept_debugger()
        self.display.make_room()
        if self._processes.in_foreground and not self._debugged:
            self._debugged = True
            self.display.say(
                f"worker {self.request.reader} is in its debugger, and writes here directly from now on; Ctrl-C is the "
                "debugger's; the job ends by its q, or by Ctrl-\\"
            )
        asks.send(b"!")
        asks.close()

    # Events of child processes, and signals.

    def _on_signal(self, event: Signalled) -> None:
        """The first signal ends the job in order. Who insists (`JobEnd.at_once`) ends it at once."""
        if event.number not in ENDING:
            return
        end = self._end
        if event.number == signal.SIGINT and self._debugged and not self._supervisor.ending:
            return  # the terminal has sent it to the debugger as well: if that worker ends by it, the job does
        end.signals += 1
        end.ended_by = end.ended_by or signal.Signals(event.number)
        end.insisted += {signal.SIGINT: 1, signal.SIGQUIT: ENOUGH}.get(signal.Signals(event.number), 0)
        if not self._supervisor.ending:
            end.interrupted = self._supervisor.ending = True  # processes that end from now on end because of it
        elif end.cause is not None and end.cause.worker in self._asked:  # it came to the worker first
            end.interrupted, end.cause = True, None
        elif end.at_once:
            self.display.say("ending at once")
        elif event.number == signal.SIGINT or end.signals == 1:
            self.display.say(f"the job is ending, servers write what is left; {INSIST}")

    def _on_line(self, event: OutputLine) -> None:
        rank = self._processes.workers.get(event.child)
        if rank is not None:
            if (self._supervisor.ending or self._end.interrupted) and event.text.startswith(TOLD_TO_END):
                return  # for the cause, which is shown last
            self.display.line(str(rank), event.text, event.error)
        elif not event.error and event.text.startswith('{"ready"'):
            self._on_ready(self._processes.servers[event.child], json.loads(event.text)["ready"])
        elif event.text and not self._supervisor.ending:
            self.display.line(event.child.label, event.text, event.error)

    def _on_drawing(self, event: OutputRows) -> None:
        rank = self._processes.workers.get(event.child)
        if rank is not None:
            self.display.draw(str(rank), event.rows, event.again, event.error)

    def _on_ready(self, server: int, addresses: list[str]) -> None:
        """A server listens at these addresses; when all do, workers of other hosts may join."""
        self._ready[server] = addresses
        if self._end.dismissed or (server == 0 and not self._coordinator.open(addresses[0])):
            return
        if server == 0:  # which could not be told of them before
            for worker in sorted(self._supervisor.finished):
                self._coordinator.send(Gone(worker=worker, incarnation=0, reason="finished", cause="finished"))
        if len(self._ready) < self.plan.shards or not self.request.listen:
            return
        ports = [self._ready[index][1].rpartition(":")[2] for index in range(self.plan.shards)]
        facts = self._processes.facts(tuple(f"tcp://HOST:{port}" for port in ports), None)
        facts = replace(facts, modes=without_paths(facts.modes))
        ranks = tuple(range(self.request.workers, self.request.size))
        self._coordinator.send(Expecting(job=json.loads(json.dumps(asdict(facts))), ranks=ranks))
        if self._processes.keys is not None:
            path = self._processes.folder.path / "workers.key"
            write_key_file(path, self._processes.keys.workers)
            how = f"--key-file {path.name}"
            self.display.say(f"key file for other hosts: {path}")
        else:
            how = "--insecure"
            self.display.say(
                f"--insecure: all that reach {self.request.listen} can join and read the model; nothing is encrypted"
            )
        awaited = counted(self.request.expect, "worker")
        join, *others = joined_by(self.request.listen, int(ports[0]), own_addresses())
        or_by = f" (or by {', '.join(others)})" if others else ""
        self.display.say(f"waiting for {awaited}: polytempo worker --join {join} {how} SCRIPT{or_by}")

    def _on_exit(self, event: Exited) -> None:
        reason, cause = described(event.status)
        rank = self._processes.workers.get(event.child)
        if rank is not None:
            if -event.status in ENDING:
                self._asked.add(rank)
            if -event.status == signal.SIGINT and self._debugged and rank == self.request.reader:
                self._end.interrupted = self._supervisor.ending = True
            self._worker_ended(rank, *self._given_up.get(rank, (reason, cause)))
            return
        if event.child is self._processes.link:
            if not self._end.finished and not self._supervisor.ending:
                self._link_lost(cause)
            return
        self._receive()  # its last messages may be waiting
        if not self._end.finished:
            server = self._processes.servers[event.child]
            if self._supervisor.ending and event.status and server in self._ready:  # before that it holds nothing
                self._end.lost = self._end.lost or f"server {server} {cause}"
            self._apply(self._supervisor.server_exited(server, cause, self._lost_server()), event.child)

    def _on_gone(self, message: Gone) -> None:
        if message.asked:
            self._asked.add(message.worker)
        self._worker_ended(message.worker, message.reason, message.cause)

    def _worker_ended(self, worker: int, reason: str, cause: str) -> None:
        """Whether a script failed before its first push the coordinator knows, as soon as it is ready.

        When it does not answer it is about to end, as its pidfd will tell: then that is the cause, and this a consequence.
        """
        if reason == "failed" and 0 in self._ready:
            self._undecided.append((self._coordinator.request_status(), worker, reason, cause))
        else:
            self._apply(self._supervisor.exited(worker, reason, cause, accepted=reason != "failed"))

    def _apply(self, actions: list[SupervisorAction], child: ChildProcess | None = None) -> None:
        for action in actions:
            if isinstance(action, FailureReport):
                if action.warning and not self._end.interrupted:  # ends that were asked for need no warning
                    self.display.say(f"warning: {action.warning}")
                self._coordinator.send(Gone(worker=action.worker, incarnation=0, reason=action.reason, cause=action.cause))
            elif isinstance(action, EndJob):
                self._end.cause = action
                killed = "SIGKILL" in action.cause  # what the process said before has nothing to do with it
                server = self._processes.servers.get(child) if child is not None else None
                if child is not None and server is not None and server not in self._ready and len(child.tail) == 1:
                    self._end.cause = EndJob(child.tail[0].removeprefix("polytempo: "))  # why it could not start
                elif child is not None and child.tail and not killed:
                    self._end.cause = EndJob(f"{action.cause}\n" + "\n".join(child.tail))
            elif isinstance(action, AllDone) and not self._supervisor.finished:
                self._end.cause = EndJob("no worker finished")

    def _warn_lost_record(self, text: str) -> None:
        """Once, and again at the end: every file meets a full disk."""
        if not self.record_lost:
            self.record_lost = text
            self.display.say(f"warning: {text}")

    # Messages of the coordinator.

    def _on_status(self, status: Status) -> None:
        due = [ended for ended in self._undecided if ended[0] <= self._coordinator.answered]
        self._undecided = self._undecided[len(due) :]
        if status.trains and not self._supervisor.trains:
            self._apply(self._supervisor.training())
        for _, worker, reason, cause in due:
            self._apply(self._supervisor.exited(worker, reason, cause, status.workers[worker].accepted))
        self._note_progress(status.progress)
        if status.trains or status.progress is not None:  # a script may have asked for servers, or make no use of them
            self._holds = status.holds
        self._step = max([self._step, *(worker.step for worker in status.workers)])
        self.display.show(status)
        self._check_timeout(status)

    def _on_notice(self, message: Notice) -> None:
        if message.fatal and not self._supervisor.ending:
            self._supervisor.ending = True
            self._end.cause = EndJob(message.text)
        elif message.about == "record":
            self._warn_lost_record(message.text)
        elif message.fatal and message.text != self._end.stopped:  # else it repeats the cause that the servers were told
            self._end.lost = self._end.lost or message.text
        elif not message.fatal:
            self.display.say(message.text)

    def _on_finished(self, message: Finished) -> None:
        self.summary, self.paces = message.summary, message.paces
        last = message.summary.get("progress")
        self._note_progress(TrainingProgress(**last) if last else None)
        self._end.unsaved = message.cause
        self._end.finished = True

    def _note_progress(self, progress: TrainingProgress | None) -> None:
        """Say once which options mean nothing to a script that trains without pushes."""
        ignored = self.request.push_options()
        if progress is not None and not progress.distributed and self.progress is None and ignored:
            self.display.say(f"a pipeline pushes nothing to servers: it ignores {', '.join(ignored)}")
        self.progress = progress or self.progress

    def _check_timeout(self, status: Status) -> None:
        """`--timeout`: a worker that others have waited for longer than that is given up."""
        limit = self.request.timeout if self.request.debug is None else None
        held_up = self._stopped.held_up(time.monotonic())
        late = waited_too_long(status, limit) if limit is not None and not held_up else None
        if late is None or late in self._given_up:
            return
        self._given_up[late] = "lost", f"was given up: others had waited for it longer than {limit:g} s (--timeout)"
        child = self._processes.worker(late)
        if child is not None:
            child.kill(signal.SIGKILL)
        else:
            self._apply(self._supervisor.exited(late, *self._given_up[late]))

    # Ending.

    def _finish(self) -> int:
        """End all processes in order: workers, then servers, which write what is left. The job's exit status."""
        if self.progress is not None and (self.progress.counted or not self._supervisor.trains):
            self._checkpoints = CheckpointWatch(None, None)  # of a pipeline, whose script saves for itself
        end, processes = self._end, self._processes
        cause = end.in_words
        saves = self._announce_save(False)
        if cause:
            end.stopped = cause
            self._coordinator.send(Stop(cause=cause))
        at_once = lambda: end.at_once  # noqa: E731
        self._handle(self._monitor.end(processes.workers, 1.0 if cause else SERVERS_END, at_once))
        if not cause:
            self._await_servers()
            self._empty_link()
        saves = self._announce_save(saves)  # a signal may have come meanwhile
        status = INTERRUPTED if end.interrupted else int(bool(cause))
        self._coordinator.send(Finish(exit_status=status, cause=cause, save=saves))
        self._wait_for_servers(self.request.grace if saves else SERVERS_END)
        end.dismissed = True
        self._handle(self._monitor.end(processes.servers, 1.0, at_once))
        self._checkpoints.clear()
        self.display.close()
        return self._report()

    def _announce_save(self, announced: bool) -> bool:
        """Whether the job ends early and its servers shall save what they hold; say so, if it was not `announced` yet."""
        if self._checkpoints.directory is None or not self._end.keeps_values:
            return False
        if not announced:
            limit = f"at most {self.request.grace:g} s; {INSIST}, without it"
            self.display.say(f"{self._end.in_words}: saving a checkpoint to {self._checkpoints.directory} ({limit})")
        return True

    def _await_servers(self) -> None:
        """Workers that load little may finish before the servers listen, which are to write the record all the same."""
        servers, deadline = self._processes.servers, time.monotonic() + SERVERS_END
        while len(self._ready) < len(servers) and not self._end.at_once and time.monotonic() < deadline:
            if any(child.status is not None for child in servers):
                return
            self._handle(self._monitor.turn(0.1))

    def _empty_link(self) -> None:
        """What workers sent last may still be under way on an emulated network: the servers get it before they finish."""
        link, deadline = self._processes.link, time.monotonic() + SERVERS_END
        if link is not None:
            link.ask_to_end()
            while link.status is None and not self._end.at_once and time.monotonic() < deadline:
                self._look_for_stopped()
                self._handle(self._monitor.turn(0.1))

    def _wait_for_servers(self, patience: float) -> None:
        end, deadline = self._end, time.monotonic() + patience
        while not (end.finished or end.lost or end.at_once) and self._coordinator.is_open and time.monotonic() < deadline:
            self._look_for_stopped()
            self._handle(self._monitor.turn(0.1))
        if not (end.finished or end.lost or end.at_once) and self._coordinator.is_open:
            stopped = "".join(f"; {child.label} is stopped" for child in self._processes.servers if child.is_stopped)
            end.lost = f"the servers were waited for longer than {patience:g} s{stopped}"

    def _report(self) -> int:
        end = self._end
        if end.interrupted or (end.at_once and not end.finished):
            cut = end.at_once and not end.finished
            trouble = end.unsaved or end.lost
            if cut:
                newest = self._checkpoints.newest()
                saved = step_of(newest) if newest else 0
                trouble = f"the checkpoint was not finished: steps {saved} to {self._step} are lost"
            self.display.say(f"interrupted; all processes have ended{self._checkpoints.after(trouble)}")
            return INTERRUPTED
        cause = end.cause or end.unfinished(self.request.checkpoint_errors == "stop", self._checkpoints.hint())
        if cause is None:
            return 0
        end.cause = cause
        child = self._processes.worker(cause.worker)
        if child is not None and child.tail and self.display.latest != (str(cause.worker), True):  # else it is in sight
            self.display.say("\n  ".join([f"the error of worker {cause.worker}:", *last_error(child.tail)]))
        self.display.say(f"{cause.cause}{self._checkpoints.after(end.unsaved or end.lost) if cause.lost else ''}")
        return 1
