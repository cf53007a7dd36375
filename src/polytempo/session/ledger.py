"""The ledger of one worker: which samples its samplers have drawn, and which of them its steps were made of.

A *pass* is one time through a sampler. How places of the epoch's order come to this worker:

    evenly      every n-th place: only counted here
    by weights  a joint batch is cut by the weights in force at its number, on every worker (`bsp+balance`): a table of
                (since, weights). Draws of passes that train are numbered: pass, joint batch in the pass. Between a push and
                its answer nothing is drawn: a push says what its worker has drawn last, and new weights hold from the first
                joint batch on that no worker has drawn
    leased      from the queue at the sequencer (`anytime`)

**Of which pass a step was made.** Loaders keep the order of draws: it is the first batch of a pass that was handed out and
not trained on. A loader of ours tells which pass each batch is of that it gives to the script, and when its loop is over. Of
other loaders the ledger sees what they draw ahead, when they have drawn all, and when they let go of a pass. Of the passes
of which something is left a step is made of

    1. those that go on: the loop is inside of them
    2. those that have ended and have trained before: a loader has read the rest of them ahead
    3. where there are none: the last, of a sampler that has trained before if there is one

and of each sampler of one: the first by this order, then the one that was drawn from last. What has ended without a step was
looked at (an evaluation), and so was what is drawn while gradients are disabled. A pass that has ended and is not held by a
loader any more was left early if a loader holds a later one. Where a pass that is shared evenly has trained, and neither its
loader nor `step(samples=...)` tells how much of it, something is left: the loader may have read ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from polytempo.errors import PolytempoError, UsageError
from polytempo.protocol.messages import LeaseSamples, SamplesLeased
from polytempo.protocol.values import Position, RoundPlan
from polytempo.sync.joint_batches import EpochCut
from polytempo.sync.sample_queue import Range, gathered, size_of, split
from polytempo.sync.shares import ShareWeights
from polytempo.sync.spec import Spec

#: The number of a draw: pass, joint batch in the pass.
Draw = tuple[int, int]
#: Whose order places are of: sampler, epoch, length.
Order = tuple[str, int, int]

#: Micro-batches that are leased ahead of the one that is needed, so that not every draw is a message.
AHEAD = 3
#: Samples that are leased at a time where batches are made by a loader, until a step has said how large they are.
CHUNK = 32
#: In place of a turn: places that have returned, of any turn.
RETURNED = -1

#: Seconds that a loader's thread waits for the end of an exchange.
PATIENCE = 600.0

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DealtBatch:
    """A batch, or a micro-batch, that a sampler hands out."""

    position: Position  #: its places, and of which epoch's order they are: they may have returned too late for the pass's
    cost: float  #: what it is expected to cost: its samples, or in the units of the sampler's `cost`
    ends_share: bool = True  #: is it the last of this worker's share of the joint batch?


@dataclass(eq=False)
class Pass:
    """One time through a sampler."""

    sampler: str
    epoch: int
    share: tuple[int, int] | None = None  #: evenly: the part of the data that it gives, of how many, where not the worker's
    cut: EpochCut | None = None  #: how the epoch is cut, where batches are dealt out
    leased: bool = False
    earlier: set[int] = field(default_factory=set)  #: epochs of which places may have returned
    order_of: Callable[[int], Sequence[int]] = lambda epoch: ()  #: the samples of these, in their order
    singles: bool = False  #: leased places are handed out one by one, and a loader makes batches of them
    each: int = CHUNK  #: samples of a leased micro-batch
    known: bool = True  #: are these the loader's? Else the steps tell
    told: int = 0  #: samples trained on, evenly as far as steps or the loader tell
    orders: dict[int, Sequence[int]] = field(default_factory=dict)
    drawn: int = 0  #: samples handed out to the loader
    fresh: int = (
        0  #: of them (or of batches that were dealt) those that came since the last step: to the script, if it tells
    )
    number: int = -1  #: -1: it has not drawn yet, or does not train
    following: int = 0  #: the joint batch that is cut next
    ready: deque[DealtBatch] = field(default_factory=deque)  #: this worker's, not handed out
    batches: deque[DealtBatch] = field(default_factory=deque)  #: handed out, and not trained on
    at: int = 0  #: the moment of its last draw, counted over all passes
    ended: bool = False  #: nothing more is drawn
    complete: bool = False  #: and all of it was
    held: bool = True  #: by its loader
    tells: bool = False  #: the loader says what it gives to the script
    over: bool = False  #: and that its loop has ended
    trained: bool = False  #: steps were made of it

    @property
    def order(self) -> Order:
        """Whose order its places are of."""
        length = 0 if self.cut is None else self.cut.leasable if self.leased else len(self.cut.order)
        return self.sampler, self.epoch, length

    @property
    def goes_on(self) -> bool:
        """Is the script inside of it, as far as the loader tells?"""
        return not (self.over if self.tells else self.ended)

    @property
    def left(self) -> bool:
        """May a step be made of it?"""
        if self.cut is not None:
            return bool(self.batches) and (self.fresh > 0 or not self.tells)
        unknown = self.trained and not self.tells and (self.goes_on or self.told < self.drawn)
        return self.fresh > 0 or unknown

    @property
    def used(self) -> bool:
        """Was it trained on, and not only looked at? An empty one counts."""
        return self.trained or not (self.drawn if self.cut is None else self.cut.order)

    def samples(self, epoch: int) -> Sequence[int]:
        """Where batches are dealt out: the samples of this epoch, or of an earlier one, in their order."""
        if epoch not in self.orders:
            self.orders[epoch] = self.order_of(epoch) if self.cut is None or epoch != self.epoch else self.cut.order
        return self.orders[epoch]

    def indices(self, batch: DealtBatch) -> list[int]:
        """The samples of a batch."""
        order = self.samples(batch.position.epoch)
        return [order[place] for start, stop in batch.position.done for place in range(start, stop)]

    def hand_out(self, samples: int) -> None:
        """The loader gives a batch of so many samples to the script."""
        self.fresh = self.fresh * self.tells + (samples if self.cut is None else 1)
        self.tells = True

    def take(self, samples: float | None) -> int:
        """Evenly: a step was made of it, of this many samples by the script's word; the number that came since the last."""
        came, self.fresh = self.fresh, 0
        self.told += int(samples) if samples is not None else came * self.tells
        return came

    def position(self) -> Position:
        """Evenly: samples trained on where `step(samples=...)` or the loader says so, else those drawn by the loader."""
        taken = min(self.told, self.drawn) if self.told else self.drawn
        return Position(self.epoch, taken, self.sampler, *self.share or (-1, 0))


