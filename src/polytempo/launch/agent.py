"""`polytempo worker --join`: starts workers on this host for a job that runs on another.

The agent says how many workers it brings, is told their ranks, and starts them; it reports their ends and sends a beat twice
a second, so that the job knows when this host is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from polytempo.errors import PeerError, UsageError
from polytempo.launch.children import Child
from polytempo.launch.crew import Crew, Event, Exited, Ready, Said, Signalled
from polytempo.launch.display import Display
from polytempo.launch.local import INTERRUPTED, private_directory, start_worker
from polytempo.launch.request import split_address
from polytempo.launch.supervise import described
from polytempo.protocol.messages import Assigned, Beat, Gone, Hello, Refused, Stopped, decode, encode
from polytempo.train.job import job_from
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.pool import Pool
from polytempo.transport.zeromq import ZmqChannel

BEAT_EVERY = 0.5
#: How long to wait for the job's first word.
PATIENCE = 15.0


@dataclass(frozen=True)
class JoinRequest:
    """Workers that join a job elsewhere."""

    join: str
    script: str
    arguments: tuple[str, ...] = ()
    workers: int = 1
    keys: WorkerKeys | None = None

    def check(self) -> None:
        """Refuse what cannot work."""
        split_address(self.join, "--join")
        if self.workers < 1:
            raise UsageError(f"expected at least 1 worker, got {self.workers}; use -n 1 or more")
        if not os.path.isfile(self.script):
            raise UsageError(f"there is no script {self.script}; expected a Python file after the options")


class Agent:
    """This host's part in a job."""

    def __init__(self, request: JoinRequest, display: Display) -> None:
        self.request, self.display = request, display
        self._host, port = split_address(request.join, "--join")
        self._channel = ZmqChannel(
            f"tcp://{self._host}:{port}", f"agent-{os.urandom(8).hex()}".encode(), request.keys, Pool(), 1 << 30
        )
        self._directory = private_directory()
        self._crew = Crew()
        self._workers: dict[Child, int] = {}
        self._cause = ""
        self._failed = False
        self._interrupted = False

    def run(self) -> int:
        """Join, run, and end; the exit status."""
        try:
            self._start(self._join())
            beat_at = 0.0
            while self._crew.running() and not self._cause and not self._interrupted:
                if time.monotonic() >= beat_at:
                    self._channel.send(encode(Beat()))
                    beat_at = time.monotonic() + BEAT_EVERY
                self._deal(self._crew.turn(BEAT_EVERY / 2))
                self._hear()
            self._deal(self._crew.end(self._workers, patience=1.0))
            if self._cause:
                self.display.say(self._cause)
            return INTERRUPTED if self._interrupted else int(self._failed or bool(self._cause))
        finally:
            self._crew.close()
            self._channel.close()
            self.display.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _join(self) -> Assigned:
        self._channel.send(encode(Hello(role="agent", count=self.request.workers, pid=os.getpid())))
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
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

    def _start(self, assigned: Assigned) -> None:
        facts = job_from(dict(assigned.job))
        addresses = tuple(address.replace("HOST", self._host) for address in facts.addresses)
        keys = asdict(self.request.keys) if self.request.keys else None
        count = len(assigned.ranks)
        facts = replace(facts, addresses=addresses, keys=keys, route=self.request.join)
        tokens = dict(zip(assigned.ranks, assigned.tokens, strict=bool(assigned.tokens)))
        facts = replace(facts, first_rank=assigned.ranks[0], local_size=count, tokens=tokens)
        job_file = self._directory / "job.json"
        facts.write(job_file)
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))}
        for rank in assigned.ranks:
            variables = {**facts.torch_variables(rank), **threads}
            child = start_worker(self.request.script, self.request.arguments, job_file, rank, variables, _no_log)
            self._workers[child] = rank
            self._crew.add(child)
        self.display.say(f"joined {self.request.join} as workers {', '.join(map(str, assigned.ranks))} of {facts.size}")

    def _deal(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Said):
                self.display.line(str(self._workers[event.child]), event.text, event.error)
            elif isinstance(event, Exited):
                reason, cause = described(event.status)
                self._failed |= reason != "finished"
                gone = Gone(worker=self._workers[event.child], incarnation=0, reason=reason, cause=cause)
                self._channel.send(encode(gone))
            elif isinstance(event, Signalled) and event.number in (signal.SIGINT, signal.SIGTERM):
                self._interrupted = True
            else:
                assert isinstance(event, Ready | Signalled)

    def _hear(self) -> None:
        while (received := self._channel.receive()) is not None:
            message = decode(received[0])
            if isinstance(message, Stopped) and self._crew.running():
                self._cause = message.cause


def _no_log(name: str) -> Path | None:
    return None
