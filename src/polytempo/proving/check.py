"""What is played to look at a mode: the whole check within some seconds, and a first look before a job.

    check        games, walks, and one worker against a plain loop. What is found first is shown, after the smallest sequence
                 of events that leads to it; then the check ends
    first_look   a few small games, before the processes of a job are started: a fraction of a second

How large the games and the jobs of walks are is chosen from the spec alone: of our modes and of those users bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from polytempo.errors import ModeError, PolytempoError, SpecError, UsageError, counted
from polytempo.proving.alone import look_at_one_worker
from polytempo.proving.finding import Finding, of_error, of_game, of_way
from polytempo.proving.games import KINDS, PAUSES, PICKS, Game, Play, random_game, shrunk
from polytempo.proving.judge import PROMISES
from polytempo.proving.small_job import Job
from polytempo.proving.states import Broken
from polytempo.proving.walk import BrokenOnTheWay, Walk
from polytempo.sync.actions import Action, Release, Wake
from polytempo.sync.capabilities import MadeOf
from polytempo.sync.spec import Spec, parse_spec

#: Of the seconds that a check may take, the part that games and the part that walks may have come to when they end.
GAMES_END, WALKS_END = 0.35, 0.85
#: Random games, at most; every fourth is played a second time.
GAMES, AGAIN = 2000, 4
#: Workers, and moves beside those at the end.
WORKERS, MOVES = 5, 70
#: Local steps of a worker in a game, about, where a push has many.
LOCAL_STEPS = 60
#: Worlds of one walk, at most.
WORLDS = 60_000
#: Games that are tried to shrink one.
TRIES = 600
#: Events of a story that need not be fewer; worlds of each walk in which fewer are looked for.
SHORT, SHORT_WORLDS = 8, 4000
#: How often a game is played once more to be told, where it does not go wrong each time.
REPLAYS = 5


@dataclass(frozen=True)
class Walked:
    """One walk."""

    job: str
    worlds: int
    exhaustive: bool


@dataclass
class CheckReport:
    """What was played, and what was found."""

    sync: str
    games: int = 0
    events: int = 0  #: in them
    walks: list[Walked] = field(default_factory=list)
    steps_alone: int = 0  #: of one worker, against a plain loop
    seconds: float = 0.0
    finding: Finding | None = None
    not_promised: tuple[str, ...] = ()

    @property
    def promises(self) -> dict[str, str]:
        """Each by its name: "ok", "broken", "not broken yet" (when that was found), "not promised", "not looked at"."""
        broken = self.finding.promise if self.finding is not None else ""
        found = {}
        for name in PROMISES:
            if name == broken:
                found[name] = "broken"
            elif name in self.not_promised:
                found[name] = "not promised"
            elif name == "alone":
                found[name] = "ok" if self.steps_alone else "not looked at"
            elif broken:
                found[name] = "not broken yet" if self.games else "not looked at"
            else:
                found[name] = "ok"
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        finding = self.finding
        return {
            "sync": self.sync,
            "games": self.games,
            "events": self.events,
            "walks": [{"job": walk.job, "worlds": walk.worlds, "exhaustive": walk.exhaustive} for walk in self.walks],
            "steps_alone": self.steps_alone,
            "seconds": round(self.seconds, 3),
            "promises": self.promises,
            "finding": None
            if finding is None
            else {"promise": finding.promise, "line": finding.line, "events": list(finding.story)},
        }


def check(
    spec: Spec,
    now: Callable[[], float],
    *,
    seconds: float = 50.0,
    seed: int = 0,
    games: int = GAMES,
    worlds: int = WORLDS,
    alone: bool = True,
) -> CheckReport:
    """Look at all that a mode promises.

    Args:
        spec: The mode, with its argument and options.
        now: The seconds of a clock.
        seconds: It ends after about this time, with what was played until then.
        seed: Of the games.
        games: Random ones, at most.
        worlds: Of one walk, at most.
        alone: Is one worker trained, too?
    """
    return _Check(spec, now, seconds, seed, games, worlds).run(alone)


class _Check:
    def __init__(self, spec: Spec, now: Callable[[], float], seconds: float, seed: int, games: int, worlds: int) -> None:
        self._spec, self._now, self._seconds = spec, now, seconds
        self._dice, self._games, self._worlds = Random(seed), games, worlds
        self._began = now()
        self._woken = False  # does it ask to be woken?
        self._report = CheckReport(spec.text)

    def _is_over(self, part: float) -> bool:
        return self._now() - self._began >= part * self._seconds

    def run(self, alone: bool) -> CheckReport:
        report = self._report
        try:
            report.not_promised = not_promised(self._spec)
            self._try_options()
            report.finding = self._play_games() or self._walk() or (self._train() if alone else None)
        except ModeError as error:  # it cannot even be made
            report.finding = of_error(error)
        report.seconds = self._now() - self._began
        return report

    def _try_options(self) -> None:
        """Each option that is not given can be: both halves of the mode can be made with its example."""
        spec = self._spec
        for name, reader in spec.mode.options.items():
            if name in spec.options or spec.mode.origin is None:
                continue
            try:
                other = parse_spec(f"{spec.text},{name}={reader.example}")
                other.machine(0)
                other.policy(fitting(other, WORKERS) or WORKERS)
                _ = other.capabilities
            except ModeError as error:
                if isinstance(error.__cause__, TypeError):  # a function of the mode does not take it
                    raise
            except SpecError:  # not this value, or not with the others
                continue

    # Games.

    def _play_games(self) -> Finding | None:
        spec = self._spec
        most = max(2, min(12, LOCAL_STEPS // spec.period))
        lead = spec.declared(spec.mode.promises.lead)
        if lead is not None and spec.period == 1:
            most = max(most, min(lead + 4, 40))
        opening = first_games(spec, 3)
        for number in range(len(opening) + self._games):
            if number < len(opening):
                game = opening[number]
            else:
                game = random_game(self._dice, WORKERS, most, MOVES + 2 * most)
            workers = fitting(spec, game.workers)
            if not workers or (number and self._is_over(GAMES_END)):
                break
            game = replace(game, workers=workers)
            again = not number % AGAIN
            if self._breaks(game, again):
                return self._smallest(game, again)
        return None

    def _breaks(self, game: Game, again: bool) -> str:
        """The promise that a game breaks; empty: none."""
        play = Play(self._spec, game)
        try:
            play.run(again)
        except Broken as error:
            return error.promise
        except Exception as error:  # noqa: BLE001  a failure of the mode's code is what is looked for
            return type(error).__name__
        finally:
            self._report.games += 1
            self._report.events += len(play.history)
            self._woken = self._woken or "Wake" in play.driver.seen
        return ""

    def _smallest(self, game: Game, again: bool) -> Finding:
        games, events, broken = self._report.games, self._report.events, self._breaks(game, again)

        def breaks(smaller: Game) -> bool:
            if fitting(self._spec, smaller.workers) != smaller.workers or self._is_over(WALKS_END):
                return False
            return self._breaks(smaller, again) == broken

        smaller = shrunk(game, breaks, TRIES)
        self._report.games, self._report.events = games, events
        for candidate in (*[smaller] * REPLAYS, *[game] * REPLAYS):
            finding = of_game(self._spec, candidate, again)
            if finding is not None:
                return self._shorter(finding) if len(finding.story) > SHORT and not again else finding
        text = "a game went wrong, and did not when it was played again: the same events do not give the same actions"
        return Finding("same again", text, self._declared())

    def _shorter(self, finding: Finding) -> Finding:
        """What small walks find, if that takes fewer events."""
        for _, job in jobs(self._spec, timed=self._woken or self._spec.capabilities.by_speed):
            try:
                Walk(job, min(self._worlds, SHORT_WORLDS), lambda: self._is_over(WALKS_END))
            except BrokenOnTheWay as error:
                other = of_way(job, error.way)
                return other if other is not None and len(other.story) < len(finding.story) else finding
        return finding

    # Walks.

    def _walk(self) -> Finding | None:
        timed = self._woken or follows_the_clock(self._spec)
        for size, job in jobs(self._spec, timed):
            if self._is_over(WALKS_END):
                break
            try:
                walk = Walk(job, self._worlds, lambda: self._is_over(WALKS_END))
            except BrokenOnTheWay as error:
                return of_way(job, error.way) or of_error(error.cause, self._declared())
            self._report.walks.append(Walked(str(size), walk.worlds, walk.exhaustive))
        return None

    # Training.

    def _train(self) -> Finding | None:
        if "alone" in self._report.not_promised:
            return None
        try:
            self._report.steps_alone = look_at_one_worker(self._spec)
        except Broken as error:
            return of_error(error, self._declared())
        except ModeError as error:
            return replace(of_error(error), promise="alone")
        except UsageError:  # it needs more than one worker, or a script of another kind
            return None
        except Exception as error:  # noqa: BLE001  what the mode has declared has made torch fail
            return replace(of_error(error, self._declared()), promise="alone")
        return None

    def _declared(self) -> str:
        origin = self._spec.mode.origin
        return f"{origin.file}:{origin.line}" if origin is not None and origin.line else ""


def not_promised(spec: Spec) -> tuple[str, ...]:
    """The promises that a mode does not make."""
    promises, can = spec.mode.promises, spec.capabilities
    made = {
        "lead": spec.declared(promises.lead) is not None,
        "waits": spec.declared(promises.waits) is not None,
        "quorum": promises.quorum is not None,
        "round": can.update is MadeOf.ALL,
        "even": promises.even,
        "rows": can.neighbours,
        "alone": spec.declared(promises.alone),
    }
    return tuple(name for name, promised in made.items() if not promised)


# How large what is played is.

#: Workers that a mode may need at least; more are not tried.
MOST_WORKERS = 8
#: Games that are played to see whether a mode follows the clock.
PROBES = 12
#: The deadline of jobs in which time matters, in steps.
DEADLINE = 2.0
#: In place of what was decided, where a policy asks to be woken.
WOKEN = "it asks to be woken"


@dataclass(frozen=True)
class Size:
    """What is walked through."""

    workers: int = 2
    steps: int = 2  #: pushes of each worker
    losses: int = 0
    joins: int = 0

    def __str__(self) -> str:
        lost, come = "one dies or leaves" if self.losses else "", "one joins" if self.joins else ""
        return ", ".join(filter(None, (counted(self.workers, "worker"), f"{self.steps} pushes each", lost, come)))


#: The smallest first.
SIZES = (
    Size(1),
    Size(),
    Size(losses=1),
    Size(joins=1),
    Size(steps=3, losses=1),
    Size(steps=3, joins=1),
    Size(workers=3, losses=1),
)


def fitting(spec: Spec, workers: int) -> int:
    """This number of workers, or the next larger one with which the mode works; 0: there is none.

    Raises:
        ModeError: The mode's own code fails.
    """
    for number in range(workers, MOST_WORKERS + 1):
        try:
            spec.policy(number)
        except SpecError:
            continue
        return number
    return 0


def jobs(spec: Spec, timed: bool) -> Iterator[tuple[Size, Job]]:
    """The jobs that are walked through, the smallest first; `timed`: of a mode that follows the clock."""
    done = set()
    for size in SIZES:
        workers = fitting(spec, size.workers)
        size = Size(workers, size.steps, size.losses, size.joins)
        if workers and size not in done:
            done.add(size)
            yield size, job_of(spec, size, timed)


def job_of(spec: Spec, size: Size, timed: bool) -> Job:
    """A job of this size; of pushes with several local steps the last is short."""
    last = size.steps * spec.period - (spec.period > 1)
    can = spec.capabilities
    beside = can.fetches or (can.averages and not can.waits)  # neither its pushes nor its workers wait: too many worlds
    return Job(
        spec,
        size.workers,
        last,
        can.ahead + 1,
        DEADLINE if timed else 0.0,
        1,
        size.losses,
        size.joins,
        prompt=bool(size.joins) and beside,
    )


def follows_the_clock(spec: Spec, seed: int = 0) -> bool:
    """Do decisions of this mode depend on moments? Games are played at two paces, which must differ then."""
    if spec.capabilities.by_speed:
        return True
    dice = Random(seed)
    for _ in range(PROBES):
        game = random_game(dice, 4, 8 if spec.period < 8 else 2, 40)
        workers = fitting(spec, game.workers)
        if not workers:
            return False
        paces = [_decided(spec, Game(workers, game.steps, moves, 0)) for moves in (game.moves, _hurried(game.moves))]
        if paces[0] != paces[1] or WOKEN in paces:
            return True
    return False


def _hurried(moves: tuple[int, ...]) -> tuple[int, ...]:
    """The same moves without pauses between them."""
    before = len(KINDS) * PICKS
    return tuple(number % before + number // (before * len(PAUSES)) * before * len(PAUSES) for number in moves)


def _decided(spec: Spec, game: Game) -> list[list[Action]] | str:
    play = Play(spec, game, explains=False)
    try:
        play.run()
    except (Broken, PolytempoError) as error:  # found elsewhere
        return type(error).__name__
    wakes = any(isinstance(action, Wake) for _, _, _, actions in play.history for action in actions)
    if wakes:
        return WOKEN
    return [[action for action in actions if isinstance(action, Release)] for _, _, _, actions in play.history]


# The first look.

#: Workers of such a job, and pushes of each, at most.
FEW, FEW_STEPS = 3, 4
#: Above this number of (local) steps for a push there are fewer pushes.
LONG = 16

_LEAVE, _DIE, _NOTICE, _JOIN = (KINDS.index(kind) for kind in ("leave", "die", "notice", "join"))


def first_look(spec: Spec, workers: int) -> None:
    """Play a few small jobs of a mode, before one of this number of workers is started.

    Raises:
        ModeError: A promise is broken; one line with file and line.
        SpecError: The mode cannot be made for this number of workers.
    """
    if spec.mode.origin is None:
        return
    spec.policy(workers)
    for game in first_games(spec, workers):
        fits = fitting(spec, game.workers)  # a mode may need more
        finding = of_game(spec, replace(game, workers=fits)) if fits else None
        if finding is not None:
            raise ModeError(finding.line)


def first_games(spec: Spec, workers: int) -> list[Game]:
    """Jobs in which nothing befalls, of one worker and of a few; in which one leaves, and in which one joins."""
    few = min(workers, FEW)
    steps = FEW_STEPS if spec.period <= LONG else 2
    some = (0,) * few
    games = [Game(few, steps, (), ends=ends) for ends in ("slowest", "fastest")]
    games += [
        Game(few, steps, (*some, _LEAVE)),
        Game(few, steps, (*some, _DIE, _NOTICE)),
        Game(few, steps, (*some, 0, _JOIN)),
    ]
    if few > 1:
        games.append(Game(1, steps, ()))
    return games
