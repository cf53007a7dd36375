"""A process's place in its job: `init`, `rank`, `size`, `shutdown`; what else scripts call is in `script_calls.py`.

How a session connects is in `connecting.py`, which samples it draws in `ledger.py`, what it does in the end in `leaving.py`.
`init` makes the one session of the process. In a job in threads (`polytempo.testing`) each thread has a session of its own,
bound to it by `as_current`. The public functions at the end of this file act on the current session.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from polytempo.client.client import Client
from polytempo.client.connections import is_importing_the_script, refusal, started_by
from polytempo.client.key_value_store import JobWatch
from polytempo.collectives.shutdown import ended_badly, watch_exit
from polytempo.collectives.world import World
from polytempo.device.device import Devices
from polytempo.door import bring, check_shared, spec_of_script
from polytempo.errors import JobEnded, ModeError, PeerError, UsageError, trained_alone
from polytempo.launcher.job_facts import (
    Emulation,
    JobFacts,
    Way,
    claim,
    disclaim,
    job_of_environment,
    place_of_environment,
    placement_of_environment,
    read_job,
    way_of,
)
from polytempo.launcher.script_error import TOLD_TO_END, note_gpu, shown_frames
from polytempo.optim.torch_compiler import spare_compiler
from polytempo.session.connecting import open_client, open_world
from polytempo.session.leaving import LeavingCalls, LeavingStep
from polytempo.session.ledger import Ledger
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.machine import MachineEntry
from polytempo.sync.mode import Mode
from polytempo.sync.spec import Spec
from polytempo.transport.deadline import TIMEOUT, RankWatch, wait_without_limit
from polytempo.transport.keys import WorkerKeys
from polytempo.transport.local_peers import LocalPeers

#: Seconds by which a wait for the servers lasts longer. Of two ranks that wait for each other, one in a collective, one in
#: `step()`, the first is to fail: failed the second, the first would lose its link, and could only say that.
AFTER_COLLECTIVES = 1.0
#: Characters of a fault that others are told.
LONGEST_FAULT = 400
#: Steps without an exchange after which a worker says so, once: a script that averages by hand does so more often.
EARLY = 100
#: Optimizers that are only measured have numbers from here on: they are not the job's main one, which is number 0.
MEASURED = 1 << 10


class RoundClock:
    """The clock by which a worker's rounds with deadlines are timed; tests have one of their own."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Wait until the condition is notified or the moment has come; it may return early. The condition's lock is held."""
        condition.wait(None if until == math.inf else max(until - self.now(), 0.0))


@dataclass(frozen=True)
class StrategyScope:
    """What is known here of the strategy of a `with strategy.scope():` block: the strategy itself lies in a room above."""

    text: str
    sync: str | None
    via: str | None
    is_split: bool  #: a replica of the model is on several workers
    strategy: Any = None  #: the `Strategy`


class LoneTraining:
    """Counts the steps that this process trains without an exchange: N separate models, which a forgotten
    `DistributedOptimizer` makes.

    A hook of torch after every optimizer step sees that a worker trains. It is removed when an optimizer of this library (or
    a `KV`) is made, and returns at once when a collective or message was begun between two steps, or torch.distributed is in
    use. What was exchanged before the first step, such as the first weights, does not count.

    Args:
        calls: Returns the number of collectives and messages that this process has begun.
        said_by: The rank that says so early; None where another rank does.
    """

    def __init__(self, calls: Callable[[], int], said_by: int | None) -> None:
        self._calls, self._said_by = calls, said_by
        self._first: Callable[[], Any] = lambda: None  # the optimizer whose steps are counted
        self._before = 0  # calls until its first step
        self._steps = 0  # that it has made with gradients
        self._together = False  # something was exchanged
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._together or torch.compiler.is_compiling():  # counting would have a compiled step compiled again and again
            return
        if self._steps == 0:
            if not any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
                return
            self._first, self._before = weakref.ref(optimizer), self._calls()
        elif self._first() is not optimizer:
            return
        self._steps += 1
        self._look()
        if self._steps == EARLY and not self._together and self._said_by is not None:
            sys.stderr.write(f"polytempo: warning: {trained_alone(f'rank {self._said_by} has', self._steps)}\n")
            sys.stderr.flush()

    def _look(self) -> None:
        elsewhere = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._together = self._together or elsewhere or self._calls() != self._before

    def count(self) -> int:
        """The steps that were trained alone, at the end; 0 where something was exchanged, or one step cannot tell."""
        self._look()
        return self._steps if self._steps > 1 and not self._together else 0

    def end(self) -> None:
        """Remove the hook: an optimizer of this library is there, or the job is left."""
        self._hook.remove()


class Session:
    """One worker of a job. Without a client there are no servers; with a size of one it is a job of its own."""

    def __init__(self, client: Client | None, job: JobFacts, rank: int) -> None:
        self.client, self.job, self.rank, self.size = client, job, rank, job.size
        self.lock = threading.RLock()  #: of the client
        self.parent = ""  #: in a child process of a worker: the name of that worker
        self.life = 0  #: the number of jobs that this process has left before this one

        # Links to other workers.
        self.way = Way()
        self.timeout: float | None = None  #: seconds after which a wait for other ranks fails
        self.least = job.size  #: the least number of workers; with fewer left, a job without a sequencer ends
        self._world: World | None = None
        self._opening = threading.Lock()  # not `lock`: other threads use the client while ranks are waited for
        self._local_peers: LocalPeers | None = None
        self._buffers = 0
        self.devices = Devices()  #: of this process, by torch device

        # What optimizers of this process have to know of each other.
        self.optimizers = 0
        self.measured = MEASURED  #: the next number of an optimizer that is only measured
        self.owners: dict[int, Any] = {}  #: id of a parameter to a weak reference to the optimizer that wrapped it last
        self.watches: Any = weakref.WeakSet()  #: parameter watches of all optimizers
        self.guards: Any = weakref.WeakSet()  #: what looks at the steps of each optimizer, for divergence
        self.told: set[str] = set()  #: what was said on stderr once, for all optimizers
        self.scope: StrategyScope | None = None  #: the strategy in force, inside `with strategy.scope():`
        self.machine_log: Callable[[MachineEntry], object] | None = None  #: is given all that machines are told and order
        self.round_clock = RoundClock()  #: times rounds with deadlines

        # Data, and what the script has said.
        self.ledger = Ledger(rank, job.size)  #: the samples of its samplers: which were drawn, and which were trained on
        #: Which part of the data this rank's replica of the model takes, of how many; None: each rank takes its own.
        self.data_axis = (rank // job.replica, job.size // job.replica) if job.replica > 1 else None
        self.registered: Any = None  #: what the script has registered for checkpoints (`train/script_state.py`)
        self.metrics: list[dict[str, Any]] = []  #: of a job of one, which has no record

        # The end.
        self.stops: bool | None = None  #: what the last stage of a pipeline has said of the budget, where there is one
        self.lone: LoneTraining | None = None  #: sees whether this process trains without an exchange, until it cannot
        self.leaving = LeavingCalls()  #: what is done when this worker leaves
        self._returned = self._excluded = 0.0  # of the last exchange, and since then: what was no computing

    @property
    def together(self) -> bool:
        """Whether this process trains with other workers or over servers."""
        return not self.parent and (self.client is not None or self.size > 1)

    def check_part(self) -> None:
        """Refuse a call that only the worker itself can make, in a child process of it."""
        if self.parent:
            raise UsageError(refusal(self.parent))

    def should_stop(self) -> bool:
        """Whether the job's budget is used up, as of this worker's last exchange. An answer that is deferred is waited for,
        unless one before it was certain of what it will say."""
        if self.client is None:
            return False
        self.client.exchanges.asked = True
        if self.stops is not None:
            return self.stops
        if undecided := self.client.exchanges.undecided():
            with self.lock:
                self.client.settle(*undecided)
        return self.client.stop

    def computing_from(self, now: float) -> None:
        """An exchange has ended at `now`: the time from here on counts as computing."""
        self._returned, self._excluded = now, 0.0

    def not_computing(self, seconds: float) -> None:
        """These seconds since the last exchange were not computing."""
        self._excluded += seconds

    def computed(self, now: float) -> float:
        """Seconds of computing since the last exchange."""
        return now - self._returned - self._excluded

    def spec_of(self, sync: str | Mode | Spec | None) -> Spec:
        """The mode that a script asks for: the job's where it names none.

        Raises:
            UsageError: It is an object, or an installed mode, that the servers of this job do not have.
        """
        spec = spec_of_script(sync) if sync else self.job.spec
        if self.job.addresses:  # servers are other processes
            check_shared(spec, self.job.modes)
        return spec

    @property
    def emulation(self) -> Emulation:
        """The emulated slow-down of this worker, a new object for each optimizer."""
        return self.job.emulation(self.rank)

    def next_optimizer_id(self) -> str:
        if self.life and self.client is not None:
            raise UsageError(
                f"rank {self.rank} has finished its part of this job with shutdown(), and the servers went on without it; "
                "call init() and shutdown() once, around all optimizers, or start another job with polytempo run"
            )
        self._end_lone()
        self.optimizers += 1
        return str(self.optimizers - 1)

    def _end_lone(self) -> None:
        lone, self.lone = self.lone, None
        if lone is not None:
            lone.end()

    def watch_lone_training(self) -> None:
        """Have workers warned that train each a model of its own."""
        if self.size > 1 and not self.parent:
            self.lone = LoneTraining(
                lambda: 0 if self._world is None else self._world.engine.started, 0 if self.rank == 0 else None
            )

    def local_peers(self) -> LocalPeers:
        """The connections to the other workers of this host, made on first use."""
        if self._local_peers is None:
            self._local_peers = LocalPeers(self.job.meeting, self.rank, self.timeout)
            self.when_departed(self._local_peers.forget)
        return self._local_peers

    def when_departed(self, handle: Callable[[int], object]) -> None:
        """Call `handle` with the rank of each worker that the sequencer says is gone."""
        if self.client is not None:
            self.client.news.when_departed.append(handle)

    def world(self, call: str = "its first collective") -> World:
        """The links to all other workers, made on first use. `call`: that needs them, for the ranks that wait."""
        self.check_part()
        if self._world is None:
            with self._opening:
                self._world = self._world or open_world(self, call)
        self._world.engine.streams.devices = self.devices
        return self._world

    def watch(self) -> RankWatch:
        """What is known of other ranks beside what their links say."""
        return RankWatch() if self.client is None else JobWatch(self.client, self.lock, self.life)

    def use(self, world: World) -> None:
        self._world = world

    def next_buffer(self) -> int:
        """The number of the next shared buffer: ranks make them in the same order."""
        self._buffers += 1
        return self._buffers - 1

    def close(self, reason: str = "finished") -> None:
        """Leave the job, after taking part in what other ranks still need of this one."""
        alone = self.lone.count() if self.lone is not None and reason == "finished" else 0
        self._end_lone()
        if alone and self.client is None and self.rank == 0:  # else the coordinator says it
            sys.stderr.write(f"polytempo: warning: {trained_alone('rank 0 has', alone)}\n")
        if reason == "finished" and self.client is not None:
            self.leaving.run(LeavingStep.FLUSH)
            self.leaving.run(LeavingStep.REPORT)
        self.leaving.run(LeavingStep.CLOSE)
        client, self.client = self.client, None
        if self._local_peers is not None:
            self._local_peers.close()
        if client is not None:
            client.leave(reason, alone, self.life)
        try:
            self.leaving.join()
        finally:
            self._end(politely=reason == "finished")

    def fail(self, fault: str) -> None:
        """End, and the job with it: its mode has done what no mode may do. All are told in one line."""
        self.leaving.run(LeavingStep.CLOSE)
        client, self.client = self.client, None
        if client is not None:
            shown = "".join(letter for letter in fault if letter.isprintable())[:LONGEST_FAULT]
            client.leave("failed", fault=shown)

    def _end(self, politely: bool, told: bool = False) -> None:
        self.leaving.of[LeavingStep.FLUSH].clear()  # of a worker that has not finished, or has no servers
        self.leaving.run(LeavingStep.UNDO)
        if self._world is not None:
            self._world.close(politely, told)

    def on_leave(self, step: LeavingStep, call: Callable[[], None]) -> None:
        """In this step of leaving, do this, too."""
        if step is LeavingStep.JOIN and self.leaving.of[step]:
            self.world().engine.keep_in_reserve()
        self.leaving.add(step, call)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Optimizers that are made in here are only measured: their numbers are apart, and ranks that leave do not wait for
        them. All ranks make the same."""
        optimizers, self.optimizers, joins = self.optimizers, self.measured, len(self.leaving.of[LeavingStep.JOIN])
        try:
            yield
        finally:
            self.measured, self.optimizers = self.optimizers, optimizers
            self.leaving.forget_joins(joins)

    def abandon(self, told: bool = False) -> None:
        """End without a message: other processes see that this worker has failed. `told`: it has not, the job has ended."""
        self._end_lone()
        self.leaving.forget_joins()
        self.leaving.run(LeavingStep.CLOSE)
        self._end(politely=False, told=told)
        if self.client is not None:
            self.client.close()

    def let_go(self, parent: str) -> None:
        """In a forked child: leave the parent's connections to the parent."""
        self._end_lone()
        if self.client is not None:
            self.client.let_go(parent)
        if self._local_peers is not None:
            self._local_peers.let_go()


