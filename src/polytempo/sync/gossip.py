"""`gossip:ring|torus|exp|full`: every worker trains its own model and mixes it with those of its neighbours in each step.

D-PSGD (Lian et al. 2017) on undirected graphs, SGP (Assran et al. 2019) on directed ones; the graphs are in `topology.py`.

    step c of worker i    compute; send (x_i, w_i) to the out-neighbours; push c, which carries no data
    release of c + 1      when every neighbour of step c, in or out, has pushed c or has left; then x_i = P_ii x_i + sum of
                          P_ij x_j, and w_i alike

This is a local barrier: workers far apart in the graph may be several steps apart. In directed graphs the values of
in-neighbours would be enough; a worker waits for its out-neighbours too, so that it takes a share back when one has left.
The push-sum weight w is 1 at the start and stays 1 while members neither leave nor join; the model is z = x / w. A local
step moves z by what the optimizer says, so x by w times that: at weight 1 it is the published rule, and a worker of small
weight is not thrown about.

`overlap=1` is D-PSGD as printed: x_i = sum of P_ij x_j(c) - eta g(x_i(c)). The values of the step's beginning are sent while
the gradient is computed; by default those after the local step are sent, which brings the models closer together.

Members and mass. The graph of a step is fixed, over the members of that moment, when the first worker is released into it.

    leaves before its push c     neighbours take back the shares meant for it and get none from it (`lost` in their release
                                 of c + 1): the columns of the others still sum to 1. It takes along its own (x, w)
    leaves after its push c      it has its part in step c, and takes along what its row of that step gives it
    joins                        it enters at the first step whose graph is not fixed, with x = 0 and w = 0 (`enters` in its
                                 release): it computes nothing, pushes at once, and has after that step what its neighbours
                                 sent it, about half of a neighbour's (x, w) in `exp`. The sums of x and of w do not change

A member goes on entering until an in-neighbour that has a model has pushed. Should no member have one any more, the next to
be released starts from the values it has, with weight 1. A live worker that finishes takes nothing along: it hands its
(x, w) over to another and then leaves (`reducer/model_mean.py`); to the policy it is one that leaves.

Where this departs from the papers: they have a fixed set of workers; P is made anew when it changes. SGP's overlap by
several steps is not built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polytempo.errors import SpecError
from polytempo.options import choice, switch
from polytempo.sync.actions import NAMED_AT_MOST, Action, Apply, Hold, Release
from polytempo.sync.capabilities import Capabilities, Promises, Pushes, Unsound
from polytempo.sync.directives import Mixing, NextMixing
from polytempo.sync.events import Pushed
from polytempo.sync.machine import (
    ADD_STEP,
    COMPUTE,
    FINISHED,
    NO_ORDERS,
    SNAPSHOT,
    Begin,
    Computed,
    Mix,
    Orders,
    SendModel,
    SendPush,
    StepHere,
    WorkerEvent,
    WorkerMachine,
    WorkerOrder,
)
from polytempo.sync.mode import Mode
from polytempo.sync.policy import Policy
from polytempo.sync.topology import TOPOLOGIES, check_size, mixing_rows, phases


@dataclass(frozen=True)
class GossipSpec:
    """How workers mix their models with those of their neighbours."""

    topology: str
    static: bool = False  #: all peers of the exponential graph in each step
    overlap: bool = False  #: the values of the step's beginning are exchanged while it is computed
    asynchronous: bool = False  #: pairs are averaged without a barrier (`adpsgd`)


def neighbours(row: Mixing) -> tuple[int, ...]:
    """The workers that a worker sends to or receives from, each once."""
    if row.send is row.receive:  # an undirected graph
        return tuple(other for other, _ in row.send)
    return tuple(dict.fromkeys(other for other, _ in (*row.send, *row.receive)))


class MixingStep:
    """One step's graph, over the members of the moment at which it was fixed."""

    __slots__ = ("empty", "lost", "missing", "pushed", "rows")

    def __init__(self, rows: dict[int, Mixing]) -> None:
        self.rows = rows
        self.missing = {worker: len(neighbours(row)) for worker, row in rows.items()}  # neighbours not heard of
        self.pushed: set[int] = set()
        self.empty: set[int] = set()  # of these, the ones without a model
        self.lost: set[int] = set()  # left before they pushed

    def heard_of(self, worker: int) -> list[int]:
        """A member has pushed, or is lost: the neighbours that waited for it alone."""
        complete = []
        for other in neighbours(self.rows[worker]):
            self.missing[other] -= 1
            if not self.missing[other]:
                complete.append(other)
        return complete

    def awaited(self, worker: int) -> list[int]:
        """The neighbours that have neither pushed nor left."""
        return [other for other in neighbours(self.rows[worker]) if other not in self.pushed and other not in self.lost]

    def lost_to(self, worker: int) -> tuple[int, ...]:
        """The neighbours of a worker that left before they pushed, sorted."""
        return tuple(sorted(self.lost.intersection(neighbours(self.rows[worker])))) if self.lost else ()

    def brought_a_model_to(self, worker: int) -> bool:
        """Has an in-neighbour with a model pushed?"""
        return any(other in self.pushed and other not in self.empty for other, _ in self.rows[worker].receive)


