"""A worker's client of the parameter servers: pushes and their answers, reads, pulls, the key-value store, and the wait.

    register   -> the first answer: the values the job starts from
    push       -> an answer from every shard, all from one position of the log (`client_state.py`)
    read       -> the same without a push
    pull       -> rows of a table, from the shards that have them

There is no thread: the caller that waits does the receiving. When no byte has moved on any connection for `retry` seconds
the shards are asked what they know. A question goes behind what it is about, and the reply comes behind what the shard has
sent: so a loss is known, and nothing is sent twice because it is slow (`docs/design/0010`).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from polytempo.client.client_state import ClientState, Exchanges, MakeSeed, Outstanding, PartlySent, Pulls, Reading, Reads
from polytempo.client.connections import ServerConnections
from polytempo.errors import HyperDiffer, JobEnded, PeerError, RankLost, UsageError
from polytempo.profile_ranges import profiled
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    AskWhere,
    Departed,
    DeviceShared,
    Held,
    Hello,
    Keep,
    LeaseSamples,
    Leave,
    MetricReport,
    PartialPush,
    PulledRows,
    ReadAnswer,
    RecallState,
    Refused,
    Register,
    Resend,
    SamplesLeased,
    ScriptState,
    SendSeed,
    ShareDevice,
    StateRecalled,
    StatusReply,
    Stopped,
    StoreGet,
    StoreSet,
    UnknownKeys,
    Welcome,
    Whereabouts,
    encode,
)
from polytempo.protocol.values import OptimizerSpec, TrainingProgress
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes, Channel
from polytempo.transport.cpu_affinity import Companion
from polytempo.transport.deadline import LOOK_EVERY, MORE_TIME, Deadline, said_of

#: Seconds for which a wait keeps a communication thread from using the client, at most.
TURN = 0.005
#: Seconds between two questions to the servers while a rank that is lost may have been given up.
ASK_EVERY = 1.0


class StreamWaits:
    """Waits of this process's streams for servers, and their end when a server is gone.

    A stream that waits for a fence holds up a host that waits for the stream (`.item()`, `torch.cuda.synchronize()`), and
    such a host reads no message. So a thread watches the connections to the servers: when one ends, all waits are released,
    the host returns, and its next call of this library raises what the connection has to say. The thread reads nothing.
    """

    def __init__(self) -> None:
        self._releases: list[Callable[[], None]] = []
        self._stop: int | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, release: Callable[[], None], connections: Iterable[int]) -> None:
        """Call `release` when the servers will not end the waits of a stream themselves.

        Args:
            release: Ends the waits; it may be called more than once, by any thread.
            connections: The descriptors of the connections to all servers.
        """
        self._releases.append(release)
        if self._thread is None:
            self._stop = os.eventfd(0)
            self._thread = threading.Thread(
                target=self._watch, args=(list(connections), self._stop), name="polytempo-hang-up", daemon=True
            )
            self._thread.start()

    def _watch(self, connections: list[int], stop: int) -> None:
        poller = select.poll()
        poller.register(stop, select.POLLIN)
        for descriptor in connections:
            poller.register(descriptor, select.POLLRDHUP)  # and POLLHUP and POLLERR, which need not be named
        if all(descriptor != stop for descriptor, _ in poller.poll()):
            self.release()

    def release(self) -> None:
        """End all waits: what is behind them must not be used."""
        with self._lock:
            for release in self._releases:
                release()

    def close(self) -> None:
        """End all waits, and the thread; before the connections are closed, whose descriptors it watches."""
        self.release()
        thread, self._thread = self._thread, None
        if thread is not None and self._stop is not None:
            os.eventfd_write(self._stop, 1)
            thread.join()
            os.close(self._stop)

    def let_go(self) -> None:
        """In a forked child: the thread is its parent's, and so are the streams."""
        self._thread, self._releases = None, []


