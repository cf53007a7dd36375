"""Gradients that are not finite: counted, or refused with the name of the parameter."""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.errors import UsageError
from polytempo.train.flat import Flat


class FiniteWatch:
    """Looks at what one optimizer pushes."""

    def __init__(self, names: Sequence[str], rank: int, nonfinite: str) -> None:
        self._names, self._rank, self._nonfinite = names, rank, nonfinite
        self.seen = 0

    def look_at(self, flat: Flat, step: int, rows: bool = True) -> bool:
        """Is there something in it that is not finite, or among rows of tables?"""
        if flat.is_finite(everything=self._nonfinite == "refuse") and rows:
            return False
        self.seen += 1
        if self._nonfinite == "refuse":
            wrong = (self._names[index] for index, view in flat.views.items() if not view.isfinite().all())
            name = next(wrong, "a table")
            raise UsageError(
                f"worker {self._rank}, step {step}: {name} has a gradient that is not finite; "
                "lower the learning rate, clip, or count such gradients with nonfinite='count'"
            )
        return True
