"""A job in front of its sequencer: what workers and shards would say goes in by hand, what is ordered is kept.

bench = Bench("bsp", size=2, shards=3).start()
bench.push(0)                        step 0 of worker 0, at all shards; what was ordered on it
bench.arrive(1, shards=[0, 2])       a part of worker 1's push
bench.entries                        the log so far
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pushes import push_of

from polytempo.protocol.log import Reply
from polytempo.protocol.messages import Push
from polytempo.protocol.push import FirstValues
from polytempo.protocol.values import OptimizerSpec, PushId, TensorInfo
from polytempo.records.lines import RecordLine
from polytempo.server.effects import Checkpoint, Effect, ToShards, ToWorker, WakeAt, Write
from polytempo.server.job_plan import JobPlan, Limits
from polytempo.server.resume_rules import proposal_of
from polytempo.server.sequencer import Sequencer

T = TypeVar("T")

TENSORS = (TensorInfo("weight", (4, 3), "float32", 0), TensorInfo("bias", (4,), "float32", 0))


def optimizer_spec(sync: str, **changes: Any) -> OptimizerSpec:
    facts: dict[str, Any] = {"apply": "server", "optimizer": "SGD", "tensors": TENSORS, "groups": ({"lr": 0.1},)}
    return OptimizerSpec(sync=sync, **{**facts, **changes})


def only(kind: type[T], things: Iterable[Any]) -> list[T]:
    return [thing for thing in things if isinstance(thing, kind)]


def entries_in(orders: Iterable[Effect]) -> list[Any]:
    return [order.entry for order in orders if isinstance(order, ToShards)]


def replies_in(orders: Iterable[Effect]) -> list[Reply]:
    return only(Reply, entries_in(orders))


def told_in(orders: Iterable[Effect]) -> list[tuple[int, Any]]:
    return [(order.worker, order.message) for order in orders if isinstance(order, ToWorker)]


class Bench:
    """One sequencer; `now` stays until it is set."""

    def __init__(
        self,
        sync: str = "bsp",
        size: int = 2,
        shards: int = 2,
        limits: Limits | None = None,
        checkpoint_every: int = 0,
        resumed: dict[str, Any] | None = None,
    ) -> None:
        self.sync, self.size, self.shards = sync, size, shards
        for track in (resumed or {}).get("tracks", {}).values():
            track.setdefault("proposal", proposal_of(optimizer_spec(sync)))
        self.sequencer = Sequencer(JobPlan(size, shards, sync, limits or Limits(), checkpoint_every, resumed or {}))
        self.now = 0.0
        self.lives = dict.fromkeys(range(size), 0)
        self.entries: list[Any] = []
        self.lines: list[RecordLine] = []
        self.wakes: list[float] = []
        self.checkpoints: list[Checkpoint] = []
        self.replies: dict[tuple[str, int], Reply] = {}  # the last to each worker, in each track

    def take(self, orders: list[Effect]) -> list[Effect]:
        self.entries += entries_in(orders)
        self.lines += [order.line for order in orders if isinstance(order, Write)]
        self.wakes += [order.at for order in orders if isinstance(order, WakeAt)]
        self.checkpoints += only(Checkpoint, orders)
        self.replies.update({(reply.optimizer_id, reply.worker): reply for reply in replies_in(orders)})
        return orders

    # Members.

    def start(self, optimizer_id: str = "0", **changes: Any) -> Bench:
        """Everybody makes the same optimizer, and the first gives its values."""
        for worker in range(self.size):
            self.register(worker, optimizer_id, **changes)
        if not self.sequencer.clocks[optimizer_id].seeded:
            self.seed(0, optimizer_id)
        return self

    def register(self, worker: int, optimizer_id: str = "0", **changes: Any) -> list[Effect]:
        offered = optimizer_spec(**{"sync": self.sync, **changes})
        return self.take(self.sequencer.register(worker, self.lives[worker], optimizer_id, offered, self.now))

    def seed(self, worker: int, optimizer_id: str = "0") -> list[Effect]:
        return self.arrive(worker, -1, optimizer_id=optimizer_id, body=FirstValues())

    def leave(self, worker: int, reason: str = "lost") -> list[Effect]:
        return self.take(self.sequencer.left(worker, self.lives[worker], reason, self.now))

    def come_back(self, worker: int, **changes: Any) -> list[Effect]:
        self.lives[worker] += 1
        return self.register(worker, **changes)

    # Pushes.

    def head(self, worker: int, step: int | None = None, optimizer_id: str = "0", **fields: Any) -> Push:
        """What a worker would push next, made on the values of its last answer."""
        reply = self.replies.get((optimizer_id, worker))
        if step is None:
            assert reply is not None, f"worker {worker} was never answered"
            step = reply.step
        identity = PushId(optimizer_id, worker, self.lives[worker], step)
        facts: dict[str, Any] = {"version": reply.version if reply else 0, "hyper": ({"lr": 0.1},)}
        return push_of(identity, **{**facts, **fields})

    def send(self, push: Push, shards: Iterable[int] | None = None) -> list[Effect]:
        """It has arrived at these shards, one after the other."""
        orders: list[Effect] = []
        for shard in range(self.shards) if shards is None else shards:
            brings = push if shard == 0 else None
            orders += self.take(self.sequencer.arrived(shard, push.id, brings, self.now))
        return orders

    def arrive(
        self,
        worker: int,
        step: int | None = None,
        shards: Iterable[int] | None = None,
        optimizer_id: str = "0",
        **fields: Any,
    ) -> list[Effect]:
        return self.send(self.head(worker, step, optimizer_id, **fields), shards)

    def push(self, worker: int, step: int | None = None, **fields: Any) -> list[Effect]:
        """A push, at all shards."""
        return self.arrive(worker, step, **fields)

    def round(self, **fields: Any) -> list[Effect]:
        """Everybody pushes once."""
        return [order for worker in range(self.size) for order in self.push(worker, **fields)]

    # What came of it.

    def lines_of(self, *kinds: str) -> list[RecordLine]:
        return [line for line in self.lines if line["kind"] in kinds]
