"""Where workers tell each other how they can be reached: posted once, found by whoever looks, now or later."""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from polytempo.errors import PeerError, counted
from polytempo.protocol.duplicate_batches import DuplicateBatches
from polytempo.protocol.log import LogEntry, Save
from polytempo.protocol.messages import (
    AnyMessage,
    Arrived,
    Assigned,
    Entries,
    Expecting,
    Failed,
    Finish,
    Finished,
    Gone,
    Heartbeat,
    Hello,
    Leave,
    MetricReport,
    Norm,
    NormTotal,
    NotSaved,
    Push,
    ReadRequest,
    Register,
    Repeat,
    Saved,
    StatusRequest,
    Stop,
    Stopped,
    StoreGet,
    StoreSet,
    StoreValue,
    encode,
)
from polytempo.protocol.values import PushId, TrainingProgress
from polytempo.records.files import RecordWriter, record_lost
from polytempo.records.lines import MAIN
from polytempo.server.checkpoint import finish_checkpoint, in_words
from polytempo.server.effects import Checkpoint, Effect, ToShards, ToWorker, WakeAt, Write
from polytempo.server.hosts import RemoteHosts
from polytempo.server.manifest import PARTIAL, manifest_of, remove_checkpoint
from polytempo.server.sequencer import Sequencer
from polytempo.server.validation import check_end, check_expecting, check_proposal, check_read
from polytempo.summation import in_order
from polytempo.transport.channel import Peer
from polytempo.transport.keys import Credentials

if TYPE_CHECKING:
    from polytempo.server.io_loop import IoLoop

#: More, or longer ones, are refused: this is for addresses.
COUNT, LENGTH = 1 << 20, 1024
#: Keys that say whose they are (`transport/rendezvous.py`).
OF_RANK = re.compile(r"(?:host|link)-(\d+)(?:-|$)")


class KeyValueNotices:
    """Texts by key, and who waits for which."""

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}
        self._owners: dict[str, int] = {}
        self._waiting: dict[str, set[int]] = {}

    def post(self, key: str, value: str, worker: int) -> list[int]:
        """A worker posts this; the workers who have waited for it. What is posted stays its poster's."""
        named = OF_RANK.match(key)
        if self._owners.setdefault(key, worker) != worker or (named and int(named[1]) != worker):
            raise PeerError(f"worker {worker} has posted {key[:40]!r}, which is another worker's to say")
        if len(key) + len(value) > LENGTH or len(self._posted) >= COUNT:
            raise PeerError(f"a notice of {len(key) + len(value)} characters was refused; at most {LENGTH} are taken")
        return self.announce(key, value)

    def announce(self, key: str, value: str) -> list[int]:
        """The same of what the job itself says, which may be longer."""
        self._posted[key] = value
        return sorted(self._waiting.pop(key, ()))

    def look(self, key: str, worker: int) -> str | None:
        """What was posted; if nothing was, this worker is among those `post` returns later."""
        if key not in self._posted and len(key) <= LENGTH:
            self._waiting.setdefault(key, set()).add(worker)
        return self._posted.get(key)


# What only the first server does: it feeds the sequencer, spreads the log, writes the record, and talks to the launcher.

#: A host is given up when nothing was heard of it for this many seconds (`--host-timeout`).
HOST_TIMEOUT = 5.0
#: What only workers send, to the first server.
OF_WORKERS = Register | Repeat | ReadRequest | Leave | MetricReport | StoreSet | StoreGet
#: After so many steps of each worker beyond the budget it is said at once; after fewer, at the end.
MANY_STEPS = 4