class Held(Generic[T]):
    """What a loader holds of a pass: the iterator of its sampler."""

    def __init__(self, one: Pass, items: Iterator[T]) -> None:
        self._pass, self._items = one, items

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._items)

    def __del__(self) -> None:
        self._pass.held = False


class Ledger:
    """The samples of one worker.

    Args:
        rank: The worker's.
        size: The number of workers.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.spec: Spec | None = None  #: the mode by which batches are dealt; None: samplers share evenly
        self.leases: Leases | None = None  #: leases places, in `anytime`
        self._made_of: list[tuple[Pass, DealtBatch]] = []  # the batches of the last step that were dealt
        self.counted: float | None = None  #: samples of the last step, as far as samplers know; None: none has drawn them
        self._datasets: dict[int, list[Callable[[], object]]] = {}  # by length, in the order in which samplers came
        self._samplers = 0
        self._passes: list[Pass] = []
        self._training: dict[str, Pass] = {}  # of each sampler that steps were made of, the last
        self._moments = count(1)
        self._even = tuple((worker, 1.0) for worker in range(size))
        self._table: list[tuple[Draw, ShareWeights]] = [((0, 0), self._even)]
        self._numbered = 0
        self._last_draw: Draw | None = None
        self._returned: list[Position] = []  # leased places of passes that are over, that none was trained on
        self._looked_at: list[Position] = []
        self._state = threading.Condition()
        self._frozen_by: int | None = None  # the thread that pushes

    def identify(self, dataset: object, length: int, shuffled: bool, name: str, nameless: bool) -> str:
        """A name for a sampler that is the same on all workers, and in a job that goes on from a checkpoint.

        `nameless`: that checkpoint is of a version that knew one sampler, which had no name. The first one takes it.
        """
        self._samplers += 1
        if nameless and self._samplers == 1:
            return ""
        if name:
            return f"{name} of {length}"
        known = self._datasets.setdefault(length, [])
        number = next((index for index, other in enumerate(known) if other() is dataset), len(known))
        if number == len(known):
            known.append(_reference(dataset))
        return f"{'shuffled' if shuffled else 'ordered'} {number} of {length}"

    # Draws.

    def begin(self, one: Pass) -> None:
        """A sampler is gone through once more."""
        if one.leased and self.leases is not None:
            one.earlier |= set(self.leases.earlier(one.order))
        with self._state:
            self._passes.append(one)

    def count(self, one: Pass, trains: bool) -> None:
        """A sample of a pass that is shared evenly goes to the loader. `trains`: gradients are enabled, or the sampler is
        known to train."""
        one.drawn += 1
        if trains and not one.tells:
            one.fresh += 1
        one.at = next(self._moments)

    def draw(self, one: Pass, trains: bool = True) -> DealtBatch | None:
        """The next batch of a pass that is dealt out; None at its end."""
        if one.leased and not one.ready:
            one.ready.extend(self._leased(one))  # the sequencer is asked: `step()` in another thread must not wait for it
        with self._turn():
            if trains and one.number < 0:
                one.number = self._numbered
                self._numbered += 1
            if not one.ready and not one.leased:
                one.ready.extend(self._share(one))
            if not one.ready:
                return None
            batch = one.ready.popleft()
            one.at = next(self._moments)
            if one.number >= 0:
                one.batches.append(batch)
            return batch

    def _leased(self, one: Pass) -> list[DealtBatch]:
        """A micro-batch, or the samples of one where a loader makes batches of single samples: of places that have returned
        there may be fewer than its batch has. What has returned of earlier epochs comes first."""
        assert self.leases is not None
        assert one.cut is not None
        order, places = one.order, list[Range]()
        while one.earlier and not places:
            epoch = min(one.earlier)
            order = one.sampler, epoch, len(one.samples(epoch))
            places = self.leases.take_returned(order, one.each)
            if not places:
                one.earlier.discard(epoch)
        if not places:
            order, places = one.order, self.leases.take(one.order, one.each)
        own = order == one.order  # else its cost is not known
        parts = [[(place, place + 1)] for span in places for place in range(*span)] if one.singles else [places]
        return [_batch(order, part, one.cut.cost(part) if own else float(size_of(part))) for part in parts if part]

    def _share(self, one: Pass) -> list[DealtBatch]:
        """This worker's share of the joint batch that follows."""
        assert one.cut is not None
        number = (one.number, one.following)
        weights = self._even if one.number < 0 else self.weights_at(number)
        share = one.cut.share(one.following, self.rank, self.size, weights)
        if share and one.number >= 0:
            self._last_draw = max(number, self._last_draw or number)
        one.following += 1
        last = len(share) - 1
        return [_batch(one.order, places, cost, index == last) for index, (places, cost) in enumerate(share)]

    def weights_at(self, number: Draw) -> ShareWeights:
        """The weights by which this joint batch is cut."""
        return next((weights for since, weights in reversed(self._table) if since <= number), self._table[0][1])

    def end(self, one: Pass) -> None:
        """Nothing more of a pass is drawn; where the script has left it early, what is drawn and not trained on never will
        be trained on."""
        with self._state:
            one.ended = True
            if not one.complete:
                self._drop(one)

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
        """A step is made: of which places, where batches are dealt out (`batches`), else how far this worker is
        in every sampler that trains.

        Args:
            samples: The weight that the script gave, which may be in other units than samples. Where batches are dealt a
                step is one batch; where a loader makes batches of single samples, it is how many.
        """
        with self._state:
            chosen, self._made_of = self._chosen(), []
            came = 0
            for one in chosen:
                if one.cut is None:
                    came += one.take(samples)
                else:
                    self._take_dealt(one, samples)
                one.trained = True
                self._training[one.sampler] = one
            self.counted = float(came) if self._training else None
            self._forget_passes(chosen)
        return tuple(batch.position for _, batch in self._made_of) or self.positions()

    @property
    def batches(self) -> list[DealtBatch]:
        """What the last step was made of, where batches are dealt out."""
        return [batch for _, batch in self._made_of]

    def positions(self) -> tuple[Position, ...]:
        """How far this worker is in every sampler that trains and is shared evenly, as of the last step."""
        return tuple(one.position() for one in self._training.values() if one.cut is None)

    def _chosen(self) -> list[Pass]:
        """Of each sampler that trains the pass that the step was made of."""
        left = [one for one in self._passes if one.left]
        left = [one for one in left if one.cut is not None] or left
        held = {one.sampler: one.at for one in sorted(left, key=lambda one: one.at) if one.held}
        left = [one for one in left if not one.ended or one.held or one.at >= held.get(one.sampler, 0)]
        training = [one for one in left if one.goes_on or one.trained]
        if not training:
            known = [one for one in left if one.sampler in self._training]
            counted = any(one.cut is None for one in left) and self._training  # a step on what the loader had already
            training = sorted(known or ([] if counted else left), key=lambda one: one.at)[-1:]
        training.sort(key=lambda one: (one.goes_on, one.trained, one.at))
        return list({one.sampler: one for one in training}.values())

    def _take_dealt(self, one: Pass, samples: float | None) -> None:
        taken = 1
        if one.singles:
            one.each = one.each if one.known else self._number_of(samples)
            taken = min(one.each, len(one.batches))
        self._made_of += [(one, one.batches.popleft()) for _ in range(taken)]
        one.fresh -= taken * one.tells

    def _number_of(self, samples: float | None) -> int:
        if samples is None or samples != int(samples):
            raise UsageError(
                f"worker {self.rank}: the samples of a micro-batch are not known: expected step(samples=len(x)), or "
                f"DistributedSampler(..., batch_size=) with the loader's batch_size, got samples={samples}"
            )
        return int(samples)

    def _forget_passes(self, chosen: Iterable[Pass]) -> None:
        """Keep the passes of which a later step may be made. What was drawn evenly for this one is not new any more."""
        now = {one.sampler: one.at for one in chosen}
        kept = []
        for one in self._passes:
            if one.cut is None:
                one.fresh = 0
            if one.at >= now.get(one.sampler, 0) and (one.goes_on or (one.left and one.trained)):
                kept.append(one)
            else:
                self._drop(one)
        self._passes = kept

    def _drop(self, one: Pass) -> None:
        """A pass is over: what it has leased and not trained on goes back. One that was gone through to its end without a
        step was looked at: its places are done."""
        if one.leased:
            looked_at = one.complete and not one.trained
            for batch in (*one.batches, *one.ready):
                own = batch.position.epoch == one.epoch
                (self._looked_at if looked_at and own else self._returned).append(batch.position)
        one.batches.clear()
        one.ready.clear()

    def leave(self) -> None:
        """No further step is made."""
        with self._state:
            for one in self._passes:
                self._drop(one)
            self._passes = []
        self.give_back()

    def abandon(self) -> None:
        """What the last step was made of is not trained on after all: it is drawn again first, or given back where nothing
        more is drawn of its pass."""
        with self._state:
            for one, batch in reversed(self._made_of):
                if one.ended:
                    self._returned.append(batch.position)
                else:
                    one.ready.appendleft(batch)
            self._made_of = []

    def give_back(self) -> None:
        """Tell the sequencer of samples that this worker has leased and will not train on."""
        with self._state:
            returned, self._returned = self._returned, []
            looked_at, self._looked_at = self._looked_at, []
        if self.leases is not None:
            self.leases.give_back(returned, looked_at)

    @property
    def in_pass(self) -> bool:
        """Is the script inside a pass that trains, of batches that are dealt out?"""
        with self._state:
            return any(one.number >= 0 and one.goes_on for one in self._passes)

    def samples(self, upcoming: bool) -> float:
        """Samples of the batch that the next step will be made of (`upcoming`), or of that of the last step; of the other
        where there is none."""
        with self._state:
            following = [one.batches[0] for one in self._chosen() if one.batches]
        batches = (following or self.batches) if upcoming else (self.batches or following)
        return float(sum(batch.position.taken for batch in batches)) or 1.0

    # Shares.

    def share(self) -> float:
        """This worker's share of the joint batch that is cut next, relative to an even one."""
        with self._state:
            weights = self._table[-1][1]
            whole = sum(weight for _, weight in weights)
            return dict(weights).get(self.rank, 0.0) * len(weights) / whole

    def freeze(self) -> Draw | None:
        """A push is made: nothing is drawn until its answer is here.

        Returns:
            The last draw, for `Push.drawn`.
        """
        with self._state:
            self._frozen_by = threading.get_ident()
            return self._last_draw

    def resume(self, plan: RoundPlan | None = None) -> None:
        """The answer is here, with new weights maybe."""
        with self._state:
            if plan is not None and plan.weights and self._last_draw is None:
                self._table = [((0, 0), plan.weights)]
                self._numbered = max(self._numbered, plan.since[0] if plan.since else 0)  # it joins others in this pass
            elif plan is not None and plan.weights and plan.weights != self._table[-1][1]:
                following = (self._last_draw[0], self._last_draw[1] + 1) if self._last_draw is not None else (0, 0)
                self._table.append((plan.since or following, plan.weights))
                self._forget_weights()
            self._frozen_by = None
            self._state.notify_all()

    def _forget_weights(self) -> None:
        """Drop weights of the table by which nothing is cut any more."""
        numbers = [(one.number, one.following) for one in self._passes if one.number >= 0 and not one.ended]
        first = min([*numbers, (self._numbered, 0)])
        used = [index for index, (since, _) in enumerate(self._table) if since <= first]
        self._table = self._table[max(used, default=0) :]


