"""The orders of a machine, performed on a small job: each is looked at first, and what may not be is a `Broken`."""

from __future__ import annotations

import math

from polytempo.proving.small_job import ALIVE, AWAY, NO_MODEL, Doing, Draft, Job, replaced
from polytempo.proving.states import Broken, States
from polytempo.sync.fields import Fields
from polytempo.sync.machine import (
    Abandon,
    AddStep,
    AnswerPartner,
    AskAgain,
    AskPartner,
    Begin,
    Compute,
    GoHome,
    Install,
    Mix,
    PushStep,
    RequestValues,
    SendModel,
    SendPush,
    Settle,
    Snapshot,
    StepHere,
    WorkerMachine,
    WorkerOrder,
)


class Performer:
    """Performs orders, one after another, which change the draft. `machine` is any of the machines: they are of one kind."""

    def __init__(self, job: Job, draft: Draft, machines: States, machine: WorkerMachine) -> None:
        self._job, self._draft, self._machines = job, draft, machines
        self._brings, self._parts, self._averaging = machine.brings, machine.parts, job.spec.averaging
        self._early = job.spec.capabilities.early

    def perform(self, rank: int, order: WorkerOrder) -> None:
        """Perform an order of a worker's machine."""
        change, doing = self._draft.change, self._draft.workers[rank]
        match order:
            case Compute():
                self._compute(rank, doing, order)
            case PushStep():
                step, machine = doing.pushes[0], self._machines.things[doing.machine]
                if machine.step - 1 != step:
                    raise Broken(f"worker {rank} pushes step {machine.step - 1}, and its next is {step}")
                self._push(rank, doing, step, 1, 0, order.measured)
            case SendPush():
                if order.beside != (doing.ends < math.inf):
                    raise Broken(f"{order} of worker {rank}")
                self._push(rank, doing, order.step, order.count, order.part, order.measured)
            case StepHere(number):
                if not any(doing.unsent):
                    raise Broken(f"worker {rank} makes a step without a gradient")
                if doing.number not in (-1, number - 1):
                    raise Broken(f"worker {rank} makes step {number} after {doing.number}")
                change(rank, number=number)
            case Install():
                self._install(rank, doing, order.part)
            case Snapshot():
                change(rank, snapshot=True)
            case AddStep():
                self._add_step(rank, doing)
            case SendModel():
                self._send_model(rank, doing, order)
            case Mix():
                self._mix(rank, doing, order)
            case AskPartner(partner, step):
                self._ask_partner(rank, doing, partner, step)
            case AnswerPartner():
                self._answer(rank, doing, order)
            case AskAgain():
                change(rank, again=True)
            case Begin(empty):
                if empty and doing.model:
                    raise Broken(f"worker {rank} throws its values away")
                change(rank, model=not empty)
            case RequestValues():
                if doing.fetching:
                    raise Broken(f"worker {rank} fetches twice at once")
                change(rank, fetching=True)
            case Abandon():
                if not doing.unsent[0]:
                    raise Broken(f"worker {rank} abandons nothing")
                change(rank, unsent=(doing.unsent[0] - 1,))
            case Settle():
                change(rank, settles=True)
            case GoHome():
                change(rank, home=True)
            case _:
                raise Broken(f"worker {rank} orders {order!r}, which is no order")

    def _compute(self, rank: int, doing: Doing, order: Compute) -> None:
        draft = self._draft
        if doing.ends != math.inf:
            raise Broken(f"worker {rank} computes already")
        if not doing.model:
            raise Broken(f"worker {rank} has no values to compute on")
        ends_its_round = self._brings == "batches" and doing.unsent[0]
        if doing.home:
            raise Broken(f"worker {rank} was to go home, and computes")
        if doing.leaving and not ends_its_round:
            raise Broken(f"worker {rank} was to leave, and computes")
        if self._brings == "values":
            self._compute_in_block(rank, doing)
        elif doing.pushes[0] > doing.released[0]:
            raise Broken(f"worker {rank} computes for step {doing.pushes[0]} without a release")
        if self._brings == "share":
            step, known = doing.pushes[0], dict(draft.cuts)
            if known.setdefault(step, order.weights) != order.weights:
                raise Broken(f"the joint batch {step} is cut in two ways")
            draft.cuts = tuple(sorted(known.items()))
        seconds = draft.seconds if self._job.deadline else 0.0  # without a clock what it takes makes no other world
        draft.chose = True
        draft.change(rank, ends=draft.now + seconds, took=seconds)

    def _compute_in_block(self, rank: int, doing: Doing) -> None:
        """Where workers wait for answers, a step after `overlap` ones since the sending needs them to be there and taken."""
        if min(doing.released) < 0:
            raise Broken(f"worker {rank} starts without the values of all fragments")
        averaging = self._averaging
        if averaging is None or not averaging.waits:
            return
        for part in range(self._parts):
            if doing.unsent[part] >= averaging.overlap:
                if doing.pushes[part] > doing.released[part]:
                    raise Broken(f"worker {rank} does not wait for fragment {part}")
                if doing.come[part]:
                    raise Broken(f"worker {rank} computes on, and has not taken fragment {part}")

    def _push(self, rank: int, doing: Doing, step: int, count: int, part: int, own: Fields | None) -> None:
        draft = self._draft
        if step != doing.pushes[part]:
            raise Broken(f"worker {rank} pushes step {step}, and its next is {doing.pushes[part]}")
        if step > doing.released[part]:
            raise Broken(f"worker {rank} pushes step {step}, and may push {doing.released[part]}")
        if count != doing.unsent[part]:
            raise Broken(f"worker {rank} pushes {count} steps of {doing.unsent[part]}")
        under_way = sum(push[1] == part for push in doing.up)
        if not self._early:  # else it may go on before they are decided on
            under_way += sum(push[:2] == (part, rank) for push in draft.pending)
        if under_way >= self._job.in_flight:
            raise Broken(f"worker {rank} has {under_way} pushes under way, and pushes another")
        if doing.snapshot:
            raise Broken(f"worker {rank} pushes a step that is not added to its values")
        spent = doing.spent if self._job.deadline else 0.0
        draft.change(
            rank,
            up=(*doing.up, ("push", part, step, count, spent, doing.version, own)),
            pushes=replaced(doing.pushes, part, step + 1),
            unsent=replaced(doing.unsent, part, 0),
            spent=0.0,
        )
        if self._brings == "nothing" and not count:
            draft.mail.add((rank, step, NO_MODEL))

    def _install(self, rank: int, doing: Doing, part: int) -> None:
        if not doing.come[part]:
            raise Broken(f"worker {rank} takes values of fragment {part} that have not come")
        if doing.ends != math.inf:
            raise Broken(f"worker {rank} takes values while it computes on others")
        self._draft.change(rank, come=replaced(doing.come, part, False), model=True)

    def _add_step(self, rank: int, doing: Doing) -> None:
        if not doing.snapshot:
            raise Broken(f"worker {rank} adds a step that it did not make on a snapshot")
        if doing.unsent[0] != 1:
            raise Broken(f"worker {rank} adds a step that it has not made")
        self._draft.change(rank, snapshot=False)

    # Between workers.

    def _send_model(self, rank: int, doing: Doing, order: SendModel) -> None:
        if not doing.model:
            raise Broken(f"worker {rank} has no model to send")
        if order.step not in (doing.pushes[0], doing.pushes[0] - 1):
            raise Broken(f"worker {rank} sends its model of step {order.step}, its next is {doing.pushes[0]}")
        draft = self._draft
        for other, _ in order.row.send:
            if draft.workers[other].status == ALIVE:
                if (rank, order.step, other) in draft.mail:
                    raise Broken(f"worker {rank} sends its model of step {order.step} twice")
                draft.mail.add((rank, order.step, other))

    def _mix(self, rank: int, doing: Doing, order: Mix) -> None:
        draft, model = self._draft, doing.model
        for other, _ in order.row.receive:
            if other in order.lost:
                continue
            sent = (other, order.step, rank) in draft.mail
            if not sent and (other, order.step, NO_MODEL) not in draft.mail:
                raise Broken(f"worker {rank} mixes what {other} has not sent: {order}")
            model = model or sent
        neighbours = {other for other, _ in (*order.row.send, *order.row.receive)}
        if not neighbours.issuperset(order.lost):
            raise Broken(f"{order} of worker {rank} has lost one who is no neighbour")
        draft.mail = {letter for letter in draft.mail if letter[2] != rank or letter[1] > order.step}
        draft.change(rank, model=model)

    def _ask_partner(self, rank: int, doing: Doing, partner: int, step: int) -> None:
        if doing.asks is not None:
            raise Broken(f"worker {rank} asks {partner}, and waits for {doing.asks}")
        if partner == rank or step != doing.pushes[0]:
            raise Broken(f"worker {rank} asks {partner} for an average of step {step}, its next is {doing.pushes[0]}")
        draft = self._draft
        draft.change(rank, asks=(partner, step))
        there = draft.workers[partner].status
        if there == ALIVE:
            draft.calls.append((rank, partner, "request", step, False))
        elif there == AWAY:  # that it is gone is known
            draft.tell(rank, "parted", 0, partner)

    def _answer(self, rank: int, doing: Doing, order: AnswerPartner) -> None:
        if order.averaged and not doing.model:
            raise Broken(f"worker {rank} averages a model that it does not have")
        if order.averaged and doing.asks is not None:
            raise Broken(f"worker {rank} averages while it waits for an average itself")
        if self._draft.workers[order.asker].status == ALIVE:
            self._draft.calls.append((rank, order.asker, "reply", order.step, order.averaged))
