"""When deferred weight gradients are computed: the rule of the runtime and of the timeline alike.

A backward may leave the weight gradients (W) of its microbatch for later, in pieces, as in zero-bubble schedules. A replica
that would wait for a message computes a piece instead. Otherwise a piece is computed only when it must be: before an update,
and before activations are made that would exceed the capacity, because deferred pieces keep activations alive. So no more
microbatches have activations at once than the schedule itself needs.
"""

from __future__ import annotations

from polytempo.pipeline.actions import ScheduleAction


class DeferredGradients:
    """The deferred pieces of one replica, which has memory for the activations of `capacity` microbatches."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.peak_held = 0  #: the most microbatches with activations at once
        self._in_flight: set[int] = set()  # between forward and backward, with activations
        self._pieces: dict[int, int] = {}  # left of each microbatch, the oldest first

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def held(self) -> int:
        """Microbatches with activations now."""
        return len(self._in_flight) + len(self._pieces)

    def due(self, action: ScheduleAction, recompute: bool) -> bool:
        """Must a piece be computed before this action? `recompute`: a forward that keeps no activations, or the backward
        that makes them again."""
        if not self._pieces or action.kind == "U":
            return bool(self._pieces)
        makes_activations = recompute if action.kind == "B" else not recompute
        return makes_activations and self.held >= self.capacity

    def completed(self, action: ScheduleAction, recompute: bool, pieces: int = 0) -> None:
        """An action was completed; a backward defers `pieces` pieces."""
        if action.kind == "F" and not recompute:
            self._in_flight.add(action.microbatch)
        elif action.kind == "B":
            self.peak_held = max(self.peak_held, self.held + recompute)
            self._in_flight.discard(action.microbatch)
            if pieces:
                self._pieces[action.microbatch] = pieces
        self.peak_held = max(self.peak_held, self.held)

    def pop(self) -> int:
        """Take off a piece of the oldest microbatch; the number of that microbatch."""
        microbatch = next(iter(self._pieces))
        self._pieces[microbatch] -= 1
        if not self._pieces[microbatch]:
            del self._pieces[microbatch]
        return microbatch
