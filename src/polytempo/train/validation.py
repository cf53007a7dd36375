"""The arguments of a `DistributedOptimizer`, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from polytempo.compression.chain import PushPullCompression
from polytempo.errors import UsageError, nearest
from polytempo.session.session import Session
from polytempo.sync.spec import Spec


def names_of(
    params: list[torch.nn.Parameter],
    named: Iterable[tuple[str, torch.nn.Parameter]] | None,
    model: torch.nn.Module | None,
) -> list[str]:
    """What each parameter is called in messages to people."""
    pairs = list(named) if named is not None else list(model.named_parameters()) if model is not None else []
    known = {id(param): name for name, param in pairs}
    return [known.get(id(param), f"parameter {index}") for index, param in enumerate(params)]


def check_order(optimizer: object, model: object) -> None:
    """Refuse what is no optimizer, or no model, before anything is asked of it."""
    wanted = "DistributedOptimizer(optimizer, model)"
    if not isinstance(optimizer, torch.optim.Optimizer):
        if isinstance(optimizer, torch.nn.Module) and isinstance(model, torch.optim.Optimizer):
            raise UsageError(f"the optimizer comes first, then the model: {wanted}; they came the other way round")
        raise UsageError(f"expected {wanted} with a torch.optim.Optimizer first, got a {type(optimizer).__name__}")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"expected {wanted} with a torch.nn.Module second, got a {type(model).__name__}")


def check_once(params: list[torch.nn.Parameter], names: list[str], on_servers: bool) -> None:
    """Refuse parameters that stand twice in an optimizer, or, where servers keep the values of each, share memory."""
    seen: dict[int, str] = {}
    places: dict[int, str] = {}
    for param, name in zip(params, names, strict=True):
        if id(param) in seen:
            raise UsageError(f"{name} stands twice in the optimizer, and would be updated twice; name each parameter once")
        seen[id(param)] = name
        other = places.setdefault(param.data_ptr(), name)
        if on_servers and param.numel() and other != name:
            raise UsageError(
                f"{other} and {name} share memory, and servers keep values for each; tie them as one parameter, not by .data"
            )


def check_choices(apply: str, via: str | None, buffers: str, clip_norm: float | None, nonfinite: str) -> None:
    """Refuse arguments that cannot be."""
    choices = {
        "apply": (apply, ("server", "delta")),
        "buffers": (buffers, ("local", "mean")),
        "nonfinite": (nonfinite, ("count", "refuse")),
        "via": (via or "auto", ("auto", "ps", "allreduce")),
    }
    for name, (given, known) in choices.items():
        if given not in known:
            raise UsageError(f"expected {name} to be {' or '.join(known)}, got {given!r}{nearest(given, known)}")
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"expected clip_norm above 0, got {clip_norm}")


def weight_of(samples: Any, zero: bool = True) -> float:
    """The weight of a step as a plain number: given as a number of any kind, of NumPy's and tensors of one element too.
    `zero`: may it be 0?"""
    is_flag = isinstance(samples, bool) or str(getattr(samples, "dtype", "")).endswith("bool")
    number = math.nan
    if not is_flag and not isinstance(samples, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError):  # it is no number, or several
            number = float(samples)
    if not 0 <= number < math.inf or (number == 0 and not zero):
        wanted = "a number, 0 or more" if zero else "a number above 0"
        raise UsageError(f"expected samples to be {wanted}, got {samples!r}; give how many samples it is of, or nothing")
    return number


def goes_via_peers(spec: Spec, via: str | None, session: Session, server_tables: bool) -> bool:
    """Do gradients travel among workers, without servers? Refused where what is asked for cannot be."""
    wanted = via or "auto"
    possible, servers = spec.mode.name == "bsp" and not server_tables, session.client is not None
    if server_tables and (wanted == "allreduce" or not servers):
        raise UsageError("a ServerEmbedding lives on servers; start the job with polytempo run --servers 1 (or more)")
    if wanted == "allreduce" and not possible:
        raise UsageError(f"via='allreduce' needs sync='bsp', this is {spec.text}; use via='ps'")
    if not servers and (wanted == "ps" or not possible):
        raise UsageError("there are no servers: this job was not started by polytempo run; use sync='bsp' without via='ps'")
    return possible and (not servers or (session.job.via if wanted == "auto" else wanted) in ("auto", "allreduce"))


def asked_way(via: str | None, compressed: PushPullCompression, session: Session) -> str | None:
    """Compression is for what goes to servers: where the command leaves the way open, a script that compresses takes it."""
    is_open = via in (None, "auto") and session.client is not None and session.job.via == "auto"
    return "ps" if is_open and not compressed.is_lossless else via