class NeighbourPolicy(Policy):
    """Workers with models of their own. One that joins a job under way enters without: others give it one."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._begun = False
        self._entering: set[int] = set()  # members without a model

    def _start(self, now: float) -> list[Action]:
        actions = super()._start(now)
        self._begun = True
        return actions

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        if self._begun:
            self._entering.add(worker)
        return []

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self._entering.discard(worker)
        return []

    def _enters(self, worker: int) -> bool:
        """Has this worker, which is released now, no model? Where no member has one, it starts from the values it has."""
        if len(self._entering) == len(self.progress.pushed):
            self._entering.discard(worker)
        return worker in self._entering


class GossipPolicy(NeighbourPolicy):
    """A local barrier: a worker goes on when its neighbours have pushed the step it has pushed."""

    def __init__(self, workers: int, topology: str, static: bool = False) -> None:
        super().__init__(workers)
        check_size(topology, workers)
        self.topology = topology
        self.static = static
        self._steps: dict[int, MixingStep] = {}
        self._oldest = self._next = 0  # the steps whose graphs are kept: from the one to before the other
        self._rows: dict[int, dict[int, Mixing]] = {}  # by phase, for the present members

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self._oldest = self._next = step

    def entry_step(self) -> int:
        return self._next

    def on_push(self, push: Pushed, now: float) -> list[Action]:
        worker, step = push.worker, push.step
        graph = self._steps[step]
        graph.pushed.add(worker)
        if worker in self._entering:
            graph.empty.add(worker)
        self.progress.move(worker, step + 1)
        actions: list[Action] = [Apply((push,), 1.0), *self._released(graph.heard_of(worker), step + 1)]
        if not graph.missing[worker]:
            actions.append(self._release(worker, step + 1, graph))
        else:
            self.room.enter(worker, step + 1)
            actions.append(self.hold(worker, step + 1))
        self._forget_old()
        return actions

    def _released(self, complete: list[int], step: int) -> list[Action]:
        """Release those of these workers that are held for `step`."""
        actions: list[Action] = []
        for worker in complete:
            if self.room.has(worker, step):
                self.room.remove(worker, step)
                actions.append(self._release(worker, step, self._steps[step - 1]))
        return actions

    def on_start(self, worker: int, step: int, now: float) -> list[Action]:
        if self._begun:
            self._rows.clear()
        return [*super().on_start(worker, step, now), self._release(worker, step, None)]

    def _release(self, worker: int, step: int, before: MixingStep | None) -> Release:
        """Release a worker into a step; `before` is the graph in which it made the one before."""
        if worker in self._entering and before is not None and before.brought_a_model_to(worker):
            self._entering.discard(worker)
        row = self._graph(step).rows[worker]
        mixing, lost = row if row.send or row.receive else None, before.lost_to(worker) if before is not None else ()
        return Release(worker, step, self.progress.slowest, NextMixing(mixing, lost, self._enters(worker)))

    def _graph(self, step: int) -> MixingStep:
        """The graph of a step; the first to be released into it fixes it."""
        graph = self._steps.get(step)
        if graph is None:
            members = tuple(sorted(self.progress.pushed))
            phase = step % phases(self.topology, len(members), self.static)
            if phase not in self._rows:
                self._rows[phase] = mixing_rows(self.topology, members, step, self.static)
            graph = self._steps[step] = MixingStep(self._rows[phase])
            self._next = step + 1
        return graph

    def on_leave(self, worker: int, now: float) -> list[Action]:
        self._rows.clear()
        actions = super().on_leave(worker, now)
        for step, graph in list(self._steps.items()):
            if worker in graph.rows and worker not in graph.pushed and worker not in graph.lost:
                graph.lost.add(worker)
                actions += self._released(graph.heard_of(worker), step + 1)
        self._forget_old()
        return actions

    def _forget_old(self) -> None:
        """Graphs of steps that all members have pushed: each of them has been released into the next."""
        while self._oldest < self.progress.slowest and self._oldest in self._steps:
            del self._steps[self._oldest]
            self._oldest += 1

    def why_held(self, worker: int, step: int) -> Hold:
        awaited = self._steps[step - 1].awaited(worker)
        awaited.sort(key=lambda other: (self.progress.pushed[other], other))
        named = tuple(awaited[:NAMED_AT_MOST])
        return Hold(worker, step, named, len(awaited), f"worker {named[0]}, a neighbour, has not pushed step {step - 1}")


#: What modes in which each worker has a model of its own may cost.
MODELS_DIFFER = "models differ: may cost accuracy"

#: The row of a worker without neighbours.
ALONE = Mixing(1.0, (), ())


class GossipMachine(WorkerMachine):
    """Local steps of one worker, mixed with those of its neighbours.

    What a step computed is sent before the push that vouches for it; with `overlap` the values leave when the step begins. A
    worker that enters without a model computes nothing and sends nothing: its pushes count for nothing.
    """

    brings = "nothing"

    def __init__(self, overlap: bool, last: float = math.inf) -> None:
        super().__init__(last)
        self.sends_early = overlap
        self._row: Mixing | None = None  # of the step it is in, or has pushed last
        self._empty = False  # it has no model

    def handle(self, event: WorkerEvent, now: float, part: int = 0) -> Orders:
        if isinstance(event, Computed):
            self.computes = False
            step, row = self.step, self._row or ALONE
            self.step += 1
            sent = () if self.sends_early else (SendModel(row, step),)
            return (StepHere(step), ADD_STEP, *sent, SendPush(step))
        if isinstance(event, Release):
            return [*self._mix(event), *self._go()]
        return super().handle(event, now, part)

    def _mix(self, release: Release) -> list[WorkerOrder]:
        """The release brings the row of the next step, and the end of the one before."""
        told = release.directive if isinstance(release.directive, NextMixing) else NextMixing()
        orders: list[WorkerOrder] = []
        if self._row is None:
            orders.append(Begin(told.enters))
        else:
            orders.append(Mix(self._row, release.step - 1, told.lost))
            if self._empty and not told.enters:
                orders.append(Begin())
        self.allowed, self._row, self._empty = release.step, told.mixing or ALONE, told.enters
        return orders

    def _go(self) -> Orders:
        if self.leaving or self.step > self.allowed or self._row is None:
            return NO_ORDERS
        if self.done:
            return FINISHED
        if self._empty:
            self.step += 1
            return (SendPush(self.step - 1, 0),)
        self.computes = True
        sent = (SendModel(self._row, self.step),) if self.sends_early else ()
        return (*sent, SNAPSHOT, COMPUTE)


def _spec(topology: str, overlap: bool = False, static: bool = False) -> GossipSpec:
    if static and topology != "exp":
        raise SpecError(f"static=1 is an option of gossip:exp, got gossip:{topology}; leave it out")
    return GossipSpec(topology, static, overlap)


GOSSIP = Mode(
    "gossip",
    "gossip:ring",
    "local models, mixed with those of neighbours in each step; overlap=1: while it is computed",
    lambda workers, topology, overlap=False, static=False: GossipPolicy(workers, topology, static),
    argument=choice("topology", TOPOLOGIES),
    options={"overlap": switch(), "static": switch()},
    machine=lambda worker, last, topology, overlap=False, **_: GossipMachine(overlap, last),
    gossip=_spec,
    capabilities=Capabilities(Pushes.NOTHING),
    split=Unsound("stages would mix with the models of neighbours at different times", ("local:8",)),
    price=MODELS_DIFFER,
    promises=Promises(waits=0),
)
