"""Machines and policies in a job of messages: a second, independent statement of how orders are performed.

Nothing here is the simulator's. A `World` is a value: what every worker does, what is in flight, and what a job may still
meet with. `World`s are equal where everything that comes can only be equal, so a walk goes through each once.

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
from collections.abc import Iterator, Sequence
from typing import Any

from small_jobs import ALIVE, AWAITED, AWAY, DEAD, NO_MODEL, Doing, Interned, Job, Move, World, in_flight, replaced

from polytempo.sync.actions import Action, Admit, Apply, Discard, Hold, Refuse, Release, Wake
from polytempo.sync.events import Joined, Left, Measured, Pushed, Ticked
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
    WorkerMachine,
)


class Driver:
    """Performs the orders of machines and the actions of policies, and looks at each of them.

    One move at a time: `after` gives the world after it. What is wrong is an `AssertionError`.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.spec = job, job.spec
        self.policies, self.machines = Interned(), Interned()
        self.seen: Counter[str] = Counter()
        machine = self._new_machine(0)
        self.brings, self.parts, self.micro = machine.brings, machine.parts, machine.micro
        self.averaging = job.spec.averaging
        self.corrections = job.spec.corrections if machine.brings != "values" else None
        self.versions = self.corrections is not None and self.corrections.any
        self._performs = {
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

    def first(self) -> World:
        policy = self.spec.policy(self.job.workers)
        policy.explains = False
        number = self.policies.number(policy)
        workers = [Doing(AWAITED)] * self.job.workers + [Doing(AWAY)] * bool(self.job.joins)
        return World((number,) * self.parts, tuple(workers), losses=self.job.losses, joins=self.job.joins, odd=self.job.odd)

    # What can happen.

    def moves(self, world: World) -> Iterator[Move]:
        """All that can happen next: what nobody can put off for ever, then what need not happen."""
        later = math.inf
        if self.job.prompt and (asking := [rank for rank, doing in enumerate(world.workers) if doing.again]):
            yield "asked", asking[0]
            return
        for rank, doing in enumerate(world.workers):
            if doing.status == ALIVE:
                if doing.ends <= world.now:
                    yield "computed", rank
                later = min(later, doing.ends)
                if self.job.deadline and (ends := self._deadline_of(doing)) < math.inf:
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

    def chances(self, world: World) -> Iterator[Move]:
        """What may befall the job."""
        for rank, doing in enumerate(world.workers):
            if world.losses and doing.status in (ALIVE, AWAITED):
                yield "dies", rank
                if doing.status == ALIVE and not (doing.leaving or doing.home):
                    yield "leaves", rank
            back = rank < self.job.workers
            if world.joins and doing.status in (AWAY, DEAD) and not (back and self.job.prompt):
                yield "joins", rank

    def _deadline_of(self, doing: Doing) -> float:
        machine = self.machines.things[doing.machine]
        return machine.ends_at if getattr(machine, "in_round", False) else math.inf

    def _may_go(self, doing: Doing) -> bool:
        idle = doing.ends == math.inf and not doing.up and not doing.again
        return idle and (doing.home or doing.leaving) and self.machines.things[doing.machine].is_free

    def after(self, world: World, move: Move) -> Iterator[World]:
        """The worlds after a move: as many as there are durations, where it makes a worker compute."""
        for seconds in (1.0, 0.0, self.job.deadline) if world.odd and self.job.deadline else (1.0,):
            self.seconds, self.workers, self.chose = seconds, list(world.workers), False
            self.policy_numbers, self.pending, self.calls = list(world.policies), list(world.pending), list(world.calls)
            self.mail, self.wakes, self.now, self.version = set(world.mail), world.wakes, world.now, world.version
            self.losses, self.joins, self.cuts = world.losses, world.joins, world.cuts
            kind, *about = move
            getattr(self, "_" + kind.replace(" ", "_"))(*about)
            yield World(
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
        orders, number = self.machines.handle(doing.machine, event, args, self.now, part)
        self.workers[rank] = doing._replace(machine=number)
        answers = 0
        for order in orders:
            kind = type(order)
            self.seen[kind.__name__] += 1
            if kind is AnswerPartner:
                assert event is Requested, f"{order} answers nobody"
                assert (order.asker, order.step) == args, f"{order} answers another request"
                answers += 1
                self._answer(rank, order)
            else:
                self._performs[kind](rank, order)
        assert answers == (event is Requested), f"a request of worker {args} has {answers} answers"

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
        assert step > before, f"worker {rank} is released for step {step} after step {before}"
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
        (_, part, step, count, seconds, version), *rest = doing.up
        self._change(rank, up=tuple(rest))
        self.pending.append((part, rank, step))
        loss = 1.0 if self.brings == "values" else None
        samples, measured = 1 if self.brings == "gradient" else count, Measured(loss, loss)
        if self.brings == "share":
            samples, count = 1, 1
            measured = Measured(None, None, 1.0, seconds, None if self.micro else (0, step))
        elif self.brings == "batches":
            measured = Measured(None, None, float(count), seconds)
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
        assert awaited or self.workers[receiver].machine == machine, (
            f"worker {receiver} heeds a reply that it does not await"
        )

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
            assert machine.done, f"worker {rank} goes home before its last step"
            late = self.brings == "batches"  # what is done after the last push is returned by the driver
            assert late or not any(doing.unsent), f"worker {rank} goes home with steps that are not pushed: {doing}"
            if self.averaging is not None and (self.averaging.waits or self.parts == 1):
                answered = all(step <= allowed for step, allowed in zip(doing.pushes, doing.released, strict=True))
                assert answered, f"worker {rank} goes home without an answer: {doing}"
                assert not any(doing.come), f"worker {rank} goes home and has not taken what has come: {doing}"
        self._part_with(rank, "finished")

    def _part_with(self, rank: int, reason: str) -> None:
        self.workers[rank] = Doing(AWAY)
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
        actions, number = self.policies.handle(self.policy_numbers[part], event, args, self.now)
        self.policy_numbers[part] = number
        for action in self._corrected(actions, version) if self.versions else actions:
            self.seen[type(action).__name__] += 1
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
            else:
                assert isinstance(action, Hold)

    def _corrected(self, actions: Sequence[Action], version: int) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, Apply):
                (push,) = action.pushes
                assert self.corrections is not None
                if drop := self.corrections.verdict(self.version - version).drop:
                    action = Discard(push.worker, push.step, drop)
            yield action

    def _send(self, rank: int, *told: Any) -> None:
        doing = self.workers[rank]
        assert doing.status in (ALIVE, DEAD), f"worker {rank} is gone, and is told {told}"
        if doing.status == ALIVE:
            self._change(rank, down=(*doing.down, told))

    def _take(self, part: int, worker: int, step: int) -> None:
        """A push is decided on, once. One of an earlier life may be of the same step."""
        push = next((push for push in ((part, worker, step), (part, -1 - worker, step)) if push in self.pending), None)
        assert push is not None, f"step {step} of worker {worker} is applied or discarded, and has not been pushed"
        self.pending.remove(push)

    # Orders.

    def _compute(self, rank: int, order: Compute) -> None:
        doing = self.workers[rank]
        assert doing.ends == math.inf, f"worker {rank} computes already"
        assert doing.model, f"worker {rank} has no values to compute on"
        ends_its_round = self.brings == "batches" and doing.unsent[0]
        assert not doing.home, f"worker {rank} was to go home, and computes"
        assert not doing.leaving or ends_its_round, f"worker {rank} was to leave, and computes"
        if self.brings == "values":
            self._may_compute_in_block(rank, doing)
        else:
            assert doing.pushes[0] <= doing.released[0], (
                f"worker {rank} computes for step {doing.pushes[0]} without a release"
            )
        if self.brings == "share":
            step, known = doing.pushes[0], dict(self.cuts)
            assert known.setdefault(step, order.weights) == order.weights, f"the joint batch {step} is cut in two ways"
            self.cuts = tuple(sorted(known.items()))
        seconds = self.seconds if self.job.deadline else 0.0
        self.chose = True
        self._change(rank, ends=self.now + seconds, took=seconds)

    def _may_compute_in_block(self, rank: int, doing: Doing) -> None:
        """Where workers wait for answers, a step after `overlap` ones since the sending needs them to be there and taken."""
        assert self.averaging is not None
        assert min(doing.released) >= 0, f"worker {rank} starts without the values of all fragments"
        for part in range(self.parts) if self.averaging.waits else ():
            if doing.unsent[part] >= self.averaging.overlap:
                assert doing.pushes[part] <= doing.released[part], f"worker {rank} does not wait for fragment {part}"
                assert not doing.come[part], f"worker {rank} computes on, and has not taken fragment {part}"

    def _step_here(self, rank: int, order: StepHere) -> None:
        doing = self.workers[rank]
        assert any(doing.unsent), f"worker {rank} makes a step without a gradient"
        assert doing.number in (-1, order.number - 1), f"worker {rank} makes step {order.number} after {doing.number}"
        self._change(rank, number=order.number)

    def _push_step(self, rank: int, order: PushStep) -> None:
        machine, step = self.machines.things[self.workers[rank].machine], self.workers[rank].pushes[0]
        assert machine.step - 1 == step, f"worker {rank} pushes step {machine.step - 1}, and its next is {step}"
        self._push(rank, step, 1, 0)

    def _send_push(self, rank: int, order: SendPush) -> None:
        assert order.beside == (self.workers[rank].ends < math.inf), f"{order} of worker {rank}"
        self._push(rank, order.step, order.count, order.part)

    def _push(self, rank: int, step: int, count: int, part: int) -> None:
        doing = self.workers[rank]
        assert step == doing.pushes[part], f"worker {rank} pushes step {step}, and its next is {doing.pushes[part]}"
        assert step <= doing.released[part], f"worker {rank} pushes step {step}, and may push {doing.released[part]}"
        assert count == doing.unsent[part], f"worker {rank} pushes {count} steps of {doing.unsent[part]}"
        under_way = sum(push[1] == part for push in doing.up) + sum(push[:2] == (part, rank) for push in self.pending)
        assert under_way < self.job.in_flight, f"worker {rank} has {under_way} pushes under way, and pushes another"
        assert not doing.snapshot, f"worker {rank} pushes a step that is not added to its values"
        spent = doing.spent if self.job.deadline else 0.0
        self._change(
            rank,
            up=(*doing.up, ("push", part, step, count, spent, doing.version if self.versions else 0)),
            pushes=replaced(doing.pushes, part, step + 1),
            unsent=replaced(doing.unsent, part, 0),
            spent=0.0,
        )
        if self.brings == "nothing" and not count:
            self.mail.add((rank, step, NO_MODEL))

    def _abandon(self, rank: int, order: Abandon) -> None:
        doing = self.workers[rank]
        assert doing.unsent[0], f"worker {rank} abandons nothing"
        self._change(rank, unsent=(doing.unsent[0] - 1,))

    def _request_values(self, rank: int, order: RequestValues) -> None:
        assert not self.workers[rank].fetching, f"worker {rank} fetches twice at once"
        self._change(rank, fetching=True)

    def _install(self, rank: int, order: Install) -> None:
        doing = self.workers[rank]
        assert doing.come[order.part], f"worker {rank} takes values of fragment {order.part} that have not come"
        assert doing.ends == math.inf, f"worker {rank} takes values while it computes on others"
        self._change(rank, come=replaced(doing.come, order.part, False), model=True)

    def _begin(self, rank: int, order: Begin) -> None:
        assert not (order.empty and self.workers[rank].model), f"worker {rank} throws its values away"
        self._change(rank, model=not order.empty)

    def _snapshot(self, rank: int, order: Snapshot) -> None:
        self._change(rank, snapshot=True)

    def _add_step(self, rank: int, order: AddStep) -> None:
        doing = self.workers[rank]
        assert doing.snapshot, f"worker {rank} adds a step that it did not make on a snapshot"
        assert doing.unsent[0] == 1, f"worker {rank} adds a step that it has not made"
        self._change(rank, snapshot=False)

    def _ask_again(self, rank: int, order: AskAgain) -> None:
        self._change(rank, again=True)

    def _settle(self, rank: int, order: Settle) -> None:
        self._change(rank, settles=True)

    def _go_home(self, rank: int, order: GoHome) -> None:
        self._change(rank, home=True)

    # Between workers.

    def _send_model(self, rank: int, order: SendModel) -> None:
        assert self.workers[rank].model, f"worker {rank} has no model to send"
        assert order.step in (self.workers[rank].pushes[0], self.workers[rank].pushes[0] - 1)
        for other, _ in order.row.send:
            if self.workers[other].status == ALIVE:
                assert (rank, order.step, other) not in self.mail, (
                    f"worker {rank} sends its model of step {order.step} twice"
                )
                self.mail.add((rank, order.step, other))

    def _mix(self, rank: int, order: Mix) -> None:
        model = self.workers[rank].model
        for other, _ in order.row.receive:
            if other in order.lost:
                continue
            sent = (other, order.step, rank) in self.mail
            assert sent or (other, order.step, NO_MODEL) in self.mail, (
                f"worker {rank} mixes what {other} has not sent: {order}"
            )
            model = model or sent
        neighbours = {other for other, _ in (*order.row.send, *order.row.receive)}
        assert neighbours.issuperset(order.lost), f"{order} of worker {rank} has lost one who is no neighbour"
        self.mail = {letter for letter in self.mail if letter[2] != rank or letter[1] > order.step}
        self._change(rank, model=model)

    def _ask_partner(self, rank: int, order: AskPartner) -> None:
        doing, partner = self.workers[rank], order.partner
        assert doing.asks is None, f"worker {rank} asks {partner}, and waits for {doing.asks}"
        assert partner != rank
        assert order.step == doing.pushes[0]
        self._change(rank, asks=(partner, order.step))
        there = self.workers[partner].status
        if there == ALIVE:
            self.calls.append((rank, partner, "request", order.step, False))
        elif there == AWAY:  # that it is gone is known
            self._change(rank, down=(*doing.down, ("parted", 0, partner)))

    def _answer(self, rank: int, order: AnswerPartner) -> None:
        doing = self.workers[rank]
        assert not order.averaged or doing.model, f"worker {rank} averages a model that it does not have"
        assert not order.averaged or doing.asks is None, f"worker {rank} averages while it waits for an average itself"
        if self.workers[order.asker].status == ALIVE:
            self.calls.append((rank, order.asker, "reply", order.step, order.averaged))
