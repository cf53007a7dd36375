"""A worker's client of the parameter servers: what it asks them (`requests.py`), what its pushes bring (`client_state.py`),
and the wait.

    register   -> the first answer: the values the job starts from
    push       -> an answer from every shard, all from one position of the log
    ask        -> answers to any other request: values, places of samples, a key, what a script has registered

There is no thread: the caller that waits does the receiving. When no byte has moved on any connection for `retry` seconds,
what is not answered is asked again, by one rule for all requests.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from polytempo.client.client_state import AnswerMemory, ClientState, Exchanges, MakeSeed, PartlySent
from polytempo.client.connections import Handler, ServerConnections
from polytempo.client.requests import AnyRequest, Outstanding, Question, Reading, Requests
from polytempo.errors import HyperDiffer, JobEnded, PeerError, RankLost, UsageError
from polytempo.profile_ranges import profiled
from polytempo.protocol.messages import (
    Answer,
    AskWhere,
    Departed,
    DeviceShared,
    Held,
    Hello,
    LeaseSamples,
    Leave,
    PulledRows,
    ReadAnswer,
    RecallState,
    Refused,
    Resend,
    SamplesLeased,
    SendSeed,
    StateRecalled,
    StatusReply,
    Stopped,
    StoreGet,
    StoreSet,
    Welcome,
    Whereabouts,
    encode,
)
from polytempo.protocol.values import OptimizerSpec
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.channel import Bytes, Channel
from polytempo.transport.cpu_affinity import Companion
from polytempo.transport.deadline import LOOK_EVERY, MORE_TIME, Deadline, said_of

#: Seconds for which a wait keeps a communication thread from using the client, at most.
TURN = 0.005
#: Seconds between two questions to the servers while a rank that is lost may have been given up.
ASK_EVERY = 1.0
#: What answers a request.
ANSWERS = (Answer, ReadAnswer, PulledRows, Welcome, DeviceShared, StoreSet, SamplesLeased, StateRecalled)


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


class JobNews:
    """What the servers say unasked, or whenever they know it: who is gone, where workers are, that the job has ended."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.ended: dict[int, str] = {}  #: of the ranks that were asked for (`AskWhere`), those that have ended, and how
        self.calls: dict[int, str] = {}  #: and what the others are in, where that is known
        self.departed: set[int] = set()  #: workers that have ended, or were given up, by the coordinator's word
        self.when_departed: list[Callable[[int], object]] = []  #: what to call then
        self.losses: dict[str, RankLost] = {}  #: by optimizer: a rank of its group is lost
        self.handlers: dict[type, Handler] = {
            Whereabouts: self._where,
            Departed: self._departed,
            Refused: self._refused,
            Stopped: self._stopped,
        }

    def check_group(self, *states: ClientState) -> None:
        """Raise `RankLost` where a rank is lost without which one of these optimizers does not go on."""
        if self.losses:
            for state in states:
                if state.name in self.losses:
                    raise self.losses[state.name]

    def _where(self, shard: int, message: Whereabouts, buffers: list[Bytes]) -> None:
        self.ended.update(message.ended)
        self.calls.update(message.calls)

    def _departed(self, shard: int, message: Departed, buffers: list[Bytes]) -> None:
        if message.ended:
            self.departed.add(message.worker)
        for call in self.when_departed:
            call(message.worker)
        if message.group:
            ranks = ", ".join(map(str, message.group))
            text = f"rank {message.worker} is lost, and with it the group of ranks {ranks}, which takes steps together"
            self.losses[message.optimizer_id] = RankLost(
                f"{text}; start the job again, from a checkpoint", (message.worker,)
            )

    def _refused(self, shard: int, message: Refused, buffers: list[Bytes]) -> None:
        kind = HyperDiffer if message.differs else UsageError
        raise kind(f"worker {self._rank}: {message.reason}")

    def _stopped(self, shard: int, message: Stopped, buffers: list[Bytes]) -> None:
        raise JobEnded(message.cause)


