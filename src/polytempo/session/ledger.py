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

and of each sampler of one: that which was drawn from last. What has ended without a step was looked at (an evaluation), and
so was what is drawn while gradients are disabled. A pass that has ended and is not held by a
loader any more was left early if a loader holds a later one. Where a pass that is shared evenly has trained, and neither its
loader nor `step(samples=...)` tells how much of it, something is left: the loader may have read ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from polytempo.errors import PolytempoError, UsageError
from polytempo.protocol.messages import LeaseSamples, SamplesLeased
from polytempo.protocol.values import Position
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


@dataclass(frozen=True, eq=False)
class DealtBatch:
    """A batch, or a micro-batch, that a sampler hands out."""

    position: Position  #: its places, and of which epoch's order they are: they may have returned too late for the pass's
    cost: float  #: what it is expected to cost: its samples, or in the units of the sampler's `cost`
    ends_share: bool = True  #: is it the last of this worker's share of the joint batch?


@dataclass(eq=False)
class SamplerPass:
    """One time through a sampler."""

    sampler: str
    epoch: int
    mine: Iterator[int] = field(default_factory=lambda: iter(()))  #: evenly: the samples
    share: tuple[int, int] | None = None  #: and the part of the data that they are, of how many, where not the worker's
    cut: EpochCut | None = None  #: how the epoch is cut, where batches are dealt out
    leased: bool = False
    singles: bool = False  #: what is leased is handed out one by one, and a loader makes batches of it
    each: int = CHUNK  #: samples of a leased micro-batch

    def __post_init__(self) -> None:
        self.earlier: set[int] = set()  #: epochs of which places may have returned
        self.order_of: Callable[[int], Sequence[int]] = lambda epoch: ()  #: the samples of these, in their order
        self._orders = {} if self.cut is None else {self.epoch: self.cut.order}
        self.told = 0  #: samples trained on, evenly, as far as steps or the loader tell
        self.drawn = 0  #: evenly: samples handed out to the loader
        self.fresh = 0  #: of them those that came since the last step; where the loader tells, what it gave to the script
        self.number = -1  #: -1: it has not drawn yet, or does not train
        self.following = 0  #: the joint batch that is cut next
        self.ready: deque[DealtBatch] = deque()  #: this worker's, not handed out
        self.batches: deque[DealtBatch] = deque()  #: handed out, and not trained on
        self.at = 0  #: the moment of its last draw, counted over all passes
        self.complete = False  #: all of it was drawn
        self.held = True  #: by its loader
        self.tells = False  #: the loader says what it gives to the script
        self.over = False  #: and that its loop has ended
        self.trained = False  #: steps were made of it

    @property
    def order(self) -> Order:
        """Whose order its places are of."""
        length = 0 if self.cut is None else self.cut.leasable if self.leased else len(self.cut.order)
        return self.sampler, self.epoch, length

    @property
    def goes_on(self) -> bool:
        """Is the script inside of it, as far as the loader tells?"""
        return not self.over if self.tells else self.held and not self.complete

    @property
    def left(self) -> bool:
        """May a step be made of it?"""
        if self.cut is not None:
            return bool(self.batches) and (self.fresh > 0 or not self.tells)
        unknown = self.trained and not self.tells and (self.goes_on or self.told < self.drawn)
        return self.fresh > 0 or unknown

    @property
    def used(self) -> bool:
        """Was it gone through to its end, and trained on, not only looked at? An empty one counts."""
        return self.complete and (self.trained or not (self.drawn if self.cut is None else self.cut.order))

    def hand_out(self, samples: int) -> None:
        """The loader gives a batch of this many samples to the script."""
        self.fresh = self.fresh * self.tells + (samples if self.cut is None else 1)
        self.tells = True

    def samples_of(self, epoch: int) -> Sequence[int]:
        """Where batches are dealt out: the samples of this epoch, or of an earlier one, in their order."""
        if epoch not in self._orders:
            self._orders[epoch] = self.order_of(epoch)
        return self._orders[epoch]

    def position(self) -> Position:
        """Evenly: samples trained on where `step(samples=...)` or the loader says so, else those drawn by the loader."""
        taken = min(self.told, self.drawn) if self.told else self.drawn
        return Position(self.epoch, taken, self.sampler, *self.share or (-1, 0))


