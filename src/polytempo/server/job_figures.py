"""What a job has done so far: for checkpoints, the display and meta.json.

WorkerStatistics    what each worker did, counted as it happens
JobBudget           what is used up, and whether workers are to stop
DivergenceGuard     gives the rule (`sync/divergence.py`) what workers have seen of their steps; the first divergence is
                    one effect, `Diverged`: the coordinator tells the user, or ends the job
CheckpointContents  the manifest of a checkpoint of this moment
JobFigures          status and summary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polytempo.protocol.messages import Push, Status, WorkerStatus
from polytempo.protocol.push import Measures, PushedChange, PushedValues
from polytempo.protocol.training_troubles import Circumstances, diverged, not_finite
from polytempo.records.lines import MAIN, MEAN
from polytempo.server.effects import Checkpoint, Diverged
from polytempo.server.job_plan import JobPlan, Limits
from polytempo.server.optimizer_clock import OptimizerClock
from polytempo.server.resume_rules import proposal_of
from polytempo.server.sample_ledger import SampleLedger
from polytempo.summation import in_order
from polytempo.sync.divergence import Divergence, DivergenceRule, Seen
from polytempo.sync.spec import compared


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
        self.bytes_sent = push.sent
        self.bytes_received = push.received
        if not counts:
            return
        self.steps += sign * measures.count
        self.pushes += sign
        self.samples += sign * measures.taken
        self.nonfinite += sign * measures.nonfinite

    def discard(self, measures: Measures) -> None:
        self.steps -= measures.count
        self.pushes -= 1
        self.samples -= measures.taken
        self.discarded += 1
        self.wasted_s += measures.computed

    def stale(self, by: int) -> None:
        self.staleness_sum += by
        self.staleness_max = max(self.staleness_max, by)

    def held(self, now: float, waiting_for: tuple[int, ...]) -> None:
        self.state = "waiting"
        self.held_since = now if self.held_since is None else self.held_since
        self.waiting_for = waiting_for

    def released(self, step: int, now: float) -> None:
        self.state, self.step = "computing", step
        if self.held_since is not None:
            if self.joined_at is not None:  # waiting for the others to start is not the mode's doing
                self.waiting_s += now - self.held_since
            self.held_since = None
            self.waiting_for = ()
        if self.joined_at is None:
            self.joined_at = now

    def left(self, reason: str, now: float) -> None:
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


#: Further answers that are certain not to say `stop`, at most: without a budget, and with one.
ALWAYS, KNOWN = 1 << 20, 64


def certain_answers(left: Limits, members: int, rounds: bool, largest: tuple[int, float]) -> int:
    """For how many further answers of a worker, beyond the one that is given, the budget lasts.

    In rounds of single steps, under a budget of steps, the members make one step each between two answers, so the number is
    known. Otherwise other workers may use up the budget meanwhile: then it is one answer, while there is enough left for
    all members to push twice more; seconds are never known, so it is one as well. What was promised is kept
    (`OptimizerClock.reply`): if the budget is used up all the same, the worker stops one answer later.

    Args:
        left: Of the budget.
        members: Workers whose pushes are counted, at most.
        rounds: Does every member push once before each answer?
        largest: The most steps and samples that a push has had.
    """
    if not left.any:
        return ALWAYS
    count, samples = largest
    if rounds and count == 1 and min(left.samples, left.seconds) == math.inf:
        return min(KNOWN, math.ceil(left.steps / members) - 1)
    return 1 if left.steps > 2 * members * count and left.samples > 2 * members * samples else 0


#: A script that never asks `should_stop` is warned when each worker is this many steps beyond the budget, or at the end.
UNHEEDED_STEPS = 4


class JobBudget:
    """What of the budget is used up, and whether workers are to stop. It counts the main optimizer's pushes."""

    def __init__(self, plan: JobPlan) -> None:
        self.steps = int(plan.resumed.get("steps", 0))
        self.samples = float(plan.resumed.get("samples", 0))
        self.started: float | None = None  #: when the first step was released
        self.stopping = False  #: the budget is used up; it stays so
        self._limits = plan.limits
        self._limited = plan.limits.any
        self._size = plan.size
        self._largest = 1, 0.0  # steps and samples of a push
        self.unknown = False  #: are samples limited, and has neither script nor sampler said how many a step had?
        self._beyond = 0  # steps that came after the budget was used up
        self._asked = False  # has any worker asked whether to stop?
        self._said: set[str] = set()  # what the user is warned of

    def begin(self, now: float) -> None:
        """A step is released; the first starts the job's seconds."""
        if self.started is None:
            self.started = now

    def count(self, push: Push, sign: int = 1, dealt: bool = False) -> None:
        """A push was counted (or, with sign -1, refused after all). `dealt`: the mode deals out batches, and weighs a push
        by its samples."""
        measures = push.measures
        self._beyond += sign * measures.count * self.stopping
        self._asked |= push.asked
        self.unknown |= measures.size is None and not dealt and measures.samples > 0 and self._limits.samples < math.inf
        self._largest = max(self._largest[0], measures.count), max(self._largest[1], measures.taken)
        self.steps += sign * measures.count
        self.samples += sign * measures.taken

    def discard(self, measures: Measures) -> None:
        self.steps -= measures.count
        self.samples -= measures.taken

    def check(self, now: float) -> None:
        """Decide whether to stop."""
        if self._limited and not self.stopping and self.used(now) >= 1:
            self.stopping = True

    def certain(self, rounds: bool) -> int:
        """For how many further answers of a worker it is certain to last."""
        if self.stopping or self.steps >= self._limits.steps or self.samples >= self._limits.samples:
            return 0
        left = Limits(self._limits.steps - self.steps, self._limits.samples - self.samples, self._limits.seconds)
        return certain_answers(left, self._size, rounds, self._largest)

    def seconds(self, now: float) -> float:
        """Since the first step was released."""
        return now - self.started if self.started is not None else 0.0

    def used(self, now: float) -> float:
        return self._limits.used(self.steps, self.samples, self.seconds(now))

    def unheeded(self) -> int:
        """Steps beyond the budget, where no worker ever asks whether to stop."""
        return 0 if self._asked else self._beyond

    def warnings(self, at_the_end: bool = False) -> list[str]:
        """What the user is to be warned of, once each: steps count as samples, or the script goes on beyond the budget."""
        found = []
        if self.unknown:
            found.append(
                "warning: --samples counts each step as one sample: step() was not told how many it had, and no sampler of "
                "polytempo drew them; call step(samples=len(x)), or use pt.DistributedSampler"
            )
        if self.unheeded() > (0 if at_the_end else UNHEEDED_STEPS * self._size):
            found.append(
                "warning: the job's budget is used up and its workers go on: the script never asks pt.should_stop(); "
                "end its loop with `if pt.should_stop(): break`"
            )
        new = [text for text in found if text not in self._said]
        self._said.update(new)
        return new


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


