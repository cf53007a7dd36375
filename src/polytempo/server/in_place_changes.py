"""Values that scripts have changed in place. In rounds all workers must have made the same change before the next update.

A worker that sends values that differ from the job's sets them; what each has sent last must be the same at the update.
Values that are the job's already change nothing: a script may have written to its parameters and put them back.
"""

from __future__ import annotations

from collections.abc import Sequence

ADVICE = "make the change alike on all workers, or call polytempo.broadcast_parameters(model.state_dict()) after it on all"


class InPlaceChanges:
    """What workers have sent since the last update."""

    def __init__(self) -> None:
        self._given: dict[int, bytes] = {}
        self._what = "parameters"

    @property
    def any(self) -> bool:
        """Has a worker changed something?"""
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
            return f"worker {first} has changed {self._what} in place and worker {without} has not; {ADVICE}"
        other = next((worker for worker in workers if given[worker] != given[first]), None)
        if other is not None:
            return f"workers {first} and {other} have changed {self._what} in place, differently; {ADVICE}"
        return ""