def open_session(job: JobFacts, rank: int, retry: float = 5.0, timeout: float | None = None) -> Session:
    """Connect to all servers of a job."""
    if job.debugged:
        wait_without_limit()
    later = None if timeout is None else timeout + AFTER_COLLECTIVES
    session = Session(open_client(job, rank, job.addresses, retry, later), job, rank)
    session.timeout = timeout
    session.least = 1  # the launcher decides how many are needed
    keys = WorkerKeys(**job.keys) if job.keys else None
    session.way = Way(job.route, keys, job.insecure, emulated=job.emulated_host(rank))
    return session


@contextmanager
def watching_job() -> Iterator[RankWatch]:
    """What the job's coordinator, where there is one, knows of other ranks; also in a process that has not called `init`."""
    session, found = _of_thread.get() or _session, job_of_environment()
    if session is not None:
        yield session.watch()
    elif found is None:
        yield RankWatch()
    else:
        if found[0].debugged:
            wait_without_limit()
        client = open_client(*found, found[0].addresses[:1])
        try:
            yield JobWatch(client, threading.RLock(), 0)
        finally:
            client.close()


_session: Session | None = None
_of_thread: ContextVar[Session | None] = ContextVar("session", default=None)
_given: tuple[Any, ...] = ()  # the arguments of `init`
_lives = 0  # jobs that this process has left


