"""A random script as plain PyTorch runs it: one process, one model, and of each worker its own batches.

A worker's own are its gradients, until they are averaged, and its buffers. With one worker nothing is averaged and nothing
copied: this is the script itself. With several, `.grad` at a step is the mean by weight: that of the joint batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz_pieces import (
    Batch,
    Composite,
    batch_of,
    cast,
    change,
    kept,
    loss_of,
    meddle,
    optimizer_of,
    scheduler_of,
    weight_of,
)
from fuzz_program import Line, Script
from torch import nn


@dataclass
class Outcome:
    """What a run is judged by: of one worker, or of each in turn."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)  #: what evaluating gave
    states: list[dict[str, Any]] = field(default_factory=list)  #: of the optimizer


def look(model: nn.Module, outcome: Outcome) -> None:
    """Keep all values."""
    outcome.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}


class Run:
    """What both kinds of run have in common. Operations are methods named after their word."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.model = Composite(script)
        self.scheduler: Any = None
        self.saved: dict[str, Any] = {}
        self.held: list[torch.Tensor] = []
        self.changes = 0

    def run(self) -> None:
        for line in self.script.steps:
            getattr(self, f"do_{line.word}")(line)

    def target(self) -> torch.optim.Optimizer:
        """What the script steps."""
        raise NotImplementedError

    def params(self) -> list[nn.Parameter]:
        """What it updates."""
        return [param for group in self.target().param_groups for param in group["params"]]

    def do_begin(self, line: Line) -> None:
        """Built in single precision."""
        self.model.float()
        self.made_anew()

    def made_anew(self) -> None:
        """The model's tensors are others."""

    def do_cast(self, line: Line) -> None:
        cast(self.model, line["to"])

    def do_freeze(self, line: Line) -> None:
        params = list(self.model.parameters())
        params[line["param"] % len(params)].requires_grad_(False)

    def do_thaw(self, line: Line) -> None:
        params = list(self.model.parameters())
        params[line["param"] % len(params)].requires_grad_(True)

    def do_schedule(self, line: Line) -> None:
        if self.scheduler is None:
            self.scheduler = scheduler_of(self.script, line["kind"], self.target())

    def do_rate(self, line: Line) -> None:
        for group in self.target().param_groups:
            group["lr"] = group["lr"] * line["times"]

    def do_deepcopy(self, line: Line) -> None:
        """As for an average of weights: nothing comes of it."""
        copy.deepcopy(self.model)

    def do_hook(self, line: Line) -> None:
        """On a gradient, or, with one worker, on the steps of the optimizer."""
        params = list(self.model.parameters())
        param = params[line["param"] % len(params)]
        if line["on"] == "gradient":
            if param.requires_grad and not self.script.sparse:
                param.register_hook(lambda grad: 0.5 * grad)
        elif self.script.setting.workers == 1:
            self.target().register_step_pre_hook(_smaller)

    def do_change(self, line: Line) -> None:
        self.changes += 1
        change(self.script, line, self.model, self.changes)

    def gradients(self, line: Line, rank: int, optimizer: torch.optim.Optimizer) -> float:
        """Zero, forward, backward, as often as the line says; the last loss."""
        if line["zero"] == "model":
            self.model.zero_grad()
        elif line["zero"] != "skip":
            optimizer.zero_grad(set_to_none=line["zero"] == "none")
        loss = torch.zeros(())
        if line.get("idle") in (-1, rank):
            return 0.0
        for part in range(line.get("parts", 1)):
            loss = loss_of(self.model, self.batch(line, rank, part))
            if loss.requires_grad:
                self.backward(line, part, loss)
        return float(loss.detach())

    def batch(self, line: Line, rank: int, part: int) -> Batch:
        return batch_of(self.script, line, rank, part)

    def backward(self, line: Line, part: int, loss: torch.Tensor) -> None:
        kind = line.get("backward")
        if kind == "twice":
            loss.backward(retain_graph=True)
        loss.backward(create_graph=kind == "graph")

    def own_changes(self, line: Line, rank: int) -> None:
        """What the script does to this worker's gradients before it steps."""
        meddle(self.script, line, self.model, rank, self.held)
        clip, params = line.get("clip"), self.params()
        if clip == "own":
            nn.utils.clip_grad_norm_(params, 0.5)
        elif clip == "value":
            nn.utils.clip_grad_value_(params, 0.05)

    def mean_changes(self, line: Line) -> None:
        """What it does to the mean."""
        params = self.params()
        if line["clip"] == "mean":
            nn.utils.clip_grad_norm_(params, 0.3)
        else:
            nn.utils.clip_grad_value_(params, 0.05)


