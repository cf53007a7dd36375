"""Gradients live in the bucket: whatever a script does with `.grad`, training goes as with plain PyTorch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from by_hand import STATEFUL, mean_of
from helpers import (
    Batch,
    MakeOptimizer,
    assert_close,
    assert_equal,
    copied,
    loss_of,
    made_from_seed,
    set_gradients,
    small_batches,
    weights,
)
from torch import nn

from polytempo.protocol.layout import lay_out
from polytempo.protocol.values import TensorInfo
from polytempo.reducer.flat_buffer import FlatBuffer, GradientHooks, ReferenceCounts
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.buffer_pool import Pool

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.both_wires,
    pytest.mark.filterwarnings("ignore:.*create_graph=True", "ignore:grad and param do not obey"),
]

STEPS = 6


class Net(nn.Module):
    """A convolution in channels_last, a layer that is used twice, and two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(5, 8), nn.Linear(3, 3)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.branches = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.branch = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv(self.first(x).view(-1, 2, 2, 2)).flatten(1))
        return self.branches[self.branch](torch.tanh(self.twice(torch.tanh(self.twice(x)))))  # type: ignore[no-any-return]


START = made_from_seed(3, Net).double()


def net() -> Net:
    model = copy.deepcopy(START)
    assert isinstance(model, Net)
    assert not model.conv.weight.is_contiguous()
    return model


#: Makes the gradients of one step: model, optimizer, batch, number of the step.
Make = Callable[[Net, torch.optim.Optimizer, Batch, int], None]


def backward(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=to_none)
    loss_of(model, batch).backward()