class Client:
    """One worker's conversation with all servers.

    Args:
        channels: A connection to each server, in order.
        rank: This worker's rank.
        incarnation: How often this rank was started before.
        pool: The memory that messages are received into.
        retry: Seconds without a byte after which the servers are asked what they know.
        token: Proves the rank of a worker on another host.
        timeout: Seconds after which a wait for other workers fails; None waits for ever.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        incarnation: int,
        pool: Pool,
        retry: float = 5.0,
        token: str = "",
        timeout: float | None = None,
    ) -> None:
        self.rank, self.incarnation, self.timeout = rank, incarnation, timeout
        self.size = 0
        self.on_departed: Callable[[int], None] = lambda worker: None
        self._others: threading.Condition | None = None  # other threads that use this client, which a wait lets in
        self._asked_at = 0.0  # when it was asked where other workers are
        self.companion: Companion | None = None  #: the server's thread, where this worker has it to itself
        self.retry = retry
        self.pool = pool
        self.whereabouts = Whereabouts()  #: what answers to `AskWhere` have said so far
        self.departed: set[int] = set()  #: workers that have ended, or were given up, by the coordinator's word
        self._asked = 0.0  # when the servers were last asked, for want of a word of it
        self._listening = False  # for that word only: what else comes waits until it is waited for
        self._postponed: list[tuple[int, AnyMessage, list[Bytes]]] = []
        self._stored: dict[str, str] = {}
        self._leased: SamplesLeased | None = None  # the last answer to `LeaseSamples`
        self._recalled: dict[str, tuple[StateRecalled, list[Bytes]]] = {}  # the answers to `RecallState`
        self._losses: dict[str, RankLost] = {}  # by optimizer: a rank of its group is lost
        self._welcomes: set[int] = set()
        self._mapped: dict[str, dict[int, str]] = {}  # by optimizer: what shards have said to `ShareDevice`
        self.stream_waits = StreamWaits()  #: of streams that wait for the servers' device
        hello = Hello(role="worker", rank=rank, incarnation=incarnation, pid=os.getpid(), token=token)
        self.connections = ServerConnections(channels, hello, self._handle)
        self.exchanges = Exchanges(self.connections, rank, incarnation, pool)
        self.reads = Reads(self.connections.send, rank, len(channels))
        self.pulls = Pulls(self.connections.send, len(channels))
        self._handlers: dict[type, Callable[[int, Any, list[Bytes]], None]] = {
            Answer: lambda shard, message, buffers: self.exchanges.answered(message, buffers),
            ReadAnswer: lambda shard, message, buffers: self.reads.answered(message, buffers),
            PulledRows: lambda shard, message, buffers: self.pulls.answered(message, buffers),
            UnknownKeys: lambda shard, message, buffers: self.pulls.send_keys(message.request, message.shard),
            DeviceShared: lambda shard, message, buffers: self._device_shared(message),
            Held: self._held,
            StatusReply: self._status,
            Resend: lambda shard, message, buffers: self.exchanges.resend(shard, message.id),
            SendSeed: lambda shard, message, buffers: self.exchanges.send_seed(message.optimizer_id),
            Welcome: self._welcome,
            Refused: self._refused,
            StoreSet: lambda shard, message, buffers: self._stored.update({message.key: message.value}),
            SamplesLeased: self._places_leased,
            StateRecalled: lambda shard, message, buffers: self._recalled.update({message.which: (message, buffers)}),
            Departed: self._departed,
            Stopped: self._stopped,
        }
        try:
            again = self.connections.greet_again
            self._wait(lambda: len(self._welcomes) == len(channels), "the servers to welcome it", again)
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        return len(self.connections.channels)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to servers, and to peers where gradients stay between workers."""
        return self.connections.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.connections.bytes_received

    @property
    def stop(self) -> bool:
        """Is the job's budget used up, as of the last answer?"""
        return self.exchanges.stop

    # Pushes and their answers.

    def register(self, name: str, optimizer_spec: OptimizerSpec, seed: MakeSeed, state: ClientState) -> None:
        """Take part in an optimizer, and wait for the values it starts from."""
        self.exchanges.states[name] = state
        state.seed = seed
        self.connections.send(0, Register(optimizer_id=name, optimizer_spec=optimizer_spec))
        # without a limit: workers of other hosts may be started by hand
        self._wait(lambda: state.joined, "all workers to make their optimizer", None, state, limited=False)

    def share_device(self, message: ShareDevice, fences: Sequence[Bytes]) -> str:
        """Have all shards map device memory of this worker, with the fences of each; empty, or why one does not."""
        told = self._mapped[message.optimizer_id] = {}
        for shard, words in enumerate(fences):
            self.connections.send(shard, message, [words])
        self._wait(lambda: len(told) == self.shards, "the servers to map its device memory", None)
        return next(filter(None, told.values()), "")

    def push(self, waiting: Outstanding, sent: Sequence[PartlySent] | None = None) -> None:
        """Send a push to all shards; its answer comes to `wait_for_release` or `settle`.

        Args:
            waiting: The push and its buffers.
            sent: For each shard what was sent during backward: that is not sent again, unless the push must be repeated.
        """
        with profiled("push"):
            self.exchanges.push(waiting, sent)

    def send_partial(self, shard: int, message: PartialPush | Keep, buffers: list[Bytes]) -> None:
        """Send a bucket before its push, or what a checkpoint shall keep of this worker."""
        self.connections.send(shard, message, buffers)

    def wait_for_release(self, name: str, step: int) -> None:
        """Wait until this worker may start `step`, and take the values that came with it."""
        state = self.exchanges.states[name]
        done = lambda: state.released >= step and state.has_room(step)  # noqa: E731
        self._wait(done, "an answer", lambda: self.exchanges.ask_status(state), state)

    def wait_for_answer(self, name: str, exchange: int) -> None:
        state = self.exchanges.states[name]
        self._wait(lambda: exchange not in state.outstanding, "an answer", lambda: self.exchanges.ask_status(state), state)

    def settle(self, *names: str, enough: Callable[[Iterable[bool]], bool] = all) -> None:
        """Wait until every push of these optimizers is answered; with `enough=any`, all those of one of them."""
        states = [self.exchanges.states[name] for name in names]

        def again() -> None:
            for state in states:
                self.exchanges.ask_status(state)

        self._wait(lambda: enough(not state.outstanding for state in states), "its answers", again, *states)

    # Reads.

    def read(self, name: str, what: str) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """The values ("params") or state ("state") of all shards, at one position of the log."""
        with profiled("pull"):
            reading = self.start_read(name, what)
            self._wait(lambda: self.reads.is_done(reading), "what it reads", lambda: self.reads.ask_status(reading))
            return self.reads.take(reading)

    def start_read(self, name: str, what: str) -> Reading:
        """Begin to read, without waiting: `reads` has the rest."""
        reading = Reading(name, what)
        self.reads.start(reading)
        return reading

    def pulled(self, request: int) -> list[tuple[int, PulledRows, list[Bytes]]]:
        """Wait for the rows that were asked for: shard, header and buffers of each answer."""
        with profiled("pull"):
            self._wait(lambda: self.pulls.is_done(request), "rows of a table", lambda: self.pulls.ask_status(request))
            return self.pulls.take(request)

    # The record, and the key-value store.

    def metric(self, values: dict[str, float | int | str], progress: TrainingProgress | None = None) -> None:
        self.connections.send(0, MetricReport(worker=self.rank, values=values, progress=progress))

    def put(self, key: str, value: str) -> None:
        self.connections.send(0, StoreSet(key=key, value=value))

    def find(self, key: str, patience: float) -> str | None:
        """The value of a key, once a worker has set it; None if that takes longer than `patience` seconds."""
        deadline = Deadline(self.rank, patience)
        self.ask_key(key)
        over = lambda: key in self._stored or deadline.over  # noqa: E731
        self._wait(over, f"another worker to set the key {key!r}", lambda: self.ask_key(key))
        return self.value_of(key)

    def ask_key(self, key: str) -> None:
        self.connections.send(0, StoreGet(key=key))

    def value_of(self, key: str) -> str | None:
        return self._stored.get(key)

    def ask_where(self, waiting: AskWhere) -> None:
        """Ask where other workers are; `whereabouts` has the answer when it has come."""
        self.connections.send(0, waiting)

    def lease(self, asked: LeaseSamples) -> SamplesLeased:
        self.connections.send(0, asked)
        came = lambda: self._leased is not None and self._leased.request == asked.request  # noqa: E731
        self._wait(came, "samples", lambda: self.connections.send(0, asked))
        assert self._leased is not None
        return self._leased

    def ask_who_departed(self, patience: float) -> None:
        """Listen for a while to which workers are gone, and to nothing else: answers are taken in where a step waits for
        them, so that all workers learn of the end of the budget after the same step. What the servers are asked they answer,
        once they have given this worker itself up, with the reason.

        Raises:
            JobEnded: They go on without this worker.
        """
        now = time.monotonic()
        if now - self._asked >= ASK_EVERY:
            self._asked = now
            for state in self.exchanges.states.values():
                self.exchanges.ask_status(state)
        self.listen(patience)

    def listen(self, patience: float = 0.0) -> None:
        """Take in who is gone, where workers are and that the job has ended; the rest stays until it is waited for."""
        self._listening = True
        try:
            self.connections.receive(patience)
        finally:
            self._listening = False

    def _take_postponed(self) -> None:
        while self._postponed:
            self._dispatch(*self._postponed.pop(0))

    def report_state(self, message: ScriptState, buffers: list[Bytes]) -> None:
        """Give the coordinator what the script has registered for checkpoints."""
        self.connections.send(0, message, buffers)

    def recall_state(self, which: str) -> tuple[StateRecalled, list[Bytes]]:
        """What was registered in the checkpoint that the job goes on from, or given to this job's workers; `which`: one of
        `RECALLED`."""
        asked = RecallState(which=which)
        self.connections.send(0, asked)
        again = lambda: self.connections.send(0, asked)  # noqa: E731
        self._wait(lambda: which in self._recalled, "state of the script that servers keep", again)
        return self._recalled.pop(which)

    # Waiting.

    def share(self, lock: threading.RLock) -> None:
        """A communication thread uses this client, too, under this lock: from now on a caller that holds the lock while it
        waits, maybe for other workers, gives it away again and again."""
        self._others = threading.Condition(lock)

    def _wait(
        self,
        done: Callable[[], bool],
        what: str,
        again: Callable[[], None] | None,
        *states: ClientState,
        limited: bool = True,
    ) -> None:
        deadline = Deadline(self.rank, self.timeout if limited else None)
        try:
            with profiled("wait"):
                self._take_postponed()
                heard, moved = time.monotonic(), self.connections.moved()
                while True:
                    self.check_group(*states)
                    if done():
                        return
                    turn = min(self.retry, 1.0, deadline.until_next_look)
                    if self.connections.receive(turn if self._others is None else min(turn, TURN)):
                        heard = time.monotonic()
                        continue
                    if self._others is not None:
                        with self._others:
                            self._others.wait(TURN / 10)
                    now, before, moved = time.monotonic(), moved, self.connections.moved()
                    if moved != before:
                        heard = now
                    self.check_wait(deadline, what, states, self.connections.silence() if moved == before else "")
                    if again is not None and now - heard >= self.retry:
                        heard = now
                        again()
        except Exception:  # it ends the job or this worker's part in it: no answer will come
            self.stream_waits.release()
            raise

    def check_wait(self, deadline: Deadline, what: str, states: Sequence[ClientState] = (), silent: str = "") -> None:
        """Report a wait for an answer if that is due, with the workers that the mode waits for and what these are in.
        `silent`: the servers that are not heard of.

        Raises:
            PeerError: The time is over.
        """
        held = next((state for state in states if state.held is not None), None)
        ranks = held.held.waiting_for if held is not None and held.held is not None else ()
        if ranks and deadline.is_long and time.monotonic() >= self._asked_at + LOOK_EVERY:
            self._asked_at = time.monotonic()
            self.ask_where(AskWhere(life=0, ranks=ranks))

        def waited_for() -> str:
            waits = f"{what if held is None else held.waits_for(what)}{silent}"
            return f"for {'; '.join(filter(None, (waits, said_of(ranks, self.whereabouts.calls))))}"

        if deadline.over:
            raise PeerError(f"{deadline.line(waited_for())}; {MORE_TIME}")
        deadline.report(waited_for)

    def check_group(self, *states: ClientState) -> None:
        """Raise `RankLost` where a rank is lost without which one of these optimizers does not go on."""
        if self._losses:
            for state in states:
                if state.name in self._losses:
                    raise self._losses[state.name]

    def poll(self) -> None:
        """Handle what has come, without waiting."""
        self._take_postponed()
        self.connections.receive(0)

    def together(self) -> AbstractContextManager[None]:
        """Around a wait: a server that this worker has to itself comes over to its core."""
        return self.companion if self.companion is not None and torch.get_num_threads() == 1 else nullcontext()

    def watched(self) -> list[tuple[int, Callable[[], object]]]:
        """What else to wait on while waiting for peers: that the job has ended must be heard at once."""
        return [(channel.pollable(), self.poll) for channel in self.connections.channels]

    # Messages.

    def _handle(self, shard: int, message: AnyMessage, buffers: list[Bytes]) -> None:
        if isinstance(message, Whereabouts):
            self.whereabouts.ended.update(message.ended)
            self.whereabouts.calls.update(message.calls)
            return
        if self._listening and not isinstance(message, Departed | Stopped):
            self._postponed.append((shard, message, buffers))
            return
        self._take_postponed()
        self._dispatch(shard, message, buffers)

    def _dispatch(self, shard: int, message: AnyMessage, buffers: list[Bytes]) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(shard, message, buffers)

    def _device_shared(self, message: DeviceShared) -> None:
        self._mapped[message.optimizer_id][message.shard] = message.refusal

    def _held(self, shard: int, message: Held, buffers: list[Bytes]) -> None:
        self.exchanges.states[message.optimizer_id].held = message

    def _status(self, shard: int, message: StatusReply, buffers: list[Bytes]) -> None:
        """What a shard knows of a push, read or pull: is it lost, or does it only take its time?"""
        if message.what == "push":
            self.exchanges.status(shard, message)
        elif (self.pulls if message.what == "pull" else self.reads).status(shard, message):
            self.exchanges.note_loss()

    def _welcome(self, shard: int, message: Welcome, buffers: list[Bytes]) -> None:
        self.size = message.size
        self.companion = Companion(message.thread) if message.thread else None
        self._welcomes.add(shard)

    def _departed(self, shard: int, message: Departed, buffers: list[Bytes]) -> None:
        if message.ended:
            self.departed.add(message.worker)
        self.on_departed(message.worker)
        if message.group:
            ranks = ", ".join(map(str, message.group))
            text = f"rank {message.worker} is lost, and with it the group of ranks {ranks}, which takes steps together"
            self._losses[message.optimizer_id] = RankLost(
                f"{text}; start the job again, from a checkpoint", (message.worker,)
            )

    def _refused(self, shard: int, message: Refused, buffers: list[Bytes]) -> None:
        kind = HyperDiffer if message.differs else UsageError
        raise kind(f"worker {self.rank}: {message.reason}")

    def _places_leased(self, shard: int, message: SamplesLeased, buffers: list[Bytes]) -> None:
        self._leased = message

    def _stopped(self, shard: int, message: Stopped, buffers: list[Bytes]) -> None:
        raise JobEnded(message.cause)

    # The end.

    def leave(self, reason: str, alone: int = 0, life: int = 0, fault: str = "") -> None:
        """Leave the job and close, after this number of steps `alone` (`LoneTraining`). A worker that finishes
        waits for its last answers first (`delay`). `life`: the number of jobs that this process had left before. `fault`: by
        which the whole job ends."""
        self._losses.clear()  # it waits for its last answers, and these come
        with suppress(PeerError):  # the servers may go first
            for name in self.exchanges.states if reason == "finished" else ():
                self.settle(name)
            about = {"alone": alone, "life": life}
            leave = Leave(worker=self.rank, incarnation=self.incarnation, reason=reason, fault=fault, **about)
            self.connections.channels[0].send(encode(leave))
        self.close()

    def close(self) -> None:
        if self.companion is not None:
            self.companion.release()
        self.stream_waits.close()
        self.connections.close()

    def let_go(self, parent: str) -> None:
        """In a forked child: the connections are its parent's, and so is the server's thread that came to its core."""
        self.companion = None
        self.stream_waits.let_go()
        self.connections.let_go(parent)


