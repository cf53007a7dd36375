"""Machines and policies in a job of messages: a second, independent statement of how orders are performed.

Nothing here is the simulator's. A `JobWorld` is a value: what every worker does, what is in flight, and what a job may still
meet with. `JobWorld`s are equal where everything that comes can only be equal, so a walk goes through each once.

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

from polytempo.proving.small_job import ALIVE, AWAITED, AWAY, DEAD, NO_MODEL, Doing, Job, JobWorld, Move, in_flight, replaced
from polytempo.proving.states import Broken, Interned, States
from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import NOT_MEASURED, Event, Joined, Left, Measured, Pushed, Ticked
from polytempo.sync.fields import Fields
from polytempo.sync.machine import (
    Abandon,
    AddStep,
    AllArrived,
    AnswerPartner,
    AskAgain,
    Asked,
    AskPartner,
    Begin,
    Compute,
    Computed,
    Dropped,
    Fetched,
    GoHome,
    Install,
    Leaving,
    Mix,
    Parted,
    PushStep,
    Replied,
    Requested,
    RequestValues,
    SendModel,
    SendPush,
    Settle,
    Snapshot,
    StartsAt,
    StepHere,
    TimeUp,
    WorkerEvent,
    WorkerMachine,
    WorkerOrder,
)


class Driver:
    """Performs the orders of machines and the actions of policies, and looks at each of them.

    One move at a time: `after` gives the world after it. What is wrong is a `Broken`.

    Args:
        job: What is played.
        states: `Interned`, where one world has several after it; `Played`, where it has one.
        explains: Do policies say why workers are held?
    """

    def __init__(self, job: Job, states: Callable[[], States] = Interned, explains: bool = False) -> None:
        self.job, self.spec, self.explains = job, job.spec, explains
        self.policies, self.machines = states(), states()
        #: Hear of what a policy is told and answers (fragment, event, moment, actions); of a machine with its rank.
        self.hears_policy: Callable[[int, Event, float, Sequence[Action]], object] | None = None
        self.hears_machine: Callable[[int, WorkerEvent, Sequence[WorkerOrder]], object] | None = None
        self.weigh: Callable[[int, int], float] | None = None  #: samples of a push: of which worker, of how many steps
        self.asked = 0  #: how many times a policy or a machine was
        self.traced: tuple[int, Callable[[Callable[[], Any]], Any]] | None = None  #: which of them is made by what
        self.current: object = None  #: the action or order that is carried out
        #: The policy or machine that was asked last, and on what event.
        self.answering: tuple[object, type, tuple[Any, ...]] = (None, type(None), ())
        self.seen: Counter[str] = Counter()
        machine = self._new_machine(0)
        self.brings, self.parts, self.micro = machine.brings, machine.parts, machine.micro
        self.averaging = job.spec.averaging
        self.corrections = job.spec.corrections if machine.brings != "values" else None
        self.versions = self.corrections is not None and self.corrections.any
        self._performs: dict[type, Callable[[int, Any], None]] = {
            Compute: self._compute,
            StepHere: self._step_here,
            PushStep: self._push_step,
            SendPush: self._send_push,
            SendModel: self._send_model,
            AskPartner: self._ask_partner,
            RequestValues: self._request_values,
            Install: self._install,
            Begin: self._begin,
            Mix: self._mix,
            Snapshot: self._snapshot,
            AddStep: self._add_step,
            Abandon: self._abandon,
            AskAgain: self._ask_again,
            Settle: self._settle,
            GoHome: self._go_home,
        }
        # The world that is being made.
        self.workers: list[Doing] = []
        self.seconds, self.chose = 1.0, False  # what a step takes that begins in this move, and whether one does

    def _new_machine(self, rank: int) -> WorkerMachine:
        return self.spec.machine(rank, self.job.last)

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
                if self._may_go(doing):
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
            elif world.now < later < math.inf and (world.odd or not in_flight(world)):
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
        machine = self.machines.things[doing.machine]
        return machine.ends_at if getattr(machine, "in_round", False) else math.inf

    def _may_go(self, doing: Doing) -> bool:
        idle = doing.ends == math.inf and not doing.up and not doing.again
        return idle and (doing.home or doing.leaving) and self.machines.things[doing.machine].is_free

    def after(self, world: JobWorld, move: Move, which: int | None = None) -> Iterator[JobWorld]:
        """The worlds after a move: as many as there are durations, where it makes a worker compute.

        Args:
            world: The one before.
            move: The move.
            which: The only one that is wanted; where states are `Played`, there is one.
        """
        durations = (1.0, 0.0, self.job.deadline) if world.odd and self.job.deadline else (1.0,)
        for seconds in durations if which is None else durations[which : which + 1]:
            self.seconds, self.workers, self.chose = seconds, list(world.workers), False
            self.policy_numbers, self.pending, self.calls = list(world.policies), list(world.pending), list(world.calls)
            self.mail, self.wakes, self.now, self.version = set(world.mail), world.wakes, world.now, world.version
            self.losses, self.joins, self.cuts = world.losses, world.joins, world.cuts
            kind, *about = move
            getattr(self, "_" + kind.replace(" ", "_"))(*about)
            yield JobWorld(
                tuple(self.policy_numbers),
                tuple(self.workers),
                tuple(sorted(self.pending)),
                tuple(self.calls),
                frozenset(self.mail),
                self.cuts,
                self.wakes,
                self.now,
                self.version,
                self.losses,
                self.joins,
                world.odd - ((self.chose and self.seconds != 1.0) or (kind == "clock" and in_flight(world))),
            )
            if not self.chose:
                return

    # Moves.

    def _change(self, rank: int, **changes: Any) -> None:
        self.workers[rank] = self.workers[rank]._replace(**changes)

    def _tell(self, rank: int, event: type, *args: Any, part: int = 0) -> None:
        """Tell a machine, and perform its orders."""
        doing = self.workers[rank]
        orders, number = self._ask(self.machines, doing.machine, event, args, self.now, part)
        self.workers[rank] = doing._replace(machine=number)
        if self.hears_machine is not None:
            self.hears_machine(rank, event(*args), orders)
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
                self._answer(rank, order)
            elif kind in self._performs:
                self._performs[kind](rank, order)
            else:
                raise Broken(f"worker {rank} orders {order!r}, which is no order")
        self.current = None
        if answers != (event is Requested):
            raise Broken(f"a request of worker {args} has {answers} answers")

    def _ask(self, states: States, number: int, event: type, args: tuple[Any, ...], *about: Any) -> tuple[Any, int]:
        """What a policy or a machine answers."""
        self.asked += 1
        self.answering = states.things[number], event, args
        if self.traced is None or self.traced[0] != self.asked:
            return states.handle(number, event, args, *about)
        answer: tuple[Any, int] = self.traced[1](lambda: states.handle(number, event, args, *about))
        return answer

    def _clock(self, now: float) -> None:
        self.now = now

    def _computed(self, rank: int) -> None:
        doing = self.workers[rank]
        self._change(
            rank,
            ends=math.inf,
            unsent=tuple(count + 1 for count in doing.unsent),
            spent=doing.spent + doing.took,
            took=0.0,
        )
        self._tell(rank, Computed, doing.took)

    def _time_is_up(self, rank: int) -> None:
        self._tell(rank, TimeUp, self.workers[rank].pushes[0])

    def _asked(self, rank: int) -> None:
        self._change(rank, again=False)
        self._tell(rank, Asked)

    def _fetched(self, rank: int) -> None:
        self._change(rank, fetching=False, come=(True,))
        self._tell(rank, Fetched)

    def _settled(self, rank: int) -> None:
        self._change(rank, settles=False)
        self._tell(rank, AllArrived)

    def _leaves(self, rank: int) -> None:
        self.losses -= 1
        self._change(rank, leaving=True)
        self._tell(rank, Leaving)

    def _told(self, rank: int) -> None:
        """A worker hears of what a policy has decided."""
        doing = self.workers[rank]
        (kind, part, *about), *rest = doing.down
        self.workers[rank] = doing = doing._replace(down=tuple(rest))
        if kind == "admit":
            self._change(rank, pushes=replaced(doing.pushes, part, about[0]))
            self._tell(rank, Admit, rank, about[0], part=part)
            if self.averaging is not None:
                interval = max(1, self.averaging.period // self.parts)
                turn = self.machines.things[self.workers[rank].machine].turn
                self._tell(rank, StartsAt, min(turn * interval, self.job.last))
        elif kind == "release":
            self._hear_release(rank, doing, part, *about)
        elif kind == "dropped":
            self._change(rank, dropped=True)
            self._tell(rank, Dropped)
        else:
            self._tell(rank, Parted, *about)
            if doing.asks is not None and doing.asks[0] == about[0]:
                self._change(rank, asks=None)

    def _hear_release(self, rank: int, doing: Doing, part: int, step: int, directive: Any, version: int) -> None:
        before, pushes = doing.released[part], doing.pushes
        if step <= before:
            raise Broken(f"worker {rank} is released for step {step} after step {before}")
        if doing.dropped:
            pushes = replaced(pushes, part, step)
        come = doing.come if self.brings == "sum" else replaced(doing.come, part, True)
        model = doing.model or self.brings not in ("nothing", "sum", "values")
        self._change(
            rank, released=replaced(doing.released, part, step), pushes=pushes, come=come, model=model, dropped=False,
            version=version,
        )  # fmt: skip
        self._tell(rank, Release, rank, step, 0, directive, part=part)

    def _arrives(self, rank: int) -> None:
        """A push has reached its policy."""
        doing = self.workers[rank]
        (_, part, step, count, seconds, version, own), *rest = doing.up
        self._change(rank, up=tuple(rest))
        self.pending.append((part, rank, step))
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
        if self.weigh is not None and samples:
            samples = self.weigh(rank, count)
        self._decide(part, Pushed, (rank, step, samples, (), count, measured), version)

    def _tick(self) -> None:
        self.wakes = tuple(at for at in self.wakes if at > self.now)
        for part in range(self.parts):
            self._decide(part, Ticked, ())

    def _calls(self, sender: int, receiver: int) -> None:
        call = next(call for call in self.calls if call[:2] == (sender, receiver))
        self.calls.remove(call)
        _, _, kind, step, averaged = call
        doing = self.workers[receiver]
        if doing.status != ALIVE:
            return
        if kind == "request":
            self._tell(receiver, Requested, sender, step)
            return
        awaited = doing.asks == (sender, step)
        if awaited:
            self._change(receiver, asks=None, model=doing.model or averaged)
        machine = doing.machine
        self._tell(receiver, Replied, sender, step, averaged)
        if not awaited and self.workers[receiver].machine != machine:
            raise Broken(f"worker {receiver} heeds a reply that it does not await")

    # Members.

    def _start(self, rank: int) -> None:
        """A worker begins a life."""
        parts = range(self.parts)
        doing = Doing(
            ALIVE,
            self.machines.number(self._new_machine(rank)),
            released=tuple(-1 for _ in parts),
            pushes=tuple(0 for _ in parts),
            unsent=tuple(0 for _ in parts),
            come=tuple(False for _ in parts),
        )
        self.workers[rank] = doing
        for part in parts:
            self._decide(part, Joined, (rank,))

    def _joins(self, rank: int) -> None:
        self.joins -= 1
        if self.workers[rank].status == DEAD:
            self._noticed(rank)
        self._start(rank)

    def _dies(self, rank: int) -> None:
        self.losses -= 1
        doing = self.workers[rank]
        self.workers[rank] = Doing(DEAD, up=doing.up)
        self.mail = {letter for letter in self.mail if letter[2] != rank}

    def _noticed(self, rank: int) -> None:
        self._part_with(rank, "lost")

    def _gone(self, rank: int) -> None:
        doing, machine = self.workers[rank], self.machines.things[self.workers[rank].machine]
        if not doing.leaving:
            if not machine.done:
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
        self.workers[rank] = Doing(AWAY)
        if all(doing.status == AWAY for doing in self.workers):
            self.cuts = ()  # who comes next cuts a joint batch that none has computed on, or a later one
        self.mail = {letter for letter in self.mail if letter[2] != rank}
        self.calls = [call for call in self.calls if call[1] != rank]
        self.pending = [(part, -1 - rank if worker == rank else worker, step) for part, worker, step in self.pending]
        for part in range(self.parts):
            self._decide(part, Left, (rank, reason))
        for other, doing in enumerate(self.workers):
            if doing.asks is not None and doing.asks[0] == rank:
                self._change(other, down=(*doing.down, ("parted", 0, rank)))

    # Policies.

    def _decide(self, part: int, event: type, args: tuple[Any, ...], version: int = 0) -> None:
        """Let the policy of a fragment decide on an event, and carry out its actions."""
        actions, number = self._ask(self.policies, self.policy_numbers[part], event, args, self.now)
        self.policy_numbers[part] = number
        if self.hears_policy is not None:
            self.hears_policy(part, event(*args), self.now, actions)
        for action in self._corrected(actions, version) if self.versions else actions:
            self.seen[type(action).__name__] += 1
            self.current = action
            if isinstance(action, Release):
                self._send(action.worker, "release", part, action.step, action.directive, self.version)
            elif isinstance(action, Admit):
                self._send(action.worker, "admit", part, action.step)
            elif isinstance(action, Apply):
                self.version += self.versions
                for push in action.pushes:
                    self._take(part, push.worker, push.step)
            elif isinstance(action, Discard | Refuse):
                self._take(part, action.worker, action.step)
                if not (self.corrections and self.corrections.gives(action.reason)):
                    self._send(action.worker, "dropped", part)
            elif isinstance(action, Wake):
                self.wakes = tuple(sorted({*self.wakes, action.at}))
            elif not isinstance(action, Hold):
                raise Broken(f"a policy answers {action!r}, which is no action")
        self.current = None

    def _corrected(self, actions: Sequence[Action], version: int) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, Apply):
                (push,) = action.pushes
                if self.corrections is not None and (drop := self.corrections.verdict(self.version - version).drop):
                    action = Discard(push.worker, push.step, drop)
            yield action

    def _send(self, rank: int, *told: Any) -> None:
        doing = self.workers[rank]
        if doing.status not in (ALIVE, DEAD):
            raise Broken(f"worker {rank} is gone, and is told {told}")
        if doing.status == ALIVE:
            self._change(rank, down=(*doing.down, told))

    def _take(self, part: int, worker: int, step: int) -> None:
        """A push is decided on, once. One of an earlier life may be of the same step."""
        push = next((push for push in ((part, worker, step), (part, -1 - worker, step)) if push in self.pending), None)
        if push is None:
            raise Broken(f"step {step} of worker {worker} is applied or discarded, and has not been pushed")
        self.pending.remove(push)

    # Orders.

    def _compute(self, rank: int, order: Compute) -> None:
        doing = self.workers[rank]
        if doing.ends != math.inf:
            raise Broken(f"worker {rank} computes already")
        if not doing.model:
            raise Broken(f"worker {rank} has no values to compute on")
        ends_its_round = self.brings == "batches" and doing.unsent[0]
        if doing.home:
            raise Broken(f"worker {rank} was to go home, and computes")
        if doing.leaving and not ends_its_round:
            raise Broken(f"worker {rank} was to leave, and computes")
        if self.brings == "values":
            self._may_compute_in_block(rank, doing)
        else:
            if doing.pushes[0] > doing.released[0]:
                raise Broken(f"worker {rank} computes for step {doing.pushes[0]} without a release")
        if self.brings == "share":
            step, known = doing.pushes[0], dict(self.cuts)
            if known.setdefault(step, order.weights) != order.weights:
                raise Broken(f"the joint batch {step} is cut in two ways")
            self.cuts = tuple(sorted(known.items()))
        seconds = self.seconds if self.job.deadline else 0.0
        self.chose = True
        self._change(rank, ends=self.now + seconds, took=seconds)

    def _may_compute_in_block(self, rank: int, doing: Doing) -> None:
        """Where workers wait for answers, a step after `overlap` ones since the sending needs them to be there and taken."""
        if min(doing.released) < 0:
            raise Broken(f"worker {rank} starts without the values of all fragments")
        averaging = self.averaging
        for part in range(self.parts) if averaging is not None and averaging.waits else ():
            if averaging is not None and doing.unsent[part] >= averaging.overlap:
                if doing.pushes[part] > doing.released[part]:
                    raise Broken(f"worker {rank} does not wait for fragment {part}")
                if doing.come[part]:
                    raise Broken(f"worker {rank} computes on, and has not taken fragment {part}")

    def _step_here(self, rank: int, order: StepHere) -> None:
        doing = self.workers[rank]
        if not any(doing.unsent):
            raise Broken(f"worker {rank} makes a step without a gradient")
        if doing.number not in (-1, order.number - 1):
            raise Broken(f"worker {rank} makes step {order.number} after {doing.number}")
        self._change(rank, number=order.number)

    def _push_step(self, rank: int, order: PushStep) -> None:
        machine, step = self.machines.things[self.workers[rank].machine], self.workers[rank].pushes[0]
        if machine.step - 1 != step:
            raise Broken(f"worker {rank} pushes step {machine.step - 1}, and its next is {step}")
        self._push(rank, step, 1, 0, order.measured)

    def _send_push(self, rank: int, order: SendPush) -> None:
        if order.beside != (self.workers[rank].ends < math.inf):
            raise Broken(f"{order} of worker {rank}")
        self._push(rank, order.step, order.count, order.part, order.measured)

    def _push(self, rank: int, step: int, count: int, part: int, own: Fields | None) -> None:
        doing = self.workers[rank]
        if step != doing.pushes[part]:
            raise Broken(f"worker {rank} pushes step {step}, and its next is {doing.pushes[part]}")
        if step > doing.released[part]:
            raise Broken(f"worker {rank} pushes step {step}, and may push {doing.released[part]}")
        if count != doing.unsent[part]:
            raise Broken(f"worker {rank} pushes {count} steps of {doing.unsent[part]}")
        under_way = sum(push[1] == part for push in doing.up)
        if not self.spec.capabilities.early:  # else it may go on before they are decided on
            under_way += sum(push[:2] == (part, rank) for push in self.pending)
        if under_way >= self.job.in_flight:
            raise Broken(f"worker {rank} has {under_way} pushes under way, and pushes another")
        if doing.snapshot:
            raise Broken(f"worker {rank} pushes a step that is not added to its values")
        spent = doing.spent if self.job.deadline else 0.0
        self._change(
            rank,
            up=(*doing.up, ("push", part, step, count, spent, doing.version if self.versions else 0, own)),
            pushes=replaced(doing.pushes, part, step + 1),
            unsent=replaced(doing.unsent, part, 0),
            spent=0.0,
        )
        if self.brings == "nothing" and not count:
            self.mail.add((rank, step, NO_MODEL))

    def _abandon(self, rank: int, order: Abandon) -> None:
        doing = self.workers[rank]
        if not doing.unsent[0]:
            raise Broken(f"worker {rank} abandons nothing")
        self._change(rank, unsent=(doing.unsent[0] - 1,))

    def _request_values(self, rank: int, order: RequestValues) -> None:
        if self.workers[rank].fetching:
            raise Broken(f"worker {rank} fetches twice at once")
        self._change(rank, fetching=True)

    def _install(self, rank: int, order: Install) -> None:
        doing = self.workers[rank]
        if not doing.come[order.part]:
            raise Broken(f"worker {rank} takes values of fragment {order.part} that have not come")
        if doing.ends != math.inf:
            raise Broken(f"worker {rank} takes values while it computes on others")
        self._change(rank, come=replaced(doing.come, order.part, False), model=True)

    def _begin(self, rank: int, order: Begin) -> None:
        if order.empty and self.workers[rank].model:
            raise Broken(f"worker {rank} throws its values away")
        self._change(rank, model=not order.empty)

    def _snapshot(self, rank: int, order: Snapshot) -> None:
        self._change(rank, snapshot=True)

    def _add_step(self, rank: int, order: AddStep) -> None:
        doing = self.workers[rank]
        if not doing.snapshot:
            raise Broken(f"worker {rank} adds a step that it did not make on a snapshot")
        if doing.unsent[0] != 1:
            raise Broken(f"worker {rank} adds a step that it has not made")
        self._change(rank, snapshot=False)

    def _ask_again(self, rank: int, order: AskAgain) -> None:
        self._change(rank, again=True)

    def _settle(self, rank: int, order: Settle) -> None:
        self._change(rank, settles=True)

    def _go_home(self, rank: int, order: GoHome) -> None:
        self._change(rank, home=True)

    # Between workers.

    def _send_model(self, rank: int, order: SendModel) -> None:
        if not self.workers[rank].model:
            raise Broken(f"worker {rank} has no model to send")
        if order.step not in (self.workers[rank].pushes[0], self.workers[rank].pushes[0] - 1):
            raise Broken(f"worker {rank} sends its model of step {order.step}, its next is {self.workers[rank].pushes[0]}")
        for other, _ in order.row.send:
            if self.workers[other].status == ALIVE:
                if (rank, order.step, other) in self.mail:
                    raise Broken(f"worker {rank} sends its model of step {order.step} twice")
                self.mail.add((rank, order.step, other))

    def _mix(self, rank: int, order: Mix) -> None:
        model = self.workers[rank].model
        for other, _ in order.row.receive:
            if other in order.lost:
                continue
            sent = (other, order.step, rank) in self.mail
            if not sent and (other, order.step, NO_MODEL) not in self.mail:
                raise Broken(f"worker {rank} mixes what {other} has not sent: {order}")
            model = model or sent
        neighbours = {other for other, _ in (*order.row.send, *order.row.receive)}
        if not neighbours.issuperset(order.lost):
            raise Broken(f"{order} of worker {rank} has lost one who is no neighbour")
        self.mail = {letter for letter in self.mail if letter[2] != rank or letter[1] > order.step}
        self._change(rank, model=model)

    def _ask_partner(self, rank: int, order: AskPartner) -> None:
        doing, partner = self.workers[rank], order.partner
        if doing.asks is not None:
            raise Broken(f"worker {rank} asks {partner}, and waits for {doing.asks}")
        if partner == rank or order.step != doing.pushes[0]:
            raise Broken(f"worker {rank} asks {partner} for an average of step {order.step}, its next is {doing.pushes[0]}")
        self._change(rank, asks=(partner, order.step))
        there = self.workers[partner].status
        if there == ALIVE:
            self.calls.append((rank, partner, "request", order.step, False))
        elif there == AWAY:  # that it is gone is known
            self._change(rank, down=(*doing.down, ("parted", 0, partner)))

    def _answer(self, rank: int, order: AnswerPartner) -> None:
        doing = self.workers[rank]
        if order.averaged and not doing.model:
            raise Broken(f"worker {rank} averages a model that it does not have")
        if order.averaged and doing.asks is not None:
            raise Broken(f"worker {rank} averages while it waits for an average itself")
        if self.workers[order.asker].status == ALIVE:
            self.calls.append((rank, order.asker, "reply", order.step, order.averaged))