def accumulated(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    with optimizer.no_sync() if isinstance(optimizer, DistributedOptimizer) else nullcontext():
        loss_of(model, batch).backward()
        loss_of(model, (batch[0] * 2, batch[1])).backward()
    loss_of(model, (batch[0] + 1, batch[1])).backward()


def changed(change: Callable[[Net], object]) -> Make:
    """Something is done to gradients between backward and step."""

    def make(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
        backward(model, optimizer, batch, number % 2 == 0)
        change(model)

    return make


def scale_data(model: Net) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.mul_(0.5)


def assign(model: Net) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5 + 0.01


def swap(model: Net) -> None:
    one, other = model.twice, model.branches[0]
    one.weight.grad, other.weight.grad = other.weight.grad, one.weight.grad


def drop_one(model: Net) -> None:
    model.twice.weight.grad = None


def branching(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    """One branch, the other, then both: a parameter that is not used has no gradient, or an old one."""
    optimizer.zero_grad(set_to_none=number < 4)
    for model.branch in ((0,), (1,), (0, 1))[number % 3]:
        loss_of(model, batch).backward()


def thawing(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    model.first.requires_grad_(number >= 2)
    model.twice.requires_grad_(number != 3)
    backward(model, optimizer, batch, number % 2 == 0)


def penalized(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    """The gradient's own norm is part of the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    grads = torch.autograd.grad(loss, list(model.first.parameters()), create_graph=True)
    (loss + 0.1 * sum((grad**2).sum() for grad in grads)).backward(retain_graph=number % 2 == 0)


def differentiated_again(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward(create_graph=number % 2 == 0)
    if number % 2 == 0:
        assert model.first.weight.grad is not None
        (model.first.weight.grad**2).sum().backward()


def tasks_apart(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    """The gradients of two losses, one after the other, put together by hand."""
    parts = []
    for factor in (1.0, 3.0):
        optimizer.zero_grad()
        (factor * loss_of(model, (batch[0] * factor, batch[1]))).backward()
        parts.append([param.grad for param in model.parameters()])
    for param, one, other in zip(model.parameters(), *parts, strict=True):
        param.grad = None if one is None else one * 2 + other


def own_memory(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    """All gradients lie in one tensor of the script's own, which it clears and clips as a whole."""
    own: torch.Tensor = model.__dict__.setdefault("own", torch.zeros(sum(p.numel() for p in model.parameters())).double())
    if number == 0:
        parts = own.split([param.numel() for param in model.parameters()])
        for param, part in zip(model.parameters(), parts, strict=True):
            param.grad = part.view(param.shape)
    own.zero_()
    loss_of(model, batch).backward()
    own.clamp_(-0.05, 0.05)


WAYS: dict[str, Make] = {
    "set to none": lambda m, o, b, n: backward(m, o, b, True),
    "set to zero": lambda m, o, b, n: backward(m, o, b, False),
    "accumulated": accumulated,
    "clipped by norm": changed(lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
    "clipped by value": changed(lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.02)),
    "scaled through data": changed(scale_data),
    "assigned": changed(assign),
    "swapped": changed(swap),
    "one without": changed(drop_one),
    "branching": branching,
    "frozen and thawed": thawing,
    "penalized": penalized,
    "differentiated again": differentiated_again,
    "two tasks": tasks_apart,
    "in the script's own memory": own_memory,
}
SGD: MakeOptimizer = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731


def by_hand(way: Make, make: MakeOptimizer, data: Sequence[Sequence[Batch]]) -> list[torch.Tensor]:
    """Replicas in one process; plain PyTorch steps on the mean of their gradients."""
    replicas = [net() for _ in data[0]]
    optimizers = [make(list(replica.parameters())) for replica in replicas]
    params = [list(replica.parameters()) for replica in replicas]
    stepped = copied(params[0])
    optimizer = make(stepped)
    for number, step in enumerate(data):
        for replica, own, batch in zip(replicas, optimizers, step, strict=True):
            way(replica, own, batch, number)
        set_gradients(stepped, mean_of([[[param.grad for param in own]] for own in params])[0])
        optimizer.step()
        with torch.no_grad():
            for own in params:
                torch._foreach_copy_(own, stepped)
    return [param.detach() for param in stepped]


def together(
    way: Make, make: MakeOptimizer, data: Sequence[Sequence[Batch]], servers: int, sync: str = "bsp", **options: Any
) -> list[list[torch.Tensor]]:
    def work(session: Session) -> list[torch.Tensor]:
        model = net()
        optimizer = DistributedOptimizer(make(list(model.parameters())), model, **options)
        for number, step in enumerate(data):
            way(model, optimizer, step[session.rank], number)
            optimizer.step()
        return weights(model)

    with ThreadJob(len(data[0]), servers, sync) as job:
        return job.run(work)


@pytest.mark.parametrize("way", WAYS)
def test_for_one_worker_it_is_plain_training_bit_for_bit(way: str) -> None:
    data = small_batches(STEPS, (4,))
    (got,) = together(WAYS[way], SGD, data, 2)
    assert_equal(got, by_hand(WAYS[way], SGD, data))


@pytest.mark.parametrize("way", WAYS)
def test_for_three_workers_it_is_one_process_that_takes_the_mean(way: str) -> None:
    data = small_batches(STEPS, (4, 3, 5))
    wanted = by_hand(WAYS[way], STATEFUL["adam"], data)
    for got in together(WAYS[way], STATEFUL["adam"], data, 1):
        assert_close(got, wanted, rtol=1e-9)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("way", ["set to zero", "accumulated", "assigned", "frozen and thawed", "clipped by norm"])
def test_a_worker_that_pushes_changes_trains_as_plain_pytorch(way: str, sync: str) -> None:
    data = small_batches(STEPS, (4,))
    (got,) = together(WAYS[way], STATEFUL["adam"], data, 2, sync, apply="delta")
    assert_close(got, by_hand(WAYS[way], STATEFUL["adam"], data), rtol=1e-9)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # of torch.compile, on that one version
def test_a_compiled_model_makes_its_gradients_in_the_bucket_too(backend: str) -> None:
    pytest.importorskip("torch._dynamo", reason="this torch has no compiler")

    def compiled(model: Net, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
        called = model.__dict__.setdefault("called", torch.compile(model, backend=backend))
        backward(called, optimizer, batch, number % 2 == 0)

    data = small_batches(4, (4,))
    (got,) = together(compiled, SGD, data, 1)
    assert_close(got, by_hand(compiled, SGD, data), rtol=1e-9)


# Where gradients lie.


def bucket_of(optimizer: DistributedOptimizer) -> Any:
    assert optimizer._reducer is not None
    return optimizer._reducer.copier.next_buffer()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_the_same_views_of_the_bucket_in_every_step(to_none: bool) -> None:
    data = small_batches(4, (4,))

    def work(session: Session) -> None:
        model = net()
        params = list(model.parameters())
        model.branches[1].requires_grad_(False)
        optimizer = DistributedOptimizer(SGD(params))
        views = bucket_of(optimizer).views
        staged = [i for i, param in enumerate(params) if param.is_contiguous() and param.requires_grad]
        assert len(staged) == 7
        for (batch,) in data:
            backward(model, optimizer, batch, to_none)
            assert all(params[index].grad is views[index] for index in staged)
            optimizer.step()
            assert all(params[index].grad is views[index] for index in staged)
            assert model.conv.weight.grad.stride() == model.conv.weight.stride()

    with ThreadJob(1, 2) as job:
        job.run(work)


@pytest.mark.parametrize("unscaled", [False, True], ids=["unscaled by the step", "unscaled and clipped before"])
def test_a_grad_scaler_works_as_in_plain_training(unscaled: bool) -> None:
    """The gradient of step 2 overflows, and the step is skipped."""
    data = small_batches(STEPS, (4,))

    def train(model: Net, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, (batch,) in enumerate(data):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            scaler.scale(loss_of(model, batch) * (float("inf") if number == 2 else 1.0)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return weights(model)

    def work(session: Session) -> list[torch.Tensor]:
        model = net()
        optimizer = DistributedOptimizer(SGD(list(model.parameters())))
        got = train(model, optimizer)
        assert optimizer.stats["step"] == STEPS
        return got

    with ThreadJob(1, 2) as job:
        (got,) = job.run(work)
    alone = net()
    assert_equal(got, train(alone, SGD(list(alone.parameters()))))


def test_after_synchronize_gradients_are_still_views_and_may_be_clipped() -> None:
    data = small_batches(STEPS, (4, 2))

    def work(session: Session) -> list[torch.Tensor]:
        model = net()
        optimizer = DistributedOptimizer(SGD(list(model.parameters())))
        for number, step in enumerate(data):
            backward(model, optimizer, step[session.rank], number % 2 == 0)
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert model.first.weight.grad is bucket_of(optimizer).views[0]
            optimizer.step()
        return weights(model)

    replicas = [net(), net()]
    optimizers = [SGD(list(replica.parameters())) for replica in replicas]
    for step in data:
        for replica, optimizer, batch in zip(replicas, optimizers, step, strict=True):
            backward(replica, optimizer, batch)
        for params in zip(*(replica.parameters() for replica in replicas), strict=True):
            if params[0].grad is not None:
                mean = sum(param.grad for param in params) / 2
                set_gradients(params, [mean, mean])
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
            optimizer.step()
    with ThreadJob(2, 2) as job:
        for got in job.run(work):
            assert_close(got, weights(replicas[0]), rtol=1e-9)


def test_the_hooks_of_an_optimizer_that_was_dropped_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_complete, called = GradientHooks.complete, []

    def complete(self: GradientHooks, index: int) -> None:
        called.append(self)
        plain_complete(self, index)

    monkeypatch.setattr(GradientHooks, "complete", complete)
    data = small_batches(4, (4,))

    def work(session: Session) -> list[torch.Tensor]:
        model = net()
        for half in (data[:2], data[2:]):
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for (batch,) in half:
                called.clear()
                backward(model, optimizer, batch)
                optimizer.step()
            assert len({id(staging) for staging in called}) == 1
            called.clear()
            del optimizer
            gc.collect()
        return weights(model)

    with ThreadJob(1) as job:
        (got,) = job.run(work)
    assert_equal(got, by_hand(WAYS["set to none"], lambda p: torch.optim.SGD(p, lr=0.1), data))


def test_copies_and_saved_states_of_a_model_have_nothing_to_do_with_the_bucket() -> None:
    data = small_batches(3, (4,))

    def work(session: Session) -> None:
        model = net()
        optimizer = DistributedOptimizer(SGD(list(model.parameters())))
        for (batch,) in data[:2]:
            backward(model, optimizer, batch)
            optimizer.step()
        twin, saved = copy.deepcopy(model), copy.deepcopy(model.state_dict())
        assert_equal(weights(twin), weights(model))
        kept = bucket_of(optimizer).views[0].clone()
        loss_of(twin, data[2][0]).backward()
        assert_equal([bucket_of(optimizer).views[0]], [kept])
        backward(model, optimizer, data[2][0])
        optimizer.step()
        assert_equal(list(saved.values()), weights(twin))
        assert not torch.equal(weights(model)[0], weights(twin)[0])

    with ThreadJob(1) as job:
        job.run(work)


# Which references to a gradient are the script's.


def counted() -> tuple[nn.Parameter, FlatBuffer, ReferenceCounts]:
    param = nn.Parameter(torch.zeros(3))
    buffer = FlatBuffer(lay_out([TensorInfo("w", (3,), "float32", 0)], 1), Pool(), pinned=False)
    nn.Linear(1, 1)(torch.zeros(1)).backward()  # whatever autograd keeps after a first backward
    (param * 2).sum().backward()
    return param, buffer, ReferenceCounts(buffer, [0])


def test_a_gradient_that_only_its_parameter_holds_may_be_replaced_and_one_that_the_script_holds_may_not() -> None:
    param, _, counts = counted()
    assert counts.only_parameter_holds_gradient(param)
    held = param.grad
    assert not counts.only_parameter_holds_gradient(param)
    del held
    assert counts.only_parameter_holds_gradient(param)
    among = {"gradients": [param.grad]}
    assert not counts.only_parameter_holds_gradient(param)
    among.clear()
    whole = torch.zeros(6)
    param.grad = whole[:3]  # memory of the script's own
    assert not counts.only_parameter_holds_gradient(param)


def test_a_view_that_the_script_holds_is_not_written_to() -> None:
    param, buffer, counts = counted()
    assert counts.is_view_unused(0)
    param.grad = buffer.views[0]
    held = param.grad
    param.grad = None
    assert not counts.is_view_unused(0)
    del held
    assert counts.is_view_unused(0)