#: Seconds between two looks, at most: a message may have been taken in by the other thread.
LOOK = 0.02
#: The same where connections are sockets that two threads must not touch at once.
NAP = 0.001


class BackgroundWait:
    """Waits for an answer in a thread beside the script's: the client is locked only while messages are taken in.

    `Client` has no thread of its own: the caller that waits receives, and holds the lock while it waits. A communication
    thread waits for whole rounds, during which the script's thread may read values, lease samples or log figures. So this
    wait blocks on the connections without the lock, and takes it for each look at what has come. Whichever of the two
    threads looks first hands a message to its owner.

    Args:
        client: The worker's connections to the servers.
        lock: Held whenever the client is used.
    """

    def __init__(self, client: Client, lock: threading.RLock) -> None:
        self._client, self._lock = client, lock

    def for_release(self, state: ClientState, step: int, given_up: Callable[[], bool]) -> bool:
        """Wait until a step may be started; the ranks that it waits for are named after a while.

        Args:
            state: Of the optimizer.
            step: The step.
            given_up: Is the answer no longer wanted?

        Returns:
            Whether it may be started; False where the wait was given up.
        """
        client = self._client
        deadline, heard, moved = Deadline(client.rank, client.timeout), time.monotonic(), client.connections.moved()
        while True:
            with self._lock:
                if given_up():
                    return False
                client.check_group(state)
                client.poll()
                if state.released >= step:
                    return True
                now, before, moved = time.monotonic(), moved, client.connections.moved()
                if moved != before:
                    heard = now
                client.check_wait(deadline, "an answer", [state])
                if now - heard >= client.retry:
                    heard = now
                    client.exchanges.ask_status(state)
            self._pause()

    def for_key(self, key: str, seconds: float) -> str | None:
        """The value of a key, once a worker has set it; None if that takes longer."""
        client, over = self._client, time.monotonic() + seconds
        ask_at = 0.0
        while True:
            with self._lock:
                if time.monotonic() >= ask_at:  # again: the question or the answer may have been lost
                    ask_at = time.monotonic() + client.retry
                    client.ask_key(key)
                client.poll()
                found = client.value_of(key)
            if found is not None or time.monotonic() >= over:
                return found
            self._pause()

    def _pause(self) -> None:
        """Until something has come, or for a while."""
        watched = [channel.pollable() for channel in self._client.connections.channels]
        if not all(isinstance(descriptor, int) for descriptor in watched):
            time.sleep(NAP)
            return
        poller = select.poll()
        for descriptor in watched:
            poller.register(descriptor, select.POLLIN)
        poller.poll(LOOK * 1000)
