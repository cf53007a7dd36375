"""`polytempo worker --join`: starts workers on this host for a job that runs on another.

The agent announces its number of workers, receives their ranks, and starts them. It reports their ends and sends a heartbeat
twice a second, so that the coordinator can tell when this host is gone. Each heartbeat is answered: without an answer for
`--host-timeout` seconds the job's host is gone, and the workers here end.

A connection whose link was down for a while is quiet for as long again: its kernel tries less and less often. So where
answers fail to come the agent makes a new connection, again and again: its host is heard of as soon as the link is back.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from polytempo.door import of_this_host
from polytempo.errors import ModeError, PeerError, UsageError
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
from polytempo.launcher.forked_process import preload
from polytempo.launcher.job_facts import JobFacts, job_from
from polytempo.launcher.job_processes import JobFolder, start_worker
from polytempo.launcher.program import Program
from polytempo.launcher.request import check_host_timeout, split_address
from polytempo.launcher.supervisor import described
from polytempo.protocol.messages import Assigned, Gone, Heartbeat, Hello, Refused, Stopped, decode, encode
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.zeromq import ZmqChannel

HEARTBEAT_EVERY = 0.5
#: A connection is made anew when a heartbeat is not answered for this many seconds, or for this many times as long as usual.
RENEW_AFTER, RENEW_TIMES = 1.0, 8
#: Seconds to wait for the coordinator's first answer.
PATIENCE = 15.0
#: Seconds without an answer after which the job is given up: more than the coordinator waits for a host, since a server may
#: be busy where an agent is not.
HOST_TIMEOUT = 15.0


@dataclass(frozen=True)
class JoinRequest:
    """Workers that join a job elsewhere."""

    join: str
    program: Program
    workers: int = 1
    keys: WorkerKeys | None = None
    host_timeout: float = HOST_TIMEOUT
    fork: bool = False

    def check(self) -> None:
        """Refuse a request that cannot work.

        Raises: UsageError."""
        split_address(self.join, "--join")
        if self.workers < 1:
            raise UsageError(f"expected at least 1 worker, got {self.workers}; use -n 1 or more")
        check_host_timeout(self.host_timeout)
        self.program.check()


class Agent:
    """The workers of this host in a job that runs on another."""

    def __init__(self, request: JoinRequest, display: Display) -> None:
        self.request, self.display = request, display
        if request.fork:
            preload()
        self._host, port = split_address(request.join, "--join")
        self._channel = ZmqChannel(
            f"tcp://{self._host}:{port}", f"agent-{os.urandom(8).hex()}".encode(), request.keys, Pool(), 1 << 30
        )
        self._workers: dict[ChildProcess, int] = {}
        self._cause = ""
        self._failed = False
        self._interrupted = False
        self._heard = 0.0  # time of the last message of the coordinator
        self._unanswered: deque[float] = deque()  # times of heartbeats on this connection
        self._patience = request.host_timeout
        self._usual = 0.0  # seconds until one is answered
        self._ends: list[Gone] = []  # all that were reported
        self._monitor = ProcessMonitor()  # from here on signals are waited for
        self._folder = JobFolder("agent")

    def run(self) -> int:
        """Join, run, and end; the exit status."""
        with ExitStack() as undo:
            undo.callback(lambda: self._monitor.close(told_to_end=self._interrupted))
            undo.callback(self._folder.remove)  # before a signal can end this process again
            undo.callback(self.display.close)
            undo.callback(self._channel.close)
            undo.callback(self._monitor.dismiss)
            assigned = self._join()
            if assigned is not None:
                self._start(assigned, self._facts_of(assigned))
                self._watch()
            self._handle(self._monitor.end(self._workers, patience=1.0))
            if self._failed and not self._cause and not self._interrupted and self._channel.pollable().poll(1000):
                self._receive()  # the workers heard of the end of the job before this loop
            if self._interrupted:
                self.display.say("interrupted; all processes have ended")
            elif self._cause:
                self.display.say(self._cause)
            return INTERRUPTED if self._interrupted else int(self._failed or bool(self._cause))

    def _watch(self) -> None:
        next_heartbeat, self._heard = 0.0, time.monotonic()
        while self._monitor.running() and not self._cause and not self._interrupted:
            if time.monotonic() >= next_heartbeat:
                self._beat()
                next_heartbeat = time.monotonic() + HEARTBEAT_EVERY
            self._handle(self._monitor.turn(HEARTBEAT_EVERY / 2))
            self._receive()
            self.display.tick()
            if not self._cause and time.monotonic() - self._heard > self._patience:
                self._cause = (
                    f"nothing was heard of the job at {self.request.join} for {self._patience:g} s: "
                    "its host is gone or cannot be reached; this host's workers have ended (--host-timeout)"
                )

    def _beat(self) -> None:
        now = time.monotonic()
        if self._unanswered and now - self._unanswered[0] > max(RENEW_AFTER, RENEW_TIMES * self._usual):
            self._channel.renew()
            self._unanswered.clear()
            for end in self._ends:  # it may be lost; what is known already does no harm
                self._channel.send(encode(end))
        self._channel.send(encode(Heartbeat()))
        self._unanswered.append(now)

    def _join(self) -> Assigned | None:
        """The ranks of this host; None when a signal ends the wait for them."""
        self._channel.send(encode(Hello(role="agent", count=self.request.workers, pid=os.getpid())))
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._handle(self._monitor.turn(0))
            if self._interrupted:
                return None
            if self._channel.pollable().poll(200):
                received = self._channel.receive()
                message = decode(received[0]) if received else None
                if isinstance(message, Assigned):
                    return message
                if isinstance(message, Refused):
                    raise UsageError(message.reason)
        raise PeerError(
            f"{self.request.join} did not answer within {PATIENCE:g} s; does the job listen there, with this key?"
        )

    def _facts_of(self, assigned: Assigned) -> JobFacts:
        """The job, with modes as this host's own command line names them: whatever paths another host tells are not used."""
        facts = job_from(dict(assigned.job))
        try:
            return replace(facts, modes=of_this_host(facts.modes))
        except ModeError as error:  # the job's host says so, too, instead of waiting for these workers
            for rank in assigned.ranks:
                self._send_end(Gone(worker=rank, incarnation=0, reason="failed", cause=f"could not be started ({error})"))
            raise

    def _start(self, assigned: Assigned, facts: JobFacts) -> None:
        self._patience = max(self._patience, facts.host_timeout)  # as long as the job waits for this host
        addresses = tuple(address.replace("HOST", self._host) for address in facts.addresses)
        keys = asdict(self.request.keys) if self.request.keys else None
        count = len(assigned.ranks)
        facts = replace(facts, addresses=addresses, keys=keys, route=self.request.join)
        tokens = dict(zip(assigned.ranks, assigned.tokens, strict=bool(assigned.tokens)))
        facts = replace(facts, first_rank=assigned.ranks[0], local_size=count, tokens=tokens)
        job_file = self._folder.job_file
        facts.write(job_file)
        self.request.program.place(self._folder.path)
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))}
        for rank in assigned.ranks:
            variables = {**facts.torch_variables(rank), **threads}
            child = start_worker(self.request.program, job_file, rank, variables, forks=self.request.fork)
            self._workers[child] = rank
            self._monitor.add(child)
        self.display.say(f"joined {self.request.join} as workers {', '.join(map(str, assigned.ranks))} of {facts.size}")

    def _handle(self, events: Iterable[MonitorEvent]) -> None:
        for event in events:
            if isinstance(event, OutputLine):
                self.display.line(str(self._workers[event.child]), event.text, event.error)
            elif isinstance(event, OutputRows):
                self.display.draw(str(self._workers[event.child]), event.rows, event.again, event.error)
            elif isinstance(event, Exited):
                reason, cause = described(event.status)
                self._failed |= reason != "finished"
                rank, asked = self._workers[event.child], -event.status in ENDING
                self._send_end(Gone(worker=rank, incarnation=0, reason=reason, cause=cause, asked=asked))
            elif isinstance(event, Signalled) and event.number in ENDING:
                self._interrupted = True
            else:
                assert isinstance(event, Readable | Signalled)

    def _send_end(self, gone: Gone) -> None:
        self._ends.append(gone)
        self._channel.send(encode(gone))

    def _receive(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, self._heard = decode(received[0]), time.monotonic()
            if isinstance(message, Heartbeat) and self._unanswered:
                self._usual += (self._heard - self._unanswered.popleft() - self._usual) / RENEW_TIMES
            elif isinstance(message, Stopped):
                self._cause = message.cause
