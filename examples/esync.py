"""ESync (Li, Yu, et al. 2020): local steps and a barrier, and each worker makes as many steps as its speed allows.

round     every worker makes its own number of local steps, then the barrier; the mean of all values, weighted by samples
speed     seconds from a worker's release to its push, over the steps in that push; a running mean over rounds
next      the slowest worker makes K steps, any other K * (slowest's seconds per step) / (its own), at most M
"""

from __future__ import annotations

from polytempo.modes import (
    Action,
    Apply,
    Averaging,
    Capabilities,
    Discard,
    MadeOf,
    Mode,
    NextBlock,
    Policy,
    Promises,
    Pushed,
    PushedWork,
    Pushes,
    Release,
    SpecError,
    machine_of_blocks,
    whole_number,
)

NEWEST = 0.5  # the part of the newest round in the running mean


class ESync(Policy):
    """Rounds with a barrier, and a number of local steps for each worker."""

    def __init__(self, workers: int, k: int, most: int | None = None) -> None:
        super().__init__(workers)
        self.k = k
        self.most = 8 * k if most is None else most
        if self.most < k:
            raise SpecError(f"most={most} is less than the {k} steps of the slowest worker; use most={k} or more")
        self.released: dict[int, float] = {}  # when each computing worker was released
        self.seconds: dict[int, float] = {}  # per local step, of each measured member
        self.arrived: dict[int, Pushed] = {}  # the pushes of this round

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        actions: list[Action] = []
        if worker in self.arrived:  # it pushed, left and came back within one round: an update has one push of each worker
            old = self.arrived.pop(worker)
            actions.append(Discard(worker, old.step, "its worker left and came back in the same round"))
        return [*actions, self._release(worker, step, now)]

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        worker = push.worker
        self._measure(push, now)
        self.arrived[worker] = push
        self.progress.move(worker, push.step + 1)
        self.room.enter(worker, push.step + 1)
        actions = self._close_if_complete(now)
        return actions or [self.why_held(worker, push.step + 1)]

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self.released.pop(worker, None)
        self.seconds.pop(worker, None)
        return self._close_if_complete(now)  # its push, if it made one, stays in the round

    def _close_if_complete(self, now: float) -> list[Action]:
        if not self.arrived or any(member not in self.arrived for member in self.members):
            return []
        pushes = tuple(self.arrived[worker] for worker in sorted(self.arrived))
        self.arrived = {}
        waiting = self.room.admit(lambda step: True)
        return [Apply(pushes, rate=1.0), *(self._release(worker, step, now) for worker, step in waiting)]

    def _measure(self, push: Pushed, now: float) -> None:
        took = now - self.released.pop(push.worker)
        if took <= 0 or push.count <= 0:
            return
        newest = took / push.count
        before = self.seconds.get(push.worker, newest)
        self.seconds[push.worker] = before + NEWEST * (newest - before)

    def _release(self, worker: int, step: int, now: float) -> Release:
        self.released[worker] = now
        return Release(worker, step, self.progress.slowest, NextBlock(self._steps(worker)))

    def _steps(self, worker: int) -> int:
        if worker not in self.seconds:
            return self.k
        ratio = max(self.seconds.values()) / self.seconds[worker]
        return min(self.most, max(self.k, round(self.k * ratio)))


def averaging(k: int, most: int | None = None) -> Averaging:
    return Averaging(k)


ESYNC = Mode(
    name="esync",
    example="esync:4",
    meaning="models are averaged at a barrier; the slowest makes K local steps, the others as many as fit",
    build=lambda workers, k, most=None: ESync(workers, k, most),
    argument=whole_number("K", at_least=1),
    options={"most": whole_number("M", at_least=1)},
    machine=machine_of_blocks(averaging),
    averaging=averaging,
    capabilities=Capabilities(pushes=Pushes.VALUES, update=MadeOf.ALL, work=PushedWork.LOCAL),
    promises=Promises(lead=0, waits=0),
)
