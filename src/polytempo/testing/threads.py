"""A whole job in one process: servers and workers are threads, bytes travel through queues.

with ThreadJob(workers=3, servers=2, sync="ssp:2") as job:
    results = job.run(train)          # calls train(session) in three threads
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from polytempo.coordinate.plan import JobPlan, Limits
from polytempo.coordinate.sequencer import Sequencer
from polytempo.errors import PolytempoError
from polytempo.parameter_server.first import First
from polytempo.parameter_server.keeper import Keeper
from polytempo.parameter_server.manifest import find_checkpoint
from polytempo.parameter_server.server import Server
from polytempo.protocol.messages import Finish, Finished, Hello, Notice, decode, encode
from polytempo.records.writer import RecordWriter
from polytempo.train.client import Client
from polytempo.train.job import JobFacts
from polytempo.train.session import Session
from polytempo.transport.memory import MemoryChannel, MemoryEndpoint
from polytempo.transport.pool import Pool

T = TypeVar("T")


class ThreadJob:
    """A job in threads. Leaving the block ends it; `summary` then holds its figures."""

    def __init__(
        self,
        workers: int,
        servers: int = 1,
        sync: str = "bsp",
        *,
        limits: Limits | None = None,
        record: str | Path | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 0,
        resume: str | Path | None = None,
        slow: dict[int, float] | None = None,
        hiccup: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
        retry: float = 5.0,
    ) -> None:
        checkpoints = Path(checkpoint) if checkpoint else None
        path, manifest = find_checkpoint(Path(resume)) if resume else (None, {})
        self.plan = JobPlan(workers, servers, sync, limits or Limits(), checkpoint_every, manifest)
        positions = tuple(manifest.get("positions", ()))
        self.job = JobFacts(workers, (), sync, seed, slow=slow or {}, hiccup=hiccup, positions=positions)
        self.retry = retry
        self.summary: dict[str, Any] = {}
        self.notices: list[str] = []
        self.endpoints = [MemoryEndpoint(f"server-{index}") for index in range(servers)]
        facts = {"spec": sync, "size": workers, "first_step": self.plan.first_step}
        self.sequencer = Sequencer(self.plan)
        writer = RecordWriter(record) if record else None
        first = First(self.sequencer, writer, checkpoints, facts)
        self.servers = []
        for index, endpoint in enumerate(self.endpoints):
            keeper = Keeper(index, servers, Pool(), checkpoints, path)
            to_first = MemoryChannel(self.endpoints[0]) if index else None
            self.servers.append(Server(keeper, [endpoint], workers, None if index else first, to_first))
        self._threads = [threading.Thread(target=server.run, daemon=True) for server in self.servers]
        for thread in self._threads:
            thread.start()
        self._launcher = MemoryChannel(self.endpoints[0])
        self._launcher.send(encode(Hello(role="launcher")))

    def session(self, rank: int) -> Session:
        """One worker's session. Close it when the worker is done."""
        channels = [MemoryChannel(endpoint) for endpoint in self.endpoints]
        return Session(Client(channels, rank, self.job.incarnation, Pool(), self.retry), self.job, rank)

    def run(self, work: Callable[[Session], T]) -> list[T]:
        """Call `work` once for each worker, in threads of their own; their results, or the first error."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def worker(rank: int) -> None:
            session: Session | None = None
            try:
                session = self.session(rank)
                results[rank] = work(session)
                session.close()
            except BaseException as error:  # noqa: BLE001  it is raised again below
                errors.append(error)
                if session is not None:
                    session.close("failed")

        threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(self.plan.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.plan.size)]

    def __enter__(self) -> ThreadJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(1 if error else 0)

    def close(self, exit_status: int = 0) -> None:
        """End the job."""
        finished = False
        try:
            self._launcher.send(encode(Finish(exit_status=exit_status)))
            deadline = time.monotonic() + 30
            while not finished and time.monotonic() < deadline:
                finished = self._hear()
        except PolytempoError:
            finished = True  # the servers ended first, with a cause
        for thread in self._threads:
            thread.join(timeout=10)
        self._launcher.close()
        if not finished or any(thread.is_alive() for thread in self._threads):
            raise PolytempoError("the servers of a job in threads did not end")

    def _hear(self) -> bool:
        received = self._launcher.receive()
        if received is None:
            threading.Event().wait(0.001)
            return False
        message = decode(received[0])
        if isinstance(message, Notice):
            self.notices.append(message.text)
        if isinstance(message, Finished):
            self.summary = message.summary
        return isinstance(message, Finished)