class Leases:
    """The places that a worker has leased and not handed out yet, of all its samplers (`server/sample_ledger.py`).

    The sequencer gives less ahead near the end of an epoch. What was leased and not handed out goes back when the worker
    turns to another epoch.

    Args:
        send: Asks the sequencer.
        lock: Held meanwhile.
    """

    def __init__(self, send: Callable[[LeaseSamples], SamplesLeased], lock: AbstractContextManager[object]) -> None:
        self._send, self._lock = send, lock
        self._requests = 0
        self._stock: dict[Order, list[Range]] = {}
        self._turns: Counter[tuple[str, int]] = Counter()  # how often the end of a sampler's epoch was reached

    def take(self, order: Order, count: int) -> list[Range]:
        """Lease up to this many places; none where nothing is left for now: the next call asks for the epoch's next turn."""
        with self._lock:
            self._turn_to(order)
            stock = list(self._stock.get(order, ()))
            asked = self._question(order)
            asked.count, asked.ahead = count - size_of(stock), AHEAD * count
            if asked.count > 0:
                stock += self._send(asked).ranges
            taken, self._stock[order] = split(stock, count)
            self._turns[order[:2]] += not taken
            return taken

    def take_returned(self, order: Order, count: int) -> list[Range]:
        """Lease up to this many places of an epoch that was gone through before: what has returned of it."""
        with self._lock:
            asked = self._question(order)
            asked.turn, asked.count = RETURNED, count
            return list(self._send(asked).ranges)

    def earlier(self, order: Order) -> tuple[int, ...]:
        """Epochs before this one of which places have returned to the queue since all workers came to their end."""
        with self._lock:
            self._turn_to(order)
            return self._send(self._question(order)).earlier

    def give_back(self, positions: Iterable[Position], looked_at: Iterable[Position] = ()) -> None:
        """Places that were handed out and will not be trained on by this worker; `looked_at`: by none, in this turn."""
        with self._lock:
            for position in united(positions):
                self._give_back(order_of(position), position.done)
            for position in united(looked_at):
                asked = self._question(order_of(position))
                asked.done = position.done
                self._send(asked)

    def _give_back(self, order: Order, places: Iterable[Range]) -> None:
        asked = self._question(order)
        asked.back = tuple(places)
        self._send(asked)

    def _turn_to(self, order: Order) -> None:
        """Give back what is left of the sampler's other orders."""
        for other in [other for other in self._stock if other[0] == order[0] and other != order]:
            if stock := self._stock.pop(other):
                self._give_back(other, stock)

    def _question(self, order: Order) -> LeaseSamples:
        self._requests += 1
        sampler, epoch, length = order
        turn = self._turns[sampler, epoch]
        return LeaseSamples(request=self._requests, sampler=sampler, epoch=epoch, length=length, turn=turn)


def united(positions: Iterable[Position]) -> tuple[Position, ...]:
    """The places of several micro-batches: one position for each order."""
    return tuple(
        _position(order, places) for order, places in gathered((order_of(one), one.done) for one in positions).items()
    )


def order_of(position: Position) -> Order:
    """Whose order its places are of."""
    return position.sampler, position.epoch, position.length


def _position(order: Order, places: Sequence[Range]) -> Position:
    sampler, epoch, length = order
    return Position(epoch, size_of(places), sampler, done=tuple(places), length=length)


def _batch(order: Order, places: Sequence[Range], cost: float, ends_share: bool = True) -> DealtBatch:
    return DealtBatch(_position(order, places), cost, ends_share)


def _reference(thing: object) -> Callable[[], object]:
    try:
        return weakref.ref(thing)
    except TypeError:  # a list, a range
        return lambda: thing
