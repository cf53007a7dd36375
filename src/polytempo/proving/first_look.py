"""A first look at a mode that was brought in, before the processes of its job are started: a few small jobs of it.

They are few and small, so that it takes a fraction of a second; `polytempo modes check` looks at everything.
"""

from __future__ import annotations

from dataclasses import replace

from polytempo.errors import ModeError
from polytempo.proving.finding import of_game
from polytempo.proving.games import KINDS, Game
from polytempo.proving.sizes import fitting
from polytempo.sync.spec import Spec

#: Workers of such a job, and pushes of each, at most.
WORKERS, STEPS = 3, 4
#: Above this number of (local) steps for a push there are fewer pushes.
LONG = 16

_LEAVE, _DIE, _NOTICE, _JOIN = (KINDS.index(kind) for kind in ("leave", "die", "notice", "join"))


def first_look(spec: Spec, workers: int) -> None:
    """Play a few small jobs of a mode.

    Args:
        spec: The mode, with its argument and options.
        workers: Of the job that is to be started.

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
    few = min(workers, WORKERS)
    steps = STEPS if spec.period <= LONG else 2
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
