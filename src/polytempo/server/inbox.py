"""The inbox of a shard: what workers have sent to it, checked, and kept until the log asks for it.

    PartialPush   a bucket sent during backward    kept; the push that names it is put together from its buckets
    Push          checked, completed               kept, and reported to the coordinator; a repeat is told its status
    log entry     from the sequencer               goes to the shard executor with the pushes it names
    Pull, Keep    outside the log                  checked, to the shard executor
    PushStatus    a worker has heard nothing       answered from the receipts
    ShareDevice   device memory of a worker        mapped; pushes may lie there from then on

**Fences.** A push with a fence lies in shared device memory (`server/device_share.py`), and its header comes before its
gradient. It is pending until the worker's stream has reached the fence, which a thread watches, and has arrived then. A
pending push of a worker whose connection ends is dropped: it was never written in full.

**Receipts.** A worker asks about a push on the connection it sent the push on, so behind it, and the reply comes behind what
the server has sent. So what the inbox does not know was lost on the way here, and what it has answered and the worker does
not have was lost on the way back (`docs/design/0010`). Forgetting a receipt is safe: the worker then sends again, and the
sequencer counts nothing twice.

**Cached keys.** A list of row ids that a worker has sent before travels as its digest (`compression/key_cache.py`); the
inbox puts the list back in place, so that nothing behind it knows of digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from polytempo.compression.key_cache import KeyReceiver
from polytempo.errors import PeerError
from polytempo.protocol.log import Drop, ForgetWorker, LoadState, LogEntry, Reply, Seed, Update
from polytempo.protocol.messages import (
    Answer,
    DeviceShared,
    Hello,
    Keep,
    PartialPush,
    Pull,
    PulledRows,
    Push,
    PushStatus,
    ReadAnswer,
    ReadRequest,
    RequestKey,
    Resend,
    ShareDevice,
    StatusReply,
    request_of,
)
from polytempo.protocol.push import (
    Content,
    FirstValues,
    NewState,
    NewValues,
    PushedChange,
    PushedGradient,
    PushedValues,
    StepReport,
    row_buffers,
)
from polytempo.protocol.values import BufferRange, Keys, OptimizerSpec, PushId
from polytempo.server.device_share import DeviceShare, FenceWatch, open_share
from polytempo.server.effects import Effect, PushArrived, ReportHold, ToWorker
from polytempo.server.optimizer_state import as_bytes, as_tensor, unpack
from polytempo.server.shard import PushBuffer, Shard
from polytempo.server.shard_executor import EndShares, KeepHere, PullHere, ShardExecutor, WorkerReply
from polytempo.server.validation import check_fit, check_hyper, check_keep, check_push, check_state
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.channel import Bytes
from polytempo.transport.shared_memory import Borrowed

#: Receipts that are kept of one worker.
RECEIPT_LIMIT = 1 << 12
#: In place of the position of an answer in the log: there is no answer yet.
NOT_YET = -2
#: Bytes of lists of ids that are kept for one worker.
KEY_CACHE_BYTES = 64 << 20

#: (optimizer, worker, incarnation, bucket)
PartialKey = tuple[str, int, int, int]
InboxHandler = Callable[[Hello, Any, list[Bytes]], list[Effect]]


class Receipts:
    """What one shard has received of each worker and incarnation, and what it has answered."""

    def __init__(self, limit: int = RECEIPT_LIMIT) -> None:
        self._limit = limit
        self._kept: dict[tuple[int, int], dict[RequestKey, int]] = {}  # with the position of the answer

    def received(self, worker: int, incarnation: int, key: RequestKey) -> bool:
        """Note that something has arrived; False when it had arrived before."""
        kept = self._kept.setdefault((worker, incarnation), {})
        if key in kept:
            return False
        self._put(kept, key, NOT_YET)
        return True

    def answered(self, worker: int, incarnation: int, key: RequestKey, place: int = -1) -> None:
        """Note that its answer is sent now."""
        self._put(self._kept.setdefault((worker, incarnation), {}), key, place)

    def _put(self, kept: dict[RequestKey, int], key: RequestKey, place: int) -> None:
        kept.pop(key, None)  # the newest stand last
        kept[key] = place
        if len(kept) > self._limit:
            del kept[next(iter(kept))]

    def lost(self, worker: int, incarnation: int, key: RequestKey) -> None:
        self._kept.get((worker, incarnation), {}).pop(key, None)

    def state(self, worker: int, incarnation: int, key: RequestKey) -> tuple[str, int]:
        """ "unknown", "received" or "answered", and the position of the answer in the log."""
        place = self._kept.get((worker, incarnation), {}).get(key)
        if place is None:
            return "unknown", -1
        return ("received", -1) if place == NOT_YET else ("answered", place)

    def forget(self, worker: int, incarnation: int) -> None:
        """Drop the receipts of this incarnation of a worker, and of those before it."""
        for known in [k for k in self._kept if k[0] == worker and k[1] <= incarnation]:
            del self._kept[known]


class ReceivedBuckets:
    """The newest version of each bucket of each worker: at most one model a worker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[PartialKey, tuple[PartialPush, list[Bytes]]] = {}

    def keep(self, partial: PartialPush, buffers: list[Bytes]) -> None:
        """Keep a bucket; an earlier version of it is out of date."""
        if [piece.stop - piece.start for piece in partial.pieces] != [buffer.nbytes for buffer in buffers]:
            raise PeerError("a bucket was refused: its pieces are not as long as it says")
        identity = partial.id
        self._drop((identity.optimizer_id, identity.worker, identity.incarnation, partial.bucket))
        self._kept[identity.optimizer_id, identity.worker, identity.incarnation, partial.bucket] = partial, buffers

    def assemble(self, push: PushId, content: Content, buffers: list[Bytes], sizes: Sequence[int]) -> list[Bytes] | None:
        """The push as if it had come whole; None when a bucket that it names is not here."""
        if not content.sent_buckets and not content.patches:
            return buffers
        found = []
        for bucket in content.sent_buckets:
            kept = self._kept.get((push.optimizer_id, push.worker, push.incarnation, bucket.number))
            if kept is None or kept[0].serial != bucket.serial or kept[0].id != push:
                return None
            found.append(kept)
        pairs = [(piece, data) for partial, parts in found for piece, data in zip(partial.pieces, parts, strict=True)]
        if len(content.patches) != len(buffers):
            raise PeerError("a push was refused: it has more pieces than it names, or fewer")
        pairs += zip(content.patches, buffers, strict=True)
        if sum(data.nbytes for _, data in pairs) != sum(sizes):
            raise PeerError(f"a push was refused: its pieces do not add up to the {sum(sizes)} bytes of this shard")
        whole = [self._pool.take(size) for size in sizes]
        for piece, data in pairs:
            self._put(whole, piece, data)
        for data in buffers:
            self._pool.give(data)
        for bucket in content.sent_buckets:
            self._drop((push.optimizer_id, push.worker, push.incarnation, bucket.number))
        return whole

    def _put(self, whole: list[Bytes], piece: BufferRange, data: Bytes) -> None:
        fits = 0 <= piece.buffer < len(whole) and 0 <= piece.start <= piece.stop <= whole[piece.buffer].nbytes
        if not fits or data.nbytes != piece.stop - piece.start:
            raise PeerError("a push was refused: a piece of it lies outside this shard")
        whole[piece.buffer][piece.start : piece.stop] = data

    def _drop(self, key: PartialKey) -> None:
        for buffer in self._kept.pop(key, (None, []))[1]:
            self._pool.give(buffer)

    def forget(self, worker: int, incarnation: int) -> None:
        for key in [key for key in self._kept if key[1] == worker and key[2] <= incarnation]:
            self._drop(key)