def _smaller(optimizer: torch.optim.Optimizer, *about: object) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.detach().mul_(0.9)


class PlainRun(Run):
    """One process, all workers' batches."""

    def __init__(self, script: Script, joint: bool = False) -> None:
        super().__init__(script)
        self.joint = joint  # one batch of all workers' samples, and no means
        self.optimizer = optimizer_of(script, self.model, plain=True)
        self.workers = script.setting.workers
        self.outcomes = [Outcome() for _ in range(self.workers)]
        self.made_anew()

    def made_anew(self) -> None:
        self.grads: list[list[torch.Tensor | None]] = [
            [p.grad for p in self.model.parameters()] for _ in range(self.workers)
        ]
        self.buffers = [[b.clone() for b in self.model.buffers()] for _ in range(self.workers)]

    def target(self) -> torch.optim.Optimizer:
        return self.optimizer

    def batch(self, line: Line, rank: int, part: int) -> Batch:
        if not self.joint:
            return super().batch(line, rank, part)
        batches = [batch_of(self.script, line, other, part) for other in range(self.workers)]
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def do_cast(self, line: Line) -> None:
        """Gradients and buffers are cast as well."""
        super().do_cast(line)
        like = list(self.model.parameters())
        self.grads = [[g if g is None else g.to(p.dtype) for g, p in zip(own, like, strict=True)] for own in self.grads]
        kinds = [buffer.dtype for buffer in self.model.buffers()]
        self.buffers = [[b.to(kind) for b, kind in zip(own, kinds, strict=True)] for own in self.buffers]

    @contextmanager
    def worker(self, rank: int) -> Iterator[None]:
        """Inside, the model has this worker's gradients and buffers."""
        if self.workers == 1:
            yield
            return
        params = list(self.model.parameters())
        for param, grad in zip(params, self.grads[rank], strict=True):
            param.grad = grad
        for buffer, own in zip(self.model.buffers(), self.buffers[rank], strict=True):
            buffer.copy_(own)
        yield
        self.grads[rank] = [param.grad for param in params]
        self.buffers[rank] = [buffer.clone() for buffer in self.model.buffers()]

    def run(self) -> None:
        super().run()
        for rank, outcome in enumerate(self.outcomes):
            with self.worker(rank):
                look(self.model, outcome)

    def do_load(self, line: Line) -> None:
        """Everybody begins with what the first rank has, but for buffers."""
        for rank in range(self.workers):
            with self.worker(rank):
                self.model.load_state_dict(loaded(self.script, line, rank, self.model))
        if self.workers > 1:
            first = loaded(self.script, line, 0, self.model)
            with torch.no_grad():
                for name, param in self.model.named_parameters(remove_duplicate=False):
                    param.copy_(first[name])

    def do_warm(self, line: Line) -> None:
        """Steps before it is wrapped, the same at each worker."""
        for rank in range(self.workers):
            with self.worker(rank):
                self.optimizer.zero_grad()
                loss = loss_of(self.model, batch_of(self.script, line, 0))
                if loss.requires_grad:
                    loss.backward()
        for param, grad in zip(self.model.parameters(), self.grads[0], strict=True):
            param.grad = grad if self.workers > 1 else param.grad
        self.optimizer.step()

    def do_wrap(self, line: Line) -> None:
        """Plain PyTorch does not."""

    def do_step(self, line: Line) -> None:
        for rank in range(self.workers):
            with self.worker(rank):
                self.outcomes[rank].losses.append(self.gradients(line, rank, self.optimizer))
                self.own_changes(line, rank)
        own = self.grads if self.joint else self._average(line)
        if line.get("clip", "").startswith("mean"):
            self.mean_changes(line)
            own = [[None if p.grad is None else p.grad.clone() for p in self.model.parameters()] for _ in own]
        clip = self.script.optimizer["clip_norm"]
        if clip is not None:
            nn.utils.clip_grad_norm_(self.params(), clip)
        self.optimizer.step()
        if self.workers > 1:
            self.grads = own
        if self.scheduler is not None:
            self.scheduler.step()

    def _average(self, line: Line) -> list[list[torch.Tensor | None]]:
        """Make `.grad` the mean; what each worker had."""
        if self.workers == 1:
            return []
        weights = [weight_of(self.script, line, rank) for rank in range(self.workers)]
        for number, param in enumerate(self.model.parameters()):
            pairs = zip(weights, self.grads, strict=True)  # what weighs nothing counts for nothing
            there = [(weight, own[number]) for weight, own in pairs if weight and own[number] is not None]
            param.grad = None
            for weight, grad in there:
                part = grad * (weight / sum(weights))  # type: ignore[operator]
                if param.grad is not None:  # torch adds sparse ones to dense ones, not the other way round
                    part = part + param.grad if param.grad.is_sparse else param.grad + part
                param.grad = part
        return self.grads

    def do_evaluate(self, line: Line) -> None:
        for rank, outcome in enumerate(self.outcomes):
            with self.worker(rank):
                outcome.seen.append(evaluated(self.script, line, self.model))

    def do_state(self, line: Line) -> None:
        for outcome in self.outcomes:
            outcome.states.append(kept(self.optimizer.state_dict()))

    def do_save(self, line: Line) -> None:
        models = []
        for rank in range(self.workers):
            with self.worker(rank):
                models.append(kept(self.model.state_dict()))
        self.saved = {"models": models, "optimizer": kept(self.optimizer.state_dict())}

    def _load_model(self) -> None:
        for rank in range(self.workers):
            with self.worker(rank):
                self.model.load_state_dict(self.saved["models"][rank])

    def do_reload(self, line: Line) -> None:
        if self.saved and line["what"] != "optimizer":
            self._load_model()
        if self.saved and line["what"] != "model":
            self.optimizer.load_state_dict(copy.deepcopy(self.saved["optimizer"]))

    def do_resume(self, line: Line) -> None:
        if not self.saved:
            return
        frozen = [param.requires_grad for param in self.model.parameters()]
        if line["model"] == "new":
            self.model = resumed(self.script, self.model, frozen)
            self.made_anew()
        self._load_model()
        self.optimizer = optimizer_of(self.script, self.model, plain=True)
        self.optimizer.load_state_dict(copy.deepcopy(self.saved["optimizer"]))
        self.scheduler = None

    def do_group(self, line: Line) -> None:
        """Not offered, so that it does not matter what would come of it."""


def loaded(script: Script, line: Line, rank: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """Other values for the model."""
    about = ("loaded", rank if line["of"] == "each" else 0)
    dtype = next(model.parameters()).dtype
    found = Composite(script, about).state_dict()
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


def resumed(script: Script, old: nn.Module, trainable: list[bool]) -> Composite:
    """A model as the script builds it, with values of its own."""
    model = Composite(script, "resumed").to(next(old.parameters()).dtype)
    if not script.has("begin"):
        for new, param in zip(model.parameters(), old.parameters(), strict=True):
            new.data = new.data.to(param.dtype)
    for param, trains in zip(model.parameters(), trainable, strict=True):
        param.requires_grad_(trains)
    return model


def evaluated(script: Script, line: Line, model: nn.Module) -> torch.Tensor:
    """What the model says, evaluating."""
    model.eval()
    with torch.inference_mode() if line["how"] == "inference" else torch.no_grad():
        seen = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(script.seed), dtype=torch.float64)).clone()
    model.train()
    return seen
