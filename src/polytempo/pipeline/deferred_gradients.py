"""Which gradients of weights a replica owes, and when they are due.

A backward may leave the gradients of weights (W) of its microbatch for later, in pieces. A replica that would wait does
a piece instead. Otherwise nothing is done before it must be: before an update; and before activations are made for which
there is no room, because what is owed keeps others. So no more microbatches have activations than the schedule itself needs.
"""

from __future__ import annotations

from polytempo.pipeline.actions import ScheduleAction


class DeferredGradients:
    """Of one replica, which has room for the activations of so many microbatches."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.most_held = 0  #: microbatches with activations at once
        self._kept: set[int] = set()  # between forward and backward, with activations
        self._pieces: dict[int, int] = {}  # left of each microbatch, the oldest first

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def held(self) -> int:
        """Microbatches with activations now."""
        return len(self._kept) + len(self._pieces)

    def due(self, action: ScheduleAction, again: bool) -> bool:
        """Must a piece be done before this action? `again`: a forward whose activations are not kept; a backward that makes
        them again."""
        if not self._pieces or action.kind == "U":
            return bool(self._pieces)
        makes = again if action.kind == "B" else not again
        return makes and self.held >= self.room

    def did(self, action: ScheduleAction, again: bool, pieces: int = 0) -> None:
        """An action was done; a backward owes so many pieces."""
        if action.kind == "F" and not again:
            self._kept.add(action.microbatch)
        elif action.kind == "B":
            self.most_held = max(self.most_held, self.held + again)
            self._kept.discard(action.microbatch)
            if pieces:
                self._pieces[action.microbatch] = pieces
        self.most_held = max(self.most_held, self.held)

    def pay(self) -> int:
        """A piece is done; of which microbatch."""
        microbatch = next(iter(self._pieces))
        self._pieces[microbatch] -= 1
        if not self._pieces[microbatch]:
            del self._pieces[microbatch]
        return microbatch
