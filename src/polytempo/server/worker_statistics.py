"""What each worker did, counted as it happens: for the display, for meta.json and for the budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polytempo.protocol.messages import Push, WorkerStatus
from polytempo.protocol.push import Measures
from polytempo.summation import in_order


@dataclass
class WorkerStatistics:
    """One worker's figures. Seconds are those of the sequencer's clock, but for `computing` and `exchanging`, its own."""

    worker: int
    state: str = "absent"
    step: int = 0
    steps: int = 0
    pushes: int = 0
    samples: float = 0.0
    discarded: int = 0
    nonfinite: int = 0
    computing_s: float = 0.0
    exchanging_s: float = 0.0
    waiting_s: float = 0.0
    wasted_s: float = 0.0  # computing for pushes that were discarded
    bytes_sent: int = 0
    bytes_received: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    accepted: bool = False  # was any push of it counted, of whatever optimizer?
    joined_at: float | None = None
    left_at: float | None = None
    earlier_s: float = 0.0  # in earlier lives
    held_since: float | None = None
    waiting_for: tuple[int, ...] = field(default_factory=tuple)

    def back(self, now: float) -> None:
        """It came back: a new life."""
        self.earlier_s = self.present(now)
        self.joined_at = self.left_at = self.held_since = None
        self.state = "absent"

    def pushed(self, push: Push, sign: int = 1, counts: bool = True) -> None:
        """A push was counted (or, with sign -1, refused after all).

        Where groups of ranks train side by side, only steps of the main one are the job's (`counts`); of the others' ranks
        this is how they spend their time.
        """
        measures = push.measures
        self.computing_s += sign * measures.computed
        self.exchanging_s += sign * measures.exchanging(waited=0.0)
        self.bytes_sent, self.bytes_received = push.sent, push.received
        if not counts:
            return
        self.steps += sign * measures.count
        self.pushes += sign
        self.samples += sign * measures.taken
        self.nonfinite += sign * measures.nonfinite

    def discard(self, measures: Measures) -> None:
        """A counted push was not applied."""
        self.steps -= measures.count
        self.pushes -= 1
        self.samples -= measures.taken
        self.discarded += 1
        self.wasted_s += measures.computed

    def stale(self, by: int) -> None:
        """One of its pushes was applied `by` updates late."""
        self.staleness_sum += by
        self.staleness_max = max(self.staleness_max, by)

    def held(self, now: float, waiting_for: tuple[int, ...]) -> None:
        """It waits from now on."""
        self.state = "waiting"
        self.held_since = now if self.held_since is None else self.held_since
        self.waiting_for = waiting_for

    def released(self, step: int, now: float) -> None:
        """It may start `step`."""
        self.state, self.step = "computing", step
        if self.held_since is not None:
            if self.joined_at is not None:  # waiting for the others to start is not the mode's doing
                self.waiting_s += now - self.held_since
            self.held_since = None
            self.waiting_for = ()
        if self.joined_at is None:
            self.joined_at = now

    def left(self, reason: str, now: float) -> None:
        """It is gone."""
        if self.held_since is not None and self.joined_at is not None:
            self.waiting_s += now - self.held_since
        self.state, self.left_at, self.held_since = reason, now, None

    def present(self, now: float) -> float:
        """Seconds between its first release and its end, in all its lives."""
        if self.joined_at is None:
            return self.earlier_s
        return self.earlier_s + (now if self.left_at is None else self.left_at) - self.joined_at

    @property
    def communicating_s(self) -> float:
        """Of its exchanges, the seconds that no mode made it wait."""
        return max(self.exchanging_s - self.waiting_s, 0.0)

    def status(self, now: float) -> WorkerStatus:
        """For the display."""
        held = now - self.held_since if self.held_since is not None else 0.0
        waited = self.waiting_s + (held if self.joined_at is not None else 0.0)
        return WorkerStatus(
            self.worker,
            self.step + self.steps - self.pushes,  # a push may be of several steps: a block, a share
            self.samples,
            self.state,
            waited,
            held,
            self.present(now),
            self.waiting_for,
            self.accepted,
        )

    @property
    def whereabouts(self) -> str:
        """What it does, for other workers that wait for it."""
        if self.state in ("waiting", "computing"):
            return f"is in optimizer.step(), step {self.step}" if self.state == "waiting" else f"computes step {self.step}"
        return "has made no optimizer and waits in no call" if self.state == "absent" else f"has {self.state}"

    def as_dict(self, now: float) -> dict[str, Any]:
        """For meta.json, in the words of the simulator's outcome."""
        return {
            "worker": self.worker,
            "state": self.state,
            "steps": self.steps,
            "samples": self.samples,
            "discarded": self.discarded,
            "nonfinite": self.nonfinite,
            "computing_s": self.computing_s,
            "waiting_s": self.waiting_s,
            "communicating_s": self.communicating_s,
            "present_s": self.present(now),
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "staleness_mean": self.staleness_sum / max(self.pushes, 1),
            "staleness_max": self.staleness_max,
        }


def sum_up(statistics: list[WorkerStatistics], now: float, started: float | None) -> dict[str, Any]:
    """The job's figures, under the same names as the simulator's."""
    present = in_order(stats.present(now) for stats in statistics) or 1.0
    seconds = now - started if started is not None else 0.0
    samples = in_order(stats.samples for stats in statistics)
    steps = sum(stats.steps for stats in statistics)
    useful = in_order(stats.computing_s - stats.wasted_s for stats in statistics)
    return {
        "seconds": seconds,
        "steps": steps,
        "samples": samples,
        "discarded": sum(stats.discarded for stats in statistics),
        "nonfinite": sum(stats.nonfinite for stats in statistics),
        "samples_per_second": samples / seconds if seconds else 0.0,
        "efficiency": useful / present,
        "computing": in_order(stats.computing_s for stats in statistics) / present,
        "waiting": in_order(stats.waiting_s for stats in statistics) / present,
        "communicating": in_order(stats.communicating_s for stats in statistics) / present,
        "staleness_mean": sum(stats.staleness_sum for stats in statistics) / max(sum(a.pushes for a in statistics), 1),
        "staleness_max": max(stats.staleness_max for stats in statistics),
        "workers": [stats.as_dict(now) for stats in statistics],
    }
