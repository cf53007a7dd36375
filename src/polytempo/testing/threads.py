"""A whole job in one process: servers and workers are threads, connected by queues, or by sockets as processes are.

with ThreadJob(workers=3, servers=2, sync="ssp:2") as job:
    results = job.run(train)          # calls train(session) in three threads
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from polytempo.checkpoints import find_checkpoint
from polytempo.client.client import Client
from polytempo.collectives.world import World, open_by_name, open_in_threads
from polytempo.device.device import Device, Devices
from polytempo.device.host_device import HostDevice
from polytempo.door import spec_of_script
from polytempo.errors import PeerError, PolytempoError, RankLost, UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.protocol.messages import STRANGER_LIMIT, Finish, Finished, Hello, Notice, decode, encode
from polytempo.server.coordinator import Coordinator, JobRecord
from polytempo.server.io_loop import IoLoop
from polytempo.server.job_plan import JobPlan, Limits
from polytempo.server.members import RemoteHosts
from polytempo.server.resume_rules import companions_in
from polytempo.server.sequencer import Sequencer
from polytempo.server.shard_executor import ShardExecutor, ShardPlacement, ShardState
from polytempo.session.session import Session, as_current
from polytempo.sync.mode import Mode
from polytempo.sync.spec import Spec
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Channel, Endpoint
from polytempo.transport.connect import connect
from polytempo.transport.keys import Credentials
from polytempo.transport.memory import MemoryChannel, MemoryEndpoint
from polytempo.transport.shared_memory import SharedMemoryRegistry
from polytempo.transport.stream import StreamEndpoint

T = TypeVar("T")


class ThreadJob:
    """A job in threads. Leaving the block ends it; `summary` then holds its figures."""

    #: Of a job with other hosts: the tokens of their workers.
    credentials: Credentials | None = None
    #: "memory": queues. "ipc": Unix sockets and shared memory, as the processes of a host use them.
    wire = "memory"

    def __init__(
        self,
        workers: int,
        servers: int = 1,
        sync: str | Mode | Spec = "bsp",
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
        via: str = "ps",
        go_on_unsaved: bool = False,
        device: str | None = None,
        on_divergence: str = "warn",
    ) -> None:
        """`device="stand-in"`: servers and workers share memory as processes on one GPU do, with the CPU as the GPU."""
        if device not in (None, "stand-in"):
            raise UsageError(f'expected device="stand-in" or None, got {device!r}')
        self._stand_in = device is not None
        spec = spec_of_script(sync)
        sync = spec.text
        self.wire = "ipc" if self._stand_in else self.wire  # queues copy the memory of fences, sockets share it
        checkpoints = Path(checkpoint) if checkpoint else None
        path, manifest = find_checkpoint(Path(resume)) if resume else (None, {})
        self.plan = JobPlan(workers, servers, sync, limits or Limits(), checkpoint_every, manifest)
        positions = tuple(manifest.get("positions", ()))
        self._directory = Path(tempfile.mkdtemp(prefix="polytempo-", dir="/tmp"))
        self.job = JobFacts(
            workers,
            (),
            sync,
            seed,
            slow=slow or {},
            hiccup=hiccup,
            positions=positions,
            budgeted=self.plan.limits.any,
            saves=checkpoints is not None,
            resumed=path is not None,
            companions=companions_in(manifest),
            via=via,
            meeting=str(self._directory),
        )
        self.retry = retry
        self.summary: dict[str, Any] = {}
        self.notices: list[str] = []
        pools = [Pool(SharedMemoryRegistry() if self.wire == "ipc" else None) for _ in range(servers)]
        self.endpoints = [self._endpoint(index, pool) for index, pool in enumerate(pools)]
        facts: dict[str, Any] = {"spec": sync, "size": workers, "first_step": self.plan.first_push}
        facts |= {"modes": spec.mode.origin.digests} if spec.mode.origin is not None and spec.digest else {}
        self.sequencer = Sequencer(self.plan)
        coordinator = Coordinator(
            *(self.sequencer, JobRecord(record), checkpoints, facts, RemoteHosts(credentials=self.credentials)),
            go_on_unsaved=go_on_unsaved,
            resume=path,
            ends_diverged=on_divergence == "stop",
        )
        self.servers = []
        for index, endpoint in enumerate(self.endpoints):
            placement = ShardPlacement(device=self._device())
            state = ShardState(index, servers, pools[index], workers, checkpoints, path, placement)
            to_coordinator = self.connect(0, Pool()) if index else None
            endpoints = [endpoint, *self._more_endpoints(index, pools[index])]
            own = None if index else coordinator
            executor = ShardExecutor(state)
            self.servers.append(IoLoop(executor, endpoints, workers, own, to_coordinator, credentials=self.credentials))
        self._threads = [threading.Thread(target=server.run, daemon=True) for server in self.servers]
        for thread in self._threads:
            thread.start()
        self._launcher = self.connect(0, Pool())
        self._launcher.send(encode(Hello(role="launcher")))

    def _device(self) -> Device | None:
        return HostDevice() if self._stand_in else None

    def _endpoint(self, index: int, pool: Pool) -> Any:
        if self.wire == "memory":
            return MemoryEndpoint(f"server-{index}")
        return StreamEndpoint(str(self._directory / f"server-{index}"), pool, STRANGER_LIMIT)

    def _more_endpoints(self, index: int, pool: Pool) -> list[Endpoint]:
        """Endpoints for workers of other hosts."""
        return []

    def connect(self, index: int, pool: Pool) -> Channel:
        """A connection to one of the servers."""
        endpoint = self.endpoints[index]
        if isinstance(endpoint, MemoryEndpoint):
            return MemoryChannel(endpoint)
        return connect(endpoint.address, "", None, pool, timeout=10.0)

    def session(self, rank: int) -> Session:
        """One worker's session. Close it when the worker is done."""
        pool = Pool(SharedMemoryRegistry() if self.wire == "ipc" else None)
        with ExitStack() as opened:  # where one server is gone already, the others' connections are closed
            channels = []
            for index in range(self.plan.shards):
                channels.append(self.connect(index, pool))
                opened.callback(channels[-1].close)
            session = Session(Client(channels, rank, self.job.incarnation, pool, self.retry), self.job, rank)
            opened.pop_all()
        session.devices = Devices(self._device())
        return session

    def run(self, work: Callable[[Session], T]) -> list[T]:
        """Call `work` once for each worker, in threads of their own; their results, or the first error that is a cause."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def worker(session: Session) -> None:
            try:
                with as_current(session):
                    results[session.rank] = work(session)
                session.close()
            except BaseException as error:  # noqa: BLE001  it is raised again below
                errors.append(error)
                session.close("failed")

        with ExitStack() as opened:  # all, before any works: what one does may end the servers
            sessions = []
            for rank in range(self.plan.size):
                sessions.append(self.session(rank))
                opened.callback(sessions[-1].close, "failed")
            opened.pop_all()
        threads = [threading.Thread(target=worker, args=(session,), daemon=True) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=_is_a_consequence)
        return [results[rank] for rank in range(self.plan.size)]

    def __enter__(self) -> ThreadJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(1 if error else 0)

    def close(self, exit_status: int = 0, save: bool = False) -> None:
        """End the job. `save`: with a checkpoint, although it is not over."""
        finished = False
        try:
            self._launcher.send(encode(Finish(exit_status=exit_status, save=save)))
            deadline = time.monotonic() + 30
            while not finished and time.monotonic() < deadline:
                finished = self._hear()
        except PolytempoError:
            finished = True  # the servers ended first, with a cause
        for thread in self._threads:
            thread.join(timeout=10)
        self._launcher.close()
        shutil.rmtree(self._directory, ignore_errors=True)
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


def _is_a_consequence(error: BaseException) -> bool:
    """Does it say only that a server or a rank has gone, perhaps for what another worker knows?"""
    return isinstance(error, RankLost) or (isinstance(error, PeerError) and str(error).endswith("is gone"))


class GroupJob:
    """A job without servers in threads: what torchrun or mpirun start, in one process."""

    #: As for `ThreadJob`.
    wire = "memory"

    def __init__(self, workers: int, least: int | None = None) -> None:
        self.sessions = [
            Session(None, JobFacts(workers, (), local_size=workers, via="allreduce"), r) for r in range(workers)
        ]
        for session, world in zip(self.sessions, self._worlds(workers), strict=True):
            session.use(world)
            session.least = least or workers

    def _worlds(self, workers: int) -> list[World]:
        if self.wire == "memory":
            return open_in_threads(workers)
        name = os.urandom(16).hex()
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda rank: open_by_name(name, rank, workers), range(workers)))

    def __enter__(self) -> GroupJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for session in self.sessions:
            session.abandon()

    def run(self, work: Callable[[Session], T]) -> list[T]:
        """Call this in a thread for each worker, which then leaves the job; the first error that is a cause."""
        with ThreadPoolExecutor(len(self.sessions)) as pool:
            futures = [pool.submit(self._work, session, work) for session in self.sessions]
            errors = [error for error in (future.exception() for future in futures) if error is not None]
            if errors:
                raise min(errors, key=_is_a_consequence)
            return [future.result() for future in futures]

    def _work(self, session: Session, work: Callable[[Session], T]) -> T:
        try:
            with as_current(session):
                result = work(session)
        except BaseException:
            session.abandon()
            raise
        session.close()
        return result
