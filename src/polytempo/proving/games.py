"""Random jobs of some workers and many steps: games, each of a seed, that shrink to the few moves that matter.

A game is numbers; each is a move, made by a worker that can make it, so that every game can be played under every mode and
what is left of one is a game, too. Messages take no time here: that is for walks. Pushes have unequal samples, moments are
uneven, workers leave, die and join, and in the end all make their steps and go home, the fastest or the slowest first, or
die one after another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from polytempo.proving.driver import Driver, Witness
from polytempo.proving.judge import Judge
from polytempo.proving.small_job import ALIVE, AWAITED, AWAY, DEAD, Job, JobWorld, stuck
from polytempo.proving.states import Broken, Played
from polytempo.proving.telling import answered, happened
from polytempo.sync.actions import Action, Hold
from polytempo.sync.events import Event
from polytempo.sync.machine import WorkerEvent, WorkerOrder
from polytempo.sync.spec import Spec

KINDS = (*["compute"] * 9, "join", "leave", "die", "notice", "tick")
PICKS = 16
PAUSES = (0.0, 1.0, 0.25, 3.5)
#: Samples of a push, for each of its steps.
WEIGHTS = (1, 2, 3, 1, 2, 3, 4, 0)
#: How a game ends: with the steps of the fastest or of the slowest first, or with deaths.
ENDS = ("slowest", "fastest", "deaths")
#: Moves at the end of a game, at most, for each step that may still be made.
LONGEST = 60
NEWCOMERS = 2
#: Steps of each worker, at most, where a push has many: then its blocks are cut short.
MOST_STEPS = 100

#: What happens as soon as it can.
_AT_ONCE = frozenset(("told", "asked", "fetched", "arrives", "calls", "settled", "time is up", "gone"))


@dataclass(frozen=True)
class Game:
    """What is played."""

    workers: int  #: initial ones
    steps: int  #: pushes of each worker
    moves: tuple[int, ...]
    early: int = 0  #: of these, how many are made before all initial workers have joined
    ends: str = ENDS[0]


def random_game(dice: Random, workers: int, steps: int, moves: int) -> Game:
    """A game with at most these numbers, and at least one worker and two steps."""
    number = len(KINDS) * PICKS * len(PAUSES) * len(WEIGHTS)
    made = tuple(dice.randrange(number) for _ in range(dice.randint(0, moves)))
    early = dice.choice((0, 0, 2, 4))
    return Game(dice.randint(1, workers), dice.randint(2, max(steps, 2)), made, early, dice.choice(ENDS))


def job_of(spec: Spec, game: Game) -> Job:
    """The job in which a game is played."""
    many = 1 << 30
    last = min(game.steps * spec.period, max(MOST_STEPS, 2 * game.steps))
    return Job(spec, game.workers, last, spec.capabilities.ahead + 1, 1.0, 0, many, many, NEWCOMERS)


class Play(Witness):
    """One game, played under a mode.

    Args:
        spec: The mode.
        game: The game.
        explains: Do its policies say why workers are held?
        witness: Hears of all that is asked and answered, before it is judged.
    """

    def __init__(self, spec: Spec, game: Game, explains: bool = True, witness: Witness | None = None) -> None:
        self.spec, self.game = spec, game
        self.driver = Driver(job_of(spec, game), Played, explains, self)
        self.world: JobWorld = self.driver.first()
        self.history: list[tuple[int, Event, float, list[Action]]] = []
        self.judges = [Judge(spec, game.workers) for _ in range(self.driver.parts)]
        self._witness = witness or Witness()
        self._weight = 1

    def asked(self, thing: object, event: type, args: tuple[Any, ...], answer: Callable[[], Any]) -> Any:
        return self._witness.asked(thing, event, args, answer)

    def hears_policy(self, part: int, event: Event, now: float, actions: list[Action]) -> None:
        self.history.append((part, event, now, actions))
        self._witness.hears_policy(part, event, now, actions)
        self.judges[part].hear(event, actions)

    def hears_machine(self, rank: int, event: WorkerEvent, orders: Sequence[WorkerOrder]) -> None:
        self._witness.hears_machine(rank, event, orders)

    def weigh(self, rank: int, steps: int) -> float:
        return steps * self._weight

    def run(self, again: bool = False) -> None:
        """Play it; `again`: and once more, without reasons, where the same events must bring the same decisions.

        Raises:
            Broken: A promise is broken.
            PolytempoError: So it is, and the mode or its watch has said so.
        """
        game = self.game
        for number in game.moves[: game.early]:
            self._move(number)
        for rank in range(game.workers):
            if self.world.workers[rank].status == AWAITED:
                self._do("start", rank)
        for number in game.moves[game.early :]:
            self._move(number)
        self._end()
        if again:
            twin = _SameAgain(self.history)
            Play(self.spec, game, explains=False, witness=twin).run()
            if twin.left:
                raise Broken("the job ended earlier when it was played again", None, "same again")

    # Moves.

    def _move(self, number: int) -> None:
        number, kind = divmod(number, len(KINDS))
        number, pick = divmod(number, PICKS)
        number, pause = divmod(number, len(PAUSES))
        self._weight = WEIGHTS[number % len(WEIGHTS)]
        if self.driver.brings == "batches":
            self._weight = max(self._weight, 1)
        later = self.world._replace(now=self.world.now + PAUSES[pause])
        if KINDS[kind] == "compute":
            self._chosen(self._computing(), pick, lambda rank: self._compute(rank, later))
            return
        if KINDS[kind] == "tick":
            self._chosen(self.world.wakes, pick, lambda at: self._do("tick", world=later._replace(now=max(at, later.now))))
            return
        can = (*self.driver.chances(self.world), *self.driver.moves(self.world))
        wanted = {"join": ("joins", "start"), "leave": ("leaves",), "die": ("dies",), "notice": ("noticed",)}[KINDS[kind]]
        self._chosen([move for move in can if move[0] in wanted], pick, lambda move: self._do(*move, world=later))

    def _chosen(self, candidates: Any, pick: int, act: Callable[[Any], None]) -> None:
        if candidates:
            act(candidates[pick % len(candidates)])

    def _computing(self) -> list[int]:
        return [rank for rank, doing in enumerate(self.world.workers) if doing.status == ALIVE and doing.ends < math.inf]

    def _compute(self, rank: int, later: JobWorld) -> None:
        """What a worker computes is done: it has taken as long as it has."""
        doing = later.workers[rank]
        took = later.now - (doing.ends - 1.0)
        workers = (*later.workers[:rank], doing._replace(took=took), *later.workers[rank + 1 :])
        self._do("computed", rank, world=later._replace(workers=workers))

    def _do(self, *move: Any, world: JobWorld | None = None) -> None:
        """Make a move, and let happen what it brings about."""
        (self.world,) = self.driver.after(world or self.world, move)
        while True:
            following = next((move for move in self.driver.moves(self.world) if move[0] in _AT_ONCE), None)
            if following is None:
                break
            (self.world,) = self.driver.after(self.world, following)
        self._look_for_life()

    def _look_for_life(self) -> None:
        """Some worker computes, or time will bring something."""
        here = [rank for rank, doing in enumerate(self.world.workers) if doing.status == ALIVE]
        coming = any(doing.status in (AWAITED, DEAD) for doing in self.world.workers) or self._next_moment() < math.inf
        if here and not coming and not self._computing():
            raise stuck(here)

    def _next_moment(self) -> float:
        driver = self.driver
        ends = [driver.deadline_of(doing) for doing in self.world.workers if doing.status == ALIVE]
        return min([*self.world.wakes, *ends], default=math.inf)

    # The end.

    def _end(self) -> None:
        job, micro = self.driver.job, max(self.spec.capabilities.micro, 1)
        for _ in range(int(LONGEST * (job.last + 1) * (job.workers + NEWCOMERS) * micro)):
            waiting = next((rank for rank, doing in enumerate(self.world.workers) if doing.status == DEAD), None)
            if waiting is not None:
                self._do("noticed", waiting)
            elif all(doing.status == AWAY for doing in self.world.workers):
                break
            else:
                self._go_on()
        else:
            raise Broken("the job goes on for ever", None, "liveness")
        if self.world.pending:
            _, worker, step = self.world.pending[0]
            worker = worker if worker >= 0 else -1 - worker
            raise Broken(f"step {step} of worker {worker} was neither applied nor discarded", None, "exactly once")

    def _go_on(self) -> None:
        able = self._computing()
        able.sort(key=lambda rank: self.world.workers[rank].pushes[0], reverse=self.game.ends == "fastest")
        if not able:
            at = max(self._next_moment(), self.world.now)
            wakes = any(wake <= at for wake in self.world.wakes)
            self._do("tick" if wakes else "clock", *(() if wakes else (at,)), world=self.world._replace(now=at))
        elif self.game.ends == "deaths":
            self._do("dies", able[0])
            self._do("noticed", able[0])
        else:
            self._compute(able[0], self.world._replace(now=self.world.now + 1))


class _SameAgain(Witness):
    """Compares a game with what happened when it was played before."""

    def __init__(self, before: Sequence[tuple[int, Event, float, list[Action]]]) -> None:
        self.left = deque(before)

    def hears_policy(self, part: int, event: Event, now: float, actions: list[Action]) -> None:
        before = self.left.popleft() if self.left else None
        if before is None or before[:3] != (part, event, now) or bare(before[3]) != bare(actions):
            says = f"{happened(event, now)} -> {answered(event, bare(actions))}"
            raise Broken(f"answered in another way when it was played again: {says}", None, "same again")


def bare(actions: list[Action]) -> list[Action]:
    """Without names and reasons in holds."""
    plain: dict[str, Any] = {"waiting_for": (), "waiting_count": 0, "reason": ""}
    return [replace(action, **plain) if isinstance(action, Hold) else action for action in actions]


# Smaller games that break the same.


def shrunk(game: Game, breaks: Callable[[Game], bool], tries: int = 400) -> Game:
    """The smallest game found that still breaks: without moves, with fewer workers and steps, with plainer moves."""
    left = tries
    moved = True
    while moved and left > 0:
        moved = False
        for smaller in _smaller(game):
            left -= 1
            if left < 0:
                break
            if breaks(smaller):
                game, moved = smaller, True
                break
    return game


def _smaller(game: Game) -> Iterator[Game]:
    moves, count = game.moves, len(game.moves)
    size = count
    while size:
        for start in range(0, count, size):
            yield replace(game, moves=moves[:start] + moves[start + size :], early=min(game.early, max(count - size, 0)))
        size //= 2
    sizes = [(workers, steps) for workers in range(1, game.workers + 1) for steps in range(1, game.steps + 1)]
    for workers, steps in sorted(sizes, key=lambda size: (size[0] * size[1], size[0])):  # what one alone hides, both show
        if workers * steps < game.workers * game.steps:
            yield replace(game, workers=workers, steps=steps)
    for early in range(game.early):
        yield replace(game, early=early)
    if game.ends != ENDS[0]:
        yield replace(game, ends=ENDS[0])
    for place, number in enumerate(moves):
        kind, of_kind = number % len(KINDS), number // len(KINDS)
        kind = 0 if KINDS[kind] == "compute" else kind
        for plainer in (kind, kind + len(KINDS) * (of_kind % PICKS)):
            if plainer < number:
                yield replace(game, moves=(*moves[:place], plainer, *moves[place + 1 :]))
