"""What goes wrong with a training that goes on: divergence, a rank that ends while others go on, ranks that read the same
batches, so that all but one of them work for nothing, and values that scripts have changed in place, not alike on all.

Each is said at its first time, in one line. With a coordinator the sequencer looks at every push it accepts; without one
(torchrun, mpirun, srun) each rank looks at its own, and at the ballots of a round (`reducer/coordination.py`). These
are the words; `sync/divergence.py` has the rule by which a training has diverged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from polytempo.protocol.messages import Push
from polytempo.units import plain_number

#: Gradients are fresh below this mean staleness, in updates.
STALE = 0.5


@dataclass(frozen=True)
class Circumstances:
    """How a job trains that diverges: what its cause may be found in."""

    sync: str
    rate: float | None = None
    momentum: float = 0.0  #: of the optimizer that servers run
    movable: bool = True  #: could workers keep it, in this mode?
    staleness: float = 0.0  #: of its gradients, on average
    local: bool = False  #: do workers make local steps?

    @property
    def advice(self) -> str:
        """What is likely to be the cause, and what to do."""
        rate = "the rate" if self.rate is None else f"the rate {self.rate:g}"
        stale = f"gradients that are {self.staleness:.1f} updates stale on average"
        if self.momentum and self.staleness >= STALE:
            less = "keep it at the workers (momentum=lookahead)" if self.movable else "lower it"
            return (
                f"likely cause: momentum {self.momentum:g} on the servers, which multiplies what is wrong with {stale} "
                f"(in {self.sync}, at {rate}); {less}, bound the staleness (ssp:3), or lower the rate"
            )
        if self.staleness >= STALE:
            return (
                f"likely cause: {rate} is too high for {stale} (in {self.sync}); lower it, bound the staleness (ssp:3), or "
                "clip (clip_norm=)"
            )
        where, more = ("for local steps ", "average more often") if self.local else ("", "warm it up")
        return f"likely cause: {rate} is too high {where}(in {self.sync}); lower it, {more}, or clip (clip_norm=)"

    @property
    def advice_on_nonfinite(self) -> str:
        """The same, of a number that is not finite."""
        return (
            f"{self.advice}, or look for such numbers in the data and the loss; nonfinite='refuse' ends at the first; the "
            "end of the job counts them"
        )


def not_finite(worker: int, step: int, what: str) -> str:
    """Of a number that is NaN or infinite. `what`: "gradient" or "model"."""
    return f"worker {worker}, step {step}: its {what} is not finite (NaN or infinite)"


def diverged(
    update: int, loss: float | None, start: float | None, change: float, gradient: float = 1.0, size: float = 1.0
) -> str:
    """Of what the last steps show; `change`, `gradient` and `size` as in `sync/divergence.py`."""
    if loss is not None and start is not None:
        found = f"the loss is {plain_number(loss, 3)}, at the start it was {plain_number(start, 3)}"
    else:
        found = f"gradients are {plain_number(gradient, 3)} times what they were at the start"
    larger = f", which have grown to {plain_number(size, 2)} times their size" if size >= 2 else ""
    return f"diverged at update {update}: {found}; a step changes the values by {plain_number(100 * change, 2)} %{larger}"


def goes_on(trouble: str, advice: str) -> str:
    """For people, of a job that goes on with it."""
    return f"warning: {trouble}, and the job goes on with it; {advice}"


def ends(trouble: str, advice: str) -> str:
    """For people, of a job that ends by it."""
    return f"{trouble}, and the job ends (--on-divergence stop); {advice}"


def ended_early(workers: Sequence[int], steps: int, left: int) -> str:
    """For people: these workers have made this number of steps and take no part in the rounds of those that are left."""
    names = ", ".join(map(str, workers))
    who, have = (f"worker {names}", "has") if len(workers) == 1 else (f"workers {names}", "have")
    rest = "the other goes" if left == 1 else f"the other {left} go"
    return (
        f"warning: {who} {have} no more data after step {steps}, and {rest} on: from here on {who} {have} weight zero, and "
        "means are over the rest; give all ranks as many batches (pt.DistributedSampler does)"
    )


class EarlyEnds:
    """Looks for workers that finish before others do, among those of one optimizer."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}  # steps of each worker
        self._furthest = -1, -1  # the number of the last push with data, and the most steps of a worker
        self._ended: dict[int, int] = {}  # workers that have no more data: the number that their next push would have had
        self._told: set[int] = set()  # of these

    def pushed(self, worker: int, number: int, count: int) -> None:
        """A push with this number was accepted, of `count` steps, 0 of a worker that has no more data."""
        self._made[worker] = self._made.get(worker, 0) + count
        if count:
            self._furthest = max(self._furthest[0], number), max(self._furthest[1], self._made[worker])
        else:
            self._ended.setdefault(worker, number)

    def finished(self, worker: int, following: int) -> None:
        """A worker has left in peace; `following`: the number that its next push would have had."""
        self._ended.setdefault(worker, following)

    def left_behind(self, first: int, there: Collection[int]) -> str:
        """Have others gone on beyond workers that have no more data? What there is to say of these, once for each.

        Args:
            first: The steps of an earlier job that this one goes on from.
            there: The workers that take part in rounds, some of which may have no more data.
        """
        number, steps = self._furthest
        ended = [w for w, following in self._ended.items() if following <= number and self._made.get(w, 0) < steps]
        behind = sorted(set(ended) - self._told)
        left = len(set(there) - set(ended))
        if not behind or not left:
            return ""
        self._told |= set(behind)
        return ended_early(behind, first + max(self._made.get(worker, 0) for worker in behind), left)


