"""The display of a running job: a table of workers on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polytempo.errors import counted
from polytempo.launcher.standard_streams import StandardStream
from polytempo.protocol.messages import Status, WorkerStatus
from polytempo.protocol.values import TrainingProgress
from polytempo.units import plain_number

PLAIN_EVERY = 5.0  #: seconds between two status lines without a terminal
DRAWN_EVERY = 0.1  #: seconds between two redraws of a terminal, at least


@dataclass
class Rates:
    """Steps per second of each worker, over the last status messages."""

    before: dict[int, tuple[float, int]] = field(default_factory=dict)
    rate: dict[int, float] = field(default_factory=dict)

    def look(self, status: Status) -> None:
        """Take the newest status."""
        for worker in status.workers:
            then, step = self.before.get(worker.worker, (status.seconds, worker.step))
            if status.seconds - then >= 1.0:
                self.rate[worker.worker] = (worker.step - step) / (status.seconds - then)
                self.before[worker.worker] = status.seconds, worker.step
            self.before.setdefault(worker.worker, (status.seconds, worker.step))


@dataclass
class Bars:
    """Rows that processes are drawing: progress bars, and lines without their newline yet. Pure."""

    drawn: dict[tuple[str, bool], tuple[str, ...]] = field(default_factory=dict)
    #: redrawn rows; the time when they were last shown as lines
    again: dict[tuple[str, bool], float] = field(default_factory=dict)
    said: dict[tuple[str, bool], tuple[str, ...]] = field(default_factory=dict)

    def draw(self, label: str, error: bool, rows: tuple[str, ...], again: bool, now: float) -> None:
        """Take the rows that a process draws now."""
        key = label, error
        if not rows:
            self.drawn.pop(key, None)
            self.again.pop(key, None)
            return
        self.drawn[key] = rows
        if again:
            self.again.setdefault(key, now)

    def rows(self, most: int) -> list[str]:
        """The rows for a terminal, by label; at most `most`."""
        found = [f"[{label}] {row}" for (label, _), rows in sorted(self.drawn.items()) for row in rows]
        return found if len(found) <= most else [*found[: most - 1], f"... and {len(found) - most + 1} more"]

    def due(self, now: float) -> list[tuple[str, bool, str]]:
        """Without a terminal: bars that have changed, as lines, each process's at most every `PLAIN_EVERY` seconds."""
        found = []
        for key, last in self.again.items():
            if now - last >= PLAIN_EVERY and self.said.get(key) != self.drawn[key]:
                self.again[key], self.said[key] = now, self.drawn[key]
                found += [(*key, row) for row in self.drawn[key]]
        return found

    def was_said(self, label: str, error: bool, text: str) -> bool:
        """Whether this complete line was already shown as the last state of a bar."""
        said = self.said.pop((label, error), ())
        return text in said