class MissingKeys(Exception):
    """A list of ids is not (or no longer) cached: it must be sent in full."""


class KeyCache:
    """The lists of ids that each worker has sent to this shard."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._lists: dict[int, KeyReceiver] = {}

    def forget(self, worker: int) -> None:
        """Drop the lists of a worker that has left, or has come anew."""
        self._lists.pop(worker, None)

    def whole(self, worker: int, content: Content, buffers: Sequence[Bytes]) -> tuple[list[Bytes], list[Bytes]]:
        """The dense buffers of a push, and those of its tables with every list of ids; `MissingKeys` when one is missing."""
        lists = [*(part.keys for part in content.rows if part.span is None), *(want.keys for want in content.wants)]
        known = sum(self._key(keys).known for keys in lists if keys)
        count = row_buffers(content) - known
        if count > len(buffers):
            raise PeerError(f"a push was refused: {len(buffers)} buffers came, its tables alone need {count}")
        cut = len(buffers) - count
        rest = iter(buffers[cut:])
        result: list[Bytes] = []
        for part in content.rows:
            if part.span is None:
                result.append(self._filled(worker, part.keys, rest))
            result.append(next(rest))
        result += [self._filled(worker, want.keys, rest) for want in content.wants]
        return list(buffers[:cut]), result

    def _filled(self, worker: int, keys: Sequence[Keys], rest: Iterator[Bytes]) -> Bytes:
        return self.list_of(worker, self._key(keys) if keys else None, rest)

    def _key(self, keys: Sequence[Keys]) -> Keys:
        if self._shard >= len(keys):
            raise PeerError(f"a list of ids was refused: it names no digest for shard {self._shard}")
        return keys[self._shard]

    def list_of(self, worker: int, keys: Keys | None, rest: Iterator[Bytes]) -> Bytes:
        """One list: as it came, or as it came before."""
        if keys is None:
            return next(rest)
        lists = self._lists.setdefault(worker, KeyReceiver(KEY_CACHE_BYTES))
        if not keys.known:
            data = next(rest)
            if data.nbytes % 8:
                raise PeerError(f"a list of ids of {data.nbytes} bytes was refused; each has 8")
            lists.take(keys.digest, as_tensor(data, "int64"))
            return data
        ids = lists.find(keys.digest)
        if ids is None:
            raise MissingKeys
        return as_bytes(ids).copy()  # the memory of pushes is used again


class ShardInbox:
    """Handles what workers send to one shard, and feeds the shard executor."""

    def __init__(self, executor: ShardExecutor) -> None:
        self._executor, self._state = executor, executor.state
        self._arrived: dict[PushId, tuple[Push, list[PushBuffer]]] = {}
        self._pending: dict[PushId, tuple[Push, list[PushBuffer]]] = {}  # their fences are not reached yet
        self._watch: FenceWatch[PushId] = FenceWatch(executor.wake_up.ring)
        self._partial = ReceivedBuckets(executor.pool)
        self._keys = KeyCache(executor.shard)
        self._receipts = Receipts()
        self._hyper: dict[str, tuple[dict[str, Any], ...]] = {}  # of each optimizer, as last checked: they seldom change
        #: By type of message; all from workers.
        self.handlers: dict[type, InboxHandler] = {
            Push: self._push,
            PartialPush: self._partial_push,
            PushStatus: lambda sender, asked, _: self._tell_status(sender, request_of(asked)),
            Pull: self._pull,
            Keep: self._keep,
            ShareDevice: self._share,
        }

    @property
    def waiting(self) -> int:
        return len(self._arrived)

    # Messages of workers.

    def _partial_push(self, sender: Hello, partial: PartialPush, buffers: list[Bytes]) -> list[Effect]:
        _check_pusher(sender, partial.id)
        self._partial.keep(partial, buffers)
        return []

    def _push(self, sender: Hello, push: Push, buffers: list[Bytes]) -> list[Effect]:
        _check_pusher(sender, push.id)
        check_push(push)
        key = request_of(push)
        if self._receipts.state(sender.rank, sender.incarnation, key)[0] != "unknown":
            return self._tell_status(sender, key)  # it was sent again
        try:
            whole = self._whole(push, buffers)
        except MissingKeys:
            return [_resend(sender, key, lost=False)]
        if whole is None:  # a bucket that it builds on is not here
            return [_resend(sender, key, lost=True)]
        self._receipts.received(sender.rank, sender.incarnation, key)
        if isinstance(push.body, Content) and push.body.fence:
            return self._await(push, push.body.fence, whole)
        self._arrived[push.id] = push, whole
        return [PushArrived(push)]

    def _await(self, push: Push, fence: int, whole: list[PushBuffer]) -> list[Effect]:
        """A push with a fence: it has arrived once that is reached."""
        share = self._share_of(push.id)
        share.expect(push.id.step, fence)
        self._pending[push.id] = push, whole
        if share.pushed(fence):
            return self._complete(push.id)
        self._watch.add(push.id, partial(share.pushed, fence))
        return []

    def _complete(self, identity: PushId) -> list[Effect]:
        if identity not in self._pending:
            return []
        push, whole = self._pending.pop(identity)
        self._arrived[identity] = push, whole
        return [PushArrived(push)]

    def completed(self) -> list[Effect]:
        """Pushes whose fences have been reached since the last call have arrived."""
        reached = self._watch.take() if self._pending else ()
        return [effect for identity in reached for effect in self._complete(identity)]

    def _share(self, sender: Hello, message: ShareDevice, buffers: list[Bytes]) -> list[Effect]:
        """Map a worker's device memory, or say why not: its pushes come in buffers then."""
        told = DeviceShared(optimizer_id=message.optimizer_id, shard=self._executor.shard)
        shard, key = (
            self._state.optimizer_shards.get(message.optimizer_id),
            (message.optimizer_id, sender.rank, sender.incarnation),
        )
        try:
            if shard is None:
                raise PeerError(f"there is no optimizer {message.optimizer_id[:40]!r} on server {told.shard} yet")
            if shard.device is None:
                raise PeerError(f"the values of server {told.shard} are in the memory of the CPU")
            if reason := shard.needs_buffers:
                raise PeerError(f"{reason} needs pushes and answers in host memory")
            if key in self._state.shares:
                raise PeerError(f"worker {sender.rank} shares device memory for this optimizer already")
            self._state.shares[key] = open_share(message, buffers, shard.device, shard.cut.layout, told.shard)
        except PeerError as error:
            told.refusal = str(error)
        return [ToWorker(sender.rank, told)]

    def _share_of(self, push: PushId) -> DeviceShare:
        share = self._state.shares.get((push.optimizer_id, push.worker, push.incarnation))
        if share is None:
            raise PeerError(f"a push was refused: its worker {push.worker} shares no device memory with this server")
        return share

    def _whole(self, push: Push, buffers: list[Bytes]) -> list[PushBuffer] | None:
        """A push as the shard wants it; refused when it does not fit, None when a bucket was lost on the way."""
        shard = self._state.optimizer_shards.get(push.id.optimizer_id)
        match push.body:
            case FirstValues():
                pass
            case _ if shard is None:
                raise PeerError(f"a push was refused: there is no optimizer {push.id.optimizer_id[:40]} yet")
            case NewState(state=state):
                check_state(unpack(state, buffers), shard.optimizer_spec)
            case NewValues():
                shard.check(buffers)
            case StepReport() as report:
                check_fit(report, shard.optimizer_spec)
                if not report.skip:
                    shard.check(buffers)
            case PushedGradient() | PushedChange() | PushedValues() as content:
                self._check_spec(push.id.optimizer_id, content, shard.optimizer_spec)
                return self._whole_content(push.id, content, shard, buffers)
        return list(buffers)

    def _whole_content(self, push: PushId, content: Content, shard: Shard, buffers: list[Bytes]) -> list[PushBuffer] | None:
        if content.skip and not content.wants:
            return list(buffers)
        rows: list[Bytes] = []
        if content.rows or content.wants:
            buffers, rows = self._keys.whole(push.worker, content, buffers)
            shard.rows.check_rows(content, rows)
        if content.skip:
            return list(rows)
        # What is not of tables is where its worker has put it, or is put together from what came.
        whole: Sequence[PushBuffer] | None
        if not content.fence:
            whole = self._partial.assemble(push, content, shard.unfiltered(buffers), shard.cut.nbytes)
        elif buffers:
            raise PeerError(f"a push was refused: {len(buffers)} buffers came with one that has a fence, expected none")
        else:
            whole = self._share_of(push).gradients
        if whole is None:
            return None
        shard.check(whole)
        return [*whole, *rows]

    def _check_spec(self, optimizer_id: str, content: Content, spec: OptimizerSpec) -> None:
        check_fit(content, spec)
        steps = spec.apply == "server" and spec.tensors and isinstance(content, PushedGradient) and not content.skip
        if steps and content.hyper != self._hyper.get(optimizer_id):
            check_hyper(content, spec)
            self._hyper[optimizer_id] = content.hyper

    def _tell_status(self, sender: Hello, key: RequestKey) -> list[Effect]:
        """What became of what a worker has sent; and for which ranks it waits, if the policy holds it."""
        state, place = self._receipts.state(sender.rank, sender.incarnation, key)
        told = ToWorker(sender.rank, StatusReply(what=key[0], optimizer_id=key[1], number=key[2], state=state, place=place))
        if key[0] == "push" and state == "received":
            return [ReportHold(PushId(key[1], sender.rank, sender.incarnation, key[2])), told]
        return [told]

    def _pull(self, sender: Hello, pull: Pull, buffers: list[Bytes]) -> list[Effect]:
        shard = self._state.optimizer_shards.get(pull.optimizer_id)
        if shard is None:
            raise PeerError(f"a pull was refused: there is no optimizer {pull.optimizer_id[:40]!r} yet")
        if pull.span is None and (pull.what != "rows" or bool(buffers) == bool(pull.keys and pull.keys.known)):
            raise PeerError("a pull was refused: expected a span of rows, or one list of ids")
        try:
            ids = [self._keys.list_of(sender.rank, pull.keys, iter(buffers))] if pull.span is None else []
        except MissingKeys:
            return [_resend(sender, request_of(pull), lost=False)]
        shard.rows.check_pull(pull.table, pull.span, ids)
        self._receipts.received(sender.rank, sender.incarnation, request_of(pull))
        self._executor.put(PullHere(sender.rank, pull, ids[0] if ids else None), {})
        return []

    def _keep(self, sender: Hello, keep: Keep, buffers: list[Bytes]) -> list[Effect]:
        check_keep(keep, unpack(keep.state, buffers))
        self._executor.put(KeepHere(sender.rank, keep, buffers), {})
        return []

    def note_read(self, sender: Hello, message: ReadRequest) -> None:
        """The coordinator has taken a read request of a worker."""
        self._receipts.received(sender.rank, sender.incarnation, request_of(message))

    def note_answer(self, reply: WorkerReply, incarnation: int) -> None:
        """An answer is sent now: a worker that asks behind it and does not have it has lost it."""
        message = reply.message
        if isinstance(message, Answer | ReadAnswer | PulledRows):  # else a refusal, which ends the worker
            place = message.place if isinstance(message, Answer) else -1
            self._receipts.answered(reply.worker, incarnation, request_of(message), place)

    # The log.

    def carry_out(self, entries: Sequence[LogEntry]) -> None:
        """Hand entries of the log to the shard executor, with the pushes they name."""
        for entry in entries:
            match entry:
                case Reply():
                    answered = PushId(entry.optimizer_id, entry.worker, entry.incarnation, entry.exchange)
                    if entry.early:
                        self._keep_copy(answered)
                    self._executor.put(entry, {})
                    if self._arrived and not entry.early:  # what a repeat brought once more
                        self._arrived.pop(answered, None)
                case Update():
                    self._executor.put(entry, {part.id: self._arrived.pop(part.id) for part in entry.parts})
                case LoadState(again=True):
                    self._arrived.pop(entry.id, None)
                    self._executor.put(entry, {})
                case Seed() | LoadState():
                    self._executor.put(entry, {entry.id: self._arrived.pop(entry.id)})
                case Drop():  # a push is not applied; its answer shall still bring the rows it wanted
                    push, buffers = self._arrived.pop(entry.id, (None, []))
                    shard = self._state.optimizer_shards.get(entry.id.optimizer_id)
                    if push is not None and shard is not None and shard.rows.tables and isinstance(push.body, Content):
                        self._executor.put(entry, {entry.id: (push, buffers)})
                case ForgetWorker():
                    self._forget(entry)
                case _:
                    self._executor.put(entry, {})

    def _keep_copy(self, identity: PushId) -> None:
        """A worker is answered before its push is applied: it may write to that memory from now on, if it is its own."""
        push, buffers = self._arrived[identity]
        copies: list[PushBuffer] = []
        for buffer in buffers:
            if isinstance(buffer, Borrowed):
                copy = self._executor.pool.take(buffer.nbytes)
                copy[:] = buffer
                copies.append(copy)
            else:
                copies.append(buffer)
        self._arrived[identity] = push, copies

    def disconnected(self, sender: Hello) -> None:
        """A worker's connection has ended: what it was writing is not complete, and its memory is not used any more."""
        for identity in self._drop_pending(sender.rank, sender.incarnation):
            self._receipts.lost(sender.rank, sender.incarnation, ("push", identity.optimizer_id, identity.step))
        if any(key[1] == sender.rank for key in list(self._state.shares)):
            self._executor.put(EndShares(sender.rank, sender.incarnation), {})

    def _drop_pending(self, worker: int, incarnation: int) -> list[PushId]:
        dropped = [i for i in self._pending if i.worker == worker and i.incarnation <= incarnation]
        for identity in dropped:
            self._watch.discard(identity)
            del self._pending[identity]
        return dropped

    def close(self) -> None:
        """The server ends, and the executor has ended: no push is waited for, and no worker's stream waits for an answer."""
        self._watch.close()
        self._pending.clear()
        self._arrived.clear()
        self._state.release()
        self._state.shares.clear()

    def _forget(self, entry: ForgetWorker) -> None:
        """A worker has left. Those of its pushes that were counted are still to come in the log; the entry names them."""
        self._drop_pending(entry.worker, entry.incarnation)
        self._partial.forget(entry.worker, entry.incarnation)
        self._keys.forget(entry.worker)
        self._receipts.forget(entry.worker, entry.incarnation)
        self._executor.put(entry, {})
        for identity in [i for i in self._arrived if i.worker == entry.worker and i.incarnation <= entry.incarnation]:
            if identity not in entry.counted:
                del self._arrived[identity]


def _check_pusher(sender: Hello, identity: PushId) -> None:
    if (identity.worker, identity.incarnation) != (sender.rank, sender.incarnation):
        raise PeerError(f"a push of worker {identity.worker} came from worker {sender.rank}")


def _resend(sender: Hello, key: RequestKey, lost: bool) -> Effect:
    what, optimizer_id, number = key
    return ToWorker(sender.rank, Resend(what=what, optimizer_id=optimizer_id, number=number, lost=lost))
