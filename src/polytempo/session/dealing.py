"""Which samples a worker was dealt, and which of them its steps were made of, in `bsp+balance` and `anytime`.

Samplers hand out batches through here. A `DataLoader` keeps their order, so a step is made of the batch that was drawn first
and is not trained on yet, whatever the loader has read ahead.

    draws       are numbered: pass of a sampler, joint batch in the pass. A pass is one time through a sampler that trains;
                passes in which gradients are disabled, or of samplers with `training=False`, have no number
    weights     a table of (since, weights): a joint batch is cut by the weights in force at its number, on every worker
    frozen      between a push and its answer nothing is drawn: a push says what its worker has drawn last, and new weights
                hold from the first joint batch on that no worker has drawn
    leases      where `take` is set, places come from the queue at the sequencer in place of a cut

Which of several passes a step was made of: one that goes on before one that has ended, of those that have ended one that has
trained before (a loader has read the rest of it ahead) before others (they were looked at); of these the last that was drawn
from. One that has ended and that no loader holds any more was left early if a loader holds a later one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from polytempo.errors import PolytempoError, UsageError
from polytempo.protocol.values import Position
from polytempo.sync.directives import Directive, NextShares
from polytempo.sync.sample_queue import Range, merged
from polytempo.sync.shares import ShareWeights
from polytempo.sync.spec import Spec

#: The number of a draw: pass, joint batch in the pass.
Draw = tuple[int, int]
#: Leases places: of a sampler, in an epoch, whose order has a length, up to a count. None are left: an empty list.
Take = Callable[[str, int, int, int], list[Range]]

#: Leases, for a new pass, what has returned of earlier epochs; and names those epochs, before one whose order has a length.
Earlier = Callable[[str, int, int], Sequence[int]]

#: Samples that are leased at a time where batches are made by a loader, until a step has said how large they are.
CHUNK = 32

#: Seconds that a loader's thread waits for the end of an exchange.
PATIENCE = 600.0


@dataclass(frozen=True)
class DealtBatch:
    """A batch, or a micro-batch, that a sampler hands out: places of the epoch's order."""

    places: tuple[Range, ...]
    samples: int
    cost: float  #: what it is expected to cost: its samples, or in the units of the sampler's `cost`
    ends_share: bool = True  #: is it the last of this worker's share of the joint batch?
    epoch: int | None = None  #: whose order it is of, where that is not the pass's: places that returned too late for theirs
    length: int = 0  #: of that order


@dataclass(eq=False)
class DealtPass:
    """One time through a sampler."""

    sampler: str
    epoch: int
    length: int  #: places of the epoch's order
    number: int = -1  #: -1: it has not drawn yet, or does not train
    following: int = 0  #: the joint batch that is cut next
    share: deque[DealtBatch] = field(default_factory=deque)  #: what is left of this worker's share of the one before
    drawn: deque[DealtBatch] = field(default_factory=deque)  #: handed out, and not trained on
    again: deque[DealtBatch] = field(default_factory=deque)  #: abandoned: handed out again first
    earlier: deque[tuple[int, int]] = field(default_factory=deque)  #: epochs of which places may have returned, and lengths
    singles: bool = False  #: samples are handed out one by one, and a loader makes batches of them
    each: int = CHUNK  #: there, samples of the last step; or of the loader's batches
    fixed: bool = False  #: and these are known
    ended: bool = False
    complete: bool = False  #: and all of it was drawn
    trained: int = 0  #: batches
    at: int = 0  #: the moment of its last draw, counted over all passes
    held_by: Callable[[], object | None] = lambda: None  #: the iterator, as long as a loader holds it

    def position(self, batch: DealtBatch) -> Position:
        """What a push says of a batch."""
        epoch, length = (self.epoch, self.length) if batch.epoch is None else (batch.epoch, batch.length)
        return Position(epoch, batch.samples, self.sampler, done=batch.places, length=length)


