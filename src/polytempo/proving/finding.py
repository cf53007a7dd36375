"""What was found broken, for a reader: one line with file and line, and the sequence of events that leads to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polytempo.errors import ModeError
from polytempo.proving.driver import Driver
from polytempo.proving.games import Game, Play, look_again
from polytempo.proving.places import Tracer, place_of_answer, placed
from polytempo.proving.small_job import Job
from polytempo.proving.states import Broken, Played
from polytempo.proving.telling import answered, happened, numbered, told
from polytempo.proving.walk import MovesMade
from polytempo.sync.actions import Action
from polytempo.sync.events import Event
from polytempo.sync.machine import WorkerEvent, WorkerOrder
from polytempo.sync.policy import Policy
from polytempo.sync.spec import Spec


@dataclass(frozen=True)
class Finding:
    """A broken promise."""

    promise: str  #: its name, as in `judge.PROMISES`
    text: str  #: what is broken
    place: str = ""  #: file and line in it; empty for a mode of ours
    story: tuple[str, ...] = ()  #: what happened until then

    @property
    def line(self) -> str:
        """In one line."""
        return f"{self.place}: {self.text}" if self.place else self.text


class _Course:
    """A course of events that is gone through once more, and what is told of it."""

    def __init__(self, driver: Driver, run: Callable[[], object]) -> None:
        self.driver, self._run = driver, run
        self.lines: list[str] = []

    def hear_policy(self, part: int, event: Event, now: float, actions: Sequence[Action]) -> None:
        """A line of its own."""
        of = f"fragment {part}: " if self.driver.parts > 1 else ""
        self.lines.append(f"{of}{happened(event, now)} -> {answered(event, actions)}")

    def hear_machine(self, rank: int, event: WorkerEvent, orders: Sequence[WorkerOrder]) -> None:
        """Likewise, where it orders something."""
        if orders:
            self.lines.append(told(rank, event, orders))

    def go(self) -> Exception | None:
        """How it ends."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what was found
            return error
        return None


def of_game(spec: Spec, game: Game, again: bool = False) -> Finding | None:
    """What is wrong in a game; `again`: when it is played a second time. None: nothing is."""

    def course() -> _Course:
        play = Play(spec, game)

        def run() -> None:
            play.run()
            if again:
                look_again(spec, play)

        made = _Course(play.driver, run)
        play.hears = made.hear_policy
        return made

    return _told(spec, course, with_machines=False)


def of_way(job: Job, way: MovesMade) -> Finding | None:
    """What is wrong on the way that a walk has found; None: nothing is, for another representative of its states."""

    def course() -> _Course:
        driver = Driver(job, Played, explains=True)

        def run() -> None:
            world = driver.first()
            for move, which in way:
                (world,) = driver.after(world, move, which)

        made = _Course(driver, run)
        driver.hears_policy = made.hear_policy
        return made

    return _told(job.spec, course, with_machines=True)


def _told(spec: Spec, course: Callable[[], _Course], with_machines: bool) -> Finding | None:
    """Go through a course, once to see how it ends, and once more to see where what is wrong is made."""
    first = course()
    error = first.go()
    if error is None:
        return None
    driver = first.driver
    answering, event, args = driver.answering
    second, origin = course(), spec.mode.origin
    if with_machines or not isinstance(answering, Policy):
        second.driver.hears_machine = second.hear_machine
    tracer = Tracer(origin.code if origin is not None else "")
    second.driver.traced = driver.asked, tracer
    twin = second.go() or error
    finding = of_error(twin)
    if not isinstance(twin, Broken) and isinstance(answering, Policy):  # it failed before it could be told
        second.lines.append(f"{happened(event(*args), driver.now)} -> {finding.text}")
    if origin is not None:
        about = getattr(twin, "about", None) or second.driver.current
        line = tracer.line_of(about) if about is not None else 0
        if line:
            finding = replace(finding, place=f"{origin.file}:{line}")
        elif not finding.place:
            finding = replace(finding, place=place_of_answer(origin, answering, event))
    return replace(finding, story=numbered(second.lines))


def of_error(error: Exception, place: str = "") -> Finding:
    """A finding without a story; `place`: where, unless the error says so."""
    promise, text = _words(error)
    if isinstance(error, ModeError):
        place, text = placed(error)
    return Finding(promise, text, place)


def _words(error: Exception) -> tuple[str, str]:
    """The promise that an error breaks, and what it says."""
    if isinstance(error, Broken):
        return error.promise, str(error)
    said = " ".join(str(error).split())
    return "orders", said if isinstance(error, ModeError) else f"{type(error).__name__}: {said}"
