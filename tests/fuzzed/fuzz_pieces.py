"""What random scripts are made of: models with odd parameters, batches, optimizers, and ways to meddle with gradients."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from fuzz_program import Line, Script
from torch import nn

from polytempo.optim.asup import AsuP
from polytempo.sync.spec import parse_spec

#: Every piece takes and gives so many columns.
WIDTH = 6
LINEAR = ("linear", "tied", "frozen", "normed")
Batch = tuple[torch.Tensor, torch.Tensor]


def dice(*about: object) -> torch.Generator:
    """The same numbers for the same words."""
    text = " ".join(map(str, about))
    return torch.Generator().manual_seed(sum(ord(letter) * 31**i % 2**40 for i, letter in enumerate(text)) % 2**40)


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)


class Piece(nn.Module):
    """One line of a model."""

    def __init__(self, line: Line, generator: torch.Generator, earlier: Sequence[Piece]) -> None:
        super().__init__()
        self.word = line.word
        self.twice = bool(line.get("twice"))
        shape = [int(size) for size in line.get("shape", "").split(",") if size]
        if line.word in LINEAR:
            self.inner: Any = nn.Linear(WIDTH, WIDTH, bias=line.get("bias", False)).double()
        elif line.word == "conv":
            self.inner = nn.Conv2d(2, 2, 3, padding=1).double()
        elif line.word == "norm":
            self.inner = nn.BatchNorm1d(WIDTH).double()
        elif line.word == "embedding":
            self.inner = nn.Embedding(9, WIDTH, sparse=line["sparse"]).double()
        elif line.word == "transposed":
            self.weight = nn.Parameter(_random(generator, WIDTH, WIDTH).t())
        elif line.word == "strided":
            self.weight = nn.Parameter(_random(generator, WIDTH, 2 * WIDTH)[:, ::2])
        elif line.word == "single":
            self.weight = nn.Parameter(_random(generator, WIDTH).float())
        else:
            self.weight = nn.Parameter(_random(generator, *(shape or ([WIDTH] if line.word == "sometimes" else []))))
        with torch.no_grad():
            for param in self.parameters() if hasattr(self, "inner") else ():
                param.copy_(_random(generator, *param.shape))
        if line.word == "tied" and (linears := [piece for piece in earlier if piece.word == "linear"]):
            self.inner.weight = linears[line["to"] % len(linears)].inner.weight
        if line.word == "normed":
            nn.utils.parametrizations.weight_norm(self.inner)
        if line.word == "frozen":
            self.requires_grad_(False)
        if line.word == "counted":
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """`given` is the model's input: what is decided by numbers is decided by those."""
        word = self.word
        if word in LINEAR:
            y = torch.tanh(self.inner(x))
            return torch.tanh(self.inner(y)) if self.twice else y
        if word == "conv":
            return x + self.inner(x.reshape(-1, 2, 3, 1)).reshape(-1, WIDTH)
        if word == "norm":
            return x + 0.1 * self.inner(x)
        if word == "embedding":
            return x + self.inner((given[:, :2].abs() * 7).long() % 9).mean(1)
        if word in ("transposed", "strided"):
            return torch.tanh(x @ self.weight)
        if word == "scale":
            return x * (1 + self.weight)
        if word == "empty":
            return x + self.weight.sum()
        if word == "single":
            return x + self.weight.to(x.dtype)
        if word == "sometimes" and given[0, 0] > 0:
            return x * (1 + self.weight)
        if word == "counted":
            self.calls += 1
            return x + 0.01 * self.weight
        return x


