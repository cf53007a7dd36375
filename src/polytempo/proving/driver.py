"""Machines and policies in a job of messages: a second, independent statement of how orders are performed.

Nothing here is the simulator's. A move makes a `JobWorld` of the one before it (`small_job.py`):

    up, down     what a worker tells the policies and what it is told: each in the order sent, at any later moment
    calls        requests and replies of pairs: in order between two workers, else in any
    mail         values for neighbours. They are there when the release is that vouches for them, as the transport sees to
    computing    ends at any later moment; where the mode has a clock it takes 0, 1 or as long as the deadline, and the clock
                 goes on when nothing is due. In a job few steps take other than 1, and few messages take time

A worker that dies leaves what it had sent; the others hear of it at any later moment, and what has not arrived by then is
lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from polytempo.proving.orders import Performer
from polytempo.proving.small_job import ALIVE, AWAITED, AWAY, DEAD, Doing, Draft, Job, JobWorld, Move, replaced
from polytempo.proving.states import Broken, Interned, States
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import NOT_MEASURED, Event, Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.machine import (
    AllArrived,
    AnswerPartner,
    Asked,
    Computed,
    Dropped,
    Fetched,
    Leaving,
    Parted,
    Replied,
    Requested,
    StartsAt,
    TimeUp,
    WorkerEvent,
    WorkerOrder,
)


class Witness:
    """Hears what policies and machines are asked and answer. A walk has none."""

    def asked(self, thing: object, event: type, args: tuple[Any, ...], answer: Callable[[], Any]) -> Any:
        """A policy or a machine is asked: the call that makes it answer."""
        return answer()

    def hears_policy(self, part: int, event: Event, now: float, actions: list[Action]) -> None:
        """The policy of a fragment has answered an event."""

    def hears_machine(self, rank: int, event: WorkerEvent, orders: Sequence[WorkerOrder]) -> None:
        """A worker's machine has."""

    def weigh(self, rank: int, steps: int) -> float:
        """The samples in a push of this number of steps."""
        return steps


