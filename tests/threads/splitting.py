"""Models split over ranks that are threads, and the same models whole: outputs and all gradients, joined."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polytempo.session.session import Session
from polytempo.tensor_parallel.group import RankTensorGroup
from polytempo.tensor_parallel.plan import TensorPlan, find_plan, parallelize
from polytempo.testing.threads import GroupJob

T = TypeVar("T")
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

Call = Callable[[nn.Module, Sequence[Tensor]], Any]


@dataclass(frozen=True)
class Result:
    """What a model gave for some inputs."""

    outputs: tuple[Tensor, ...]
    grads: dict[str, Tensor]
    input_grads: tuple[Tensor | None, ...]


def on_ranks(size: int, work: Callable[[RankTensorGroup], T]) -> list[T]:
    """Call this with the tensor group of each of `size` ranks."""

    def rank(session: Session) -> T:
        return work(RankTensorGroup(session.world().all_ranks))

    with GroupJob(size) as job:
        return job.run(rank)


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """A model in float64 whose biases are not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(torch.randn_like(param) * 0.1)
    return model


def called(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """The plain call."""
    return module(*inputs)


def measured(model: nn.Module, inputs: Sequence[Tensor], call: Call = called) -> Result:
    """Forward, and backward from weights that differ for each element of the output."""
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    made = call(model, inputs)
    outputs = tuple(x for x in (made if isinstance(made, tuple) else (made,)) if x is not None)
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs)
    total.backward()
    grads = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    return Result(tuple(x.detach() for x in outputs), grads, tuple(x.grad for x in inputs))


def joined(plan: TensorPlan, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by parameter name, from those of each rank. Replicated ones must be bitwise equal on all."""
    whole: dict[str, Tensor] = {}
    for name in shards[0]:
        values = [shard[name] for shard in shards]
        if name in plan.sharding:
            whole[name] = plan.sharding[name].join(values)
        else:
            assert all(torch.equal(values[0], value) for value in values[1:]), name
            whole[name] = values[0]
    return whole


def assert_equal_to_whole(
    model: nn.Module,
    inputs: Sequence[Tensor],
    size: int,
    styles: Mapping[str, Any] | None = None,
    call: Call = called,
    loss: object | None = None,
) -> TensorPlan:
    """Outputs, gradients of all parameters and of inputs are those of the unsplit model; the plan."""
    wanted = measured(copy.deepcopy(model), inputs, call)
    plan = find_plan(model, size, styles, loss)

    def work(group: RankTensorGroup) -> Result:
        mine = copy.deepcopy(model)
        parallelize(mine, plan, group)
        return measured(mine, inputs, call)

    results = on_ranks(size, work)
    grads = joined(plan, [result.grads for result in results])
    assert grads.keys() == wanted.grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted.grads[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    for result in results:
        for got, want in zip(result.outputs, wanted.outputs, strict=True):
            torch.testing.assert_close(got, want, **TOLERANCE)
        for got, want in zip(result.input_grads, wanted.input_grads, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want, **TOLERANCE)
    return plan
