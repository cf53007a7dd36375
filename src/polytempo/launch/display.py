"""What a running job looks like: a line a worker on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polytempo.protocol.messages import Status, WorkerStatus
from polytempo.protocol.values import Progress

#: Without a terminal a line is written about so often.
PLAIN_EVERY = 5.0


@dataclass
class Rates:
    """Steps a second of each worker, over the last few looks."""

    before: dict[int, tuple[float, int]] = field(default_factory=dict)
    rate: dict[int, float] = field(default_factory=dict)

    def look(self, status: Status) -> None:
        """Take what is new."""
        for worker in status.workers:
            then, step = self.before.get(worker.worker, (status.seconds, worker.step))
            if status.seconds - then >= 1.0:
                self.rate[worker.worker] = (worker.step - step) / (status.seconds - then)
                self.before[worker.worker] = status.seconds, worker.step
            self.before.setdefault(worker.worker, (status.seconds, worker.step))


class Display:
    """Shows the job and passes on what its processes say."""

    def __init__(self, title: str, quiet: bool, verbose: bool = False) -> None:
        self._title = title
        self._quiet = quiet
        self._verbose = verbose
        self._console = Console(stderr=True, highlight=False)
        self._rates = Rates()
        self._live: Live | None = None
        self._said = 0.0
        if self._console.is_terminal and not quiet:
            self._live = Live(Text(f"{title}: starting"), console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def line(self, label: str, text: str, error: bool) -> None:
        """A line that a process wrote."""
        if self._live is not None:
            self._console.print(Text(f"[{label}] {text}"), soft_wrap=True)
            return
        stream = sys.stderr if error else sys.stdout
        stream.write(f"[{label}] {text}\n")
        stream.flush()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        if self._live is not None:
            self._console.print(Text(f"polytempo: {text}"), soft_wrap=True)
        else:
            sys.stderr.write(f"polytempo: {text}\n")
            sys.stderr.flush()

    def detail(self, text: str) -> None:
        """A line for those who asked for more."""
        if self._verbose:
            self.say(text)

    def show(self, status: Status) -> None:
        """How everybody is now."""
        self._rates.look(status)
        if self._live is not None:
            self._live.update(self._picture(status), refresh=True)  # by hand: a launcher has no threads
        elif not self._quiet and status.seconds - self._said >= PLAIN_EVERY:
            self._said = status.seconds
            self.say(plain(self._title, status))

    def _picture(self, status: Status) -> Table | Text | Group:
        if status.progress is None:
            return self._table(status)
        told = Text(told_in_words(status.progress))
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
        for worker in status.workers[:24]:
            rate = self._rates.rate.get(worker.worker)
            shown = "-" if rate is None else f"{rate:.1f}"
            table.add_row(str(worker.worker), str(worker.step), shown, f"{100 * share(worker):.0f} %", state(worker))
        if len(status.workers) > 24:
            table.add_row("...", "", "", "", f"and {len(status.workers) - 24} more")
        return table

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def share(worker: WorkerStatus) -> float:
    """Of a worker's time, the part it waited."""
    return worker.waited_s / worker.present_s if worker.present_s else 0.0


def state(worker: WorkerStatus) -> str:
    """What a worker is doing, and for whom it waits."""
    if worker.state != "waiting":
        return worker.state
    named = ", ".join(map(str, worker.waiting_for[:4]))
    return f"waits for {named}{', ...' if len(worker.waiting_for) > 4 else ''}"


def pushes(status: Status) -> bool:
    """Does anybody train by pushes?"""
    return any(worker.present_s for worker in status.workers)


def told_in_words(progress: Progress) -> str:
    """How far something is that trains without pushes."""
    if progress.steps < 1:
        return f"{progress.what}: 0 steps"
    loss = f", last loss {progress.loss:.4g}" if progress.loss is not None else ""
    steps = f"{progress.steps} step{'s' * (progress.steps != 1)} in {progress.seconds:.1f} s"
    return f"{progress.what}: {steps}, {progress.seconds / progress.steps:.3g} s a step{loss}"


def plain(title: str, status: Status) -> str:
    """The whole job in one line."""
    if status.progress is not None and not pushes(status):
        return told_in_words(status.progress)
    present = sum(worker.present_s for worker in status.workers) or 1.0
    waiting = sum(worker.waited_s for worker in status.workers) / present
    steps = [worker.step for worker in status.workers]
    used = f", {100 * min(status.used, 1):.0f} % of the budget" if status.used else ""
    return f"{title}: {status.seconds:.0f} s{used}, steps {min(steps)} to {max(steps)}, waiting {100 * waiting:.0f} %"
