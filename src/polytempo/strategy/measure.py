"""A model measured for the predictions of a strategy: its layers at one number of shards and one microbatch size.

Layers are those between which a pipeline can be cut, measured by the pipeline's own profiler (`pipeline/profiler.py`); the
loss is measured behind the last. For T shards a copy of the model is split as it would be on rank 0 of a tensor group, with
a group that only notes its collectives: their bytes are known, and their seconds are those of the links (`links.py`). The
optimizer is made for copies of each layer's parameters and steps on them. Afterwards the model is as it was.

A worker of `polytempo run` has its share of the cores, and torch as many threads: measure where, and with as many threads
as, the ranks will compute.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.pipeline.partition import ModelPart, layers_of, tied
from polytempo.pipeline.profiler import Device, Undisturbed, mapped_tensors, measure_parts, tensors_in
from polytempo.pipeline.stage import Loss, MakeOptimizer
from polytempo.strategy.costs import ModelProfile, ShardedLayer, TensorCall, TiedWeights
from polytempo.tensor_parallel.cross_entropy import parallel_loss
from polytempo.tensor_parallel.group import CountingGroup
from polytempo.tensor_parallel.plan import find_plan, parallelize

#: Seconds that measuring a model may take beyond one run of each layer.
BUDGET = 2.0


def measure_model(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    *,
    microbatch: int,
    tensor: int = 1,
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
    target: Any = None,
    repeats: int = 7,
    seconds: float = BUDGET,
    device: Device = None,
    tensor_plan: Mapping[str, Any] | None = None,
) -> ModelProfile:
    """Measure every layer of a model for one microbatch.

    Args:
        model: The model, or its layers.
        example: Its inputs, a tensor or a tuple of them. Rows are taken from the front, and repeated where there are fewer
            than the microbatch has.
        microbatch: The number of samples.
        tensor: The number of ranks of a tensor group.
        optimizer: Makes the optimizer of some parameters; without it, updates and optimizer state count nothing.
        loss: The loss function; it is measured where `target` is given, too.
        target: An example of the targets.
        repeats: How often each layer is measured; the medians count.
        seconds: About how long repeats may take altogether.
        device: Where to measure, if not where the model is.
        tensor_plan: How layers are split, by name, where that is not found by itself.

    Returns:
        Seconds and bytes of every layer, as one rank has them.

    Raises:
        UsageError: The example does not fit the model, its layers cannot be split so, or a number is less than 1.
    """
    for name, value in (("microbatch", microbatch), ("tensor", tensor), ("repeats", repeats)):
        if value < 1:
            raise UsageError(f"expected {name} to be at least 1, got {value}")
    inputs = taken(tuple(example) if isinstance(example, tuple | list) else (example,), microbatch)
    cut = _Cut(model, inputs, tensor, tensor_plan, loss)
    named = list(zip(cut.names, cut.parts, strict=True))
    if cut.loss is not None and target is not None:
        named.append(("loss", ModelPart(_LossLayer(cut.loss, taken(target, microbatch)))))
    measured, calls = [], []
    for one in measure_parts(named, inputs, repeats=repeats, device=device, seconds=seconds / len(named)):
        measured.append(one)
        calls.append(cut.take_calls(one.runs))
    found: list[ShardedLayer] = []
    for one, behind, (_, part) in zip(measured, [*measured[1:], None], named, strict=True):
        passing = max(0, one.output_unsaved - (behind.input_saved if behind is not None else 0))
        passing = 0 if len(found) == len(cut.parts) else passing  # a stage keeps its losses
        params = list(dict.fromkeys(param for _, param in part.parameters()))
        seconds, state_bytes = _measured_update(params, optimizer, repeats, device) if optimizer is not None else (0.0, 0.0)
        found.append(
            ShardedLayer(
                layer=replace(one.layer, made_bytes=one.layer.kept_bytes - passing),
                calls=calls[len(found)],
                update_s=seconds,
                state_bytes=state_bytes,
                core_share=one.core_share,
                gradient_bytes=_trained(params),
                passing_bytes=passing,  # of its output, what neither it nor the layer behind needs again
            )
        )
    return ModelProfile(
        model=type(model).__name__ if isinstance(model, nn.Module) else "model",
        tensor=tensor,
        microbatch=microbatch,
        layers=tuple(found[: len(cut.parts)]),
        tied=_tied(cut.parts, found),
        loss=found[-1] if len(found) > len(cut.parts) else None,
        input_bytes=sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor)),
    )


class _Cut:
    """The layers of a model, or of a copy of it of which each layer is split, and its loss."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inputs: tuple[Any, ...],
        tensor: int,
        styles: Mapping[str, Any] | None,
        loss: Loss | None,
    ) -> None:
        self.loss, self._group = loss, CountingGroup(tensor)
        if tensor > 1:
            model = nn.Sequential(*model) if not isinstance(model, nn.Module) else model
            model = copy.deepcopy(model)
            plan = find_plan(model, tensor, styles, loss)
        chain = layers_of(model, inputs)
        self.names = chain.names
        self.parts = [chain.part(number, number + 1) for number in range(len(chain.costs))]
        if tensor > 1:
            for part in self.parts:
                for name, member in part.members:
                    parallelize(member, plan, self._group, name)
            if plan.logits is not None and loss is not None:
                self.loss = parallel_loss(loss, self._group, plan.logits[1])

    def take_calls(self, runs: int) -> tuple[TensorCall, ...]:
        """The collectives of one run of the layer that has just run this often."""
        noted, self._group.calls = self._group.calls, []
        return tuple(TensorCall(*call) for call in noted[: len(noted) // runs])


class _LossLayer(nn.Module):  # type: ignore[misc]
    """The loss of a microbatch, as a layer behind the last. Targets are inputs, and no memory that it keeps."""

    def __init__(self, loss: Loss, target: Any) -> None:
        super().__init__()
        self._loss, self._target = loss, target
        if isinstance(target, torch.Tensor):
            self.register_buffer("target", target)

    def forward(self, output: Any) -> torch.Tensor:
        if isinstance(self._target, torch.Tensor):
            return self._loss(output, self.target)
        target = self._target
        if isinstance(output, torch.Tensor):
            target = mapped_tensors(lambda tensor: tensor.to(output.device), target)
        return self._loss(output, target)


# A microbatch.


def taken(value: Any, count: int) -> Any:
    """As many rows of each tensor of an example as a microbatch has."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or not len(tensor):
            return tensor
        return tensor[:count] if len(tensor) >= count else tensor[torch.arange(count, device=tensor.device) % len(tensor)]

    return mapped_tensors(rows, value)


# The optimizer.


def _trained(params: Sequence[nn.Parameter]) -> int:
    return sum(param.nbytes for param in params if param.requires_grad)


def _measured_update(
    params: Sequence[nn.Parameter], optimizer: MakeOptimizer, repeats: int, device: Device
) -> tuple[float, float]:
    """Seconds of a step of the optimizer on copies of these parameters, and bytes of its state, which the first makes."""
    if not any(param.requires_grad for param in params):
        return 0.0, 0.0
    copies = [nn.Parameter(param.detach().to(device, copy=True), requires_grad=param.requires_grad) for param in params]
    gradients = [torch.full_like(one, 1e-3) if one.requires_grad else None for one in copies]
    made, times = optimizer(copies), []
    for _ in range(1 + repeats):
        for one, gradient in zip(copies, gradients, strict=True):
            one.grad = gradient
        clock = Undisturbed({copies[0].device} if copies[0].device.type == "cuda" else set())
        made.step()
        made.zero_grad()
        clock.end()
        times.append(clock.seconds)
    return median(times[1:]), sum(tensor.nbytes for tensor in state_tensors(made))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state."""
    return tensors_in(dict(optimizer.state))


# Tied parameters.


def _tied(parts: Sequence[ModelPart], layers: Sequence[ShardedLayer]) -> tuple[TiedWeights, ...]:
    """Parameters that several layers hold. Their optimizer state is their share of that of the first of these layers."""
    found = []
    for holders, params in sorted(tied(parts).items()):
        first, trained = layers[holders[0]], _trained(params)
        state = first.state_bytes * trained / first.gradient_bytes if first.gradient_bytes else 0.0
        found.append(TiedWeights(holders, sum(param.nbytes for param in params), trained, state))
    return tuple(found)