class Client:
    """One worker's conversation with all servers.

    Args:
        channels: A connection to each server, in order.
        rank: This worker's rank.
        incarnation: How often this rank was started before.
        pool: The memory that messages are received into.
        retry: Seconds without a byte after which the servers are asked again, or what they know.
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
        self.retry, self.pool = retry, pool
        self._others: threading.Condition | None = None  # other threads that use this client, which a wait lets in
        self._asked_at = 0.0  # when it was asked where other workers are
        self.companion: Companion | None = None  #: the server's thread, where this worker has it to itself
        self._asked = 0.0  # when the servers were last asked, for want of a word of who is gone
        self.news = JobNews(rank)
        self.departed = self.news.departed
        self.stream_waits = StreamWaits()  #: of streams that wait for the servers' device
        self.hello = Hello(role="worker", rank=rank, incarnation=incarnation, pid=os.getpid(), token=token)
        handlers: dict[type, Handler] = {
            Held: lambda shard, message, buffers: self.exchanges.held(message),
            SendSeed: lambda shard, message, buffers: self.exchanges.send_seed(message.optimizer_id),
            StatusReply: lambda shard, message, buffers: self.requests.told(shard, message),
            Resend: lambda shard, message, buffers: self.requests.resend(shard, message),
            **self.news.handlers,
        }
        self.connections = ServerConnections(channels, handlers)
        self.send = self.connections.send
        self.memory = AnswerMemory(pool)
        self.requests = Requests(self.send, len(channels), self.memory.note_loss)
        self.exchanges = Exchanges(self.requests, self.memory, Arena(pool), rank, incarnation)
        handlers |= dict.fromkeys(ANSWERS, self.requests.answered)
        try:
            greeting = Question(self.hello, of=((),) * len(channels))
            welcome: Welcome = self.ask(greeting, "the servers to welcome it").answer[0]
            self.size = welcome.size
            self.companion = Companion(welcome.thread) if welcome.thread else None
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
        assert name == state.name
        self.exchanges.join(state, optimizer_spec, seed)
        # without a limit: workers of other hosts may be started by hand
        self.wait(lambda: state.joined, "all workers to make their optimizer", state, limited=False)

    def push(self, waiting: Outstanding, sent: Sequence[PartlySent] | None = None) -> None:
        """Send a push to all shards; its answer comes to `wait_for_release` or `settle`.

        Args:
            waiting: The push and its buffers.
            sent: For each shard what was sent during backward: that is not sent again, unless the push must be repeated.
        """
        with profiled("push"):
            self.exchanges.push(waiting, sent)

    def wait_for_release(self, name: str, step: int) -> None:
        """Wait until this worker may start `step`, and take the values that came with it."""
        state = self.exchanges.states[name]
        self.wait(lambda: state.released >= step and state.has_room(step), "an answer", state)

    def settle(self, *names: str, enough: Callable[[Iterable[bool]], bool] = all) -> None:
        """Wait until every push of these optimizers is answered; with `enough=any`, all those of one of them."""
        states = [self.exchanges.states[name] for name in names]
        self.wait(lambda: enough(not state.outstanding for state in states), "its answers", *states)

    # Questions.

    def ask(self, request: AnyRequest, what: str) -> AnyRequest:
        """Send a request, and wait for its answers; `what`: these, in words."""
        self.requests.start(request)
        self.wait(lambda: request.answers is not None, what)
        return request

    def read(self, name: str, what: str) -> list[tuple[ReadAnswer, list[Bytes]]]:
        """The values ("params") or state ("state") of all shards, at one position of the log."""
        with profiled("pull"):
            return self.ask(Reading(name, what, self.rank), "what it reads").in_order()

    def find(self, key: str, patience: float) -> str | None:
        """The value of a key, once a worker has set it; None if that takes longer than `patience` seconds."""
        question, deadline = self.requests.start(Question(StoreGet(key=key))), Deadline(self.rank, patience)
        over = lambda: question.answers is not None or deadline.over  # noqa: E731
        self.wait(over, f"another worker to set the key {key!r}")
        self.requests.forget(question)
        return question.answer[0].value if question.answers is not None else None

    def lease(self, asked: LeaseSamples) -> SamplesLeased:
        leased: SamplesLeased = self.ask(Question(asked), "samples").answer[0]
        return leased

    def recall_state(self, which: str) -> tuple[StateRecalled, list[Bytes]]:
        """What was registered in the checkpoint that the job goes on from, or given to this job's workers; `which`: one of
        `RECALLED`."""
        return self.ask(Question(RecallState(which=which)), "state of the script that servers keep").answer

    # Waiting.

    def share(self, lock: threading.RLock) -> None:
        """A communication thread uses this client, too, under this lock: from now on a caller that holds the lock while it
        waits, maybe for other workers, gives it away again and again."""
        self._others = threading.Condition(lock)

    def poll(self) -> None:
        """Handle what has come, without waiting."""
        self.connections.take_postponed()
        if not self.connections.receive(0):
            self.remind()

    def remind(self) -> None:
        """Ask again for what is not answered, if no byte has moved for `retry` seconds."""
        connections = self.connections
        if not connections.moves() and time.monotonic() - connections.heard >= self.retry:
            connections.heard = time.monotonic()
            self.requests.ask_again()

    def wait(self, done: Callable[[], bool], what: str, *states: ClientState, limited: bool = True) -> None:
        """Handle what comes until something is so; what is waited for is named after a while.

        Args:
            done: Is it so?
            what: What is waited for, in words.
            states: Of the optimizers that it is about: a rank may be lost without which one does not go on, or the mode may
                hold this worker.
            limited: Does the wait end with an error after the worker's time-out?
        """
        deadline = Deadline(self.rank, self.timeout if limited else None)
        try:
            with profiled("wait"):
                self.connections.take_postponed()
                while True:
                    self.news.check_group(*states)
                    if done():
                        return
                    turn = min(self.retry, 1.0, deadline.until_next_look)
                    if self.connections.receive(turn if self._others is None else min(turn, TURN)):
                        continue
                    if self._others is not None:
                        with self._others:
                            self._others.wait(TURN / 10)
                    silent = "" if self.connections.moves() else self.connections.silence()
                    self.check_wait(deadline, what, states, silent)
                    self.remind()
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
            self.send(0, AskWhere(life=0, ranks=ranks))

        def waited_for() -> str:
            waits = f"{what if held is None else held.waits_for(what)}{silent}"
            return f"for {'; '.join(filter(None, (waits, said_of(ranks, self.news.calls))))}"

        if deadline.over:
            raise PeerError(f"{deadline.line(waited_for())}; {MORE_TIME}")
        deadline.report(waited_for)

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
            self.requests.ask_again()
        self.connections.listen(patience)

    def together(self) -> AbstractContextManager[None]:
        """Around a wait: a server that this worker has to itself comes over to its core."""
        return self.companion if self.companion is not None and torch.get_num_threads() == 1 else nullcontext()

    def watched(self) -> list[tuple[int, Callable[[], object]]]:
        """What else to wait on while waiting for peers: that the job has ended must be heard at once."""
        return [(channel.pollable(), self.poll) for channel in self.connections.channels]

    # The end.

    def leave(self, reason: str, alone: int = 0, life: int = 0, fault: str = "") -> None:
        """Leave the job and close, after this number of steps `alone` (`LoneTraining`). A worker that finishes
        waits for its last answers first (`delay`). `life`: the number of jobs that this process had left before. `fault`: by
        which the whole job ends."""
        self.news.losses.clear()  # it waits for its last answers, and these come
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
        deadline = Deadline(client.rank, client.timeout)
        while True:
            with self._lock:
                if given_up():
                    return False
                client.news.check_group(state)
                client.poll()
                if state.released >= step:
                    return True
                client.check_wait(deadline, "an answer", [state])
            self._pause()

    def for_key(self, key: str, seconds: float) -> str | None:
        """The value of a key, once a worker has set it; None if that takes longer."""
        client, over = self._client, time.monotonic() + seconds
        with self._lock:
            question = client.requests.start(Question(StoreGet(key=key)))
        while True:
            with self._lock:
                client.poll()
                if question.answers is not None:
                    return str(question.answer[0].value)
                if time.monotonic() >= over:
                    client.requests.forget(question)
                    return None
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
