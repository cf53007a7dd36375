"""Momentum at each worker in virtual time: against torch's Nesterov, and against every rule worked out here by hand."""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scalar import BATCH, INPUTS, SPEEDS, START, TARGETS, asynchronous, gradients, halved, model, train
from torch import nn

from polytempo.errors import UsageError
from polytempo.records.lines import RecordLine
from polytempo.simulate import replicas
from polytempo.simulate.cluster import Arrival, Cluster, Crash
from polytempo.simulate.virtual_model import VirtualModel
from polytempo.simulate.virtual_training import train_virtually
from polytempo.sync.momentum import MomentumForm
from polytempo.tasks import digits

RATE = 0.1
SGD = partial(torch.optim.SGD, lr=RATE, momentum=0.9)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models are small: several threads are slower, much so where others use them, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# One worker.


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in net.parameters()]


def alone(optimizer: Callable[[list[nn.Parameter]], Any], sync: str) -> list[torch.Tensor]:
    """One worker, in double precision, for 40 steps."""
    task = digits()
    data = tuple((inputs.double(), targets) for inputs, targets in task.data)
    run = train_virtually(
        task.model.double(), data, task.loss, sync=sync, cluster=Cluster(workers=1, batch=16), optimizer=optimizer,
        steps_each=40,
    )  # fmt: skip
    return weights(run.model)


@pytest.mark.parametrize("sync", ["asp", "ssp:3", "every:4", "dssp:3..15", "delay:0"])
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.01}, {"maximize": True}], ids=str)
def test_sgd_is_torchs_nesterov_bit_for_bit(sync: str, more: dict[str, Any]) -> None:
    ours = alone(partial(torch.optim.SGD, lr=0.05, momentum=0.9, **more), f"{sync},momentum=lookahead")
    theirs = alone(partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, **more), "bsp")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_the_look_ahead_sgd_is_torchs_own() -> None:
    ours = alone(partial(torch.optim.SGD, lr=0.05, momentum=0.9), "asp,momentum=worker")
    theirs = alone(partial(torch.optim.SGD, lr=0.05, momentum=0.9), "bsp")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_form_of_all_rules_is_nesterov_for_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "form_of", lambda *_: MomentumForm.CHANGE)
    ours = alone(partial(torch.optim.SGD, lr=0.05, momentum=0.9), "asp,momentum=lookahead")
    theirs = alone(partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True), "bsp")
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-12


def test_one_worker_is_left_alone() -> None:
    run, weight = train("asp", SGD, 1.0, steps=10)
    assert run.outcome.sync == "asp"
    assert weight == train("bsp", SGD, 1.0, steps=10)[1]


# Defaults.


@pytest.mark.parametrize(
    ("sync", "optimizer", "text"),
    [
        ("asp", SGD, "asp,momentum=lookahead,spike=1.5"),
        ("ssp:3", torch.optim.AdamW, "ssp:3,momentum=lookahead,scale=n^-0.75"),
        ("asp,momentum=server", torch.optim.Adam, "asp,momentum=server,scale=n^-0.75"),
        ("asp,dc=0.1", SGD, "asp,dc=0.1,momentum=server"),
        ("asp", partial(torch.optim.SGD, lr=RATE), "asp"),
        ("downpour", torch.optim.Adagrad, "downpour,scale=sqrt"),
        ("downpour", SGD, "downpour"),
        ("asup", SGD, "asup"),
        ("bsp", SGD, "bsp"),
        ("local:2", SGD, "local:2"),
    ],
)
def test_defaults_are_written_out(sync: str, optimizer: Callable[..., Any], text: str) -> None:
    lines: list[RecordLine] = []
    run, weight = train(sync, optimizer, *SPEEDS, steps=24, record=lines.append)
    again, same = train(text, optimizer, *SPEEDS, steps=24)
    assert run.outcome.sync == again.outcome.sync == text
    assert same == weight