class Ledger:
    """The samples of a worker, of a job of this size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.spec: Spec | None = None  #: the mode by which batches are dealt; None: samplers share evenly
        self.ask: Callable[[LeaseSamples], SamplesLeased] | None = None  #: leases places from the sequencer, in `anytime`
        self.counted: float | None = None  #: samples of the last step, as far as samplers know; None: none has drawn them
        self._datasets: dict[int, list[Callable[[], object]]] = {}  # by length, in the order in which samplers came
        self._samplers = 0
        self._passes: list[SamplerPass] = []
        self._training: dict[str, SamplerPass] = {}  # of each sampler that steps were made of, the last
        self._made_of: list[tuple[SamplerPass, DealtBatch]] = []  # the batches of the last step that were dealt
        self._moments = count(1)
        self._even = tuple((worker, 1.0) for worker in range(size))
        self._table: list[tuple[Draw, ShareWeights]] = [((0, 0), self._even)]
        self._numbered = 0
        self._last_draw: Draw | None = None
        self._requests = count(1)
        self._turns: Counter[tuple[str, int]] = Counter()  # how often the end of a sampler's epoch was reached
        self._unused: list[tuple[Position, bool]] = []  # leased places that none was trained on; were they looked at?
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
            try:
                known.append(weakref.ref(dataset))
            except TypeError:  # a list, a range
                known.append(lambda: dataset)
        return f"{'shuffled' if shuffled else 'ordered'} {number} of {length}"

    # Draws.

    def begin(self, one: SamplerPass) -> None:
        if one.leased and self.ask is not None:
            self.give_back()
            one.earlier |= set(self.ask(self._question(one.order)).earlier)
        with self._state:
            self._passes.append(one)

    def draw(self, one: SamplerPass, trains: bool = True) -> int | list[int] | None:
        """The next sample of a pass that is shared evenly, or the samples of the next batch; None at its end. `trains`:
        gradients are enabled, or the sampler is known to train."""
        one.at = next(self._moments)
        if one.cut is None:
            index = next(one.mine, None)
            if index is not None:
                one.drawn += 1
                one.fresh += trains and not one.tells
            return index
        if one.leased and not one.ready:
            one.ready.extend(self._leased(one, one.cut))  # without the lock: `step()` must not wait for the sequencer
        with self._state:  # nothing is drawn between a push and its answer
            here = threading.get_ident()
            if not self._state.wait_for(lambda: self._frozen_by in (None, here), PATIENCE):
                raise PolytempoError(
                    f"worker {self.rank}: a batch was asked for in another thread than that of step(), whose exchange did "
                    f"not end within {PATIENCE:.0f} s; draw batches in the thread that calls step()"
                )
            if trains and one.number < 0:
                one.number = self._numbered
                self._numbered += 1
            if not one.ready and not one.leased:
                one.ready.extend(self._share(one, one.cut))
            if not one.ready:
                return None
            batch = one.ready.popleft()
            if one.number >= 0:
                one.batches.append(batch)
        order = one.samples_of(batch.position.epoch)
        return [order[place] for start, stop in batch.position.done for place in range(start, stop)]

    def _share(self, one: SamplerPass, cut: EpochCut) -> list[DealtBatch]:
        number = (one.number, one.following)
        weights = self._even if one.number < 0 else self.weights_at(number)
        share = cut.share(one.following, self.rank, self.size, weights)
        if share and one.number >= 0:
            self._last_draw = max(number, self._last_draw or number)
        one.following += 1
        ends = [index == len(share) for index in range(1, len(share) + 1)]
        return [DealtBatch(_position(one.order, places), cost, end) for (places, cost), end in zip(share, ends, strict=True)]

    def _leased(self, one: SamplerPass, cut: EpochCut) -> list[DealtBatch]:
        """Some micro-batches, what has returned of earlier epochs first; or single samples, where a loader makes batches of
        them: of places that have returned there may be fewer than its batch has."""
        assert self.ask is not None
        order, places = one.order, list[Range]()
        while one.earlier and not places:
            epoch = min(one.earlier)
            order = one.sampler, epoch, len(one.samples_of(epoch))
            asked = self._question(order)
            asked.turn, asked.count = RETURNED, one.each
            places = list(self.ask(asked).ranges)
            if not places:
                one.earlier.discard(epoch)
        if not places:
            order, asked = one.order, self._question(one.order)
            asked.count, asked.ahead = one.each, AHEAD * one.each  # near the end of an epoch the sequencer gives less
            places = list(self.ask(asked).ranges)
            self._turns[order[:2]] += not places  # the next pass asks for the epoch's next turn
        found = []
        while places:
            part, places = split(places, 1 if one.singles else one.each)
            cost = cut.cost(part) if order == one.order else float(size_of(part))
            found.append(DealtBatch(_position(order, part), cost))
        return found

    def _question(self, order: Order) -> LeaseSamples:
        sampler, epoch, length = order
        turn = self._turns[sampler, epoch]
        return LeaseSamples(request=next(self._requests), sampler=sampler, epoch=epoch, length=length, turn=turn)

    def weights_at(self, number: Draw) -> ShareWeights:
        return next((weights for since, weights in reversed(self._table) if since <= number), self._table[0][1])

    def let_go(self, one: SamplerPass) -> None:
        """The loader has dropped a pass; where it has not drawn all of it, what is not trained on by now never will be."""
        with self._state:
            one.held = False
            if not one.complete:
                self._drop(one)

    # Steps.

    def trained(self, samples: float | None = None) -> tuple[Position, ...]:
        """A step is made: of which places, where batches are dealt out (`batches`), else how far this worker is in every
        sampler that trains.

        `samples` is the weight that the script gave, which may be in other units. Where batches are dealt a step is one
        batch; where a loader makes batches of single samples, it says how many."""
        with self._state:
            chosen, self._made_of, came = self._chosen(), [], 0
            for one in chosen:
                if one.cut is not None:
                    self._take(one, one.cut, samples)
                else:
                    came += one.fresh
                    one.told += int(samples) if samples is not None else one.fresh * one.tells
                one.trained = True
                self._training[one.sampler] = one
            self.counted = float(came) if self._training else None
            self._forget_passes(chosen)
        return tuple(batch.position for batch in self.batches) or self.positions()

    @property
    def batches(self) -> list[DealtBatch]:
        """What the last step was made of, where batches are dealt out."""
        return [batch for _, batch in self._made_of]

    def positions(self) -> tuple[Position, ...]:
        """How far this worker is in every sampler that trains and is shared evenly, as of the last step."""
        return tuple(one.position() for one in self._training.values() if one.cut is None)

    def _chosen(self) -> list[SamplerPass]:
        """Of each sampler that trains the pass that the step was made of."""
        left = sorted((one for one in self._passes if one.left), key=lambda one: one.at)
        left = [one for one in left if one.cut is not None] or left
        held = {one.sampler: one.at for one in left if one.held}
        left = [one for one in left if one.held or one.at >= held.get(one.sampler, 0)]
        training = [one for one in left if one.goes_on or one.trained]
        if not training:
            dealt = any(one.cut is not None for one in left)
            known = [one for one in left if one.sampler in self._training]
            # Evenly it may be a step on what the loader of a sampler that trains has read before, and not of another.
            training = (known or (left if dealt or not self._training else []))[-1:]
        return list({one.sampler: one for one in training}.values())

    def _take(self, one: SamplerPass, cut: EpochCut, samples: float | None) -> None:
        taken = 1
        if one.singles:
            if not cut.shape.each and (samples is None or samples != int(samples)):
                raise UsageError(
                    f"worker {self.rank}: the samples of a micro-batch are not known: expected step(samples=len(x)), or "
                    f"DistributedSampler(..., batch_size=) with the loader's batch_size, got samples={samples}"
                )
            one.each = cut.shape.each or int(samples or 0)
            taken = min(one.each, len(one.batches))
        self._made_of += [(one, one.batches.popleft()) for _ in range(taken)]
        one.fresh -= taken * one.tells

    def _forget_passes(self, chosen: Iterable[SamplerPass]) -> None:
        """Keep the passes of which a later step may be made. What was drawn evenly for this one is not new any more."""
        now = {one.sampler: one.at for one in chosen}
        passes, self._passes = self._passes, []
        for one in passes:
            one.fresh *= one.cut is not None
            if one.at >= now.get(one.sampler, 0) and (one.goes_on or (one.left and one.trained)):
                self._passes.append(one)
            else:
                self._drop(one)

    def _drop(self, one: SamplerPass) -> None:
        """A pass is over: what it has leased and not trained on goes back. One that was gone through to its end without a
        step was looked at: its places are done."""
        if one.leased:
            looked_at = one.complete and not one.trained
            left = [batch.position for batch in (*one.batches, *one.ready)]
            self._unused += [(position, looked_at and position.epoch == one.epoch) for position in left]
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
                if one.held and not one.complete:
                    one.ready.appendleft(batch)
                else:
                    self._unused.append((batch.position, False))
            self._made_of = []

    def give_back(self) -> None:
        """Tell the sequencer of places that this worker has leased and will not train on."""
        with self._state:
            unused, self._unused = self._unused, []
        found = gathered(((order_of(position), looked_at), position.done) for position, looked_at in unused)
        for (order, looked_at), places in found.items():
            assert self.ask is not None
            asked = self._question(order)
            asked.back, asked.done = ((), tuple(places)) if looked_at else (tuple(places), ())
            self.ask(asked)

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
        """A push is made: nothing is drawn until its answer is here. The last draw, for `Measures.drawn`."""
        with self._state:
            self._frozen_by = threading.get_ident()
            return self._last_draw

    def cut_by(self, weights: ShareWeights, since: Draw | None) -> None:
        """New weights for joint batches, from this one on; where it is not known, from the next that is drawn."""
        with self._state:
            if self._last_draw is None:
                self._table = [((0, 0), weights)]
                self._numbered = max(self._numbered, since[0] if since else 0)  # it joins others in this pass
            elif weights != self._table[-1][1]:
                self._table.append((since or (self._last_draw[0], self._last_draw[1] + 1), weights))
                # Weights by which nothing is cut any more are dropped.
                numbers = [(one.number, one.following) for one in self._passes if one.number >= 0 and not one.complete]
                first = min([*numbers, (self._numbered, 0)])
                used = [index for index, (since, _) in enumerate(self._table) if since <= first]
                self._table = self._table[max(used, default=0) :]

    def resume(self) -> None:
        """The answer is here, and what it brought."""
        with self._state:
            self._frozen_by = None
            self._state.notify_all()


def united(positions: Iterable[Position]) -> tuple[Position, ...]:
    """The places of several micro-batches: one position for each order."""
    found = gathered((order_of(one), one.done) for one in positions)
    return tuple(_position(order, places) for order, places in found.items())


def order_of(position: Position) -> Order:
    """Whose order its places are of."""
    return position.sampler, position.epoch, position.length


def _position(order: Order, places: Sequence[Range]) -> Position:
    sampler, epoch, length = order
    return Position(epoch, size_of(places), sampler, done=tuple(places), length=length)