def init(
    job: str | None = None,
    rank: int | None = None,
    sync: str | Mode | Spec | None = None,
    *,
    address: str | None = None,
    key_file: str | None = None,
    min_workers: int | None = None,
    host_timeout: float | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Join the job of the launcher (`polytempo run`, torchrun, mpirun, srun); without a launcher, be a job of one.

    Call it before anything else of this library. It never touches torch's default process group. A second call with the same
    arguments does nothing. With others it begins a new job of one where there is no launcher (a notebook's cell that is
    changed and run again), and is refused in a job.

    Args:
        job: The launcher's job file, for processes that were started by hand; by default the environment names it.
        rank: This worker's rank, with `job`.
        sync: The synchronisation mode where another launcher than `polytempo run` started the job, as a text or an object;
            `bsp` by default.
        address: HOST:PORT on the host of rank 0, where ranks on several hosts meet; torchrun says it by itself.
        key_file: The key file that all ranks share, written by `polytempo key`; "insecure" on a trusted network.
        min_workers: Without servers, the job goes on after a rank is lost while at least this number of ranks is left; all
            are needed by default. Under `polytempo run` use its option.
        host_timeout: Without servers, a link between hosts that is back within these seconds loses nothing (5 by default).
            Silent ranks are given up by more than half of all ranks, while `min_workers` are left; else the job ends.
            Under `polytempo run` use its option.
        timeout: Seconds, or a `timedelta`, after which a wait for other ranks fails with an error that names them and what
            they are in; 30 minutes by default, as in torch.distributed, `math.inf` for none. It holds for collectives,
            messages, the first meeting of the ranks and `step()`; `new_group` may set another for its calls.

    Raises:
        UsageError: `init` was called in a job with other arguments before, or the mode, the address or a time-out does not
            fit the launcher.
        PeerError: A server or a rank could not be reached in time.

    Example:
        ```python
        import polytempo as pt

        pt.init()
        print(pt.rank(), "of", pt.size())
        ```
    """
    global _session, _given
    given = (job, rank, sync, address, key_file, min_workers, host_timeout, timeout)
    if _session is not None and not _session.parent:
        if given == _given:
            return
        if _session.together:
            raise UsageError("init() was called before with other arguments; call shutdown() in between")
        shutdown()
    place = place_of_environment() if job is None else ""
    parent = started_by(place) if job is None else ""
    if _session is not None or parent:
        _session = _session or _of_a_child(parent)
        return
    spare_compiler()
    limit = seconds_of(TIMEOUT if timeout is None else timeout)
    found = job_of_environment() if job is None else (read_job(job), 0)
    if found is None:
        spec = spec_of_script(sync or "bsp")
        if host_timeout is not None and not host_timeout >= 1:
            raise UsageError(f"expected host_timeout of at least 1 second, got {host_timeout:g}")
        _session = _without_servers(spec, way_of(address, key_file), min_workers, host_timeout, limit)
    else:
        facts, own_rank = found
        _session = open_session(facts, own_rank if rank is None else rank, timeout=limit)
        _session.life = _lives
    _given = given
    _session.watch_lone_training()
    claim(place)
    atexit.register(_leave)
    watch_exit()
    if not isinstance(sys.excepthook, _Ending):
        sys.excepthook = _Ending(sys.excepthook)
    if found is not None:
        for source in found[0].modes:  # before any text is read; a file that fails here ends the job, in one line, as of now
            bring(source)


def seconds_of(timeout: float | timedelta) -> float | None:
    """A time-out in seconds; None for one that never comes."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        raise UsageError(f"expected timeout= above 0 seconds, got {seconds:g}; math.inf waits for ever")
    return None if math.isinf(seconds) else seconds


def _of_a_child(parent: str) -> Session:
    """The session of a process that a worker has started: it has that worker's rank, and no part in the job."""
    found = job_of_environment()
    placement = placement_of_environment() if found is None else None
    if found is not None:
        for source in found[0].modes:
            bring(source)
        session = Session(None, *found)
    elif placement is not None:
        first = placement.rank - placement.local_rank
        facts = JobFacts(placement.size, (), first_rank=first, local_size=placement.local_size)
        session = Session(None, facts, placement.rank)
    else:
        return Session(None, JobFacts(1, ()), 0)
    session.parent = parent
    if not is_importing_the_script():
        sys.stderr.write(
            f"polytempo: process {os.getpid()} was started by {parent} and trains alone, outside the job; "
            "to give it a rank of its own, start it with polytempo run\n"
        )
    return session


def _forked() -> None:
    """After a fork, in the child: it is not the worker, and its exit does not count as the worker's."""
    global _session
    if _session is not None and not _session.parent:
        parent = f"worker {_session.rank}, process {os.getppid()},"
        inherited, _session = _session, Session(None, _session.job, _session.rank)
        _session.parent = parent  # the same rank, without a part in the job
        inherited.let_go(parent)


os.register_at_fork(after_in_child=_forked)


def _without_servers(spec: Spec, way: Way, least: int | None, host_timeout: float | None, timeout: float | None) -> Session:
    """A job of one, or of the ranks that another launcher started."""
    placement = placement_of_environment()
    if placement is None or placement.size == 1:
        return Session(None, JobFacts(1, (), spec.text), 0)
    check_features(spec, Feature.OTHER_LAUNCHER, launcher=placement.launcher)
    here = placement.local_size == placement.size
    way = way if way.address or here else replace(way, address=placement.address)
    if not here and not way.address:
        raise UsageError(
            f"{placement.launcher} started ranks on several hosts and gives no address for their rendezvous; "
            "call init(address='HOST:PORT', key_file=...) with a port on the host of rank 0"
        )
    first = placement.rank - placement.local_rank
    meeting = placement.name if here else ""
    facts = JobFacts(placement.size, (), spec.text, 0, first, placement.local_size, via="allreduce", meeting=meeting)
    facts = facts if host_timeout is None else replace(facts, host_timeout=host_timeout)
    session = Session(None, facts, placement.rank)
    session.life = _lives
    session.way, session.least, session.timeout = way, least or placement.size, timeout
    session.world("init()")
    return session


class _Ending:
    """The excepthook: one line instead of a traceback when the job, and not the script, has ended."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobEnded):
            sys.stderr.write(f"{TOLD_TO_END}{' '.join(str(error).split())}\n")
        elif isinstance(error, ModeError):  # it names file and line itself, and no line of the script is to blame
            said = " ".join(str(error).split())
            sys.stderr.write(f"polytempo: {said}\n")
            if (session := _session) is not None and not session.parent:
                session.fail(said)
        else:
            note_gpu(error, rank() if is_initialized() else 0)
            self._before(kind, error, shown_frames(error, trace))


def _leave() -> None:
    """At the exit of the process: leave the job. After an error no message is sent: the launcher sees the exit status."""
    global _session
    session, _session = _session, None
    if session is None or session.parent:
        return
    if ended_badly():
        session.abandon(told=isinstance(getattr(sys, "last_value", None), JobEnded))
        return
    try:
        session.close()
    except PeerError as error:  # the script has succeeded; another process has not
        sys.stderr.write(f"polytempo: worker {session.rank} is done, but {error}\n")


def shutdown() -> None:
    """Leave the job: this worker is finished. The end of the process does the same; a second call does nothing.

    `init` may follow: alone it makes another job of one; under torchrun, mpirun and srun a new world, once all ranks have
    called it. Under `polytempo run` the servers have gone on without this rank: collectives work, another optimizer is
    refused.

    Raises:
        PeerError: Another process failed while this one was waiting to leave.
    """
    global _session, _lives
    if _session is not None:
        session, _session = _session, None
        if session.parent:
            return
        _lives += 1
        atexit.unregister(_leave)
        disclaim()
        session.close()


def current() -> Session:
    """The session of this process; in a job in threads (`polytempo.testing`), of this thread."""
    session = _of_thread.get() or _session
    if session is None:
        raise UsageError("call polytempo.init() first")
    return session


@contextmanager
def as_current(session: Session) -> Iterator[Session]:
    """Inside, `current()` is this session: for workers that are threads of one process."""
    token = _of_thread.set(session)
    try:
        yield session
    finally:
        _of_thread.reset(token)


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    return _of_thread.get() is not None or _session is not None


def rank() -> int:
    """The rank of this worker: 0 to `size() - 1`.

    Raises:
        UsageError: `init` was not called.
    """
    return current().rank


def size() -> int:
    """The number of workers that the job started with.

    Raises:
        UsageError: `init` was not called.
    """
    return current().size


def local_rank() -> int:
    """The rank of this worker among those of its host; `local_device()` chooses a GPU by it.

    Raises:
        UsageError: `init` was not called.
    """
    return current().rank - current().job.first_rank


def local_size() -> int:
    """The number of workers of the job on this host.

    Raises:
        UsageError: `init` was not called.
    """
    return current().job.local_size