class Composite(nn.Module):
    """All lines of a model."""

    def __init__(self, script: Script, about: object = "first") -> None:
        super().__init__()
        self.pieces = nn.ModuleList()
        for number, line in enumerate(script.model):
            self.pieces.append(Piece(line, dice(script.seed, "values", about, number), list(self.pieces)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = given = x.to(next(self.parameters()).dtype)
        for piece in self.pieces:
            x = piece(x, given)
        return x


def batch_of(script: Script, line: Line, rank: int, part: int = 0) -> Batch:
    """A worker's batch of a step."""
    generator = dice(script.seed, "batch", line["batch"], rank, part)
    size = line["sizes"][rank % len(line["sizes"])]
    return tuple(torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    got = model(batch[0])
    return nn.functional.mse_loss(got, batch[1].to(got.dtype))


def weight_of(script: Script, line: Line, rank: int) -> float:
    """What a worker's gradient weighs."""
    kind, size = line["samples"], line["sizes"][rank]
    if kind == "odd":
        return 0.5 + 0.75 * ((line["batch"] + rank) % 4)
    if kind == "zero":
        return 0.0 if rank == line["batch"] % script.setting.workers else float(size)
    return float(size) if kind == "len" else 1.0


# Optimizers.


class Own(torch.optim.Optimizer):  # type: ignore[misc]
    """A class that only the script knows: SGD whose rate falls with the size of the weights."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                        param.sub_(group["lr"] * grad / (1 + param * param))
        return loss


NOT_TORCH = ("tensor_lr", "name", "groups", "trainable", "clip_norm", "model")


def optimizer_of(script: Script, model: Composite, plain: bool = False) -> torch.optim.Optimizer:
    """The script's optimizer; `plain`: with the rule that the mode brings, if it brings one."""
    line = script.optimizer
    frozen = {id(p) for piece in model.pieces if piece.word == "frozen" and line["trainable"] for p in piece.parameters()}
    params = [param for param in model.parameters() if id(param) not in frozen]
    options = {name: value for name, value in line.facts.items() if name not in NOT_TORCH}
    if line.get("tensor_lr"):
        options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
    groups: list[dict[str, Any]] = [{"params": params}]
    if line["groups"] == 2 and len(params) > 1:
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.6 * options["lr"]}]
    spec = parse_spec(script.setting.sync)
    if plain and spec.mode.rule:
        own = {name: options[name] for name in ("lr", "weight_decay") if name in options}
        return AsuP(groups, **own, **spec.rule_options)
    return Own(groups, **options) if line["name"] == "Own" else getattr(torch.optim, line["name"])(groups, **options)


def scheduler_of(script: Script, kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "cycle":
        moves = script.optimizer["name"] in ("SGD", "Adam") and not script.sparse and script.setting.sync != "asup"
        cycle = torch.optim.lr_scheduler.OneCycleLR
        return cycle(optimizer, max_lr=0.05, total_steps=60, cycle_momentum=moves and "downpour" not in script.setting.sync)
    if kind == "steps":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)


def kept(thing: Any) -> Any:
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


# What scripts do to gradients and weights.


def meddle(script: Script, line: Line, model: nn.Module, rank: int, held: list[torch.Tensor]) -> None:
    """Do something to one parameter's gradient."""
    if "meddle" not in line.facts or line["rank"] not in (-1, rank):
        return
    params = list(model.parameters())
    param = params[line["param"] % len(params)]
    how, grad = line["meddle"], param.grad
    if how == "none":
        param.grad = None
    elif how == "hold" and grad is not None:
        held.append(grad)
    elif how == "assign" and param.requires_grad:
        param.grad = _random(dice(script.seed, "assigned", line["batch"], rank), *param.shape).to(param.dtype)
    elif grad is None or grad.layout != torch.strided:
        return
    elif how == "double":
        grad.mul_(2)
    elif how == "data":
        grad.data.mul_(0.5)
    elif how == "transposed":
        grad = grad.detach()
        param.grad = grad.transpose(0, -1).contiguous().transpose(0, -1) if grad.dim() > 1 else grad.clone()


def change(script: Script, line: Line, model: nn.Module, number: int) -> None:
    """Change weights by hand: in place, or by putting other memory under them."""
    how = line["how"]
    with torch.no_grad():
        if how == "vector":
            vector = nn.utils.parameters_to_vector([p.contiguous() for p in model.parameters()])
            nn.utils.vector_to_parameters((0.9 * vector).to(next(model.parameters()).dtype), model.parameters())
            return
        for param in model.parameters():
            if how == "clamp":
                param.clamp_(-0.3, 0.3)
            elif how == "data":
                param.data = param.data * 0.9
            else:
                param.copy_(0.8 * param)


def cast(model: nn.Module, to: str) -> None:
    if to == "channels_last":
        model.to(memory_format=torch.channels_last)
    elif to == "float":
        model.float()
    else:
        model.double()
