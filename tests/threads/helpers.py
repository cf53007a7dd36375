"""Models, data and waiting for tests of live jobs. Everything random is made in the main thread."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polytempo.records.check import check_lines
from polytempo.records.files import read_events, read_meta
from polytempo.records.lines import MAIN, MEAN, of_optimizer
from polytempo.records.replay import replay
from polytempo.session.session import Session
from polytempo.sync.spec import parse_spec
from polytempo.train.optimizer import DistributedOptimizer

Batch = tuple[torch.Tensor, torch.Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def made_from_seed(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    return made_from_seed(seed, lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))).to(dtype)


def small_batches(steps: int, sizes: Sequence[int], seed: int = 1) -> list[list[Batch]]:
    """For each step one batch for each worker, of the sizes given."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [[(make(size, 5), make(size, 3)) for size in sizes] for _ in range(steps)]


def joined(batches: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def made_gradients(shapes: Sequence[Sequence[int]], steps: int, seed: int = 2) -> list[list[torch.Tensor]]:
    """Gradients that do not depend on weights: for each step one for each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(steps)]


def made_params(shapes: Sequence[Sequence[int]], seed: int = 3, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def copied(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad) for param in params]


def set_gradients(params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else gradient.to(param.dtype).clone()


def assert_close(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], rtol: float = 1e-6) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-12)


def assert_equal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(one, other), f"tensor {index} differs by {(one - other).abs().max()}"


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Wait for something that another thread does; fail when it never does."""
    deadline = time.monotonic() + seconds
    nothing = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        nothing.wait(0.001)


def check_record(directory: Path) -> list[dict[str, Any]]:
    """A record keeps its modes' promises, and fresh policies decide the same; the first optimizer's lines."""
    meta = read_meta(directory)
    for optimizer_id, text in meta["job"]["optimizers"].items():
        spec, lines = parse_spec(text), list(of_optimizer(read_events(directory), optimizer_id))
        members = meta["job"].get("members", {}).get(optimizer_id, ())
        assert check_lines(lines, spec, meta["size"], members) == len(lines)
        policy = spec.policy(meta["size"], members)
        policy.begin_at(0 if optimizer_id.endswith(MEAN) else meta["first_step"])
        policy.restore(meta["job"].get("restored", {}).get(optimizer_id, {}))
        assert replay(lines, policy) > 0
    return list(of_optimizer(read_events(directory), MAIN))


def trained(
    session: Session, model: nn.Module, make: MakeOptimizer, batches: Sequence[Sequence[Batch]], **options: object
) -> tuple[list[torch.Tensor], DistributedOptimizer]:
    """A worker's plain loop over its own batches; the weights it ends with, and its optimizer."""
    model = copy.deepcopy(model)
    optimizer = DistributedOptimizer(make(list(model.parameters())), model, **options)  # type: ignore[arg-type]
    for step in batches:
        optimizer.zero_grad()
        loss_of(model, step[session.rank]).backward()
        optimizer.step()
    return weights(model), optimizer


def trained_alone(model: nn.Module, make: MakeOptimizer, batches: Sequence[Sequence[Batch]]) -> list[torch.Tensor]:
    """The same in one process on the joint batches."""
    model = copy.deepcopy(model)
    optimizer = make(list(model.parameters()))
    for step in batches:
        optimizer.zero_grad()
        loss_of(model, joined(step)).backward()
        optimizer.step()
    return weights(model)


FORKING = threading.Lock()


def begun(loader: Any) -> Any:
    """Its processes are forked one loader after another: libraries that take part in forks expect one at a time."""
    with FORKING:
        return iter(loader)