def test_a_rule_that_is_not_known_stays_on_the_servers() -> None:
    class Own(torch.optim.SGD):
        """Some other rule."""

    assert train("asp", partial(Own, lr=RATE, momentum=0.9), *SPEEDS, steps=9)[0].outcome.sync == "asp"
    with pytest.raises(UsageError, match=r"the look-ahead of Own is not known; leave it out"):
        train("asp,momentum=lookahead", partial(Own, lr=RATE, momentum=0.9), *SPEEDS, steps=9)


# Several workers in turn: the rules by hand, on one weight.


class SgdRule:
    """What one worker pushes. A gradient is at most `spike` times as long as usual, in numbers of 32 bits."""

    def __init__(self, momentum: float = 0.9, decay: float = 0.0, ahead: bool = True, spike: float = 1.5) -> None:
        self.momentum, self.decay, self.ahead, self.velocity = momentum, decay, ahead, 0.0
        self.spike, self.usual = spike, 0.0

    def calmed(self, g: float) -> float:
        length = ctypes.c_float(abs(g)).value
        kept = min(length, self.spike * self.usual) if self.usual else length
        self.usual = ctypes.c_float(self.usual + 0.05 * (kept - self.usual) if self.usual else length).value
        return g * kept / length

    def change(self, g: float, read: float) -> float:
        g = self.calmed(g) if self.spike and g else g
        g += self.decay * read
        self.velocity = self.momentum * self.velocity + g
        return -RATE * (g + self.momentum * self.velocity if self.ahead else self.velocity)


class ChangeRule:
    """Extrapolates what a rule changes, its decoupled weight decay excepted."""

    def __init__(self, b: float, decay: float = 0.0) -> None:
        self.b, self.decay, self.steps = b, decay, 0
        self.before: float | None = None
        self.mean = self.square = 0.0

    def change(self, g: float, read: float) -> float:
        self.steps += 1
        made = self.made(g)
        pushed = made if self.before is None else made + self.b * (made - self.before)
        self.before = made
        return pushed - RATE * self.decay * read

    def made(self, g: float) -> float:
        self.mean = 0.9 * self.mean + 0.1 * g
        self.square = 0.99 * self.square + 0.01 * g * g
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.99**self.steps)
        return -RATE * mean / (math.sqrt(square) + 1e-8)


class RmspropRule(ChangeRule):
    def made(self, g: float) -> float:
        self.square = 0.99 * self.square + 0.01 * g * g
        self.mean = self.b * self.mean + g / (math.sqrt(self.square) + 1e-8)
        return -RATE * self.mean


ADAM = {"lr": RATE, "betas": (0.9, 0.99)}
RULES: list[tuple[str, Callable[..., Any], Callable[[], Any], float]] = [
    ("asp", SGD, SgdRule, 1 / 3),
    ("asp", partial(SGD, weight_decay=0.1), partial(SgdRule, decay=0.1), 1 / 3),
    ("asp,momentum=lookahead", SGD, partial(SgdRule, spike=0.0), 1 / 3),
    ("asp,spike=1.2", SGD, partial(SgdRule, spike=1.2), 1 / 3),
    ("asp,momentum=worker", SGD, partial(SgdRule, ahead=False, spike=0.0), 1 / 3),
    ("asp,scale=1", SGD, SgdRule, 1.0),
    ("asp", partial(torch.optim.Adam, **ADAM), partial(ChangeRule, 0.9), 3**-0.75),
    ("asp,momentum=worker", partial(torch.optim.Adam, **ADAM), partial(ChangeRule, 0.0), 3**-0.75),
    ("asp", partial(torch.optim.AdamW, weight_decay=0.2, **ADAM), partial(ChangeRule, 0.9, 0.2), 3**-0.75),
    ("asp", partial(torch.optim.RMSprop, lr=RATE, momentum=0.8), partial(RmspropRule, 0.8), 3**-0.75),
]