class Display:
    """Shows the status of the job and the output of its processes."""

    def __init__(self, title: str, quiet: bool, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._quiet = quiet
        self._verbose = verbose
        self._clock = clock
        self._console = Console(stderr=True, highlight=False)
        self._out, self._error = StandardStream(sys.stdout), StandardStream(sys.stderr)
        self._rates = Rates()
        self._said = 0.0
        self._bars = Bars()
        self._status: Status | None = None
        self._stale = False  #: something has changed since the terminal was drawn
        self._drawn_at = 0.0
        self._begun = title
        #: label of the process whose line was shown last, and whether it was on standard error
        self.latest: tuple[str, bool] | None = None
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
            self._guarded(self._live.start)

    def begin(self, text: str) -> None:
        """Show what is started."""
        self._begun = f"{self._title}: {text}"
        if self._live is None and not self._quiet:
            self.say(self._begun)
        self._refresh()

    def line(self, label: str, text: str, error: bool) -> None:
        """A line that a process wrote."""
        if self._bars.was_said(label, error, text):
            return
        self.latest = label, error
        shown = f"[{label}] {text}"
        if self._live is not None and (error or sys.stdout.isatty()):
            self._guarded(lambda: self._console.print(Text(shown), soft_wrap=True))
        elif not (self._error if error else self._out).write(f"{shown}\n") and not error:
            self.say(f"standard output is gone ({self._out.lost}); the job goes on, and what workers print there is dropped")

    def draw(self, label: str, rows: tuple[str, ...], again: bool, error: bool) -> None:
        """Show rows that a process is drawing; no rows: they are erased."""
        self._bars.draw(label, error, rows, again, self._clock())
        self._stale = True
        self.tick()

    def tick(self) -> None:
        """Redraw what has changed, when it is due."""
        now = self._clock()
        if self._live is None:
            for label, error, text in self._bars.due(now):
                self.latest = label, error
                (self._error if error else self._out).write(f"[{label}] {text}\n")
        elif self._stale and now - self._drawn_at >= DRAWN_EVERY:
            self._refresh()

    def say(self, text: str) -> None:
        """Show a message of the launcher."""
        self.latest = None
        if self._live is not None:
            self._guarded(lambda: self._console.print(Text(f"polytempo: {text}"), soft_wrap=True))
        else:
            self._error.write(f"polytempo: {text}\n")

    def note(self, text: str) -> None:
        """Show a message of the launcher, unless it is told to be quiet."""
        if not self._quiet:
            self.say(text)

    def detail(self, text: str) -> None:
        """Show a message with --verbose."""
        if self._verbose:
            self.say(text)

    def show(self, status: Status) -> None:
        """Show the status of all workers."""
        self._rates.look(status)
        self._status = status
        if self._live is not None:
            self._refresh()  # not by a thread: a launcher has none
        elif not self._quiet and status.seconds - self._said >= PLAIN_EVERY:
            self._said = status.seconds
            before, now = self.latest, status_line(self._title, status)
            self.say(now)
            self.latest = before  # an error above it is still in sight

    def _refresh(self) -> None:
        live = self._live
        if live is None:
            return
        self._stale, self._drawn_at = False, self._clock()
        bars = [Text(row, no_wrap=True, overflow="ellipsis") for row in self._bars.rows(max(4, self._console.height // 2))]
        below = [] if self._quiet else [Text(self._begun) if self._status is None else self._picture(self._status)]
        self._guarded(lambda: live.update(Group(*bars, *below), refresh=True))

    def _guarded(self, draw: Callable[[], object]) -> None:
        """Draw; when the terminal was closed, the job goes on without it."""
        try:
            draw()
        except OSError as error:
            self._live, self._error.lost = None, error.strerror or str(error)

    def _picture(self, status: Status) -> Table | Text | Group:
        if status.progress is None:
            return self._table(status)
        told = Text(_pipeline_line(status.progress, status.used))
        return Group(self._table(status), told) if pushes(status) else told

    def _table(self, status: Status) -> Table:
        used = f", {100 * min(status.used, 1):.0f} % of the budget" if status.used else ""
        table = Table(
            title=f"{self._title}: {status.seconds:.0f} s{used}",
            title_justify="left",
            box=None,
            pad_edge=False,
            title_style="",
        )
        for head in ("worker", "step", "steps/s", "waiting", ""):
            table.add_column(head, justify="left" if not head else "right")
        waiting, workers = {worker.worker for worker in status.workers if worker.state == "waiting"}, counting(status)
        for worker in workers[:24]:
            rate = self._rates.rate.get(worker.worker)
            shown = "-" if rate is None else f"{rate:.1f}"
            doing = state(worker, waiting)
            table.add_row(str(worker.worker), str(worker.step), shown, f"{100 * share(worker):.0f} %", doing)
        if len(workers) > 24:
            table.add_row("...", "", "", "", f"and {len(workers) - 24} more")
        return table

    def make_room(self) -> None:
        """A worker is debugged on this terminal: from now on nothing is drawn here, and no status is told."""
        self.close()
        self._quiet = True

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._guarded(self._live.stop)
            self._live = None


def share(worker: WorkerStatus) -> float:
    """The share of a worker's time that it waited."""
    return worker.waited_s / worker.present_s if worker.present_s else 0.0


def state(worker: WorkerStatus, waiting: Container[int] = ()) -> str:
    """The state of a worker, and the ranks it waits for: without those that have arrived since and wait themselves."""
    if worker.state != "waiting":
        return "starting" if worker.state == "absent" else worker.state
    late = [rank for rank in worker.waiting_for if rank not in waiting] or worker.waiting_for
    named = ", ".join(map(str, late[:4]))
    return f"waits for {named}{', ...' if len(late) > 4 else ''}"


def pushes(status: Status) -> bool:
    """Whether any worker pushes gradients."""
    only_counts = status.progress is not None and status.progress.counted
    return not only_counts and any(worker.present_s for worker in status.workers)


def counting(status: Status) -> list[WorkerStatus]:
    """The workers whose steps are counted: of replicas of a pipeline one stage."""
    of_replicas = status.progress is not None and status.progress.distributed
    return [worker for worker in status.workers if not of_replicas or worker.present_s] or list(status.workers)


def progress_line(progress: TrainingProgress) -> str:
    """The progress of a script that trains without pushes."""
    if progress.steps < 1:
        return f"{progress.what}: 0 steps"
    loss = f", last loss {plain_number(progress.loss)}" if progress.loss is not None else ""
    steps = f"{counted(progress.steps, 'step')} in {progress.seconds:.1f} s"
    return f"{progress.what}: {steps}, {plain_number(progress.seconds / progress.steps, 3)} s a step{loss}"


def _pipeline_line(progress: TrainingProgress, used: float) -> str:
    """The same while it runs, with what of the budget is used up where its steps are counted."""
    counted_too = f", {100 * min(used, 1):.0f} % of the budget" if used and progress.counted else ""
    return f"{progress_line(progress)}{counted_too}"


def status_line(title: str, status: Status) -> str:
    """The whole job in one line."""
    if status.progress is not None and not pushes(status):
        return _pipeline_line(status.progress, status.used)
    present = sum(worker.present_s for worker in status.workers) or 1.0
    waiting = sum(worker.waited_s for worker in status.workers) / present
    each = [worker.step for worker in counting(status)]
    first, last = min(each), max(each)
    steps = f"workers at steps {first} to {last}" if first != last else f"{'each worker at ' * (len(each) > 1)}step {first}"
    used = f", {100 * min(status.used, 1):.0f} % of the budget" if status.used else ""
    return f"{title}: {status.seconds:.0f} s{used}, {steps}, waiting {100 * waiting:.0f} %"
