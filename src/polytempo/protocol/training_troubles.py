"""What goes wrong with a training that goes on: numbers that are not finite, and a rank that ends while others go on.

Each is said at its first time, in one line. With a coordinator the sequencer looks at every push it accepts; without one
(torchrun, mpirun, srun) each rank looks at its own, and at the ballots of a round (`reducer/collective_reducer.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def not_finite(worker: int, step: int, what: str) -> str:
    """For people. `what`: "gradient" or "model"."""
    return (
        f"warning: worker {worker}, step {step}: its {what} is not finite (NaN or infinite), and the job goes on with it; "
        "lower the learning rate, clip, or end at such a step with nonfinite='refuse'; the end of the job counts them"
    )


def ended_early(workers: Sequence[int], steps: int, left: int) -> str:
    """For people: these workers have made this number of steps and take no part in the rounds of those that are left."""
    names = ", ".join(map(str, workers))
    who, have = (f"worker {names}", "has") if len(workers) == 1 else (f"workers {names}", "have")
    rest = "the other goes" if left == 1 else f"the other {left} go"
    return (
        f"warning: {who} {have} no more data after step {steps}, and {rest} on: from here on {who} {have} weight zero, and "
        "means are over the rest; give all ranks as many batches (pt.DistributedSampler does)"
    )


class TrainingTroubles:
    """Looks at the pushes of one optimizer's workers, and at workers that finish."""

    def __init__(self) -> None:
        self._nonfinite = False  # was it said?
        self._made: dict[int, int] = {}  # steps of each worker
        self._furthest = -1, -1  # the number of the last push with data, and the most steps of a worker
        self._ended: dict[int, int] = {}  # workers that have no more data: the number that their next push would have had
        self._told: set[int] = set()  # of these

    def pushed(self, worker: int, number: int, count: int, nonfinite: str, step: int) -> str:
        """A push with this number was accepted, of `count` steps, 0 of a worker that has no more data; what there is to say
        of it. `nonfinite`: what of it is not, if anything is; `step`: which."""
        self._made[worker] = self._made.get(worker, 0) + count
        if count:
            self._furthest = max(self._furthest[0], number), max(self._furthest[1], self._made[worker])
        else:
            self._ended.setdefault(worker, number)
        if not nonfinite or self._nonfinite:
            return ""
        self._nonfinite = True
        return not_finite(worker, step, nonfinite)

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