@pytest.mark.parametrize(("sync", "optimizer", "rule", "rate"), RULES)
def test_workers_in_turn_by_hand(sync: str, optimizer: Callable[..., Any], rule: Callable[[], Any], rate: float) -> None:
    """Equal workers push 0, 1, 2, 0, 1, 2, ...: each is two updates stale, but for the first."""
    gradient, weight, rounds = gradients(3), START, 12
    rules, read = [rule() for _ in range(3)], [START] * 3
    for step in range(rounds):
        for worker in range(3):
            weight += rate * rules[worker].change(gradient(worker, step, read[worker]), read[worker])
            read[worker] = weight
    assert train(sync, optimizer, 1.0, 1.0, 1.0, steps_each=rounds)[1] == pytest.approx(weight, abs=1e-12)
    assert (
        abs(train(f"{sync.split(',')[0]},momentum=server", optimizer, 1.0, 1.0, 1.0, steps_each=rounds)[1] - weight) > 1e-6
    )


def test_what_is_dropped_has_changed_the_momentum_of_its_worker() -> None:
    """The worker that made it does not know, as in a live job."""
    rules = [SgdRule() for _ in SPEEDS]
    turns: list[tuple[int, int]] = []

    def update(weight: float, g: float, read: float, stale: int) -> float | None:
        worker = turns.pop(0)[0]
        change = rules[worker].change(g, read)
        return None if stale > 1 else weight + change / 3

    lines: list[RecordLine] = []
    run, weight = train("asp,drop=1", SGD, *SPEEDS, seconds=50.0, record=lines.append)
    turns += [(int(line["worker"]), int(line["step"])) for line in lines if line["kind"] == "push"]
    assert run.outcome.discarded > 3
    assert weight == pytest.approx(asynchronous(SPEEDS, 50.0, update), abs=1e-12)
    assert turns == []


def test_who_comes_back_starts_anew() -> None:
    """From a record: the order of the pushes, what each had read, and who left when."""
    cluster = Cluster(
        workers=3, batch=BATCH, step_times={0: 1.0, 1: 1.3717, 2: 2.1131}, crashes=(Crash(1, 9.0, 0.5),),
        joins=(Arrival(1, 15.2),),
    )  # fmt: skip
    lines: list[RecordLine] = []
    run = train_virtually(
        model(), ((INPUTS, TARGETS), (INPUTS, TARGETS)), halved, sync="asp", cluster=cluster, optimizer=SGD,
        metric=lambda output, target: 0.0, evaluate_every=1e9, seconds=40.0, record=lines.append,
    )  # fmt: skip

    def by_hand(anew: bool) -> float:
        gradient, history, rules = gradients(3), [START], [SgdRule() for _ in range(3)]
        step, active = -1, 0
        for line in lines:
            if line["kind"] == "join":
                active += 1
            if line["kind"] == "leave":
                active -= 1
                rules[line["worker"]] = SgdRule() if anew else rules[line["worker"]]
            if line["kind"] == "push":
                step = line["step"]
            if line["kind"] == "apply":
                (worker,), (stale,) = line["workers"], line["staleness"]
                read = history[len(history) - 1 - stale]
                history.append(history[-1] + rules[worker].change(gradient(worker, step, read), read) / active)
        return history[-1]

    assert [line["worker"] for line in lines if line["kind"] in ("join", "leave")] == [0, 1, 2, 1, 1]
    assert run.model.weight.item() == pytest.approx(by_hand(anew=True), abs=1e-12)
    assert abs(run.model.weight.item() - by_hand(anew=False)) > 1e-6


# delay:k: pushes really in flight.


