"""How large the jobs are that a walk goes through, chosen from the spec alone: of our modes and of those users bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from polytempo.errors import PolytempoError, SpecError, counted
from polytempo.proving.games import KINDS, PAUSES, PICKS, Game, Play, random_game
from polytempo.proving.small_job import Job
from polytempo.proving.states import Broken
from polytempo.sync.actions import Action, Release, Wake
from polytempo.sync.spec import Spec

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
    """The jobs that are walked through, the smallest first.

    Args:
        spec: The mode.
        timed: Does it follow the clock?
    """
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
