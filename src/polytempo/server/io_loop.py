"""What a desk has received of each worker, and what it has answered: so that a loss is known, not guessed from silence.

A worker asks behind what it has sent, on the same connection, and is told behind what was sent to it. So what a desk does
not know was lost on the way here, and what it has answered and the worker does not have was lost on the way back.
Forgetting a receipt is safe: the worker then sends again, and the sequencer counts nothing twice.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import zmq

from polytempo.errors import PeerError, PolytempoError
from polytempo.protocol.log import Drop, ForgetWorker, LoadState, LogEntry, Reply, Seed, Update
from polytempo.protocol.messages import (
    Answer,
    AnyMessage,
    Arrived,
    Entries,
    Failed,
    Hello,
    Keep,
    NormTotal,
    PartialPush,
    Push,
    PushStatus,
    ReadAnswer,
    ReadRequest,
    Refused,
    Resend,
    Stopped,
    Told,
    Welcome,
    decode,
    encode,
)
from polytempo.protocol.values import OptimizerSpec, Pull, PulledRows, PushId, UnknownKeys
from polytempo.server.coordinator import Coordinator, named
from polytempo.server.key_cache import KeyCache, Unknown
from polytempo.server.optimizer_state import unpack
from polytempo.server.partial_push import PartialPushes
from polytempo.server.shard_executor import ForWorker, KeepHere, PullHere, ShardExecutor
from polytempo.server.validation import check_fit, check_hello, check_hyper, check_keep, check_push, check_state, refusal
from polytempo.transport.channel import Bytes, Channel, Closed, Endpoint, Peer, Received
from polytempo.transport.keys import Credentials
from polytempo.transport.poller import Poller

#: What was sent: "push", "read" or "pull", the track, and the step or request.
ReceiptKey = tuple[str, str, int]

#: Receipts that are kept of one worker.
LIMIT = 1 << 12
#: In place of an answer's place in the log: there is no answer yet.
NOT_YET = -2


class Receipts:
    """The receipts of one shard, by worker and incarnation."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept: dict[tuple[int, int], dict[ReceiptKey, int]] = {}  # with the place of the answer

    def received(self, worker: int, incarnation: int, key: ReceiptKey) -> bool:
        """Something is here; False when it was here before."""
        kept = self._kept.setdefault((worker, incarnation), {})
        if key in kept:
            return False
        self._put(kept, key, NOT_YET)
        return True

    def answered(self, worker: int, incarnation: int, key: ReceiptKey, place: int = -1) -> None:
        """Its answer goes out now."""
        self._put(self._kept.setdefault((worker, incarnation), {}), key, place)

    def _put(self, kept: dict[ReceiptKey, int], key: ReceiptKey, place: int) -> None:
        kept.pop(key, None)  # the newest stand last
        kept[key] = place
        if len(kept) > self._limit:
            del kept[next(iter(kept))]

    def state(self, worker: int, incarnation: int, key: ReceiptKey) -> tuple[str, int]:
        """ "unknown", "received" or "answered", and the place of the answer."""
        place = self._kept.get((worker, incarnation), {}).get(key)
        if place is None:
            return "unknown", -1
        return ("received", -1) if place == NOT_YET else ("answered", place)

    def forget(self, worker: int, incarnation: int) -> None:
        """This life of a worker, and those before it, are over."""
        for known in [k for k in self._kept if k[0] == worker and k[1] <= incarnation]:
            del self._kept[known]


# The desk of a server: the thread that owns its sockets, and in the first server the sequencer.
#
#     message in -> who is it, may it? -> a push: kept until the log asks for it, and reported as arrived
#                                      -> anything else: to the sequencer (first server)
#     log        -> each entry, with the pushes it needs, to the store's thread (`keeper.py`)
#     answers    -> from the store's thread to the workers
#
# The other servers send their arrivals to the first one and get the log from it, over the connection they opened.

#: What somebody who has said who it is may send at once.
MEMBER_LIMIT = 1 << 40