class InFlight:
    """Workers that compute on while pushes and answers take `latency` each; `own`: the factor on unanswered pushes."""

    def __init__(self, speeds: tuple[float, ...], delay: int, latency: float, rule: Callable[[], Any], rate: float) -> None:
        self.speeds, self.delay, self.latency, self.rate = speeds, delay, latency, rate
        self.gradient, self.weight = gradients(len(speeds)), START
        self.own = len(speeds) * rate
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = count()
        self.most = 0  # in flight
        self.workers = [SimpleNamespace(rule=rule(), read=START, sent={}, next=0, last=-1, busy=False) for _ in speeds]

    def run(self, seconds: float) -> float:
        for worker in range(len(self.speeds)):
            self.later(0.0, self.latency, self.answered, worker, self.weight, -1)
        while self.heap[0][0] <= seconds:
            now, _, act, args = heapq.heappop(self.heap)
            act(now, *args)
        return self.weight

    def later(self, now: float, delay: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (now + delay, next(self.order), act, args))

    def begin(self, now: float, worker: int) -> None:
        me = self.workers[worker]
        if me.busy or me.next > me.last:
            return
        values = me.read
        for _, push in sorted(me.sent.items()):
            values += self.own * push
        self.most = max(self.most, len(me.sent))
        push = me.rule.change(self.gradient(worker, me.next, values), values)
        me.busy, me.next = True, me.next + 1
        self.later(now, self.speeds[worker], self.computed, worker, me.next - 1, push)

    def computed(self, now: float, worker: int, step: int, push: float) -> None:
        me = self.workers[worker]
        me.sent[step], me.busy = push, False
        self.later(now, self.latency, self.arrived, worker, step, push)
        self.begin(now, worker)

    def arrived(self, now: float, worker: int, step: int, push: float) -> None:
        self.weight += self.rate * push
        self.later(now, self.latency, self.answered, worker, self.weight, step)

    def answered(self, now: float, worker: int, weight: float, step: int) -> None:
        me = self.workers[worker]
        me.sent.pop(step, None)
        me.read, me.last = weight, step + 1 + self.delay
        self.begin(now, worker)


@pytest.mark.parametrize(
    ("sync", "optimizer", "rule", "rate"),
    [
        ("delay:3", SGD, SgdRule, 1 / 3),
        ("delay:3,scale=0.5", SGD, SgdRule, 0.5),
        ("delay:2", partial(torch.optim.Adam, **ADAM), partial(ChangeRule, 0.9), 3**-0.75),
    ],
)
@pytest.mark.parametrize("latency", [0.3, 1.77])
def test_delay_by_hand(
    sync: str, optimizer: Callable[..., Any], rule: Callable[[], Any], rate: float, latency: float
) -> None:
    """A worker computes on what it has read, and on its own pushes that are under way, each for all workers'."""
    delay = int(sync[6])
    by_hand = InFlight(SPEEDS, delay, latency, rule, rate)
    expected = by_hand.run(40.0)
    assert by_hand.most == (delay if latency > 1 else 1)
    assert train(sync, optimizer, *SPEEDS, latency=latency, seconds=40.0)[1] == pytest.approx(expected, abs=1e-11)
    blind = InFlight(SPEEDS, delay, latency, rule, rate)
    blind.own = 0.0
    assert abs(blind.run(40.0) - expected) > 1e-6


def test_pushes_are_kept_only_while_a_step_can_lack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]
    add, observe = replicas.OwnMomentum.add_own, VirtualModel.observe
    kept: list[VirtualModel] = []

    def look(self: replicas.OwnMomentum, read: int) -> None:
        add(self, read)
        most[0] = max(most[0], len(self.pushes))

    monkeypatch.setattr(replicas.OwnMomentum, "add_own", look)
    monkeypatch.setattr(VirtualModel, "observe", lambda self, now: (kept.append(self), observe(self, now)))
    run, _ = train("delay:3,drop=5", SGD, *SPEEDS, latency=1.77, steps_each=40)
    assert run.outcome.discarded > 3
    assert most[0] == 3
    assert not kept[0].momenta  # all have left