def same_batches(one: int, other: int, step: int) -> str:
    """For people: these workers push the same gradient."""
    return (
        f"warning: workers {min(one, other)} and {max(one, other)} pushed the same gradient in step {step}: do they read "
        "the same batches? share the data out with DataLoader(..., sampler=pt.DistributedSampler(dataset))"
    )


class DuplicateBatches:
    """Compares the digests that workers send with their first pushes; says once what it has found."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, int]] = {}  # by step and digest: the worker
        self._said = False

    def look_at(self, push: Push) -> str:
        """A push is here: what there is to say, if anything."""
        digest = push.measures.gradient_digest
        if not digest or self._said:
            return ""
        first = self._seen.setdefault(push.id.step, {}).setdefault(digest, push.id.worker)
        if first == push.id.worker:
            return ""
        self._said = True
        self._seen.clear()
        return same_batches(first, push.id.worker, push.id.step)


ALIKE = "make the change alike on all workers, or call polytempo.broadcast_parameters(model.state_dict()) after it on all"


class InPlaceChanges:
    """Values that scripts have changed in place, as workers have sent them since the last update.

    In rounds all workers must have made the same change before the next update. A worker that sends values that differ from
    the job's sets them; what each has sent last must be the same at the update. Values that are the job's already change
    nothing: a script may have written to its parameters and put them back.
    """

    def __init__(self) -> None:
        self._given: dict[int, bytes] = {}
        self._what = "parameters"

    @property
    def any(self) -> bool:
        return bool(self._given)

    def take(self, worker: int, what: str, digest: bytes) -> None:
        """A worker has sent values, of which `what` is one that its script has written to."""
        self._given[worker] = digest
        self._what = what or self._what

    def judge(self, workers: Sequence[int]) -> str:
        """An update is made by these workers: have all of them made the same change? Why not, if not."""
        given, self._given = self._given, {}
        if not given:
            return ""
        first = min(given)
        without = next((worker for worker in workers if worker not in given), None)
        if without is not None:
            return f"worker {first} has changed {self._what} in place and worker {without} has not; {ALIKE}"
        other = next((worker for worker in workers if given[worker] != given[first]), None)
        if other is not None:
            return f"workers {first} and {other} have changed {self._what} in place, differently; {ALIKE}"
        return ""