class Driver:
    """Performs the orders of machines and the actions of policies, and looks at each of them.

    One move at a time: `after` gives the world after it. What is wrong is a `Broken`.

    Args:
        job: What is played.
        states: `Interned`, where one world has several after it; `Played`, where it has one.
        explains: Do policies say why workers are held?
        witness: Hears of all that is asked and answered.
    """

    def __init__(
        self, job: Job, states: Callable[[], States] = Interned, explains: bool = False, witness: Witness | None = None
    ) -> None:
        self.job, self.spec, self.explains, self.witness = job, job.spec, explains, witness
        self.policies, self.machines = states(), states()
        self.current: object = None  #: the action or order that is carried out
        self.seen: Counter[str] = Counter()
        machine = job.spec.machine(0, job.last)
        self.brings, self.parts, self.micro = machine.brings, machine.parts, machine.micro
        self.averaging = job.spec.averaging
        self.corrections = job.spec.corrections
        self.versions = self.corrections.any
        self.draft = Draft()  #: the world that is being made
        self._performer = Performer(job, self.draft, self.machines, machine)

    def first(self) -> JobWorld:
        """All workers are awaited."""
        policies = [self.spec.policy(self.job.workers) for _ in range(self.parts)]
        for policy in policies:
            policy.explains = self.explains
        numbers = tuple([self.policies.number(policy) for policy in policies])
        workers = [Doing(AWAITED)] * self.job.workers + [Doing(AWAY)] * min(self.job.joins, self.job.comers)
        return JobWorld(numbers, tuple(workers), losses=self.job.losses, joins=self.job.joins, odd=self.job.odd)

    # What can happen.

    def moves(self, world: JobWorld) -> Iterator[Move]:
        """All that can happen next: what cannot be put off for ever."""
        later = math.inf
        if self.job.prompt and (asking := [rank for rank, doing in enumerate(world.workers) if doing.again]):
            yield "asked", asking[0]
            return
        for rank, doing in enumerate(world.workers):
            if doing.status == ALIVE:
                if doing.ends <= world.now:
                    yield "computed", rank
                later = min(later, doing.ends)
                if self.job.deadline and (ends := self.deadline_of(doing)) < math.inf:
                    if ends <= world.now:
                        yield "time is up", rank
                    later = min(later, ends)
                if doing.down:
                    yield "told", rank
                if doing.again:
                    yield "asked", rank
                if doing.fetching:
                    yield "fetched", rank
                if doing.settles and not doing.up:
                    yield "settled", rank
                idle = doing.ends == math.inf and not doing.up and not doing.again
                if idle and (doing.home or doing.leaving) and self.machines.things[doing.machine].is_free:
                    yield "gone", rank
            elif doing.status == AWAITED:
                yield "start", rank
            elif doing.status == DEAD:
                yield "noticed", rank
            if doing.up:
                yield "arrives", rank
        for pair in {(call[0], call[1]): None for call in world.calls}:
            yield "calls", *pair
        if self.job.deadline:
            later = min([later, *world.wakes])
            if any(at <= world.now for at in world.wakes):
                yield ("tick",)
            elif world.now < later < math.inf and (world.odd or not world.in_flight):
                yield "clock", later

    def chances(self, world: JobWorld) -> Iterator[Move]:
        """What may befall the job."""
        for rank, doing in enumerate(world.workers):
            if world.losses and doing.status in (ALIVE, AWAITED):
                yield "dies", rank
                if doing.status == ALIVE and not (doing.leaving or doing.home):
                    yield "leaves", rank
            back = rank < self.job.workers
            if world.joins and doing.status in (AWAY, DEAD) and not (back and self.job.prompt):
                yield "joins", rank

    def deadline_of(self, doing: Doing) -> float:
        """When the round of a worker ends; inf: it is in none, or that has no deadline."""
        machine = self.machines.things[doing.machine]
        return machine.ends_at if getattr(machine, "in_round", False) else math.inf

    def after(self, world: JobWorld, move: Move, which: int | None = None) -> Iterator[JobWorld]:
        """The worlds after a move: as many as there are durations, where it makes a worker compute; or only that number
        `which` of them. Where states are `Played`, there is one."""
        draft, in_flight = self.draft, move[0] == "clock" and world.in_flight
        # Where the mode follows the clock, a few steps of a job may take no time, or as long as the deadline.
        durations = (1.0, 0.0, self.job.deadline) if world.odd and self.job.deadline else (1.0,)
        for seconds in durations if which is None else durations[which : which + 1]:
            draft.begin(world, seconds)
            self._make(move)
            yield draft.world(world.odd - ((draft.chose and seconds != 1.0) or in_flight))
            if not draft.chose:
                return

    def _make(self, move: Move) -> None:
        draft, change = self.draft, self.draft.change
        match move:
            case "clock", now:
                draft.now = now
            case ("tick",):
                draft.wakes = tuple(at for at in draft.wakes if at > draft.now)
                for part in range(self.parts):
                    self._decide(part, Ticked, ())
            case "computed", rank:
                doing = draft.workers[rank]
                unsent, spent = tuple(count + 1 for count in doing.unsent), doing.spent + doing.took
                change(rank, ends=math.inf, unsent=unsent, spent=spent, took=0.0)
                self._tell(rank, Computed, doing.took)
            case "time is up", rank:
                self._tell(rank, TimeUp, draft.workers[rank].pushes[0])
            case "asked", rank:
                change(rank, again=False)
                self._tell(rank, Asked)
            case "fetched", rank:
                change(rank, fetching=False, come=(True,))
                self._tell(rank, Fetched)
            case "settled", rank:
                change(rank, settles=False)
                self._tell(rank, AllArrived)
            case "told", rank:
                self._told(rank)
            case "arrives", rank:
                self._arrives(rank)
            case "calls", sender, receiver:
                self._calls(sender, receiver)
            case "start", rank:
                self._start(rank)
            case "joins", rank:
                draft.joins -= 1
                if draft.workers[rank].status == DEAD:
                    self._part_with(rank, "lost")
                self._start(rank)
            case "leaves", rank:
                draft.losses -= 1
                change(rank, leaving=True)
                self._tell(rank, Leaving)
            case "dies", rank:
                draft.losses -= 1
                draft.workers[rank] = Doing(DEAD, up=draft.workers[rank].up)
                draft.mail = {letter for letter in draft.mail if letter[2] != rank}
            case "noticed", rank:
                self._part_with(rank, "lost")
            case "gone", rank:
                self._gone(rank)

    # What a worker hears, and sends.

    def _ask(self, states: States, number: int, event: type, args: tuple[Any, ...], *about: Any) -> tuple[Any, int]:
        if self.witness is None:
            return states.handle(number, event, args, *about)
        answer: tuple[Any, int] = self.witness.asked(
            states.things[number], event, args, lambda: states.handle(number, event, args, *about)
        )
        return answer

    def _tell(self, rank: int, event: type, *args: Any, part: int = 0) -> None:
        """Tell a machine, and perform its orders."""
        doing = self.draft.workers[rank]
        orders, number = self._ask(self.machines, doing.machine, event, args, self.draft.now, part)
        self.draft.workers[rank] = doing._replace(machine=number)
        if self.witness is not None:
            self.witness.hears_machine(rank, event(*args), orders)
        answers = 0
        for order in orders:
            kind, self.current = type(order), order
            self.seen[kind.__name__] += 1
            if kind is AnswerPartner:
                if event is not Requested:
                    raise Broken(f"{order} answers a request that is not there")
                if (order.asker, order.step) != args:
                    raise Broken(f"{order} answers another request")
                answers += 1
            self._performer.perform(rank, order)
        self.current = None
        if answers != (event is Requested):
            raise Broken(f"a request of worker {args} has {answers} answers")

    def _told(self, rank: int) -> None:
        """A worker hears of what a policy has decided."""
        draft, doing = self.draft, self.draft.workers[rank]
        (kind, part, *about), *rest = doing.down
        draft.workers[rank] = doing = doing._replace(down=tuple(rest))
        if kind == "admit":
            draft.change(rank, pushes=replaced(doing.pushes, part, about[0]))
            self._tell(rank, Admit, rank, about[0], part=part)
            if self.averaging is not None:
                interval = max(1, self.averaging.period // self.parts)
                turn = self.machines.things[draft.workers[rank].machine].turn
                self._tell(rank, StartsAt, min(turn * interval, self.job.last))
        elif kind == "release":
            self._hear_release(rank, doing, part, *about)
        elif kind == "dropped":
            draft.change(rank, dropped=True)
            self._tell(rank, Dropped)
        else:
            self._tell(rank, Parted, *about)
            if doing.asks is not None and doing.asks[0] == about[0]:
                draft.change(rank, asks=None)

    def _hear_release(self, rank: int, doing: Doing, part: int, step: int, directive: Any, version: int) -> None:
        before = doing.released[part]
        if step <= before:
            raise Broken(f"worker {rank} is released for step {step} after step {before}")
        self.draft.change(
            rank,
            released=replaced(doing.released, part, step),
            pushes=replaced(doing.pushes, part, step) if doing.dropped else doing.pushes,
            come=doing.come if self.brings == "sum" else replaced(doing.come, part, True),
            model=doing.model or self.brings not in ("nothing", "sum", "values"),
            dropped=False,
            version=version,
        )
        self._tell(rank, Release, rank, step, 0, directive, part=part)

    def _arrives(self, rank: int) -> None:
        """A push has reached its policy."""
        doing = self.draft.workers[rank]
        (_, part, step, count, seconds, version, own), *rest = doing.up
        self.draft.change(rank, up=tuple(rest))
        self.draft.pending.append((part, rank, step))
        samples: float = count
        measured = NOT_MEASURED
        if self.brings == "values":
            measured = Measured(loss=1.0, lr=1.0)
        elif self.brings == "share":
            measured = Measured(work=1.0, computed=seconds, drawn=None if self.micro else (0, step))
            samples = count = 1
        elif self.brings == "batches":
            measured = Measured(work=float(count), computed=seconds)
        elif self.brings == "gradient":
            samples = 1
        if own is not None:
            measured = replace(measured, fields=own)
        if self.witness is not None and samples and self.brings != "nothing":
            samples = self.witness.weigh(rank, count)
        self._decide(part, Pushed, (rank, step, samples, (), count, measured), version)

    def _calls(self, sender: int, receiver: int) -> None:
        """The next request or reply of a pair arrives."""
        draft = self.draft
        call = next(call for call in draft.calls if call[:2] == (sender, receiver))
        draft.calls.remove(call)
        _, _, kind, step, averaged = call
        doing = draft.workers[receiver]
        if doing.status != ALIVE:
            return
        if kind == "request":
            self._tell(receiver, Requested, sender, step)
            return
        awaited = doing.asks == (sender, step)
        if awaited:
            draft.change(receiver, asks=None, model=doing.model or averaged)
        self._tell(receiver, Replied, sender, step, averaged)
        if not awaited and draft.workers[receiver].machine != doing.machine:
            raise Broken(f"worker {receiver} heeds a reply that it does not await")

    # Members.

    def _start(self, rank: int) -> None:
        none, machine = (0,) * self.parts, self.machines.number(self.spec.machine(rank, self.job.last))
        self.draft.workers[rank] = Doing(
            ALIVE, machine, released=(-1,) * self.parts, pushes=none, unsent=none, come=(False,) * self.parts
        )
        for part in range(self.parts):
            self._decide(part, Joined, (rank,))

    def _gone(self, rank: int) -> None:
        """A worker goes home: it has made all its steps, unless it was told to leave."""
        doing = self.draft.workers[rank]
        if not doing.leaving:
            if not self.machines.things[doing.machine].done:
                raise Broken(f"worker {rank} goes home before its last step")
            late = self.brings == "batches"  # what is done after the last push is returned by the driver
            if not late and any(doing.unsent):
                raise Broken(f"worker {rank} goes home with steps that are not pushed: {doing}")
            if self.averaging is not None and (self.averaging.waits or self.parts == 1):
                answered = all(step <= allowed for step, allowed in zip(doing.pushes, doing.released, strict=True))
                if not answered:
                    raise Broken(f"worker {rank} goes home without an answer: {doing}")
                if any(doing.come):
                    raise Broken(f"worker {rank} goes home and has not taken what has come: {doing}")
        self._part_with(rank, "finished")

    def _part_with(self, rank: int, reason: str) -> None:
        """The others know that a worker is gone; what was on its way to it is lost."""
        draft = self.draft
        draft.workers[rank] = Doing(AWAY)
        if all(doing.status == AWAY for doing in draft.workers):
            draft.cuts = ()  # who comes next cuts a joint batch that none has computed on, or a later one
        draft.mail = {letter for letter in draft.mail if letter[2] != rank}
        draft.calls = [call for call in draft.calls if call[1] != rank]
        draft.pending = [(part, -1 - rank if worker == rank else worker, step) for part, worker, step in draft.pending]
        for part in range(self.parts):
            self._decide(part, Left, (rank, reason))
        for other, doing in enumerate(draft.workers):
            if doing.asks is not None and doing.asks[0] == rank:
                draft.tell(other, "parted", 0, rank)

    # Policies.

    def _decide(self, part: int, event: type, args: tuple[Any, ...], version: int = 0) -> None:
        """Let the policy of a fragment decide on an event, and carry out its actions."""
        draft = self.draft
        actions, draft.policies[part] = self._ask(self.policies, draft.policies[part], event, args, draft.now)
        if self.witness is not None:
            self.witness.hears_policy(part, event(*args), draft.now, actions)
        for action in actions:
            if self.versions and isinstance(action, Apply):
                action = self.corrections.corrected(action, draft.version - version)
            self.seen[type(action).__name__] += 1
            self.current = action
            if isinstance(action, Release):
                draft.tell(action.worker, "release", part, action.step, action.directive, draft.version)
            elif isinstance(action, Admit):
                draft.tell(action.worker, "admit", part, action.step)
            elif isinstance(action, Apply):
                draft.version += self.versions
                for push in action.pushes:
                    draft.decide_on(part, push.worker, push.step)
            elif isinstance(action, Discard | Refuse):
                draft.decide_on(part, action.worker, action.step)
                if isinstance(action, Refuse) or not action.too_stale:
                    draft.tell(action.worker, "dropped", part)
            elif isinstance(action, Wake):
                draft.wakes = tuple(sorted({*draft.wakes, action.at}))
            elif not isinstance(action, Hold):
                raise Broken(f"a policy answers {action!r}, which is no action")
        self.current = None
