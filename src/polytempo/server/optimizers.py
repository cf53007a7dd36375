"""Which `torch.optim` classes a server runs. A class is named, never sent: only names in this table are built.

Element-wise classes treat every element by itself, so a server may run them on any stretch of a flat tensor. Adafactor and
Muon look at whole matrices and get whole tensors. Everything else runs on the worker: `apply="delta"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polytempo.errors import UsageError
from polytempo.optim.asup import AsuP

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "RMSprop",
    "Rprop",
    "ASGD",
)
WHOLE = ("Adafactor", "Muon")
#: Of this library: element-wise, too.
OWN: dict[str, type] = {"AsuP": AsuP}
REASONS = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it works on sparse gradients",
}
#: Their step does not grow with the learning rate, so a mode cannot scale it down for single pushes.
BARRIER_ONLY = ("Rprop",)


def check_optimizer(cls: type, barrier: bool) -> str:
    """The name under which a server runs this class; refused with the reason where none can."""
    name = cls.__name__
    known = OWN.get(name) is cls or (name in ELEMENTWISE + WHOLE and getattr(torch.optim, name, None) is cls)
    if not known:
        why = REASONS.get(name, "it runs classes of torch.optim by their names, and no others")
        raise UsageError(f'a server cannot run {name}: {why}; use apply="delta", which runs it on the worker')
    if name in BARRIER_ONLY and not barrier:
        raise UsageError(
            f"{name} ignores the learning rate, so single pushes cannot be scaled; use bsp, or another optimizer"
        )
    return name


def is_whole(name: str) -> bool:
    """Must this class see whole tensors?"""
    return name in WHOLE


def build(name: str, groups: Sequence[dict[str, Any]], params: Sequence[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer of the named class over these parameters, a list for each group."""
    if name not in (*ELEMENTWISE, *WHOLE, *OWN):
        raise UsageError(f"a server runs {', '.join((*ELEMENTWISE, *WHOLE, *OWN))}, not {name!r}")
    described = [{**settle(group), "params": list(own)} for group, own in zip(groups, params, strict=True)]
    optimizer: torch.optim.Optimizer = (OWN.get(name) or getattr(torch.optim, name))(described)
    if name == "Adagrad":  # reads this one from its arguments, not from the group
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["sum"].fill_(group["initial_accumulator_value"])
    return optimizer


#: Classes whose fused form does a step in one pass; from this many elements on it is faster.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
FUSED_FROM = 1 << 20
#: On a GPU, where launches and memory bound a step, these are always fused; plain PyTorch's bits are promised on the CPU.
FUSED_ON_GPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def settle(
    group: dict[str, Any], optimizer: torch.optim.Optimizer | None = None, alone: bool = True, on_gpu: bool = False
) -> dict[str, Any]:
    """Hyper-parameters as torch wants them on a server: pairs are tuples, nothing is captured in a CUDA graph.

    Where the user has left the choice to torch, the fused form is taken for large tensors. It rounds differently, but for
    SGD without momentum, so a worker that is alone, and is promised plain PyTorch's bits, gets the plain form.
    """
    settled = {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
    if "capturable" in settled:
        settled["capturable"] = False
    if "foreach" in settled and settled["foreach"] is None and not settled.get("fused"):
        if on_gpu and optimizer is not None:
            fused = type(optimizer) in FUSED_ON_GPU and not settled["differentiable"]
            return settled | (
                {"foreach": False, "fused": True} if fused else {"foreach": not is_whole(type(optimizer).__name__)}
            )
        same_bits = type(optimizer) is torch.optim.SGD and settled["momentum"] == 0
        wanted = (same_bits or not alone) and type(optimizer) in FUSED and not settled["differentiable"]
        settled |= {"foreach": False, "fused": True} if wanted and _is_large(optimizer) else {"foreach": False}
    return settled


def place_scalars(optimizer: torch.optim.Optimizer, place: torch.device) -> None:
    """Single numbers of an optimizer's state, such as the count of steps, to where its form wants them.

    Fused forms want them beside the values. Others would wait for the GPU to read them there, so they are on the CPU; only
    ASGD keeps its own on the GPU, and waits.
    """
    beside = isinstance(optimizer, torch.optim.ASGD)
    for group in optimizer.param_groups:
        wanted = place if beside or group.get("fused") else torch.device("cpu")
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != wanted:
                    state[name] = value.to(wanted)


def _is_large(optimizer: torch.optim.Optimizer | None) -> bool:
    groups = optimizer.param_groups if optimizer is not None else []
    return int(sum(param.numel() for group in groups for param in group["params"])) >= FUSED_FROM
