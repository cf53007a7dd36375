"""The ledger of a job, at the sequencer: which samples are leased to whom, and which are trained on.

    evenly      a worker's pushes say how many samples it has taken of its shard. A push that is counted and not applied
                does not count: its worker was as far as the push before it says
    by weights  a push names the places of the epoch's order that it was made of; those of an update are done. A place that
                is done again is of another *turn*: another time through the epoch, without `set_epoch`
    leased      each worker takes as many as it manages (`sync/sample_queue.py`): what it needs now, and more ahead while
                there is much left, so that near the end of an epoch no slow worker holds what fast ones could take. The
                places of a discarded push return to the queue, and so does what its worker gives back, or held when it left,
                but for what is in pushes that are still to be applied. A worker asks for the next turn once it was told that
                nothing is left of one. What returns after that is leased first in the next turn, or by a worker that asks
                for an earlier epoch: each answer names those that have such places. A push does not name the turn: it is of
                the first in which its worker holds the places

What earlier jobs have done of an epoch is left out by the samplers: places are of what they have left. A checkpoint has what
is done of each sampler's last epoch, behind what earlier jobs have done of it; where places are leased, also of those before
that are not done. What was only looked at is in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from polytempo.protocol.messages import LeaseSamples, Push, SamplesLeased
from polytempo.protocol.values import Position
from polytempo.sync.epoch_parts import name_of, parts_of
from polytempo.sync.sample_queue import Range, SampleQueue, gathered, merged, without

#: A worker holds at most this part of what is left for each worker, beyond what it needs now.
AHEAD = 4
#: Epochs of a sampler that are kept: what returns late is leased to workers that ask for an earlier epoch.
EPOCHS = 4


@dataclass
class Turn:
    """One time through what was left of an epoch of a sampler."""

    queue: SampleQueue
    trained: list[Range] = field(default_factory=list)  #: what updates were made of

    def add(self, places: Iterable[Range]) -> None:
        self.trained = merged([*self.trained, *places])


class SampleLedger:
    """The samples of a job of some workers. `earlier`: the parts of the jobs that it goes on from."""

    def __init__(self, size: int, earlier: Sequence[dict[str, Any]] = ()) -> None:
        self._size, self._earlier = size, earlier
        self._turns: dict[tuple[str, int], dict[int, Turn]] = {}  # by sampler and epoch, then by number
        self._leased: set[tuple[str, int]] = set()  # samplers and epochs that places were leased of
        self._answers: dict[int, SamplesLeased] = {}  # the last to each worker, which may be lost on its way
        self._taken: list[dict[str, Position]] = [{} for _ in range(size)]  # evenly: of each worker, by sampler
        self._before = list(self._taken)  # as of the push before the last

    # Leases.

    def lease(self, worker: int, asked: LeaseSamples) -> SamplesLeased:
        """What a worker gets; asked again, the same."""
        last = self._answers.get(worker)
        if last is not None and last.request == asked.request:
            return last
        key = asked.sampler, asked.epoch
        for turn, places in self._held(worker, key, asked.back):
            turn.queue.give_back(worker, places)
        for turn, places in self._held(worker, key, asked.done):
            turn.queue.finish(worker, places)
        taken = self._take(worker, asked) if asked.count else []
        before = sorted(epoch for sampler, epoch in self._turns if sampler == asked.sampler and epoch < asked.epoch)
        earlier = tuple(epoch for epoch in before if any(turn.queue.left for turn in self._of(asked.sampler, epoch)))
        answer = self._answers[worker] = SamplesLeased(request=asked.request, ranges=tuple(taken), earlier=earlier)
        return answer

    def _take(self, worker: int, asked: LeaseSamples) -> list[Range]:
        """What has returned of earlier turns comes first: their order is the same."""
        key = asked.sampler, asked.epoch
        if asked.turn >= 0 or key not in self._leased:
            self._leased.add(key)
            self._open(key, max(asked.turn, 0), asked.length)
        turns = sorted(self._turns.get(key, {}).items())
        queues = [turn.queue for number, turn in turns if asked.turn < 0 or number <= asked.turn]
        queue = next((queue for queue in queues if queue.left), None)
        if queue is None:
            return []
        ahead = min(asked.ahead, queue.left // (AHEAD * self._size)) // asked.count
        return queue.take(worker, (1 + ahead) * asked.count)

    def _open(self, key: tuple[str, int], number: int, length: int) -> Turn:
        turns = self._turns.setdefault(key, {})
        if number not in turns:
            turns[number] = Turn(SampleQueue(length))
            self._turns = {old: kept for old, kept in self._turns.items() if old[0] != key[0] or old[1] > key[1] - EPOCHS}
        return turns[number]

    def _of(self, sampler: str, epoch: int) -> list[Turn]:
        return [turn for _, turn in sorted(self._turns.get((sampler, epoch), {}).items())]

    def _held(self, worker: int, key: tuple[str, int], places: Iterable[Range]) -> Iterator[tuple[Turn, list[Range]]]:
        """The turns of which a worker has leased these places, and which of them."""
        for turn in self._of(*key):
            if here := turn.queue.held(worker, places):
                places = without(places, here)
                yield turn, here

    def _made_of(self, push: Push) -> Iterator[tuple[Turn, list[Range]]]:
        for one in push.measures.positions:
            yield from self._held(push.id.worker, (one.sampler, one.epoch), one.done)

    def left(self, worker: int, pending: Iterable[Push]) -> None:
        """A worker is gone, and these of its pushes are still to be applied."""
        self._answers.pop(worker, None)
        kept = [found for push in pending if push.id.worker == worker for found in self._made_of(push)]
        for turn in [turn for turns in self._turns.values() for turn in turns.values()]:
            needed = [place for other, places in kept if other is turn for place in places]
            turn.queue.give_back(worker, without(turn.queue.held(worker), needed))

    # Pushes.

    def counted(self, push: Push) -> None:
        worker = push.id.worker
        if positions := push.measures.positions:
            evenly = {position.sampler: position for position in positions if not position.length}
            self._before[worker], self._taken[worker] = self._taken[worker], self._taken[worker] | evenly

    def applied(self, pushes: Sequence[Push]) -> None:
        if self._leased:
            for push in pushes:
                for turn, places in self._made_of(push):
                    turn.queue.finish(push.id.worker, places)
                    turn.add(places)
            return
        dealt = [one for push in pushes for one in push.measures.positions if one.length]
        found = gathered(((one.sampler, one.epoch, one.length), one.done) for one in dealt)
        for (sampler, epoch, length), places in found.items():
            turns = self._of(sampler, epoch)
            if not turns or turns[-1].queue.length != length or without(places, turns[-1].trained) != places:
                turns.append(self._open((sampler, epoch), len(turns), length))
            turns[-1].add(places)

    def discarded(self, push: Push) -> None:
        for turn, places in self._made_of(push):
            turn.queue.give_back(push.id.worker, places)

    # Checkpoints.

    def parts(self, ahead: Collection[int], lost: Collection[int]) -> list[dict[str, Any]]:
        """How far each sampler is: this job's part, after those of the jobs it goes on from. The last push of the workers in
        `ahead` is not applied, and the job went on without those that are `lost`."""
        dealt = self._dealt()
        taken = [(self._before if worker in ahead else self._taken)[worker] for worker in range(self._size)]
        samplers: dict[str, list[tuple[int, int] | None]] = {}
        left_out: dict[str, set[int]] = {}
        for name in dict.fromkeys(name for own in self._taken for name in own if name not in dealt):  # as they came
            positions = [own.get(name) for own in taken]
            if any(positions):  # else none of it is applied yet
                samplers[name], left_out[name] = self._shares(positions, lost)
        own_parts = [part for parts in dealt.values() for part in parts]
        return own_parts + parts_of(samplers, [part for part in self._earlier if name_of(part) not in dealt], left_out)

    def _shares(
        self, positions: Sequence[Position | None], lost: Collection[int]
    ) -> tuple[list[tuple[int, int] | None], set[int]]:
        """How far each share of the data is, and which are left out. Where several workers take the same share, as the ranks
        of one replica of a model do, one of them says so."""
        size = next((position.parts for position in positions if position and position.parts), self._size)
        places: list[tuple[int, int] | None] = [None] * size
        left_out = set(range(size))
        for worker, position in enumerate(positions):
            share = position.part if position and position.parts else worker
            if share < size and worker not in lost:
                left_out.discard(share)
            if position and (position.parts or self._size) == size:
                places[share] = max(places[share] or (0, 0), (position.epoch, position.taken))
        return places, left_out

    def _dealt(self) -> dict[str, list[dict[str, Any]]]:
        """The parts of samplers whose places were dealt out, by name. Another turn of an epoch starts over, without what
        earlier jobs have done of it."""
        last = dict(key for key in sorted(self._turns) if any(one.trained for one in self._of(*key)))
        before: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for part in self._earlier:
            before.setdefault((name_of(part), part["epoch"]), []).append(part)
        result: dict[str, list[dict[str, Any]]] = {sampler: [] for sampler in last}
        for sampler, epoch in sorted({*self._turns, *before}):
            turns, final = self._of(sampler, epoch), last.get(sampler, -1)
            earlier = before.get((sampler, epoch), [])
            lacks = any(not one.queue.is_done for one in turns) if turns else any("done" in part for part in earlier)
            if final < 0 or (epoch < final and not (lacks and self._leased and epoch > final - EPOCHS)):
                continue
            trained = [one for one in turns if one.trained]
            if len(trained) < 2:
                result[sampler] += earlier
            if epoch <= final and turns:
                turn = (trained or turns)[-1]
                done = [list(place) for place in turn.trained]
                result[sampler].append({"sampler": sampler, "epoch": epoch, "length": turn.queue.length, "done": done})
        return result