class IoLoop:
    """One shard of a job. `run` returns when the job is over."""

    def __init__(
        self,
        keeper: ShardExecutor,
        endpoints: Sequence[Endpoint],
        size: int,
        first: Coordinator | None = None,
        to_first: Channel | None = None,
        launcher: int | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`launcher`: a descriptor that can be read when the launcher is gone."""
        self.keeper = keeper
        self.over = False
        self._endpoints = endpoints
        self._size = size
        self._first = first
        self._to_first = to_first
        self._credentials = credentials
        self._arrived: dict[PushId, tuple[Push, list[Bytes]]] = {}
        self._staged = PartialPushes(keeper.pool)
        self._keys = KeyCache(keeper.shard)
        self._receipts = Receipts()
        self._hyper: dict[str, tuple[dict[str, Any], ...]] = {}  # of each track, as they were found to be right
        self._workers: dict[int, Peer] = {}
        self._lives: dict[int, int] = {}  # the incarnation of each worker
        self._poller = Poller()
        for endpoint in endpoints:
            endpoint.attach(self._poller)
        self._poller.register(keeper.wake_up.fileno, zmq.POLLIN)
        self._launcher = launcher
        if launcher is not None:
            self._poller.register(launcher, zmq.POLLIN)
        if to_first is not None:
            self._poller.register(to_first.pollable(), zmq.POLLIN)
            to_first.send(encode(Hello(role="server", rank=keeper.shard)))
        if first is not None:
            first.desk = self

    def run(self) -> None:
        """Serve until the job is over."""
        torch.set_grad_enabled(False)  # in this thread
        try:
            while not self.over:
                self.turn()
        finally:
            for endpoint in self._endpoints:
                endpoint.close()
            self.keeper.close()
            if self._first is not None:
                self._first.close()
            if self._to_first is not None:
                self._to_first.close()

    def turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        wait = self._first.patience(time.monotonic()) if self._first else None
        ready = self._poller.poll(None if wait is None else max(0, int(wait * 1000 + 0.999)))
        for endpoint in self._endpoints:
            for event in endpoint.handle(ready):
                self._take(event)
        if self._to_first is not None and self._to_first.pollable() in ready:
            self._follow(self._to_first)
        if self._launcher in ready:
            (self._first or self).stop("the launcher is gone")
        if self.keeper.wake_up.fileno in ready:
            self.keeper.wake_up.silence()
        self._deliver_all()
        if self._first is not None:
            self._first.turn(time.monotonic())
            self._deliver_all()  # what it has just ordered may be carried out already

    # What comes in.

    def _take(self, event: Received | Closed) -> None:
        peer = event.peer
        if isinstance(event, Closed):
            self._closed(event)
            return
        try:
            message = decode(event.header)
            if peer.who is None:
                self._greet(peer, message)
            else:
                self._hear(peer, message, event.buffers)
        except PolytempoError as error:  # what was sent cannot be; its sender goes, the job stays
            reason = refusal(error)
            peer.send(encode(Refused(reason=reason)))
            peer.close()
            self._closed(Closed(peer, reason))

    def _greet(self, peer: Peer, message: AnyMessage) -> None:
        if not isinstance(message, Hello):
            raise PeerError("expected a greeting first")
        if message.role == "worker":
            check_hello(message, self._size)
            if self._credentials is not None and not peer.here:
                self._credentials.check("worker", message.rank, message.incarnation, message.token)
            before = self._workers.get(message.rank)
            if before is not None:
                _check_takes_over(before.who, message)
            self._workers[message.rank], self._lives[message.rank] = peer, message.incarnation
            self._welcome(peer)
        elif self._first is None or not self._first.greet(peer, message):
            raise PeerError(f"{message.role!r} is not served here")
        peer.who = message
        peer.limit = MEMBER_LIMIT

    def _welcome(self, peer: Peer) -> None:
        alone = self._size == self.keeper.shards == 1 and torch.get_num_threads() == 1
        thread = threading.get_native_id() if alone else 0
        peer.send(encode(Welcome(size=self._size, shards=self.keeper.shards, thread=thread)))

    def _hear(self, peer: Peer, message: AnyMessage, buffers: list[Bytes]) -> None:
        if isinstance(message, Hello):
            if message != peer.who:
                raise PeerError("somebody who has said who it is cannot be somebody else")
            self._welcome(peer)  # the first welcome was lost
            return
        if self._first is not None and peer.who.role == "worker":
            cause = self._first.given_up(peer.who, time.monotonic())
            if cause:
                peer.send(encode(Stopped(cause=cause)))
                return
        if isinstance(message, PushStatus) and peer.who.role == "worker":
            self._tell_state(peer, (message.what, message.track, message.number))
            return
        if isinstance(message, Pull) and peer.who.role == "worker":
            self._pull(peer, message, buffers)
            return
        if isinstance(message, Keep) and peer.who.role == "worker":
            check_keep(message, unpack(message.state, buffers))
            self.keeper.put(KeepHere(peer.who.rank, message, buffers), {})
            return
        if not isinstance(message, Push | PartialPush):
            if self._first is None:
                raise PeerError(f"{type(message).__name__} belongs to the first server")
            self._first.hear(peer, message, time.monotonic())
            if isinstance(message, ReadRequest):
                self._receipts.received(peer.who.rank, peer.who.incarnation, ("read", message.track, message.request))
            return
        who = peer.who
        if who.role != "worker" or (message.id.worker, message.id.incarnation) != (who.rank, who.incarnation):
            raise PeerError("a worker may push as itself only")
        if isinstance(message, PartialPush):
            self._staged.keep(message, buffers)
            return
        check_push(message)
        key = "push", message.id.track, message.id.step
        if self._receipts.state(who.rank, who.incarnation, key)[0] != "unknown":
            self._tell_state(peer, key)  # it was sent again
            return
        try:
            whole = self._whole(message, buffers)
        except Unknown:
            whole = None
        if whole is None:  # what it builds on is not here
            peer.send(encode(Resend(id=message.id)))
            return
        self._receipts.received(who.rank, who.incarnation, key)
        self._arrived[message.id] = message, whole
        self._report_arrival(message)

    def _tell_state(self, peer: Peer, key: ReceiptKey) -> None:
        """What became of what a worker has sent; whom it waits for, if that is so. (`docs/design/0010`)"""
        who = peer.who
        state, place = self._receipts.state(who.rank, who.incarnation, key)
        if self._first is not None and key[0] == "push" and state == "received":
            self._first.ask(PushId(key[1], who.rank, who.incarnation, key[2]))
        peer.send(encode(Told(what=key[0], track=key[1], number=key[2], state=state, place=place)))

    def _pull(self, peer: Peer, pull: Pull, buffers: list[Bytes]) -> None:
        """Rows for a worker, outside the log."""
        store = self.keeper.stores.get(pull.track)
        if store is None or (
            pull.span is None and (pull.what != "rows" or bool(buffers) == bool(pull.keys and pull.keys.known))
        ):
            raise PeerError("a pull was refused: there is no such track, or it says no rows")
        try:
            ids = [self._keys.list_of(peer.who.rank, pull.keys, iter(buffers))] if pull.span is None else []
        except Unknown:
            peer.send(encode(UnknownKeys(shard=self.keeper.shard, request=pull.request)))
            return
        store.rows.check_pull(pull.table, pull.span, ids)
        self._receipts.received(peer.who.rank, peer.who.incarnation, ("pull", pull.track, pull.request))
        self.keeper.put(PullHere(peer.who.rank, pull, ids[0] if ids else None), {})
        self._deliver_all()

    def _whole(self, push: Push, buffers: list[Bytes]) -> list[Bytes] | None:
        """A push as the store wants it; refused when it does not fit, None when a part was lost on the way."""
        store = self.keeper.stores.get(push.id.track)
        if store is None and push.kind != "seed":
            raise PeerError(f"a push was refused: there is no optimizer {push.id.track[:40]} yet")
        if store is not None:
            self._check(push, store.proposal)
            if push.kind == "state":
                check_state(unpack(push.state, buffers), store.proposal)
        if store is None or push.kind in ("state", "seed") or (push.skip and not push.wants):
            return buffers
        if push.kind == "values":
            store.check(buffers)
            return buffers
        rows: list[Bytes] = []
        if push.rows or push.wants:
            buffers, rows = self._keys.whole(push, buffers)
            store.rows.check_rows(push, rows)
        if push.skip:
            return rows
        whole = self._staged.assemble(push, store.unfiltered(buffers), store.expected)
        if whole is None:
            return None
        store.check(whole)
        return [*whole, *rows] if rows else whole

    def _check(self, push: Push, proposal: OptimizerSpec) -> None:
        check_fit(push, proposal)
        steps = proposal.apply == "server" and proposal.tensors and push.kind == "gradient" and not push.skip
        if steps and push.hyper != self._hyper.get(push.id.track):  # they seldom change
            check_hyper(push, proposal)
            self._hyper[push.id.track] = push.hyper

    def _report_arrival(self, push: Push) -> None:
        if self._first is not None:
            self._first.arrived(0, push.id, push, time.monotonic())
        else:
            self._tell_first(Arrived(shard=self.keeper.shard, id=push.id))

    def _closed(self, event: Closed) -> None:
        who = event.peer.who
        if who is not None and who.role == "worker" and self._workers.get(who.rank) is event.peer:
            del self._workers[who.rank]
        if self._first is not None:
            self._first.closed(event.peer, event.reason)
        elif event.reason:
            said = f"server {self.keeper.shard}: the connection of {named(event.peer)} was closed: {event.reason}"
            sys.stderr.write(f"polytempo: {said}\n")
            sys.stderr.flush()

    def _follow(self, first: Channel) -> None:
        """Carry out what the first server sends."""
        try:
            while (received := first.receive()) is not None:
                message = decode(received[0])
                if isinstance(message, Entries):
                    self.carry_out(message.entries)
                elif isinstance(message, NormTotal):
                    self.keeper.norm_total(message.square)
                elif isinstance(message, Stopped):
                    self.stop(message.cause)
                elif isinstance(message, Refused):
                    self.stop(f"server {self.keeper.shard} was turned away: {message.reason}")
        except PeerError:
            self.stop("the first server is gone")

    # The log.

    def carry_out(self, entries: Sequence[LogEntry]) -> None:
        """Hand entries of the log to the store, with what they need."""
        for entry in entries:
            if isinstance(entry, Update):
                self.keeper.put(entry, {part.id: self._arrived.pop(part.id) for part in entry.parts})
            elif isinstance(entry, Reply):
                self.keeper.put(entry, {})
                if self._arrived:  # what a repeat brought once more
                    self._arrived.pop(PushId(entry.track, entry.worker, entry.incarnation, entry.exchange), None)
            elif isinstance(entry, LoadState) and entry.again:
                self._arrived.pop(entry.id, None)
                self.keeper.put(entry, {})
            elif isinstance(entry, Seed | LoadState):
                self.keeper.put(entry, {entry.id: self._arrived.pop(entry.id)})
            elif isinstance(entry, Drop):
                self._drop(entry)
            elif isinstance(entry, ForgetWorker):
                self._forget(entry)
            else:
                self.keeper.put(entry, {})

    def _drop(self, entry: Drop) -> None:
        """A push is not applied; its answer shall still bring what it wanted."""
        push, buffers = self._arrived.pop(entry.id, (None, []))
        store = self.keeper.stores.get(entry.id.track)
        if push is not None and store is not None and store.rows and push.kind != "seed":
            self.keeper.put(entry, {entry.id: (push, buffers)})

    def _forget(self, entry: ForgetWorker) -> None:
        """A worker is gone. What was counted of it is still to come in the log; the first server knows which."""
        self._staged.forget(entry.worker, entry.incarnation)
        self._keys.forget(entry.worker)
        self._receipts.forget(entry.worker, entry.incarnation)
        self.keeper.put(entry, {})
        for identity in [i for i in self._arrived if i.worker == entry.worker and i.incarnation <= entry.incarnation]:
            if identity not in entry.counted:
                del self._arrived[identity]

    # What goes out.

    def _deliver_all(self) -> None:
        for item in self.keeper.take():
            self._deliver(item)

    def _deliver(self, item: ForWorker | AnyMessage) -> None:
        if isinstance(item, ForWorker):
            peer = self._workers.get(item.worker)
            self._note_answer(item.worker, item.message)
            if peer is not None:
                peer.send(encode(item.message), item.buffers, item.done)
            elif item.done is not None:
                item.done()
        elif self._first is not None:
            self._first.report(item, time.monotonic())
        elif isinstance(item, Failed) and self._to_first is not None:
            self.stop(item.cause)
            with suppress(PeerError):
                self._to_first.send(encode(item))
        else:
            self._tell_first(item)

    def _note_answer(self, worker: int, message: AnyMessage) -> None:
        """An answer goes out now: a worker that asks behind it and does not have it has lost it."""
        life = self._lives.get(worker, 0)
        if isinstance(message, Answer):
            self._receipts.answered(worker, life, ("push", message.track, message.exchange), message.place)
        elif isinstance(message, ReadAnswer):
            self._receipts.answered(worker, life, ("read", message.track, message.request))
        elif isinstance(message, PulledRows):
            self._receipts.answered(worker, life, ("pull", message.track, message.request))

    def _tell_first(self, message: AnyMessage) -> None:
        try:
            if self._to_first is not None:
                self._to_first.send(encode(message))
        except PeerError:
            self.stop("the first server is gone")

    def tell(self, worker: int, message: AnyMessage) -> None:
        """Send a worker a message without buffers."""
        peer = self._workers.get(worker)
        if peer is not None:
            peer.send(encode(message))

    def stop(self, cause: str) -> None:
        """Tell all workers that the job has ended, and end."""
        for peer in self._workers.values():
            peer.send(encode(Stopped(cause=cause)))
        self.over = True

    def facts(self) -> dict[str, Any]:
        """For tests: what is kept that was not asked for yet."""
        return {"arrived": len(self._arrived), "workers": sorted(self._workers)}


def _check_takes_over(before: Hello, after: Hello) -> None:
    """A rank is one process: a later life of it takes over from an earlier one, and a process from itself."""
    if before.incarnation > after.incarnation:
        raise PeerError(f"worker {after.rank} was started again; this is an earlier life of it")
    if before.incarnation == after.incarnation and before.pid != after.pid:
        raise PeerError(
            f"process {before.pid} is worker {after.rank} already, so process {after.pid} cannot be; "
            "start each rank once, or run what it starts outside the job"
        )