class DivergenceGuard:
    """Looks at the pushes of all optimizers of a job."""

    def __init__(self, size: int, statistics: Sequence[WorkerStatistics]) -> None:
        self._size, self._statistics = size, statistics
        self._rules: dict[str, DivergenceRule] = {}
        self._told = ""  # what has gone wrong first
        self._update = 0  # of its optimizer, by then

    def pushed(self, clock: OptimizerClock, push: Push, step: int) -> list[Diverged]:
        """A push was accepted; the first divergence, if it shows that. `step`: the worker's, for people."""
        found = self._look(clock, push.measures)
        if found is None or self._told:
            return []
        circumstances = circumstances_of(clock, push, self._statistics)
        self._update = clock.version
        if found.finite:
            self._told = diverged(clock.version, found.loss, found.start, found.change, found.gradient, found.size)
            return [Diverged(self._told, circumstances.advice)]
        averages = clock.spec.capabilities.averages
        on_values = not push.measures.nonfinite or averages or isinstance(push.body, PushedChange | PushedValues)
        self._told = not_finite(push.id.worker, step, "model" if on_values else "gradient")
        return [Diverged(self._told, circumstances.advice_on_nonfinite)]

    def _look(self, clock: OptimizerClock, measures: Measures) -> Divergence | None:
        nonfinite = measures.nonfinite and measures.samples > 0  # what weighs nothing changes nothing
        if not measures.vital_signs and not nonfinite:
            return None
        if clock.name not in self._rules:
            self._rules[clock.name] = DivergenceRule(len(clock.optimizer_spec.members) or self._size)
        rule = self._rules[clock.name]
        if nonfinite:
            return rule.add_nonfinite()
        return rule.add([Seen(signs.loss, signs.gradient, signs.change, signs.size) for signs in measures.vital_signs])

    def summary(self) -> dict[str, Any]:
        """What went wrong first, at which update, and whether the training has come back; empty where nothing did."""
        if not self._told:
            return {}
        found = [rule.found for rule in self._rules.values() if rule.found is not None]
        return {"update": self._update, "trouble": self._told, "recovered": all(one.recovered for one in found)}


def circumstances_of(clock: OptimizerClock, push: Push, statistics: Sequence[WorkerStatistics]) -> Circumstances:
    """How the optimizer of this push trains."""
    hyper = push.made.hyper
    group: dict[str, Any] = hyper[0] if hyper else {}
    rate = group.get("local lr", group.get("lr"))
    averages = clock.spec.capabilities.averages
    on_servers = clock.optimizer_spec.apply == "server" and not averages
    momentum = group.get("momentum") or (group.get("betas") or (0.0,))[0]
    pushes = sum(stats.pushes for stats in statistics)
    return Circumstances(
        sync=clock.spec.text,
        rate=float(rate) if isinstance(rate, int | float) else None,
        momentum=float(momentum) if on_servers and isinstance(momentum, int | float) else 0.0,
        movable=clock.spec.mode.keeps_momentum,
        staleness=sum(stats.staleness_sum for stats in statistics) / max(pushes, 1),
        local=averages,
    )


