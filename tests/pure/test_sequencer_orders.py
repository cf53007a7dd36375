"""Whatever the order in which parts of pushes arrive, get lost and are sent again, and whoever dies and comes back.

A game is a list of numbers; each is a move, made by whoever can make it. What a worker sends to a shard arrives there in the
order sent, and so do the answers; a shard that is asked says what it knows of a push (`Receipts`). What must hold is worked
out here from what was sent and ordered, never read from the sequencer.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgspec
from hypothesis import given, note, settings
from hypothesis import strategies as st
from sequencing import Bench, told_in

from polytempo.protocol.log import Drop, ForgetWorker, Reply, Update
from polytempo.protocol.messages import Held, Push
from polytempo.protocol.values import PushId
from polytempo.records.check import check_lines
from polytempo.records.replay import replay
from polytempo.server.effects import Effect, ToShards, Write
from polytempo.server.inbox import Receipts
from polytempo.sync.spec import MODES, parse_spec

ALL = (*(mode.example for mode in MODES.values()), "ssp:1", "dssp:0..2", "every:2", "every:2,wait=1", "delay:2")
KINDS = (*["begin"] * 5, *["deliver"] * 9, "repeat", "lose", "die", "back")
PAUSES = (0.0, 0.5, 3.0)
MOVES = st.lists(st.integers(0, len(KINDS) * 8 * len(PAUSES) - 1), min_size=20, max_size=120)


class Game(Bench):
    """Workers that push, and connections that deliver, or do not."""

    def __init__(self, sync: str, size: int, shards: int) -> None:
        self.pipes: dict[tuple[int, int], deque[Push]] = {}  # (worker, shard): sent and not yet arrived
        self.pushes: dict[float, PushId] = {}  # the number each push carries as samples
        self.outstanding: dict[int, dict[int, Push]] = {worker: {} for worker in range(size)}
        self.next_step: dict[int, int] = {}
        self.whole: dict[PushId, set[int]] = {}  # the shards that have it
        self.receipts = [Receipts() for _ in range(shards)]
        self.down: dict[tuple[int, int], deque[Reply]] = {}  # (worker, shard): answered and not yet heard
        self.answers: dict[PushId, dict[int, set[int]]] = {}  # by place, the shards whose answer has come
        self.counted: set[PushId] = set()
        self.applied: Counter[PushId] = Counter()
        self.discarded: set[PushId] = set()
        self.released: dict[int, int] = {}  # by the record
        self.may: dict[int, int] = {}  # by the answers each worker has taken
        self.values: dict[int, int] = {}  # their version
        self.held: set[int] = set()
        self.version = 0
        self.alive = set(range(size))
        super().__init__(sync, size, shards)
        self.start()

    # What is ordered, looked at in order.

    def take(self, orders: list[Effect]) -> list[Effect]:
        for order in super().take(orders):
            if isinstance(order, Write):
                self._line(order.line)
            elif isinstance(order, ToShards):
                self._entry(order.entry)
        return orders

    def _line(self, line: dict[str, Any]) -> None:
        worker = line.get("worker", -1)
        if line["kind"] == "push":
            identity = self.pushes[line["samples"]]
            assert (identity.worker, identity.step) == (worker, line["step"])
            assert identity not in self.counted, "counted twice"
            assert len(self.whole[identity]) == self.shards, "not at all shards"
            self.counted.add(identity)
        elif line["kind"] in ("discard", "refuse"):
            self.discarded.add(PushId("0", worker, self.lives[worker], line["step"]))
        elif line["kind"] == "hold":
            self.held.add(worker)
        elif line["kind"] == "release":
            self.held.discard(worker)
            self.released[worker] = line["step"]
        elif line["kind"] == "apply" and line["server"] == 0:
            assert line["version"] == self.version

    def _entry(self, entry: Any) -> None:
        if isinstance(entry, Update):
            self.version += 1
            assert entry.version == self.version
            for part in entry.parts:
                assert part.id in self.counted
                assert self.pushes[part.samples] == part.id
                self.applied[part.id] += 1
        elif isinstance(entry, Drop):
            waiting = entry.id in self.counted and not self.applied[entry.id]
            assert not waiting or entry.id in self.discarded, "dropped although it was counted"
        elif isinstance(entry, ForgetWorker):
            for receipts in self.receipts:
                receipts.forget(entry.worker, entry.incarnation)
        elif isinstance(entry, Reply):
            self._answered(entry)

    def _answered(self, reply: Reply) -> None:
        worker = reply.worker
        assert worker not in self.held, "answered while it is held"
        assert reply.step <= self.released[worker], "answered before the release"
        assert (reply.incarnation, reply.version) == (self.lives[worker], self.version)
        if worker not in self.next_step:  # the first of its life
            self.next_step[worker] = reply.exchange + 1
            self.may[worker], self.values[worker] = reply.step, reply.version
            return
        for shard, receipts in enumerate(self.receipts):
            receipts.answered(worker, reply.incarnation, ("push", "0", reply.exchange), reply.place)
            self.down.setdefault((worker, shard), deque()).append(reply)

    def _hear(self, worker: int, shard: int, reply: Reply) -> None:
        """One shard's answer has come; it counts when all have come from the same place."""
        mine = self.outstanding[worker].get(reply.exchange)
        if mine is None or mine.id.incarnation != reply.incarnation:
            return  # it was answered before
        places = self.answers.setdefault(mine.id, {})
        places.setdefault(reply.place, set()).add(shard)
        if len(places[reply.place]) == self.shards:
            del self.outstanding[worker][reply.exchange]
            self.next_step[worker] = self.next_step[worker] if parse_spec(self.sync).capabilities.ahead else reply.step
            self.may[worker] = max(self.may[worker], reply.step)
            self.values[worker] = reply.version

    # Moves.

    def move(self, number: int) -> None:
        kind, pick, pause = number % len(KINDS), number // len(KINDS) % 8, number // len(KINDS) // 8
        self.now += PAUSES[pause]
        if any(at <= self.now for at in self.wakes):
            self.wakes = [at for at in self.wakes if at > self.now]
            self.take(self.sequencer.tick(self.now))
        able = getattr(self, f"_can_{KINDS[kind]}")()
        if able:
            getattr(self, f"_{KINDS[kind]}")(able[pick % len(able)])

    def _can_begin(self) -> list[int]:
        able = [worker for worker in sorted(self.alive) if self.next_step.get(worker, 0) <= self.may.get(worker, -1)]
        return [worker for worker in able if self._has_room(worker)]

    def _has_room(self, worker: int) -> bool:
        """Under delay so many may be under way, counted from the first that was not answered."""
        waiting, ahead = self.outstanding[worker], parse_spec(self.sync).capabilities.ahead
        return not ahead or not waiting or self.next_step[worker] <= min(waiting) + ahead

    def _begin(self, worker: int) -> None:
        serial = float(len(self.pushes) + 1)
        push = self.head(worker, self.next_step[worker], samples=serial, version=self.values[worker])
        self.pushes[serial] = push.id
        self.whole[push.id] = set()
        self.next_step[worker] += 1
        self._send_out(worker, push)

    def _send_out(self, worker: int, push: Push) -> None:
        self.outstanding[worker][push.id.step] = push
        for shard in range(self.shards):
            self.pipes.setdefault((worker, shard), deque()).append(push)

    def _can_deliver(self) -> list[tuple[int, int, bool]]:
        up = [(*pipe, True) for pipe, waiting in self.pipes.items() if waiting]
        return sorted(up + [(*pipe, False) for pipe, waiting in self.down.items() if waiting])

    def _deliver(self, pipe: tuple[int, int, bool]) -> None:
        worker, shard, upward = pipe
        if not upward:
            self._hear(worker, shard, self.down[worker, shard].popleft())
            return
        push = self.pipes[worker, shard].popleft()
        if push.id.incarnation < self.lives[worker]:
            self.send(push, [shard])
        elif self.receipts[shard].received(worker, push.id.incarnation, ("push", "0", push.id.step)):
            self.whole[push.id].add(shard)
            self.send(push, [shard])

    def _can_lose(self) -> list[tuple[int, int, bool]]:
        return self._can_deliver()

    def _lose(self, pipe: tuple[int, int, bool]) -> None:
        worker, shard, upward = pipe
        (self.pipes if upward else self.down)[worker, shard].popleft()

    def _can_repeat(self) -> list[tuple[int, int]]:
        return [(worker, step) for worker in sorted(self.alive) for step in sorted(self.outstanding[worker])]

    def _repeat(self, which: tuple[int, int]) -> None:
        worker, step = which
        push = self.outstanding[worker][step]
        self._send_out(worker, msgspec.structs.replace(push, attempt=push.attempt + 1))

    def _can_die(self) -> list[int]:
        return sorted(self.alive)[1:]

    def _die(self, worker: int, reason: str = "lost") -> None:
        self.alive.discard(worker)
        for state in (self.released, self.next_step, self.may):
            state.pop(worker, None)
        self.held.discard(worker)
        self.outstanding[worker] = {}
        for shard in range(self.shards):
            self.down.pop((worker, shard), None)
        self.leave(worker, reason)

    def _can_back(self) -> list[int]:
        return sorted(set(range(self.size)) - self.alive)

    def _back(self, worker: int) -> None:
        self.alive.add(worker)
        self.come_back(worker)

    # The end.

    def settle(self) -> None:
        """Nothing is lost any more; whoever has heard nothing asks."""
        for _ in range(20):
            while able := self._can_deliver():
                self._deliver(able[0])
            asking = self._can_repeat()
            for worker, step in asking:
                self._ask(worker, step)
            if not self._can_deliver():
                break
        assert {worker for worker, _ in self._can_repeat()} <= self.held, "somebody hears nothing although it is not held"

    def _ask(self, worker: int, step: int) -> None:
        """Everything that was sent has arrived or is lost: the shards say which."""
        push = self.outstanding[worker][step]
        for _, answer in told_in(self.sequencer.ask(push.id)):
            assert isinstance(answer, Held)
            assert worker in self.held
        for shard, receipts in enumerate(self.receipts):
            state, place = receipts.state(worker, push.id.incarnation, ("push", "0", step))
            if state == "unknown":
                self.pipes.setdefault((worker, shard), deque()).append(push)
            elif state == "answered" and shard not in self.answers.get(push.id, {}).get(place, ()):
                self.take(self.sequencer.repeat(push.id, place))

    def finish(self) -> None:
        self.settle()
        for worker in sorted(self.alive):
            self._die(worker, "finished")
        assert all(count == 1 for count in self.applied.values()), "applied twice"
        assert self.applied.keys() | self.discarded == self.counted, "a push that was counted is lost"
        assert not self.applied.keys() & self.discarded


@given(size=st.integers(2, 4), shards=st.integers(1, 3), moves=MOVES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_every_push_counts_once_and_nobody_is_answered_too_early_or_never(size: int, shards: int, moves: list[int]) -> None:
    """Each game under every mode: to make up a game takes longer than to play it."""
    for sync in ALL:
        note(f"under {sync}")  # the last one is the one that failed
        game = Game(sync, size, shards)
        for number in moves:
            game.move(number)
        game.finish()
        spec = parse_spec(sync)
        check_lines(game.lines, spec, size)
        replay(game.lines, spec.policy(size))
