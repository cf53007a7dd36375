"""Momentum at each worker beside all else: corrections, compression, tables, several optimizers, other ways of updating.

Where it cannot be, momentum stays on the servers, and one line says why. Nothing that worked without it is refused.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    MakeOptimizer,
    assert_close,
    assert_equal,
    check_record,
    copied,
    made_from_seed,
    made_gradients,
    made_params,
    set_gradients,
)
from own_momentum import ORDER, START, ByHand, Tensors, by_hand, gradient, played, shortened
from tabled import lookup_batches, lookup_model
from torch import nn

from polytempo.compression.chain import parse_chain, parse_compression
from polytempo.device.device import Devices
from polytempo.device.host_device import HostDevice
from polytempo.errors import UsageError
from polytempo.records.files import read_meta
from polytempo.session.session import Session
from polytempo.sync.momentum import MomentumForm
from polytempo.sync.spec import MODES, parse_spec
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding
from polytempo.train.update import HyperParameters
from polytempo.train.validation import OptimizerArguments

pytestmark = pytest.mark.timeout(20)

Params = list[nn.Parameter]
RULES: dict[str, tuple[MakeOptimizer, float]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 0.5),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.05), 0.5**0.75),
}


def told(job: ThreadJob) -> list[str]:
    """What was said of momentum and scale."""
    return [line for line in job.notices if "momentum" in line or "scale=" in line]


# Corrections of stale pushes.


def stale_by_hand() -> list[int]:
    last, result = [0, 0], []
    for version, worker in enumerate(ORDER):
        result.append(version - last[worker])
        last[worker] = version + 1
    return result


def corrected(rate: Callable[[int], float]) -> Callable[[ByHand, Tensors, int, int], Tensors]:
    stale = iter(stale_by_hand())
    return lambda one, values, worker, number: [
        factor * change for factor in [rate(next(stale))] for change in one.change(values, gradient(values, worker, number))
    ]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ("lr=staleness", lambda stale: 1 / max(1, stale)),
        ("decay=0.7", lambda stale: 0.7**stale),
        ("lr=staleness,decay=0.7", lambda stale: 0.7**stale / max(1, stale)),
    ],
)
def test_the_rate_of_what_is_pushed_falls_with_staleness(options: str, rate: Callable[[int], float], name: str) -> None:
    make, scale = RULES[name]
    end, job, _ = played(f"asp,{options}", make)
    assert_close(end, by_hand(make, scale, of=corrected(rate)), rtol=1e-11)
    chosen = "momentum=lookahead,spike=1.5:" if name == "SGD" else "momentum=lookahead,scale=n^-0.75:"
    assert told(job)[0].startswith(f"asp,{options},{chosen}")


@pytest.mark.parametrize("name", RULES)
def test_a_push_that_is_dropped_stays_in_the_momentum_of_its_worker(name: str) -> None:
    """The worker cannot know: what it learned there comes with its next pushes. Values move on without it."""
    make, scale = RULES[name]
    end, job, _ = played("asp,drop=1", make)
    assert job.summary["discarded"] == sum(stale > 1 for stale in stale_by_hand_dropping(1)) > 0
    now = [start.detach() for start in START]
    workers, read, counts, stale = [ByHand(make), ByHand(make)], [now, now], [0, 0], iter(stale_by_hand_dropping(1))
    for worker in ORDER:
        changes = workers[worker].change(read[worker], gradient(read[worker], worker, counts[worker]))
        counts[worker] += 1
        if next(stale) <= 1:
            now = [value + scale * change for value, change in zip(now, changes, strict=True)]
        read[worker] = now
    assert_close(end, now, rtol=1e-11)


def stale_by_hand_dropping(most: int) -> list[int]:
    last, version, result = [0, 0], 0, []
    for worker in ORDER:
        result.append(version - last[worker])
        version += result[-1] <= most
        last[worker] = version
    return result


def test_the_servers_momentum_that_falls_with_staleness_is_what_it_was() -> None:
    _, job, states = played("asp,momentum=async", RULES["SGD"][0])
    assert not told(job)
    assert_equal(*([own["momentum_buffer"] for own in state["state"].values()] for state in states))  # of the servers


# Compression.

LONG = made_gradients([(41,)], 8, seed=3)


@pytest.mark.parametrize("chain", ["bf16", "topk:0.1", "sign"])
def test_what_compression_holds_back_is_of_look_aheads(chain: str) -> None:
    """What came and what waits is all that was pushed: g + m v, of gradients that do not depend on values."""

    def work(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        param = nn.Parameter(torch.zeros(41, dtype=torch.float64))
        sgd = torch.optim.SGD([param], lr=1.0, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, compression={"push": chain})
        for number, (grad,) in enumerate(LONG):
            if number % 2 == session.rank:
                set_gradients([param], [grad])
                optimizer.step()
                assert torch.equal(param.grad, grad)
        optimizer.consolidate()
        here.wait(10)
        optimizer.consolidate()
        return param.detach().clone(), optimizer.state_dict()["filters"]["float64"]

    here = threading.Barrier(2)
    with ThreadJob(2, 2, "asp") as job:
        ends = job.run(work)
    pushed = torch.zeros(41, dtype=torch.float64)
    for rank in range(2):
        velocity = torch.zeros(41, dtype=torch.float64)
        for (grad,) in LONG[rank::2]:
            velocity = 0.9 * velocity + grad
            pushed += grad + 0.9 * velocity
    waits = ends[0][1] + ends[1][1]
    assert waits.any()
    torch.testing.assert_close(-2 * ends[0][0] + waits, pushed, rtol=1e-12, atol=1e-12)
    assert not parse_chain(chain).is_lossless


def test_answers_that_are_compressed_leave_the_momentum_to_the_workers() -> None:
    make, scale = RULES["SGD"]
    end, job, _ = played("asp", make, compression={"pull": "topk:1"})
    assert told(job)[0].startswith("asp,momentum=lookahead,spike=1.5:")
    assert_close(end, by_hand(make, scale), rtol=1e-9)


# Where it cannot be.


def with_tables(make: MakeOptimizer, embedding: Callable[[], nn.Module]) -> Callable[[], DistributedOptimizer]:
    def optimizer() -> DistributedOptimizer:
        model = nn.Sequential(embedding(), nn.Linear(2, 2))
        params = list(model.parameters())
        return DistributedOptimizer(make(params), model)

    return optimizer


def plain(make: MakeOptimizer, **options: Any) -> Callable[[], DistributedOptimizer]:
    return lambda: DistributedOptimizer(make(copied(START)), **options)


def muon(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.01)


SGD, ADAM = RULES["SGD"][0], RULES["Adam"][0]
#: What falls back, in which mode, and the reason that is told.
FALLEN: dict[str, tuple[Callable[[], DistributedOptimizer], str, str]] = {
    "dc": (plain(SGD), "asp,dc=0.1", "dc and dca correct gradients there"),
    "dca": (plain(ADAM), "ssp:3,dca=2", "dc and dca correct gradients there"),
    "compressed changes": (
        plain(ADAM, compression="bf16"),
        "asp",
        "compression is for gradients, and Adam would push changes",
    ),
    "tables": (with_tables(ADAM, lambda: ServerEmbedding(10, 2)), "asp", "the model has tables"),
    "a class that is not known": (plain(muon), "asp", "the look-ahead of Muon is not known"),
    "capturable": (
        plain(lambda p: torch.optim.Adam(p, lr=0.01, capturable=True)),
        "asp",
        "with capturable=True Adam does not run",
    ),
    "differentiable": (
        plain(lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, differentiable=True)),
        "delay:2",
        "with differentiable=True RMSprop does not run",
    ),
}


@pytest.mark.parametrize("why", FALLEN)
def test_momentum_stays_on_the_servers_with_one_line(why: str) -> None:
    make, sync, reason = FALLEN[why]

    def work(session: Session) -> tuple[str, bool]:
        optimizers = [make(), make()]
        return optimizers[0].spec.text, optimizers[0]._reducer is not None and optimizers[0]._reducer.holds_state

    with ThreadJob(2, 1, sync) as job:
        texts = job.run(work)
    assert texts[0] == texts[1]
    text, on_servers = texts[0]
    assert on_servers
    assert not parse_spec(text).worker_momentum
    (line,) = told(job)
    assert line.startswith(f"{text}: momentum stays on the servers: {reason}")
    assert line.endswith("; a rate that is right for bsp may be too high there")


@pytest.mark.parametrize("make", [SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_parameters_on_a_gpu_have_it_too(make: MakeOptimizer) -> None:
    """With the stand-in for a GPU: values are exchanged as with one."""
    with ThreadJob(2, 1, "asp", device="stand-in") as job:
        specs = job.run(lambda session: plain(make)().spec.text)
    assert all("momentum=lookahead" in spec for spec in specs)
    assert "each worker keeps the momentum" in told(job)[0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", [{"apply": "delta"}, {"sync": "asp,momentum=server,scale=1"}, {"sync": "bsp"}], ids=str)
def test_nothing_is_told_where_nothing_was_chosen(options: dict[str, str], name: str) -> None:
    with ThreadJob(2, 1, "asp") as job:
        specs = job.run(lambda session: plain(RULES[name][0], **options)().spec.text)
    assert specs == [options.get("sync", "asp")] * 2
    assert not told(job)


def test_what_the_user_asked_for_and_cannot_have_is_refused() -> None:
    for make, sync, reason in [(plain(SGD, apply="delta"), "asp", "apply='delta' pushes what"), *FALLEN.values()]:
        if "dc" not in sync:
            with ThreadJob(1, 1, f"{sync},momentum=lookahead") as job, pytest.raises(UsageError, match=reason):
                job.run(lambda session, make=make: make() and None)


@pytest.mark.parametrize(
    ("sync", "make", "options", "reason"),
    [
        ("asp,spike=2", ADAM, {}, "that of Adam is of changes"),
        ("asp,spike=2", SGD, {"apply": "delta"}, "apply='delta' pushes what the script's optimizer changes"),
        ("asp,spike=2", muon, {}, "the look-ahead of Muon is not known"),
        ("asp,spike=2", lambda p: torch.optim.SGD(p, lr=0.05), {}, "SGD has none"),
        ("asp,momentum=server,spike=2", SGD, {}, "momentum=server keeps it on the servers"),
    ],
)
def test_spike_is_refused_where_it_could_do_nothing_but_to_one_worker_alone(
    sync: str, make: MakeOptimizer, options: dict[str, Any], reason: str
) -> None:
    with ThreadJob(2, 1, sync) as job, pytest.raises(UsageError) as refused:
        job.run(lambda session: plain(make, **options)() and None)
    wanted = f"{sync}: spike= shortens gradients that go into momentum at each worker, and {reason}; leave it out"
    assert wanted in str(refused.value)
    with ThreadJob(1, 1, sync) as job:
        assert job.run(lambda session: plain(make, **options)().spec.text) == [sync]


def test_lbfgs_runs_on_the_worker_as_it_did() -> None:
    def work(session: Session) -> str:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.LBFGS(params, lr=0.1), apply="delta")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([param.square().sum() for param in params]).sum()
            loss.backward()
            return loss

        first, second = (optimizer.step(closure).item() for _ in range(2))
        assert second < first
        return optimizer.spec.text

    with ThreadJob(2, 1, "asp") as job:
        assert job.run(work) == ["asp", "asp"]


# Tables beside it.


def test_rows_keep_the_servers_rule_and_the_rest_its_momentum() -> None:
    """A sparse embedding, whose group has no momentum, beside layers that have: by turns, against a loop by hand."""
    start, batches = lookup_model(), lookup_batches(4, (3, 3))

    def groups(model: Any) -> torch.optim.Optimizer:
        rest = [*model.out.parameters()]
        return torch.optim.SGD(
            [{"params": [model.embedding.weight], "momentum": 0.0}, {"params": rest}], lr=0.1, momentum=0.9
        )

    def work(session: Session) -> list[torch.Tensor]:
        model = copy.deepcopy(start)  # the seed is the process's: threads that make theirs at once share it
        optimizer = DistributedOptimizer(groups(model), model)
        for step in batches:
            for worker in range(2):
                turns.wait(10)
                if worker == session.rank:
                    optimizer.consolidate()
                    differentiate(model, step[worker])
                    optimizer.step()
                turns.wait(10)
        optimizer.consolidate()
        return [param.detach().clone() for param in model.parameters()]

    def differentiate(model: Any, batch: Any) -> None:
        model.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()

    turns = threading.Barrier(2)
    with ThreadJob(2, 2, "asp") as job:
        ends = job.run(work)
    velocities = [[torch.zeros_like(param) for param in start.out.parameters()] for _ in range(2)]
    usual = [[0.0 for _ in of] for of in velocities]
    for step in batches:
        for worker, batch in enumerate(step):
            differentiate(start, batch)
            with torch.no_grad():
                start.embedding.weight.sub_(start.embedding.weight.grad.to_dense(), alpha=0.05)
                for index, (param, velocity) in enumerate(zip(start.out.parameters(), velocities[worker], strict=True)):
                    grad, usual[worker][index] = shortened(param.grad, usual[worker][index])
                    velocity.mul_(0.9).add_(grad)
                    param.sub_(grad + 0.9 * velocity, alpha=0.05)
    assert_close(ends[0], [param.detach() for param in start.parameters()], rtol=1e-10)
    assert told(job)[0].startswith("asp,momentum=lookahead,spike=1.5:")


@pytest.mark.parametrize("name", RULES)
def test_sparse_gradients_of_an_embedding_that_is_no_table_are_taken_as_dense(name: str) -> None:
    """Without the model nobody knows of it. Servers took it so; Adam itself would refuse."""
    ends = []
    for sparse in (True, False):

        def work(session: Session, sparse: bool = sparse) -> list[torch.Tensor]:
            table = made_from_seed(1, lambda: nn.Embedding(6, 2, sparse=sparse, dtype=torch.float64))
            optimizer = DistributedOptimizer(RULES[name][0](list(table.parameters())))
            for number in range(4):
                optimizer.zero_grad()
                table(torch.tensor([number, number + 1])).square().sum().backward()
                optimizer.step()
                assert table.weight.grad.is_sparse == sparse, "the gradient stays what it is"
            return [table.weight.detach().clone()]

        with ThreadJob(1, 1, "asp,momentum=lookahead") as job:
            ends += job.run(work)
    assert_equal(ends[0], ends[1])


# Several optimizers.


def test_each_optimizer_has_its_own_way_and_alike_ones_are_told_of_once() -> None:
    def work(session: Session) -> list[str]:
        first, second, third, fourth = (copied(START) for _ in range(4))
        optimizers = [
            DistributedOptimizer(SGD(first)),
            DistributedOptimizer(ADAM(second)),
            DistributedOptimizer(SGD(third)),
            DistributedOptimizer(torch.optim.SGD(fourth, lr=0.1), sync="ssp:3"),
        ]
        for params, optimizer in zip((first, second, third, fourth), optimizers, strict=True):
            set_gradients(params, gradient([param.detach() for param in params], session.rank, 0))
            optimizer.step()
        return [optimizer.spec.text for optimizer in optimizers]

    with ThreadJob(2, 1, "asp") as job:
        specs = job.run(work)
    look, power = "asp,momentum=lookahead,spike=1.5", "asp,momentum=lookahead,scale=n^-0.75"
    assert specs == [[look, power, look, "ssp:3"]] * 2
    assert [line.split(":")[0] for line in told(job)] == [look, power]


# Nothing that works without it is refused.

#: Every class of torch.optim that takes parameters and nothing else.
CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
TEXTS = [mode.example for mode in MODES.values()]
TEXTS += ["asp,scale=1", "asp,lr=staleness,decay=0.9,drop=8", "ssp:3,dc=0.04", "asp,dca=2", "asp,momentum=server"]
TEXTS += ["delay:2,decay=0.5", "every:3,wait=2", "downpour:push=3,fetch=3", "asup,bound=1", "bsp+balance,micro=2"]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "changes": {"apply": "delta"},
    "compression": {"compression": parse_compression({"push": "topk:0.1+bf16", "pull": "bf16"})},
    "clipping": {"clip_norm": 1.0},
    "tables": {"server_tables": True},
    "means of buffers": {"buffers": "mean", "model": nn.Linear(2, 2)},
}


def is_refused(session: Session, sync: str, kind: type, given: dict[str, Any]) -> bool:
    params = copied(made_params([(3, 2)]))
    try:
        optimizer = kind(params, lr=0.1)
        if "momentum" in optimizer.defaults:
            optimizer.param_groups[0]["momentum"] = 0.9
        about = {"model": None, "apply": "server", "compression": parse_compression(None), "buffers": "local"}
        about |= {"group": None, "via": "ps", "clip_norm": None, "server_tables": False, **given}
        groups, names = [0], ["weight"]
        arguments = OptimizerArguments(session, optimizer, params=params, names=names, groups=groups, **about)
        settled = arguments.settled(parse_spec(sync))
        described = settled.specs.describe(params, names, groups, [0])
        if settled.spec.averaging is None and settled.spec.gossip is None:
            settled.specs.build("", described, HyperParameters(settled.spec, optimizer).now(), ())
    except UsageError:
        return True
    return False


@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("name", CLASSES)
def test_what_is_refused_was_refused_before(name: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadJob(2, 1, "asp") as job:
        session = job.session(0)
        now = [is_refused(session, sync, CLASSES[name], ARGUMENTS[given]) for sync in TEXTS]
        nothing = lambda self, spec, workers, tables: (spec, MomentumForm.NONE, "")  # noqa: E731
        monkeypatch.setattr(OptimizerArguments, "_with_momentum", nothing)
        before = [is_refused(session, sync, CLASSES[name], ARGUMENTS[given]) for sync in TEXTS]
        session.close()
    assert now == before
    assert given != "plain" or name in ("LBFGS", "SparseAdam", "Rprop") or now.count(False) > 10, "the test tries something"


#: Settings under which a step of the worker's own optimizer must be possible, as one of the servers' was.
SETTINGS: dict[str, MakeOptimizer] = {
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "a rate that is a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), betas=(0.8, 0.9)),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "capturable": lambda p: torch.optim.RAdam(p, lr=0.01, capturable=True),
    "differentiable": lambda p: torch.optim.Adamax(p, lr=0.01, differentiable=True),
    "differentiable SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, differentiable=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": muon,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_is_set_steps_are_made(name: str, dtype: torch.dtype) -> None:
    def work(session: Session) -> bool:
        params = [nn.Parameter(param.detach().to(dtype)) for param in made_params([(4, 3), (2, 5)])]
        optimizer = DistributedOptimizer(SETTINGS[name](params))
        before = [param.detach().clone() for param in params]
        for number in range(2):
            set_gradients(params, made_gradients([(4, 3), (2, 5)], 1, seed=number)[0])
            optimizer.step()
        return all(bool(p.isfinite().all()) and not torch.equal(p, b) for p, b in zip(params, before, strict=True))

    with ThreadJob(2, 1, "asp") as job:
        assert job.run(work) == [True, True]


def test_parameters_in_other_forms_are_taken_as_they_lie() -> None:
    """channels_last, transposed, and larger than what is worked on at a time: as in the usual order."""
    shapes = [(2, 3, 4, 4), (7, 5), (300, 230)]
    ends = []
    for unusual in (False, True):

        def work(session: Session, unusual: bool = unusual) -> list[torch.Tensor]:
            params = made_params(shapes)
            if unusual:
                params[0] = nn.Parameter(params[0].detach().to(memory_format=torch.channels_last))
                params[1] = nn.Parameter(params[1].detach().t().contiguous().t())
            optimizer = DistributedOptimizer(ADAM(params) if session.job.seed else SGD(params))
            for number in range(3):
                set_gradients(params, made_gradients(shapes, 1, seed=number)[0])
                optimizer.step()
            return [param.detach().contiguous() for param in params]

        for seed in (0, 1):
            with ThreadJob(1, 2, "asp,momentum=lookahead", seed=seed) as job:
                ends += job.run(work)
    assert_equal(ends[0], ends[2])
    assert_equal(ends[1], ends[3])


def test_what_was_chosen_is_recorded_for_each_optimizer_and_replays(tmp_path: Path) -> None:
    def work(session: Session) -> None:
        for make in (SGD, ADAM):
            params = copied(START)
            optimizer = DistributedOptimizer(make(params))
            for number in range(3):
                set_gradients(params, gradient([param.detach() for param in params], session.rank, number))
                optimizer.step()

    with ThreadJob(2, 2, "ssp:1", record=tmp_path) as job:
        job.run(work)
    check_record(tmp_path)
    meta = read_meta(tmp_path)
    assert meta["spec"] == "ssp:1"
    assert meta["job"]["optimizers"] == {
        "0": "ssp:1,momentum=lookahead,spike=1.5",
        "1": "ssp:1,momentum=lookahead,scale=n^-0.75",
    }


@pytest.mark.parametrize("name", RULES)
def test_workers_with_a_gpu_and_without_one_train_together(name: str) -> None:
    """What is chosen does not depend on where parameters are; with the stand-in for a GPU at worker 1."""
    make, scale = RULES[name]

    def work(session: Session) -> tuple[str, Tensors]:
        if session.rank == 1:
            session.devices = Devices(HostDevice())
        params = copied(START)
        optimizer = DistributedOptimizer(make(params))
        set_gradients(params, gradient([param.detach() for param in params], session.rank, 0))
        optimizer.step()
        done.wait(10)
        optimizer.consolidate()
        done.wait(10)
        return optimizer.spec.text, [param.detach().clone() for param in params]

    done = threading.Barrier(2)
    with ThreadJob(2, 1, "asp") as job:
        (text, end), (other, same) = job.run(work)
    assert text == other
    assert parse_spec(text).worker_momentum
    assert_equal(end, same)
    start = [param.detach() for param in START]
    changes = [ByHand(make).change(start, gradient(start, rank, 0)) for rank in range(2)]
    assert_close(end, [at + scale * (one + two) for at, one, two in zip(start, *changes, strict=True)], rtol=1e-11)


def test_tables_on_the_servers_learn_beside_momentum_of_the_workers() -> None:
    """A `ServerEmbedding` keeps its own rule; the layer behind it is pushed as a look-ahead."""

    def work(session: Session) -> tuple[str, float, float]:
        table = ServerEmbedding(10, 2)
        model = nn.Sequential(table, nn.Linear(2, 1))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (model(torch.arange(5)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return optimizer.spec.text, losses[0], losses[-1]

    with ThreadJob(2, 2, "asp") as job:
        for text, first, last in job.run(work):
            assert text == "asp,momentum=lookahead,spike=1.5"
            assert last < first / 2
