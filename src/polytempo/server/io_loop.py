"""The I/O loop of a server: the thread that owns its sockets and timers.

    bytes in    -> a typed message -> by its type: to the shard's inbox, or (server 0) to the coordinator
    effects out -> what inbox and coordinator return: messages to send, log entries for all shards
    answers     -> from the shard executor's thread to the workers

Servers other than server 0 report arrivals to the coordinator and get the log from it, over the connection that they open.
Calls go downward only: I/O loop -> coordinator -> sequencer, and I/O loop -> inbox -> shard executor -> shard.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
import zmq

from polytempo.errors import PeerError, PolytempoError
from polytempo.protocol.log import LogEntry
from polytempo.protocol.messages import (
    AnyMessage,
    Arrived,
    Entries,
    Failed,
    Hello,
    NormTotal,
    ReadRequest,
    Refused,
    ScriptState,
    Stopped,
    Welcome,
    decode,
    encode,
)
from polytempo.records.lines import MAIN
from polytempo.server.coordinator import Coordinator
from polytempo.server.effects import (
    Effect,
    EndLoop,
    PushArrived,
    ReportHold,
    ShareNorm,
    StopWorkers,
    ToAgent,
    ToLauncher,
    ToServers,
    ToShards,
    ToWorker,
)
from polytempo.server.inbox import ShardInbox
from polytempo.server.shard_executor import ShardExecutor, WorkerReply
from polytempo.server.validation import check_hello, describe
from polytempo.transport.channel import Bytes, Channel, Closed, Endpoint, Peer, Poller, Received
from polytempo.transport.keys import Credentials

#: What a peer may send at once after its Hello was accepted.
MEMBER_LIMIT = 1 << 40


class Connections:
    """The peers of a server, by their role."""

    def __init__(self) -> None:
        self.workers: dict[int, Peer] = {}
        self.incarnations: dict[int, int] = {}  # of each worker
        self.servers: dict[int, Peer] = {}
        self.agents: dict[int, Peer] = {}
        self.launcher: Peer | None = None

    def add_worker(self, peer: Peer, hello: Hello) -> None:
        """A worker, or a later connection or incarnation of it; `PeerError` for a second process of the same rank."""
        before = self.workers.get(hello.rank)
        if before is not None and before.who.incarnation > hello.incarnation:
            raise PeerError(f"worker {hello.rank} was started again; this is an earlier incarnation of it")
        if before is not None and before.who.incarnation == hello.incarnation and before.who.pid != hello.pid:
            raise PeerError(
                f"process {before.who.pid} is worker {hello.rank} already, so process {hello.pid} cannot be; "
                "start each rank once, or run what it starts outside the job"
            )
        self.workers[hello.rank], self.incarnations[hello.rank] = peer, hello.incarnation


class IoLoop:
    """One server of a job. `run` returns when the job is over."""

    def __init__(
        self,
        executor: ShardExecutor,
        endpoints: Sequence[Endpoint],
        size: int,
        coordinator: Coordinator | None = None,
        to_coordinator: Channel | None = None,
        launcher: int | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`coordinator`: on server 0; `to_coordinator`: on the others. `launcher`: a descriptor that becomes readable when
        the launcher has ended."""
        self.executor = executor
        self._over = False
        self._endpoints = endpoints
        self._size = size
        self._coordinator = coordinator
        self._to_coordinator = to_coordinator
        self._credentials = credentials
        self._connections = Connections()
        self._inbox = ShardInbox(executor)
        self._itself = Hello(role="server", rank=executor.shard)
        self._early: list[LogEntry] = []  # of the time before all servers were connected
        self._from_coordinator: dict[type, Callable[[Any], None]] = {
            Entries: lambda message: self._inbox.carry_out(message.entries),
            NormTotal: lambda message: executor.norm_total(message.square),
            Stopped: lambda message: self._stop(message.cause),
            Refused: lambda message: self._stop(f"server {executor.shard} was turned away: {message.reason}"),
        }
        self._poller = Poller()
        for endpoint in endpoints:
            endpoint.attach(self._poller)
        self._poller.register(executor.wake_up.fileno, zmq.POLLIN)
        self._launcher_exit = launcher
        if launcher is not None:
            self._poller.register(launcher, zmq.POLLIN)
        if to_coordinator is not None:
            self._poller.register(to_coordinator.pollable(), zmq.POLLIN)
            to_coordinator.send(encode(self._itself))

    def run(self) -> None:
        torch.set_grad_enabled(False)  # in this thread
        try:
            while not self._over:
                self._turn()
        finally:
            for endpoint in self._endpoints:
                endpoint.close()
            self.executor.close()
            self._inbox.close()
            if self._coordinator is not None:
                self._coordinator.close()
            if self._to_coordinator is not None:
                self._to_coordinator.close()

    def _turn(self) -> None:
        due = self._coordinator.next_deadline() if self._coordinator is not None else None
        ready = self._poller.poll(None if due is None else max(0, int((due - time.monotonic()) * 1000 + 0.999)))
        for endpoint in self._endpoints:
            for event in endpoint.handle(ready):
                self._closed(event) if isinstance(event, Closed) else self._received(event)
        if self._to_coordinator is not None and self._to_coordinator.pollable() in ready:
            self._receive_log(self._to_coordinator)
        if self._launcher_exit in ready and self._coordinator is None:
            self._stop("the launcher is gone")
        elif self._launcher_exit in ready and self._coordinator is not None:
            self._perform(self._coordinator.launcher_gone())
        if self.executor.wake_up.fileno in ready:
            self.executor.wake_up.silence()
            self._perform(self._inbox.completed())
        self._deliver()
        if self._coordinator is not None:
            now = time.monotonic()
            self._perform(self._coordinator.tick(now))
            if self._coordinator.is_done:
                held = self.executor.state
                self._perform(self._coordinator.end(now, held.settled_divergence(MAIN), held.device_facts()))
            self._deliver()  # entries that were appended just now may be carried out already

    # Connections.

    def _received(self, event: Received) -> None:
        peer = event.peer
        try:
            message = decode(event.header)
            if peer.who is None:
                self._accept(peer, message)
            else:
                self._dispatch(peer, message, event.buffers)
        except PolytempoError as error:  # an invalid message: its sender is disconnected, the job goes on
            reason = " ".join(str(error).split())  # in one line
            peer.send(encode(Refused(reason=reason)))
            peer.close()
            self._closed(Closed(peer, reason))

    def _accept(self, peer: Peer, message: AnyMessage) -> None:
        """The first message on a connection."""
        if not isinstance(message, Hello):
            raise PeerError(f"expected Hello as the first message, got {type(message).__name__}")
        if message.role == "worker":
            check_hello(message, self._size)
            if self._credentials is not None and not peer.here:
                self._credentials.check("worker", message.rank, message.incarnation, message.token)
            self._connections.add_worker(peer, message)
            self._welcome(peer)
            peer.who = message
        elif self._coordinator is None or message.role not in ("server", "launcher", "agent"):
            raise PeerError(f"a connection of role {message.role[:40]!r} is not served by server {self.executor.shard}")
        else:
            peer.who = self._accept_member(peer, message, self._coordinator)
        peer.limit = MEMBER_LIMIT

    def _accept_member(self, peer: Peer, hello: Hello, coordinator: Coordinator) -> Hello:
        """A server, the launcher or an agent. The first two run on the coordinator's host, and connect once."""
        connections = self._connections
        if hello.role == "agent":
            number = len(connections.agents)
            effects = coordinator.agent_connected(number, hello.count, time.monotonic())
            connections.agents[number] = peer
            self._perform(effects)
            return msgspec.structs.replace(hello, rank=number)
        if not peer.here:
            raise PeerError(f"a {hello.role} is accepted on the job's own host only")
        if hello.role == "launcher":
            if connections.launcher is not None:
                raise PeerError("the launcher is connected already")
            connections.launcher = peer
            self._perform(coordinator.launcher_connected())
            return hello
        if not 0 < hello.rank < self.executor.shards:
            raise PeerError(f"expected a server between 1 and {self.executor.shards - 1}, got server {hello.rank}")
        if hello.rank in connections.servers:
            raise PeerError(f"server {hello.rank} is connected already")
        connections.servers[hello.rank] = peer
        early, self._early = self._early, []
        self._append_log(early)
        return hello

    def _welcome(self, peer: Peer) -> None:
        alone = self._size == self.executor.shards == 1 and torch.get_num_threads() == 1
        thread = threading.get_native_id() if alone else 0
        peer.send(encode(Welcome(size=self._size, shards=self.executor.shards, thread=thread)))

    def _closed(self, event: Closed) -> None:
        who = event.peer.who
        if who is not None and self._connections.workers.get(who.rank) is event.peer:
            self._inbox.disconnected(who)
            del self._connections.workers[who.rank]
        if event.peer is self._connections.launcher:
            self._connections.launcher = None
        if self._coordinator is not None:
            self._perform(self._coordinator.disconnected(who, event.reason))
        elif event.reason:
            said = f"server {self.executor.shard}: the connection of {describe(who)} was closed: {event.reason}"
            sys.stderr.write(f"polytempo: {said}\n")
            sys.stderr.flush()

    # Messages.

    def _dispatch(self, peer: Peer, message: AnyMessage, buffers: list[Bytes]) -> None:
        sender, kind = peer.who, type(message)
        if kind is Hello:
            if message != sender:
                raise PeerError("second Hello with a different identity on this connection")
            self._welcome(peer)  # the first welcome was lost
            return
        coordinator, from_worker = self._coordinator, sender.role == "worker"
        if coordinator is not None and from_worker:
            cause = coordinator.given_up(sender, time.monotonic())
            if cause:
                peer.send(encode(Stopped(cause=cause)))
                return
        handler = self._inbox.handlers.get(kind) if from_worker else None
        if handler is not None:
            self._perform(handler(sender, message, buffers))
            return
        if coordinator is None:
            raise PeerError(f"{kind.__name__} goes to the coordinator (server 0), not to server {self.executor.shard}")
        if isinstance(message, ScriptState):
            self._perform(coordinator.script_state(sender, message, buffers))
            return
        self._perform(coordinator.handle(sender, message, time.monotonic()))
        if isinstance(message, ReadRequest):
            self._inbox.note_read(sender, message)

    def _receive_log(self, channel: Channel) -> None:
        try:
            while (received := channel.receive()) is not None:
                message = decode(received[0])
                handler = self._from_coordinator.get(type(message))
                if handler is not None:
                    handler(message)
        except PeerError:
            self._stop("the coordinator (server 0) is gone")

    def _deliver(self) -> None:
        for item in self.executor.take():
            if isinstance(item, WorkerReply):
                self._reply(item)
            elif self._coordinator is not None:
                self._perform(self._coordinator.handle(self._itself, item, time.monotonic()))
            elif isinstance(item, Failed) and self._to_coordinator is not None:
                self._stop(item.cause)
                with suppress(PeerError):
                    self._to_coordinator.send(encode(item))
            else:
                self._tell_coordinator(item)

    def _reply(self, reply: WorkerReply) -> None:
        peer = self._connections.workers.get(reply.worker)
        self._inbox.note_answer(reply, self._connections.incarnations.get(reply.worker, 0))
        if peer is not None:
            peer.send(encode(reply.message), reply.buffers, reply.done)
        elif reply.done is not None:
            reply.done()

    def _tell_coordinator(self, message: AnyMessage) -> None:
        try:
            if self._to_coordinator is not None:
                self._to_coordinator.send(encode(message))
        except PeerError:
            self._stop("the coordinator (server 0) is gone")

    # Effects.

    def _perform(self, effects: Sequence[Effect]) -> None:
        """Carry out effects; entries of the log go last, together."""
        entries: list[LogEntry] = []
        for effect in effects:
            match effect:
                case ToShards():
                    entries.append(effect.entry)
                case PushArrived():
                    if self._coordinator is not None:
                        self._perform(self._coordinator.push_arrived(effect.push, time.monotonic()))
                    else:
                        self._tell_coordinator(Arrived(shard=self.executor.shard, id=effect.push.id))
                case ToWorker():
                    peer = self._connections.workers.get(effect.worker)
                    if peer is not None:
                        peer.send(encode(effect.message), effect.buffers)
                    if isinstance(effect.message, Refused):
                        self.executor.state.release(effect.worker)  # it will not be answered
                case ReportHold():
                    if self._coordinator is not None:
                        self._perform(self._coordinator.report_hold(effect.id))
                case ToServers():
                    self._to_servers(effect.message)
                case ToLauncher():
                    if self._connections.launcher is not None:
                        self._connections.launcher.send(encode(effect.message))
                case ToAgent():
                    self._connections.agents[effect.agent].send(encode(effect.message))
                case ShareNorm():
                    self.executor.norm_total(effect.total.square)
                    self._to_servers(effect.total)
                case StopWorkers():
                    for peer in self._connections.workers.values():
                        peer.send(encode(Stopped(cause=effect.cause)))
                    self.executor.state.release()
                case EndLoop():
                    self._over = True
        if entries:
            self._append_log(entries)

    def _append_log(self, entries: Sequence[LogEntry]) -> None:
        """Send entries to all shards, once all servers are connected."""
        if len(self._connections.servers) < self.executor.shards - 1:
            self._early += entries
            return
        if not entries:
            return
        if self._connections.servers:
            self._to_servers(Entries(entries=tuple(entries)))
        self._inbox.carry_out(entries)

    def _to_servers(self, message: AnyMessage) -> None:
        header = encode(message)
        for peer in self._connections.servers.values():
            peer.send(header)

    def _stop(self, cause: str) -> None:
        """Of a server that has no say in the job."""
        self._perform([StopWorkers(cause), EndLoop()])

    def facts(self) -> dict[str, Any]:
        """For tests: pushes that the log has not asked for yet, and the workers that are connected."""
        return {"arrived": self._inbox.waiting, "workers": sorted(self._connections.workers)}
