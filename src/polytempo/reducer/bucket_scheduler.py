"""The one mechanism that overlaps reduction with backward: launch buckets as their gradients become complete, remember what
was launched, and find the buckets whose gradients were changed afterwards.

How a bucket travels is the `launch` callback's business: a partial push to servers (`partial_push.py`), an all-reduce
(`collective_reducer.py`) or Horovod's all-reduce with compression (`horovod/gradient_buckets.py`).

    complete     a hook of backward says that a gradient is there; the bucket leaves once it has all
    launch_rest  at the end of the step: what has not left
    changed      launched buckets whose gradients were changed afterwards (clipped, unscaled, accumulated)
    start_over   the next step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class BucketScheduler:
    """The buckets of one optimizer, given as the indices of their parameters.

    Args:
        buckets: For each bucket its parameters.
        launch: Lets a bucket travel.
        stamp: Something that differs once a parameter's gradient has changed.
        differs: An exact comparison of a bucket with what was launched. It replaces stamps where the way of travel keeps a
            copy: a clipped gradient that was small enough has another stamp and the same bytes, and one written through
            `.data` the same stamp and other bytes.
        in_order: Launch in the order of the buckets, whatever order backward takes: collectives need the same order on all
            ranks. Otherwise a bucket leaves as soon as it is complete, and again when all of it was completed again.
        hold_last: Leave the last bucket to `launch_rest`: nothing is left of backward to hide it behind.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        launch: Callable[[int], None],
        stamp: Callable[[int], object] = lambda index: None,
        *,
        in_order: bool,
        hold_last: bool = False,
        differs: Callable[[int], bool] | None = None,
    ) -> None:
        self._buckets = [tuple(bucket) for bucket in buckets]
        self._launch, self._stamp, self._in_order = launch, stamp, in_order
        self._differs = differs or self._has_other_stamps
        self._early = len(self._buckets) - hold_last  # buckets that may leave during backward
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self.start_over()

    def start_over(self) -> None:
        """Begin a step: no gradient is there, no bucket has left."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._stamps: dict[int, list[object]] = {}  # of the gradients of launched buckets, in the order of launching

    @property
    def launched(self) -> list[int]:
        """The buckets that have left, in order."""
        return list(self._stamps)

    def complete(self, index: int) -> None:
        """A gradient is complete; launch what has become ready."""
        number = self._bucket_of.get(index)
        if number is None:
            return
        self._missing[number].discard(index)
        if not self._in_order:
            if not self._missing[number]:
                self._missing[number].update(self._buckets[number])
                self._send(number)
            return
        while len(self._stamps) < self._early and not self._missing[len(self._stamps)]:
            self._send(len(self._stamps))

    def launch_rest(self) -> None:
        """Launch what has not left yet, in order, with the gradients as they are."""
        for number in range(len(self._buckets)):
            if number not in self._stamps:
                self._send(number)

    def changed(self) -> list[int]:
        """Launched buckets with a gradient that has changed since."""
        return [number for number in self._stamps if self._differs(number)]

    def _has_other_stamps(self, number: int) -> bool:
        return self._stamps[number] != self._stamps_of(number)

    def _send(self, number: int) -> None:
        self._stamps[number] = self._stamps_of(number)
        self._launch(number)

    def _stamps_of(self, number: int) -> list[object]:
        return [self._stamp(index) for index in self._buckets[number]]
