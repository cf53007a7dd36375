"""What follows from the end of a process: go on, or end the job, and with which cause. Pure: ends in, actions out."""

from __future__ import annotations

import signal
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from polytempo.protocol.messages import Status


@dataclass(frozen=True)
class FailureReport:
    """Tell the coordinator that a worker is gone; `warning` is for the user, where there is one."""

    worker: int
    reason: str
    cause: str
    warning: str = ""


@dataclass(frozen=True)
class EndJob:
    """End the job; `cause` is the first cause."""

    cause: str
    worker: int | None = None
    lost: bool = False  #: the worker was killed, or its host is gone: nothing is wrong with the values that servers hold


@dataclass(frozen=True)
class AllDone:
    """Every worker has ended, and enough of them finished."""


SupervisorAction = FailureReport | EndJob | AllDone


@dataclass(frozen=True)
class LostServer:
    """What is lost with a server: a part of the model, or where that is at the workers, the coordination of the job."""

    holds: bool  #: did servers hold the model?
    checkpoint: str = ""  #: the newest of the job
    saving: str = ""  #: how a model that is at the workers can be saved

    def in_words(self, server: int) -> str:
        """The rest of the line that says how the server ended."""
        if self.holds:
            none = "there is no checkpoint to resume from (--checkpoint DIR)"
            return f"its part of the model is lost; {f'resume with --resume {self.checkpoint}' if self.checkpoint else none}"
        was = "it coordinated the job" if server == 0 else "it was needed by the job"
        where = "the model was at the workers, and what the script has not saved is lost"
        return f"{was}, which has ended; {where}; {self.saving}"


@dataclass
class Supervisor:
    """Counts the workers that finished and those that failed."""

    size: int
    least: int
    tolerant: bool = False  #: the user has set `least` (--min-workers)
    trains: bool = False  #: a worker has made an optimizer
    finished: set[int] = field(default_factory=set)
    dead: dict[int, str] = field(default_factory=dict)
    ending: bool = False
    _early: dict[int, str] = field(default_factory=dict)  # failed before a push, in a job that may make none

    def exited(self, worker: int, reason: str, cause: str, accepted: bool = True) -> list[SupervisorAction]:
        """A worker's process has ended: "finished", "failed" or "lost". `accepted`: a push of it was applied.

        A script that fails before its first push has a mistake in it, or does not fit the others: the job ends, in every
        mode. Later failures, and deaths by a signal at any time, are what `--min-workers` is about. What makes no optimizer
        (a pipeline, torch.distributed) never pushes: there `--min-workers`, if it was given, holds from the start.
        """
        if worker in self.finished or worker in self.dead or self.ending:
            return []
        if reason == "finished":
            self.finished.add(worker)
            return [FailureReport(worker, reason, cause), *self._whether_done()]
        if reason == "failed" and not accepted:
            if self.trains or not self.tolerant:
                return self._mistaken(worker, cause)
            self._early[worker] = cause
        self.dead[worker] = cause
        left = self.size - len(self.dead)
        if left < self.least:
            self.ending = True
            needs = "" if left == 0 else f"; {left} of {self.size} workers are left, at least {self.least} are needed"
            return [EndJob(f"worker {worker} {cause}{needs}", worker, lost=reason == "lost")]
        warning = f"worker {worker} {cause}; going on with {left} of {self.size}"
        return [FailureReport(worker, reason, cause, warning), *self._whether_done()]

    def active(self) -> list[int]:
        """The workers that have not ended; none once the job ends."""
        return [] if self.ending else [w for w in range(self.size) if w not in self.finished and w not in self.dead]

    def training(self) -> list[SupervisorAction]:
        """A worker has made an optimizer: a worker that failed before its first push ends the job after all."""
        self.trains = True
        for worker, cause in self._early.items():
            return [] if self.ending else self._mistaken(worker, cause)
        return []

    def _mistaken(self, worker: int, cause: str) -> list[SupervisorAction]:
        self.ending = True
        return [EndJob(f"worker {worker} {cause} before its first push", worker)]

    def _whether_done(self) -> list[SupervisorAction]:
        if len(self.finished) + len(self.dead) < self.size:
            return []
        self.ending = True
        return [AllDone()]

    def server_exited(self, server: int, cause: str, lost: LostServer) -> list[SupervisorAction]:
        """A server's process has ended before the job did."""
        if self.ending:
            return []
        self.ending = True
        return [EndJob(f"server {server} {cause}: {lost.in_words(server)}")]


#: Seconds for which a process is stopped before it is named (a snapshot stops it for less), and before it is named again;
#: from then on it is named each time that the stop has doubled.
NAMED_AFTER, AGAIN_AFTER = 1.0, 10.0


Process = TypeVar("Process", bound=Hashable)


@dataclass
class StoppedProcesses(Generic[Process]):
    """The processes without which no worker goes on, and since when which of them are stopped (SIGSTOP).

    The kernel tells them from those that are busy: a long optimizer step or checkpoint is no reason to name one.
    """

    limit: float | None  #: seconds after which one is given up (--timeout)
    since: dict[Process, float] = field(default_factory=dict)
    named: dict[Process, float] = field(default_factory=dict)  #: when each was named last
    resumed: float = float("-inf")  #: when one was last seen to go on

    def look(self, stopped: Collection[Process], now: float) -> tuple[list[Process], list[Process], list[Process]]:
        """These are stopped now: which of them to name, which that were named go on again, and which to give up."""
        gone_on = [process for process in self.since if process not in stopped]
        again = [process for process in gone_on if self.named.pop(process, None) is not None]
        for process in gone_on:
            del self.since[process]
            self.resumed = now
        for process in stopped:
            self.since.setdefault(process, now)
        over = [process for process, since in self.since.items() if self.limit is not None and now - since > self.limit]
        due = []
        for process, since in self.since.items():
            last = self.named.get(process)
            wait = NAMED_AFTER if last is None else max(AGAIN_AFTER, 2 * (last - since))
            if process not in over and now - since >= wait:
                due.append(process)
        self.named.update(dict.fromkeys(due, now))
        return due, again, over

    def held_up(self, now: float) -> bool:
        """Whether workers may have waited for a stopped process in the last `limit` seconds, instead of for each other."""
        return bool(self.since) or (self.limit is not None and now - self.resumed <= self.limit)


def waited_too_long(status: Status, limit: float) -> int | None:
    """A worker that another has waited for longer than `limit` and that does not wait itself; None without one."""
    states = {worker.worker: worker.state for worker in status.workers}
    for worker in status.workers:
        if worker.held_s > limit:  # since its wait began some of those may have come
            late = [rank for rank in worker.waiting_for if states.get(rank) in ("absent", "computing")]
            if late:
                return late[0]
    return None


def last_error(written: Iterable[str]) -> list[str]:
    """The last traceback in the last lines of a process, with its causes; without a traceback, all lines."""
    lines = list(written)
    begin = "Traceback (most recent call last):"
    heads = [number for number, line in enumerate(lines) if line == begin]
    if not heads:
        return lines
    first = heads[-1]
    for head in reversed(heads[:-1]):
        between = lines[head:first]
        if not any(line.startswith(("The above exception", "During handling of")) for line in between[-3:]):
            break
        first = head
    return lines[first:]


def described(status: int) -> tuple[str, str]:
    """A process's exit status as a reason and in words."""
    if status == 0:
        return "finished", "finished"
    if status > 0:
        return "failed", f"failed with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return "lost", f"was killed by {name}"
