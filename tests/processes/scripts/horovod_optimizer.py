"""Several ranks against one process with all the data, in every way a `DistributedOptimizer` can be used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import polytempo.horovod as hvd
from polytempo.errors import UsageError
from polytempo.horovod import gradient_buckets

warnings.simplefilter("error")
gradient_buckets.CAPACITY = 64  # so that there are several
torch.set_num_threads(1)
hvd.init()
rank, size = hvd.rank(), hvd.size()
generator = torch.Generator().manual_seed(5)
X, Y = torch.randn(8 * size, 4, generator=generator), torch.randn(8 * size, 2, generator=generator)
MINE = slice(8 * rank, 8 * rank + 8)


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    parts = (torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return torch.nn.Sequential(*parts)


def loss(model: torch.nn.Module, part: slice) -> torch.Tensor:
    return functional.mse_loss(model(X[part]), Y[part])


def train(model: torch.nn.Module, optimizer: Any, part: slice, steps: int = 4, factor: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (factor * loss(model, part)).backward()
        optimizer.step()


def check_same(model: torch.nn.Module, reference: torch.nn.Module, tolerance: float = 2e-6) -> None:
    for mine, one in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, one, atol=tolerance), (mine - one).abs().max()
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    assert all(torch.equal(other, flat) for other in hvd.allgather(flat[None])), "ranks differ in bits"


def pair(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model with its optimizer for all ranks, and one for one process."""
    reference, model = network(), network()
    named = list(model.named_parameters())
    wrapped = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=named, **options)
    return model, wrapped, reference, make(reference.parameters())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def like_one_process() -> None:
    whole = slice(None)
    for options, factor in (({}, 1), ({"op": hvd.Sum}, size), ({"gradient_predivide_factor": 2.0}, 1)):
        model, optimizer, reference, plain = pair(sgd, **options)
        train(model, optimizer, MINE)
        train(reference, plain, whole, factor=factor)
        check_same(model, reference)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        model, optimizer, reference, plain = pair(sgd, compression=compression)
        train(model, optimizer, MINE)
        train(reference, plain, whole)
        check_same(model, reference, 1e-2)


def state_goes_to_who_has_none() -> None:
    model, reference = network(rank), network(0)
    plain = torch.optim.Adam(reference.parameters(), 0.05)
    adam = torch.optim.Adam(model.parameters(), 0.01 * (rank + 1))
    if rank == 0:
        adam.param_groups[0]["lr"] = 0.05
        train(model, adam, slice(None), 2)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["betas"]) == (0.05, (0.9, 0.999))
    train(model, optimizer, MINE, 1)
    scheduler.step()  # made before wrapping, and still heard
    assert optimizer.param_groups[0]["lr"] == 0.025
    train(model, optimizer, MINE, 1)
    train(reference, plain, slice(None), 3)
    plain.param_groups[0]["lr"] = 0.025
    train(reference, plain, slice(None), 1)
    check_same(model, reference)


def several_passes() -> None:
    model, optimizer, reference, plain = pair(sgd, backward_passes_per_step=2)
    for _ in range(3):
        optimizer.zero_grad()
        for start in (8 * rank, 8 * rank + 4):
            loss(model, slice(start, start + 4)).backward()
        optimizer.step()
    train(reference, plain, slice(None), 3, factor=2)
    check_same(model, reference)
    loss(model, MINE).backward()
    optimizer.zero_grad()  # one pass alone has not left
    for _ in range(2):
        loss(model, MINE).backward()
    refused(lambda: loss(model, MINE).backward(), "more than 2 times before step()")
    refused(optimizer.zero_grad, "zero_grad() came between backward() and step()")
    refused(hvd.join, "join() came between backward() and step()")
    optimizer.step()
    optimizer.set_backward_passes_per_step(1)


def refused(call: Callable[[], object], words: str) -> None:
    text = "nothing was refused"
    try:
        call()
    except UsageError as error:
        text = str(error)
    assert words in text, text


