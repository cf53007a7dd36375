"""ASU-P in live jobs: its rule in the order of the record, its bound, rounds, statistics that stay local."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_close,
    assert_equal,
    check_record,
    copied,
    loss_of,
    made_from_seed,
    made_gradients,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained,
    trained_alone,
    until,
    weights,
)
from sessions import within
from torch import nn

import polytempo
from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.reducer.servers import ServerExchange
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(20), pytest.mark.both_wires]

SHAPES = [(3, 2), (5,)]
START = made_params(SHAPES)
STEPS, LR, DECAY = 7, 0.02, 0.1
GRADIENTS = [made_gradients(SHAPES, STEPS, seed=90 + worker) for worker in range(3)]
DEFAULTS = {"momentum": 0.9, "rho": 0.9, "eps": 1e-10, "initial": 0.0}
Numbers = list[list[float]]


class Scalars:
    """The rule, number by number in plain Python."""

    def __init__(self, momentum: float, rho: float, eps: float, initial: float) -> None:
        self.momentum, self.rho, self.eps = momentum, rho, eps
        self.w = [number for start in START for number in start.detach().reshape(-1).tolist()]
        self.s = [initial] * len(self.w)
        self.v = [0.0] * len(self.w)

    def push(self, gradient: list[torch.Tensor], lr: float) -> None:
        flat = [number for one in gradient for number in one.reshape(-1).tolist()]
        for i, pushed in enumerate(flat):
            g = pushed + DECAY * self.w[i]
            self.s[i] = self.rho * self.s[i] + (1 - self.rho) * g * g
            self.v[i] = self.momentum * self.v[i] + lr * g / (self.s[i] + self.eps) ** 0.5
            self.w[i] -= self.v[i]

    def tensors(self) -> list[torch.Tensor]:
        parts = torch.tensor(self.w, dtype=torch.float64).split([start.numel() for start in START])
        return [part.view(start.shape) for part, start in zip(parts, START, strict=True)]


def made(session: Session, wrapped: str = "SGD", **options: Any) -> tuple[list[nn.Parameter], DistributedOptimizer]:
    params = copied(START)
    inner: torch.optim.Optimizer
    if wrapped == "SGD":
        inner = torch.optim.SGD(params, lr=LR, weight_decay=DECAY)
    else:
        inner = polytempo.AsuP(params, lr=LR, weight_decay=DECAY, **options)
    return params, DistributedOptimizer(inner)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("asup", {}),
        ("asup,momentum=0.5,rho=0.7,eps=1e-3,initial=1", {"momentum": 0.5, "rho": 0.7, "eps": 1e-3, "initial": 1.0}),
        ("asup,bound=3,initial=0.1", {"initial": 0.1}),
        ("asup,momentum=0,rho=0", {"momentum": 0.0, "rho": 0.0}),
    ],
)
def test_the_servers_run_the_rule_in_the_order_of_the_record(
    text: str, changed: dict[str, float], servers: int, tmp_path: Path
) -> None:
    def work(session: Session) -> list[torch.Tensor]:
        params, optimizer = made(session)
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()
        optimizer.consolidate()
        done.wait(20)  # who leaves changes the others' rate
        optimizer.consolidate()
        done.wait(20)
        return [param.detach().clone() for param in params]

    done = threading.Barrier(3)
    with ThreadJob(3, servers, text, record=tmp_path) as job:
        results = job.run(work)
    reference, counts = Scalars(**{**DEFAULTS, **changed}), [0, 0, 0]
    for line in check_record(tmp_path):
        if line["kind"] == "apply" and line["server"] == 0:
            (worker,) = line["workers"]
            reference.push(GRADIENTS[worker][counts[worker]], LR / 3)
            counts[worker] += 1
    assert counts == [STEPS] * 3
    for values in results:
        assert_close(values, reference.tensors(), rtol=1e-10)


def test_a_bound_holds_as_in_ssp(tmp_path: Path) -> None:
    def work(session: Session) -> None:
        params, optimizer = made(session)
        account = job.sequencer.statistics[0]
        if session.rank == 1:
            until(lambda: account.steps == 4 and account.state == "waiting", "worker 0 is held")
        for gradients in GRADIENTS[session.rank]:
            set_gradients(params, gradients)
            optimizer.step()

    with ThreadJob(2, 1, "asup,bound=3", record=tmp_path) as job:
        job.run(work)
    holds = [(line["worker"], line["step"]) for line in check_record(tmp_path) if line["kind"] == "hold"]
    assert (0, 4) in holds


@pytest.mark.parametrize("text", ["asup", "asup,rho=0.8"])
def test_options_of_a_wrapped_asup_hold_unless_the_spec_names_them(text: str) -> None:
    def work(session: Session) -> list[torch.Tensor]:
        params, optimizer = made(session, "AsuP", rho=0.6, eps=1e-4)
        for gradients in GRADIENTS[0]:
            set_gradients(params, gradients)
            optimizer.step()
        return [param.detach().clone() for param in params]

    with ThreadJob(1, 2, text) as job:
        got = job.run(work)[0]
    reference = Scalars(0.9, 0.8 if "rho" in text else 0.6, 1e-4, 0.0)
    for gradients in GRADIENTS[0]:
        reference.push(gradients, LR)
    assert_close(got, reference.tensors(), rtol=1e-10)
    assert_equal(within(Session(None, JobFacts(1, (), text), 0), work), got)


@pytest.mark.parametrize("text", ["asup", "asup,momentum=0.5,initial=1"])
def test_alone_the_same_rule_runs_and_its_state_can_be_saved(text: str) -> None:
    def work(params: list[nn.Parameter], optimizer: DistributedOptimizer, steps: range) -> None:
        for step in steps:
            set_gradients(params, GRADIENTS[0][step])
            optimizer.step()

    def alone() -> tuple[list[nn.Parameter], DistributedOptimizer]:
        return within(Session(None, JobFacts(1, (), text), 0), made)

    changed = {"momentum": 0.5, "initial": 1.0} if "," in text else {}
    reference = Scalars(**{**DEFAULTS, **changed})
    for gradients in GRADIENTS[0]:
        reference.push(gradients, LR)
    params, optimizer = alone()
    work(params, optimizer, range(3))
    others, second = alone()
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param.data)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, one in ((params, optimizer), (others, second)):
        work(own, one, range(3, STEPS))
        assert_close([param.detach() for param in own], reference.tensors(), rtol=1e-10)


@pytest.mark.parametrize("via", ["ps", "allreduce"])
def test_under_rounds_asup_is_one_process_on_the_joint_batch(via: str) -> None:
    model, batches = small_model(), small_batches(8, [3, 3])

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return polytempo.AsuP(params, lr=0.01, initial=0.1, weight_decay=0.01)

    with ThreadJob(2, 2 if via == "ps" else 1, "bsp", via=via) as job:
        results = job.run(lambda session: trained(session, model, make, batches)[0])
    for values in results:
        assert_close(values, trained_alone(model, make, batches), rtol=1e-9)


def normed_model() -> nn.Module:
    return made_from_seed(7, lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))).double()


def test_running_statistics_stay_where_they_were_made() -> None:
    """Never pushed, never overwritten: after the same weights, each worker still has the statistics of its own data."""
    model, batches = normed_model(), small_batches(10, [8, 8])
    batches = [[(x + 3 * rank, y) for rank, (x, y) in enumerate(step)] for step in batches]

    def work(session: Session) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
        own = copy.deepcopy(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.01), own)
        means = []
        for step in batches:
            optimizer.zero_grad()
            loss_of(own, step[session.rank]).backward()
            means.append([buffer.clone() for buffer in own.buffers()])
            optimizer.step()
            assert_equal([buffer.clone() for buffer in own.buffers()], means[-1])
        optimizer.consolidate()
        done.wait(20)
        optimizer.consolidate()
        assert_equal([buffer.clone() for buffer in own.buffers()], means[-1])
        assert isinstance(optimizer._reducer, ServerExchange)
        return weights(own), means[-1], [info.name for info in optimizer._reducer.spec.tensors]

    done = threading.Barrier(2)
    with ThreadJob(2, 2, "asup") as job:
        (first, here, names), (second, there, _) = job.run(work)
        held = [server.executor.state.optimizer_shards["0"].optimizer_spec.tensors for server in job.servers]
    assert names == [name for name, _ in model.named_parameters()]
    assert all([info.name for info in tensors] == names for tensors in held)
    assert_equal(first, second)
    assert here[2].item() == there[2].item() == len(batches)
    assert not torch.allclose(here[0], there[0], atol=0.1)


def test_gamma_and_beta_are_trained_by_all_workers() -> None:
    model, batches = normed_model(), small_batches(3, [8, 8])
    with ThreadJob(1, 1, "asup") as job:
        end = job.run(lambda session: trained(session, model, lambda p: torch.optim.SGD(p, lr=0.05), batches)[0])[0]
    moved = {name: not torch.equal(a, b) for (name, a), b in zip(model.named_parameters(), end, strict=True)}
    assert moved["1.weight"]
    assert moved["1.bias"]


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.RMSprop])
def test_other_rules_cannot_be_wrapped(inner: Any, servers: int) -> None:
    def work(session: Session) -> None:
        DistributedOptimizer(inner(copied(START), lr=0.1))

    def start() -> None:
        if not servers:
            within(Session(None, JobFacts(1, (), "asup"), 0), work)
        with ThreadJob(1, 1, "asup") as job:
            job.run(work)

    with pytest.raises(UsageError, match="brings its own rule; wrap SGD"):
        start()


def test_a_rule_of_the_mode_needs_gradients_on_the_servers() -> None:
    with ThreadJob(1, 1, "asup") as job, pytest.raises(UsageError, match="leave apply='delta' out"):
        job.run(lambda s: DistributedOptimizer(torch.optim.SGD(copied(START), lr=0.1), apply="delta"))


def test_corrected_momentum_begins_with_the_number_that_was_asked_for() -> None:
    """One worker: nothing is stale, so the momentum is the one that was named."""
    ends = []
    for text in ("asup,momentum=0.7", "asup,momentum=async:0.7"):

        def work(session: Session) -> list[torch.Tensor]:
            params, optimizer = made(session)
            for gradients in GRADIENTS[0]:
                set_gradients(params, gradients)
                optimizer.step()
            return [param.detach().clone() for param in params]

        with ThreadJob(1, 2, text) as job:
            ends.append(job.run(work)[0])
    assert_equal(ends[1], ends[0])