#: The batches of one joint batch that are a worker's: by its number in the pass, and weights; empty at the end of the pass.
Cut = Callable[[int, ShareWeights], Sequence[DealtBatch]]


class Dealing:
    """The batches of one worker.

    Args:
        rank: The worker's.
        size: The number of workers.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.spec: Spec | None = None  #: the mode by which batches are dealt; None: samplers share evenly
        self.take: Take | None = None  #: leases places, in `anytime`
        self.take_returned: Take | None = None  #: and those that have returned of earlier epochs
        self.earlier: Earlier | None = None  #: which are these?
        self.last: list[tuple[DealtPass, DealtBatch]] = []  #: what the last step was made of, by sampler
        self._even = tuple((worker, 1.0) for worker in range(size))
        self._table: list[tuple[Draw, ShareWeights]] = [((0, 0), self._even)]
        self._passes: list[DealtPass] = []
        self._numbered = 0
        self._moment = 0
        self._last_draw: Draw | None = None
        self._trainers: set[str] = set()  # samplers that steps were made of
        self._returned: list[Position] = []  # places of passes that are over
        self._looked_at: list[Position] = []
        self._state = threading.Condition()
        self._frozen_by: int | None = None  # the thread that pushes

    def use(self, spec: Spec) -> None:
        """An optimizer of a mode that deals batches is made."""
        self.spec = spec

    # Draws.

    def begin(self, sampler: str, epoch: int, length: int) -> DealtPass:
        """A sampler is gone through once more."""
        one = DealtPass(sampler, epoch, length)
        with self._state:
            self._passes.append(one)
        return one

    def draw(self, one: DealtPass, cut: Cut, trains: bool) -> DealtBatch | None:
        """The next batch of a pass; None at its end. `trains`: gradients are enabled, or the sampler is known to train."""
        with self._turn():
            self._moment += 1
            one.at = self._moment
            if trains and one.number < 0:
                one.number = self._numbered
                self._numbered += 1
            if one.again:
                batch = one.again.popleft()
            else:
                if not one.share:
                    one.share.extend(self._next_share(one, cut))
                if not one.share:
                    return None
                batch = one.share.popleft()
            if one.number >= 0:
                one.drawn.append(batch)
            return batch

    def lease(self, one: DealtPass, count: int, cost: Callable[[Sequence[Range]], float]) -> DealtBatch | None:
        """The next micro-batch of a pass whose places are leased; None where none are left. Where a loader makes batches of
        single samples, these are handed out one by one: of places that have returned there may be fewer than its batch has.

        Args:
            one: The pass.
            count: Samples of a micro-batch; 0: as in the last step.
            cost: What places cost.
        """
        with self._state:
            batch = one.again.popleft() if one.again else one.share.popleft() if one.share else None
            wanted = count or one.each
        if batch is None:
            batches = self._leased(one, wanted, cost)
            if one.singles:
                batches = [_single(batch, place) for batch in batches for span in batch.places for place in range(*span)]
            if not batches:
                return None
            batch = batches[0]
            with self._state:
                one.share.extend(batches[1:])
        with self._state:
            self._moment += 1
            one.at, one.number = self._moment, max(one.number, 0)
            one.drawn.append(batch)
        return batch

    def _leased(self, one: DealtPass, count: int, cost: Callable[[Sequence[Range]], float]) -> list[DealtBatch]:
        """Places of a micro-batch: what has returned of earlier epochs comes first."""
        assert self.take is not None
        while one.earlier and self.take_returned is not None:
            epoch, length = one.earlier[0]
            if ranges := self.take_returned(one.sampler, epoch, length, count):
                return [DealtBatch(tuple(ranges), _size(ranges), float(_size(ranges)), epoch=epoch, length=length)]
            one.earlier.popleft()
        ranges = self.take(one.sampler, one.epoch, one.length, count)
        return [DealtBatch(tuple(ranges), _size(ranges), cost(ranges))] if ranges else []

    def end(self, one: DealtPass, complete: bool) -> None:
        """A pass has ended; where the script has left it early, what is drawn and not trained on never will be."""
        with self._state:
            one.ended, one.complete = True, complete
            if not complete:
                self._drop(one)

    def weights_at(self, number: Draw) -> ShareWeights:
        """The weights by which this joint batch is cut."""
        return next((weights for since, weights in reversed(self._table) if since <= number), self._table[0][1])

    def _next_share(self, one: DealtPass, cut: Cut) -> Sequence[DealtBatch]:
        if one.number < 0:
            share = cut(one.following, self._even)
        else:
            number = (one.number, one.following)
            share = cut(one.following, self.weights_at(number))
            if share:
                self._last_draw = max(number, self._last_draw or number)
        one.following += 1
        return share

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Nothing is drawn between a push and its answer."""
        with self._state:
            here = threading.get_ident()
            if not self._state.wait_for(lambda: self._frozen_by in (None, here), PATIENCE):
                raise PolytempoError(
                    f"worker {self.rank}: a batch was asked for in another thread than that of step(), whose exchange did "
                    f"not end within {PATIENCE:.0f} s; draw batches in the thread that calls step()"
                )
            yield

    # Steps.

    def trained(self, samples: float | None = None) -> tuple[Position, ...]:
        """A step is made: of which places. `last` holds the batches; it is empty where no sampler has dealt any.

        Args:
            samples: The weight that the script gave, which may be in other units than samples; a step is one batch. Where a
                loader makes batches of single samples, it is how many.
        """
        with self._state:
            chosen = self._training()
            self.last = []
            for one in chosen:
                if one.singles and not one.fixed:
                    one.each = self._number_of(samples)
                for _ in range(min(one.each, len(one.drawn)) if one.singles else 1):
                    self.last.append((one, one.drawn.popleft()))
                one.trained += 1
            self._trainers |= {one.sampler for one in chosen}
            over = [other for one in chosen for other in self._passes if other.sampler == one.sampler and other.at < one.at]
            kept = [one for one in self._passes if (not one.ended or (one.drawn and one.trained)) and one not in over]
            for one in self._passes:
                if one not in kept:
                    self._drop(one)
            self._passes = kept
        return tuple(one.position(batch) for one, batch in self.last)

    def _number_of(self, samples: float | None) -> int:
        if samples is None or samples != int(samples):
            raise UsageError(
                f"worker {self.rank}: the samples of a micro-batch are not known: expected step(samples=len(x)), or "
                f"DistributedSampler(..., batch_size=) with the loader's batch_size, got samples={samples}"
            )
        return int(samples)

    def _drop(self, one: DealtPass) -> None:
        """A pass is over: what it has leased and not trained on goes back. One that was gone through to its end without a
        step was looked at: its places are done."""
        if self.take is not None and one.number >= 0:
            left = (*one.drawn, *one.again, *one.share)
            looked_at = [batch for batch in left if one.complete and not one.trained and batch.epoch is None]
            self._looked_at += [one.position(batch) for batch in looked_at]
            self._returned += [one.position(batch) for batch in left if batch not in looked_at]
        one.drawn.clear()
        one.again.clear()
        one.share.clear()

    def leave(self) -> None:
        """No further step is made."""
        with self._state:
            for one in self._passes:
                self._drop(one)
            self._passes = []

    def returned(self) -> tuple[list[Position], list[Position]]:
        """Leased places of passes that are over, since the last call: those that none was trained on, to be given back, and
        those that were only looked at."""
        with self._state:
            found, self._returned, self._looked_at = (self._returned, self._looked_at), [], []
            return found

    @property
    def in_pass(self) -> bool:
        """Is the script inside a pass that trains?"""
        with self._state:
            return any(one.number >= 0 and not one.ended for one in self._passes)

    def _training(self) -> list[DealtPass]:
        """Of each sampler that trains the pass that the step was made of."""
        drawn = [one for one in self._passes if one.drawn]
        held = {one.sampler: one.at for one in sorted(drawn, key=lambda one: one.at) if one.held_by() is not None}
        drawn = [one for one in drawn if not (one.ended and one.held_by() is None and one.at < held.get(one.sampler, 0))]
        training = [one for one in drawn if not one.ended or one.trained]
        if not training:  # a loader has read a whole pass ahead, before the first step on it
            training = [one for one in drawn if one.sampler in self._trainers] or drawn
            training = sorted(training, key=lambda one: one.at)[-1:]
        best: dict[str, DealtPass] = {}
        for one in sorted(training, key=lambda one: (not one.ended, one.trained > 0 and one.ended, one.at)):
            best[one.sampler] = one
        return list(best.values())

    def samples(self, upcoming: bool) -> float:
        """Samples of the batch that the next step will be made of, or of the last where there is none."""
        with self._state:
            following, before = [one.drawn[0] for one in self._training()], [batch for _, batch in self.last]
        batches = (following or before) if upcoming else (before or following)
        return float(sum(batch.samples for batch in batches)) or 1.0

    def share(self) -> float:
        """This worker's share of the joint batch that is cut next, relative to an even one."""
        with self._state:
            weights = self._table[-1][1]
            whole = sum(weight for _, weight in weights)
            return dict(weights).get(self.rank, 0.0) * len(weights) / whole

    def abandoned(self) -> tuple[Position, ...]:
        """What the last step was made of is not trained on after all: it is drawn again first.

        Returns:
            What cannot be drawn again by this worker, since its pass has ended: to be given back.
        """
        with self._state:
            gone = [(one, batch) for one, batch in self.last if one.ended]
            for one, batch in reversed(self.last):
                if not one.ended:
                    one.again.appendleft(batch)
            self.last = []
        return tuple(one.position(batch) for one, batch in gone)

    def freeze(self) -> Draw | None:
        """A push is made: nothing is drawn until its answer is here.

        Returns:
            The last draw, for `Push.drawn`.
        """
        with self._state:
            self._frozen_by = threading.get_ident()
            return self._last_draw

    def resume(self, told: Directive | None = None) -> None:
        """The answer is here, with new weights maybe."""
        with self._state:
            weights, since = (told.weights, told.since) if isinstance(told, NextShares) else ((), None)
            if weights and self._last_draw is None:
                self._table = [((0, 0), weights)]
                self._numbered = max(self._numbered, since[0] if since else 0)  # it joins others in this pass
            elif weights and weights != self._table[-1][1]:
                following = (self._last_draw[0], self._last_draw[1] + 1) if self._last_draw is not None else (0, 0)
                self._table.append((since or following, weights))
                self._forget()
            self._frozen_by = None
            self._state.notify_all()

    def _forget(self) -> None:
        """Drop weights of the table by which nothing is cut any more."""
        numbers = [(one.number, one.following) for one in self._passes if one.number >= 0 and not one.ended]
        first = min([*numbers, (self._numbered, 0)])
        used = [index for index, (since, _) in enumerate(self._table) if since <= first]
        self._table = self._table[max(used, default=0) :]


def _size(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _single(batch: DealtBatch, place: int) -> DealtBatch:
    """One sample of a batch."""
    return replace(batch, places=((place, place + 1),), samples=1, cost=batch.cost / batch.samples)


def united(positions: Iterable[Position]) -> tuple[Position, ...]:
    """The places of several micro-batches: one position for each sampler, epoch and length."""
    found: dict[tuple[str, int, int], list[Position]] = {}
    for one in positions:
        found.setdefault((one.sampler, one.epoch, one.length), []).append(one)
    return tuple(
        Position(
            epoch,
            sum(one.taken for one in parts),
            sampler,
            done=tuple(merged(place for one in parts for place in one.done)),
            length=length,
        )
        for (sampler, epoch, length), parts in found.items()
    )
