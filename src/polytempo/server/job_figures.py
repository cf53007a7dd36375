"""What a job has done so far, read from its clocks, statistics and budget: for checkpoints, the display and meta.json."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from polytempo.protocol.messages import Push, Status, WorkerStatus
from polytempo.protocol.values import OptimizerSpec
from polytempo.records.lines import MAIN, MEAN
from polytempo.server.divergence_guard import DivergenceGuard
from polytempo.server.effects import Checkpoint
from polytempo.server.job_plan import JobBudget, JobPlan
from polytempo.server.optimizer_clock import OptimizerClock
from polytempo.server.sample_ledger import SampleLedger
from polytempo.server.worker_statistics import WorkerStatistics, sum_up
from polytempo.sync.spec import compared


class CheckpointContents:
    """The name and the manifest of a checkpoint of this moment: what it must hold beside the tensors."""

    def __init__(
        self, plan: JobPlan, clocks: dict[str, OptimizerClock], statistics: list[WorkerStatistics], budget: JobBudget
    ) -> None:
        self._plan, self._clocks, self._statistics, self._budget = plan, clocks, statistics, budget
        self.ledger = SampleLedger(plan.size, plan.resumed.get("positions", []))
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
        """What a checkpoint must know beside the tensors."""
        clocks = self._clocks[MAIN].policy.progress.pushed if MAIN in self._clocks else {}
        pending = self._pending()
        return {
            "step": step,
            "exchange": pushes,
            "steps": self._budget.steps - sum(push.measures.count for push in pending),
            "samples": self._budget.samples - sum(push.measures.taken for push in pending),
            "size": self._plan.size,
            "sync": self._plan.sync,
            "clocks": {str(worker): clock for worker, clock in clocks.items()},
            "positions": self.ledger.parts({push.id.worker for push in pending if push.measures.positions}, self._lost()),
            "tracks": {
                name: {"proposal": _plain(clock.optimizer_spec), "version": clock.version, **_policy(clock)}
                for name, clock in self._clocks.items()
                if not name.endswith(MEAN)
            },
        }

    def _pending(self) -> list[Push]:
        """What is counted but in no update: it is lost to a job that goes on from here, and its samples are not done."""
        return self._clocks[MAIN].pending() if MAIN in self._clocks else []

    def _lost(self) -> set[int]:
        """Workers that the job went on without."""
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
        self._clocks, self._statistics, self._budget, self._guard = clocks, statistics, budget, guard

    def status(self, now: float) -> Status:
        """For the display."""
        budget = self._budget
        workers = tuple(self._seen(stats.status(now)) for stats in self._statistics)
        holds = any(clock.on_servers for clock in self._clocks.values())
        seconds, used = budget.seconds(now), budget.used(now)
        return Status(seconds=seconds, used=used, workers=workers, trains=bool(self._clocks), holds=holds)

    def _seen(self, status: WorkerStatus) -> WorkerStatus:
        """In a mesh not every rank reports steps: one that is in no clock has made steps when others have."""
        if status.accepted or any(clock.includes(status.worker) for clock in self._clocks.values()):
            return status
        return structs.replace(status, accepted=any(stats.accepted for stats in self._statistics))

    def summary(self, now: float) -> dict[str, Any]:
        """For meta.json and the last line."""
        ends = [stats.left_at for stats in self._statistics if stats.left_at is not None]
        updates = sum(clock.version for clock in self._clocks.values() if clock.is_main)
        groups = {name: list(clock.optimizer_spec.members) for name, clock in self._clocks.items()}
        summary = sum_up(self._statistics, max(ends, default=now), self._budget.started) | {
            "updates": updates,
            "optimizers": {name: clock.spec.text for name, clock in self._clocks.items()},
            "refused": self._refused(),
            "diverged": self._guard.summary(),
        }
        restored = {name: clock.restored for name, clock in self._clocks.items() if clock.restored}
        summary |= {"restored": restored} if restored else {}
        members = {name: group for name, group in groups.items() if group}
        return summary | {"members": members} if members else summary

    def _refused(self) -> list[str]:
        """Modes that this job could not use, of those that advice compares: those that the first optimizer refuses; all
        where no values are exchanged (one replica of a model in stages), or no model's (`KV`, which has no groups)."""
        first = self._clocks.get(MAIN)
        if first is None or not first.has_values or not first.optimizer_spec.groups:
            return list(compared())
        return list(first.optimizer_spec.refused)


def _policy(clock: OptimizerClock) -> dict[str, Any]:
    """What its policy has learned, where it has: for a job that goes on in the same mode."""
    saved = clock.policy.saved()
    return {"policy": {"sync": clock.spec.text, "saved": saved}} if saved else {}


def _plain(optimizer_spec: OptimizerSpec) -> dict[str, Any]:
    tensors = [[info.name, list(info.shape), info.dtype, info.group] for info in optimizer_spec.tensors]
    tables = [list(structs.astuple(info)) for info in optimizer_spec.tables]
    facts = {name: getattr(optimizer_spec, name) for name in ("apply", "optimizer", "sync", "inner", "companions")}
    return {**facts, "tensors": tensors, "tables": tables}