class CheckpointContents:
    """The name and the manifest of a checkpoint of this moment: what it must hold beside the tensors."""

    def __init__(
        self,
        plan: JobPlan,
        clocks: dict[str, OptimizerClock],
        statistics: list[WorkerStatistics],
        budget: JobBudget,
        ledger: SampleLedger,
    ) -> None:
        self._plan = plan
        self._clocks = clocks
        self._statistics = statistics
        self._budget = budget
        self._ledger = ledger
        self._lost_before: set[int] | None = None  # workers that were lost before the job was told to end

    def at(self, step: int, pushes: int) -> Checkpoint:
        """A checkpoint of this moment, named after a step, to which each worker has come with this number of pushes."""
        return Checkpoint(f"step-{step:08d}", self.manifest(step, pushes))

    def at_the_end(self) -> Checkpoint:
        """What is left to save when all workers have left."""
        main = self._clocks.get(MAIN)
        if main is None:
            return self.at(self._plan.first_step, self._plan.first_push)
        return self.at(main.made.fastest, main.policy.progress.fastest)

    def now(self) -> Checkpoint | None:
        """A checkpoint of this moment, in the middle of training; None when there is nothing to save yet."""
        main = self._clocks.get(MAIN)
        if main is None or not main.seeded or not any(stats.pushes for stats in self._statistics):
            return None
        return self.at(main.made.slowest, main.policy.reached) if main.policy.members else self.at_the_end()

    def manifest(self, step: int, pushes: int) -> dict[str, Any]:
        clocks = self._clocks[MAIN].policy.progress.pushed if MAIN in self._clocks else {}
        # What is counted but in no update is lost to a job that goes on from here, and its samples are not done.
        pending = self._clocks[MAIN].pending() if MAIN in self._clocks else []
        tracks: dict[str, dict[str, Any]] = {}
        for name, clock in self._clocks.items():
            if not name.endswith(MEAN):
                tracks[name] = {"proposal": proposal_of(clock.optimizer_spec), "version": clock.version}
                if learned := clock.policy.saved():  # for a job that goes on in the same mode
                    tracks[name]["policy"] = {"sync": clock.spec.text, "saved": learned}
        return {
            "step": step,
            "exchange": pushes,
            "steps": self._budget.steps - sum(push.measures.count for push in pending),
            "samples": self._budget.samples - sum(push.measures.taken for push in pending),
            "size": self._plan.size,
            "sync": self._plan.sync,
            "clocks": {str(worker): clock for worker, clock in clocks.items()},
            "positions": self._ledger.parts({push.id.worker for push in pending if push.measures.positions}, self._lost()),
            "tracks": tracks,
        }

    def _lost(self) -> set[int]:
        gone = {stats.worker for stats in self._statistics if stats.left_at is not None and stats.state != "finished"}
        return gone if self._lost_before is None else self._lost_before

    def ends_early(self) -> None:
        """The job is told to end: workers that leave from now on leave because of it, and are not lost."""
        self._lost_before = self._lost()


class JobFigures:
    """The job's figures: while it runs, and at its end."""

    def __init__(
        self,
        clocks: dict[str, OptimizerClock],
        statistics: list[WorkerStatistics],
        budget: JobBudget,
        guard: DivergenceGuard,
    ) -> None:
        self._clocks = clocks
        self._statistics = statistics
        self._budget = budget
        self._guard = guard

    def status(self, now: float) -> Status:
        budget = self._budget
        accepted = any(stats.accepted for stats in self._statistics)
        workers = []
        for status in (stats.status(now) for stats in self._statistics):
            # In a mesh not every rank reports steps: one that is in no clock has made steps when others have.
            if not any(clock.includes(status.worker) for clock in self._clocks.values()):
                status.accepted = accepted
            workers.append(status)
        holds = any(clock.on_servers for clock in self._clocks.values())
        seconds, used = budget.seconds(now), budget.used(now)
        return Status(seconds=seconds, used=used, workers=tuple(workers), trains=bool(self._clocks), holds=holds)

    def summary(self, now: float) -> dict[str, Any]:
        ends = [stats.left_at for stats in self._statistics if stats.left_at is not None]
        updates = sum(clock.version for clock in self._clocks.values() if clock.is_main)
        groups = {name: list(clock.optimizer_spec.members) for name, clock in self._clocks.items()}
        # Modes that this job could not use, of those that advice compares: those that the first optimizer refuses; all where
        # no values are exchanged (one replica of a model in stages), or no model's (`KV`, which has no groups).
        refused, first = compared(), self._clocks.get(MAIN)
        if first is not None and first.has_values and first.optimizer_spec.groups:
            refused = first.optimizer_spec.refused
        summary = sum_up(self._statistics, max(ends, default=now), self._budget.started) | {
            "updates": updates,
            "optimizers": {name: clock.spec.text for name, clock in self._clocks.items()},
            "refused": list(refused),
            "diverged": self._guard.summary(),
        }
        restored = {name: clock.restored for name, clock in self._clocks.items() if clock.restored}
        summary |= {"restored": restored} if restored else {}
        members = {name: group for name, group in groups.items() if group}
        return summary | {"members": members} if members else summary