def clipping() -> None:
    """After `synchronize()` the mean is clipped; without it, each rank's own gradient, though it was on its way."""
    model, optimizer, reference, plain = pair(sgd)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, MINE).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        loss(reference, slice(None)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    check_same(model, reference)
    optimizer.zero_grad()
    loss(model, MINE).backward()
    if rank == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    own = torch.cat([param.grad.reshape(-1) for param in model.parameters()])
    expected = hvd.allreduce(own)
    optimizer.step()
    assert torch.allclose(torch.cat([param.grad.reshape(-1) for param in model.parameters()]), expected, atol=1e-7)


def unused_parameters_and_calls_between() -> None:
    """Rank 0 does not use a layer and sends nothing before `step()`; no rank uses the last one."""
    model, optimizer, _, _ = pair(sgd)
    hidden = model[0](X[MINE])
    output = hidden if rank == 0 else model[2](torch.tanh(hidden))
    output.sum().backward()
    hvd.allreduce(torch.ones(3), name="between")
    optimizer.step()
    assert model[4].weight.grad is None
    assert model[2].weight.grad.abs().sum() > 0
    every = hvd.allgather(model[2].weight.grad[None])
    assert all(torch.equal(one, every[0]) for one in every)


def scaler_and_closure() -> None:
    model, optimizer, reference, plain = pair(sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss(model, MINE)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, MINE)
        value.backward()
        return value

    assert optimizer.step(closure) > 0
    train(reference, plain, slice(None), 3)
    check_same(model, reference)


def two_optimizers() -> None:
    """One backward for both, steps in another order than they were made."""
    one, first, reference_one, plain_one = pair(sgd)
    two, second, reference_two, plain_two = pair(sgd)
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        (loss(one, MINE) + loss(two, MINE)).backward()
        second.step()
        first.step()
    train(reference_one, plain_one, slice(None), 2)
    train(reference_two, plain_two, slice(None), 2)
    check_same(one, reference_one)
    check_same(two, reference_two)


def sparse_gradients() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), sparse_as_dense=True)
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    assert torch.allclose(table.weight[:size], torch.full((size, 2), 1 - 1 / size))


def batch_normalization() -> None:
    plain, synced = torch.nn.BatchNorm1d(4), hvd.SyncBatchNorm(4)
    whole, part = X.clone().requires_grad_(), X[MINE].clone().requires_grad_()
    (plain(whole) ** 3).sum().backward()
    (synced(part) ** 3).sum().backward()
    assert torch.allclose(whole.grad[MINE], part.grad, atol=1e-4)
    assert torch.allclose(plain.running_var, synced.running_var, atol=1e-6)
    assert torch.allclose(plain.running_mean, synced.running_mean, atol=1e-6)
    assert torch.allclose(plain.weight.grad, hvd.allreduce(synced.weight.grad, op=hvd.Sum), atol=1e-3)
    assert torch.allclose(plain.eval()(X), synced.eval()(X), atol=1e-5)


def cast_after_wrapping() -> None:
    """Gradients travel as what they are now, with all their digits."""
    global X, Y
    model, optimizer, reference, _ = pair(sgd)
    train(model, optimizer, MINE, steps=1)
    model.double()
    reference.double().load_state_dict(model.state_dict())
    kept, (X, Y) = (X, Y), (X.double(), Y.double())
    plain = torch.optim.SGD(reference.parameters(), 0.05)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    train(model, optimizer, MINE)
    train(reference, plain, slice(None))
    check_same(model, reference, 1e-13)
    X, Y = kept


def running_out_of_data() -> None:
    """Rank r has r more batches; who has none adds zeros, and the mean is still over all."""
    model, optimizer, reference, plain = pair(sgd)
    batches = 2 + rank
    for step in range(batches):
        optimizer.zero_grad()
        loss(model, MINE).backward()
        if step == 3:
            model[0].weight.grad.mul_(1.0)  # changed: all buckets leave again, also those of who has joined
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
        optimizer.step()
    last = hvd.join()
    assert last == size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    for step in range(1 + size):
        plain.zero_grad()
        for other in range(size):
            if step < 2 + other:
                (loss(reference, slice(8 * other, 8 * other + 8)) / size).backward()
        plain.step()
    check_same(model, reference)


for check in (
    like_one_process,
    state_goes_to_who_has_none,
    several_passes,
    clipping,
    unused_parameters_and_calls_between,
    scaler_and_closure,
    two_optimizers,
    sparse_gradients,
    batch_normalization,
    cast_after_wrapping,
    running_out_of_data,
):
    check()
print("all right")