class Coordinator:
    """The first server's part in the job."""

    def __init__(
        self,
        sequencer: Sequencer,
        record: RecordWriter | None = None,
        checkpoints: Path | None = None,
        facts: dict[str, Any] | None = None,
        host_timeout: float = HOST_TIMEOUT,
        go_on_unsaved: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        """`go_on_unsaved`: a checkpoint that cannot be written is no reason to end the job."""
        self.sequencer = sequencer
        self._go_on_unsaved = go_on_unsaved
        self.desk: IoLoop
        self._record = record
        self._checkpoints = checkpoints
        self._facts = facts or {}  # what meta.json says beside the figures
        self._remote: dict[str, Any] = {}  # what a worker on another host must know
        self._servers: dict[int, Peer] = {}
        self._early: list[LogEntry] = []  # entries that came before all servers were there
        self._launcher: Peer | None = None
        self._hosts = RemoteHosts(host_timeout)
        self._credentials = credentials
        self._given_up: dict[int, tuple[int, str]] = {}  # workers that the job goes on without: incarnation and cause
        self._free_ranks: deque[int] = deque()
        self._wakes: list[float] = []
        self._norms: dict[tuple[str, int], list[float]] = {}
        self._saving: dict[str, tuple[dict[str, Any], list[Saved | NotSaved]]] = {}
        self._saved_manifest: dict[str, Any] = {}  # of the last that is whole
        self._unsaved = ""  # why the last checkpoint could not be written
        self._finish: Finish | None = None
        self._notices = KeyValueNotices()
        self._likeness = DuplicateBatches()
        self._unheeded = False  # was it said that the budget is?
        self._progress: TrainingProgress | None = None  # of what trains without pushes, and since when
        self._progress_since = 0.0
        self._begun = time.time()
        self.checkpoint = ""  # the last that is whole
        self.record_lost = ""  # why there is no record, though one was asked for

    @property
    def _shards(self) -> int:
        return self.sequencer.plan.shards

    # Who is there.

    def greet(self, peer: Peer, hello: Hello) -> bool:
        """Somebody other than a worker says who it is. Servers and the launcher are on this host, and are there once."""
        if hello.role in ("server", "launcher") and not peer.here:
            raise PeerError(f"a {hello.role} is taken on the job's own host only")
        if hello.role == "server" and 0 < hello.rank < self._shards:
            if hello.rank in self._servers:
                raise PeerError(f"there is a server {hello.rank} already")
            self._servers[hello.rank] = peer
            if len(self._servers) == self._shards - 1:
                early, self._early = self._early, []
                self._spread(early)
            return True
        if hello.role == "launcher":
            if self._launcher is not None:
                raise PeerError("there is a launcher already")
            self._launcher = peer
            if self.record_lost:
                self._say(self.record_lost, about="record")
            return True
        return hello.role == "agent" and self._take_agent(peer, hello.count)

    def _take_agent(self, peer: Peer, count: int) -> bool:
        if not 0 < count <= len(self._free_ranks):
            free = len(self._free_ranks)
            raise PeerError(
                f"this job expects {counted(free, 'more worker')} from other hosts, this host brings {count}; use -n {free}"
            )
        ranks = tuple(self._free_ranks.popleft() for _ in range(count))
        self._hosts.add(peer, ranks, time.monotonic())
        prove = self._credentials
        tokens = tuple(prove.token("worker", rank, 0) for rank in ranks) if prove is not None else ()
        peer.send(encode(Assigned(job=self._remote, ranks=ranks, tokens=tokens)))
        self._say(f"{counted(count, 'worker')} joined from another host: rank {', '.join(map(str, ranks))}")
        return True

    def closed(self, peer: Peer, reason: str) -> None:
        """A connection is gone."""
        if peer is self._launcher:
            self._launcher = None
            self.stop(f"the launcher is gone{': ' + reason if reason else ''}")
        elif peer.who is not None and peer.who.role == "server" and self._finish is None:
            if reason:
                self.stop(f"server {peer.who.rank} was turned away: {reason}")
            elif self._launcher is None:  # else it knows how the server ended, and will say so
                self.stop(f"server {peer.who.rank} is gone")
        elif reason:
            self._say(f"the connection of {named(peer)} was closed: {reason}")

    # What comes in.

    def hear(self, peer: Peer, message: AnyMessage, now: float) -> None:
        """A message that is not a push."""
        role, rank = peer.who.role, peer.who.rank
        if isinstance(message, OF_WORKERS):
            if role != "worker":
                raise PeerError(f"{type(message).__name__} is a worker's")
            self._hear_worker(rank, peer.who.incarnation, message, now)
        elif isinstance(message, Arrived | Norm | Saved | NotSaved) and role == "server":
            if message.shard != rank:
                raise PeerError(f"server {rank} speaks for server {message.shard}")
            if isinstance(message, Arrived):
                self._do(self.sequencer.arrived(message.shard, message.id, None, now))
            else:
                self.report(message, now)
        elif isinstance(message, Failed) and role == "server":
            self.report(message, now)
        elif role == "launcher":
            self._hear_launcher(peer, message, now)
        elif role == "agent" and isinstance(message, Heartbeat | Gone):
            self._hear_agent(peer, message, now)
        else:
            raise PeerError(f"{type(message).__name__} is not for a {role} to send")

    def ask(self, identity: PushId) -> None:
        """A worker asks what holds its push, which is here."""
        self._do(self.sequencer.ask(identity))

    def _hear_worker(
        self,
        rank: int,
        incarnation: int,
        message: Register | Repeat | ReadRequest | Leave | MetricReport | StoreSet | StoreGet,
        now: float,
    ) -> None:
        if isinstance(message, StoreSet | StoreGet):
            self._hear_notice(rank, message)
        elif isinstance(message, Register):
            check_proposal(message.track, message.proposal)
            known = set(self.sequencer.tracks)
            self._do(self.sequencer.register(rank, incarnation, message.track, message.proposal, now))
            for name in self.sequencer.tracks.keys() - known:
                self._tell(f"manifest/{name}", self._notices.announce(f"manifest/{name}", manifest_of(message.proposal)))
        elif isinstance(message, Leave):
            check_end(message, self.sequencer.plan.size)
            self._do(self.sequencer.left(rank, incarnation, message.reason, now))
        elif isinstance(message, Repeat):
            if (message.id.worker, message.id.incarnation) != (rank, incarnation):
                raise PeerError("a worker may ask for its own answers only")
            self._do(self.sequencer.repeat(message.id, message.place))
        elif message.worker != rank:
            raise PeerError("a worker may speak for itself only")
        elif isinstance(message, ReadRequest):
            check_read(message)
            self._do(self.sequencer.read(message))
        else:
            self._take_progress(message.progress, now)
            self._do(self.sequencer.metric(message, now))

    def _take_progress(self, progress: TrainingProgress | None, now: float) -> None:
        if progress is not None:
            self._progress_since = now if self._progress is None else self._progress_since
            self._progress = progress

    def _hear_notice(self, rank: int, message: StoreSet | StoreGet) -> None:
        if isinstance(message, StoreSet):
            self._tell(message.key, self._notices.post(message.key, message.value, rank))
        elif (value := self._notices.look(message.key, rank)) is not None:
            self.desk.tell(rank, StoreSet(key=message.key, value=value))

    def _tell(self, key: str, workers: list[int]) -> None:
        for worker in workers:
            self.desk.tell(worker, StoreSet(key=key, value=self._notices.look(key, worker) or ""))

    def _hear_launcher(self, peer: Peer, message: AnyMessage, now: float) -> None:
        if isinstance(message, StatusRequest):
            status = self.sequencer.status(now)
            status.checkpoint, status.progress = self.checkpoint, self._progress
            if self._progress is not None:  # time goes on, even if no step does
                status.seconds = max(status.seconds, now - self._progress_since)
            peer.send(encode(status))
        elif isinstance(message, Gone):
            check_end(message, self.sequencer.plan.size)
            if message.reason != "finished":
                self._given_up[message.worker] = message.incarnation, message.cause
                line = {"t": now, "kind": "fault", "worker": message.worker, "cause": message.cause}
                self._do([Write(line)])
            self._do(self.sequencer.left(message.worker, message.incarnation, message.reason, now))
        elif isinstance(message, Expecting):
            check_expecting(message, self.sequencer.plan.size)
            self._remote, self._free_ranks = message.job, deque(message.ranks)
        elif isinstance(message, Stop):
            self.stop(message.cause, over=False)
        elif isinstance(message, Finish):
            self._finish = message
            self._last_checkpoint()

    def _hear_agent(self, peer: Peer, message: Heartbeat | Gone, now: float) -> None:
        host = self._hosts.of(peer)
        if host is None:
            raise PeerError("an agent that has brought no workers has nothing to say")
        if host.cause:
            peer.send(encode(Stopped(cause=told_late(host.cause))))
            return
        self._hosts.heard(host, now)
        if isinstance(message, Heartbeat):
            peer.send(encode(message))  # so that the agent knows when this host is gone
        if isinstance(message, Gone) and message.worker in host.ranks and self._launcher is not None:
            check_end(message, self.sequencer.plan.size)
            self._launcher.send(encode(message))

    def given_up(self, worker: Hello, now: float) -> str:
        """A worker has something to say: why the job goes on without it; empty when it does not."""
        self._hosts.heard_worker(worker.rank, now)
        incarnation, cause = self._given_up.get(worker.rank, (-1, ""))
        return told_late(cause) if worker.incarnation <= incarnation else ""

    def arrived(self, shard: int, identity: PushId, head: Push | None, now: float) -> None:
        """A push is here."""
        self._do(self.sequencer.arrived(shard, identity, head, now))
        if head is not None and identity.track == MAIN and (alike := self._likeness.look_at(head)):
            self._say(alike)
        self._watch_budget(MANY_STEPS * self.sequencer.plan.size)

    def _watch_budget(self, allowed: int) -> None:
        """Say once that the script goes on, though the budget is used up, and does not ask."""
        if not self._unheeded and self.sequencer.unheeded() > allowed:
            self._unheeded = True
            self._say(
                "warning: the job's budget is used up and its workers go on: the script never asks pt.should_stop(); "
                "end its loop with `if pt.should_stop(): break`"
            )

    def report(self, item: AnyMessage, now: float) -> None:
        """A store has something to say."""
        if isinstance(item, Norm):
            squares = self._norms.setdefault((item.track, item.version), [])
            squares.append(item.square)
            if len(squares) == self._shards:
                del self._norms[item.track, item.version]
                total = NormTotal(track=item.track, version=item.version, square=in_order(squares))
                self.desk.keeper.norm_total(total.square)
                self._to_servers(total)
        elif isinstance(item, NotSaved) and item.worker >= 0:
            self._not_saved(item.name, f"what worker {item.worker} holds back: {item.reason}")
        elif isinstance(item, Saved | NotSaved):
            self._saved(item)
        elif isinstance(item, Failed):
            self.stop(item.cause)

    # What goes out.

    def _do(self, orders: list[Effect]) -> None:
        entries: list[LogEntry] = []
        for order in orders:
            if isinstance(order, ToShards):
                entries.append(order.entry)
            elif isinstance(order, Write):
                self._keep_record(RecordWriter.write, order.line)
            elif isinstance(order, ToWorker):
                self.desk.tell(order.worker, order.message)
            elif isinstance(order, WakeAt):
                heapq.heappush(self._wakes, order.at)
            elif isinstance(order, Checkpoint):
                self._saving[order.name] = order.manifest, []
        if entries:
            self._spread(entries)

    def _spread(self, entries: list[LogEntry]) -> None:
        if len(self._servers) < self._shards - 1:
            self._early += entries
            return
        if self._servers:
            self._to_servers(Entries(entries=tuple(entries)))
        self.desk.carry_out(entries)

    def _to_servers(self, message: AnyMessage) -> None:
        header = encode(message)
        for peer in self._servers.values():
            peer.send(header)

    def _say(self, text: str, fatal: bool = False, about: str = "") -> None:
        if self._launcher is not None:
            self._launcher.send(encode(StoreValue(text=text, fatal=fatal, about=about)))

    def stop(self, cause: str, over: bool = True) -> None:
        """The job ends early: everybody is told why."""
        self._say(cause, fatal=True)
        if over or self._launcher is None:  # else they may still have to save, and are told at the end
            self._to_servers(Stopped(cause=cause))
        for peer in self._hosts.peers():
            peer.send(encode(Stopped(cause=cause)))
        self.desk.stop(cause)
        if not over and self._launcher is not None:
            self.desk.over = False  # the launcher will say Finish

    def _keep_record(self, act: Callable[..., None], *what: Any) -> None:
        """A record that cannot be written ends; the job is worth more and goes on."""
        if self._record is None:
            return
        try:
            act(self._record, *what)
        except OSError as error:
            self._record.abandon()
            self._record = None
            self.record_lost = record_lost(error)
            self._say(self.record_lost, about="record")

    # Time.

    def patience(self, now: float) -> float | None:
        """Seconds until something is due."""
        due = [self._wakes[0]] if self._wakes else []
        host = self._hosts.due()
        due += [host] if host is not None else []
        return max(min(due) - now, 0.0) if due else None

    def turn(self, now: float) -> None:
        """After everything that came was dealt with."""
        due = False
        while self._wakes and self._wakes[0] <= now:
            heapq.heappop(self._wakes)
            due = True
        if due:
            self._do(self.sequencer.tick(now))
        for host in self._hosts.overdue(now):
            for rank in host.ranks if self._launcher is not None else ():
                gone = Gone(worker=rank, incarnation=0, reason="lost", cause=host.cause)
                self._launcher.send(encode(gone))  # type: ignore[union-attr]
        self._keep_record(RecordWriter.flush)
        if self._finish is not None and not self._saving:
            self._end(self._finish, now)

    # Checkpoints and the end.

    def _saved(self, item: Saved | NotSaved) -> None:
        if item.name not in self._saving:
            raise PeerError(f"server {item.shard} has saved {item.name[:40]!r}, which is not being made")
        manifest, parts = self._saving[item.name]
        parts.append(item)
        if len(parts) < self._shards or self._checkpoints is None:
            return
        del self._saving[item.name]
        ordered = sorted((part for part in parts if isinstance(part, Saved)), key=lambda part: part.shard)
        files = [{"file": part.file, "digest": part.digest, "tensors": part.tensors} for part in ordered]
        reason = next((part.reason for part in parts if isinstance(part, NotSaved)), "")
        try:
            if not reason:
                self.checkpoint = str(finish_checkpoint(self._checkpoints, item.name, manifest, files))
                self._saved_manifest = manifest
        except OSError as error:
            reason = in_words(error)
        if reason:
            remove_checkpoint(self._checkpoints / f"{item.name}{PARTIAL}")
            self._not_saved(item.name, reason)

    def _not_saved(self, name: str, reason: str) -> None:
        """A checkpoint could not be written: go on without it, or end the job, as was asked for."""
        cause = f"the checkpoint {name} could not be written to {self._checkpoints}: {reason}"
        if self._go_on_unsaved:
            self._say(f"warning: {cause}; going on without it")
        elif self._finish is None:
            self.stop(f"{cause}; make room and --resume, or use --checkpoint-errors continue")
        self._unsaved = cause

    def _last_checkpoint(self) -> None:
        """The values at the end are worth keeping too, when the job ended well or was interrupted."""
        self._unsaved = ""
        if self._checkpoints is None or self._finish is None or not self.sequencer.tracks:
            return
        if self._finish.exit_status and not self._finish.save:
            return
        order = self.sequencer.checkpoint_now() if self._finish.save else self.sequencer.last_checkpoint()
        if order is None or order.name in self._saving:
            return
        if not _same_state(self._saved_manifest, order.manifest):
            self._do([ToShards(Save(name=order.name)), order])

    def _end(self, finish: Finish, now: float) -> None:
        self._watch_budget(0)
        if self._unsaved and not self._go_on_unsaved:
            finish = Finish(exit_status=finish.exit_status or 1, cause=finish.cause or self._unsaved)
        progress = asdict(self._progress) if self._progress is not None else None
        summary = self.sequencer.summary(now) | {"spread": self._apart(), "progress": progress}
        if self._record is not None:
            meta = {
                **self._facts,
                "start": self._begun,
                "end": time.time(),
                "exit_status": finish.exit_status,
                "cause": finish.cause,
                "throughput": summary["samples_per_second"],
                "efficiency": summary["efficiency"],
                "workers": summary.pop("workers"),
                "job": summary,
            }
            if any(track.proposal.apply != "peers" for track in self.sequencer.tracks.values()) and "options" in meta:
                meta["options"] = meta["options"] | {"via": "ps"}  # a script may have asked for servers
            self._keep_record(RecordWriter.close, meta)
        self._to_servers(Stopped(cause="the job has ended"))
        if self._launcher is not None:
            self._launcher.send(encode(Finished(summary=summary, checkpoint=self.checkpoint, cause=self._unsaved)))
        self.desk.over = True

    def _apart(self) -> float:
        """How far the workers' gradients were apart, over the job."""
        store = self.desk.keeper.stores.get(MAIN)
        return store.spread.mean if store is not None else 0.0

    def close(self) -> None:
        """Leave the record as it is."""
        if self._record is not None:
            self._record.abandon()


def named(peer: Peer) -> str:
    """Who a peer has said to be."""
    who = peer.who
    if who is None:
        return "a stranger"
    return f"{who.role} {who.rank}" if who.role in ("worker", "server") else f"the {who.role}"


def told_late(cause: str) -> str:
    """What those are told who come back after they were given up."""
    return f"the job goes on without it: {cause}"


def _same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Do two manifests describe the same values? Clocks are of workers, which may have left in between."""
    return {**one, "clocks": None} == {**other, "clocks": None}
