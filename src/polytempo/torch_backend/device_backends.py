"""Back ends of torch beside this one: `"cpu:polytempo,cuda:nccl"`, `"cpu:gloo,cuda:polytempo"`.

A process group made in Python stands for the whole group, and torch makes no other back end beside it. So the group makes
the others itself, as torch would have, and hands them the calls whose tensors are on their devices. Torch does not say which
were asked for; it stands in its own function that makes groups, which is found among the callers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from polytempo.errors import UsageError
from polytempo.lazy_imports import when_imported
from polytempo.torch_backend.register import DEVICES, NAME

Class = TypeVar("Class", bound=type)

#: The compiler, which most scripts load with their first optimizer, and some never.
COMPILER = "torch._dynamo"


def leave_uncompiled(made: Class, also: Sequence[str] = ()) -> Class:
    """Keep the compiler out of the public methods of a class, as soon as it is loaded.

    Torch calls a group and its `Work` from C++, also while a model is compiled (`torch.compile(DDP(model))`). The compiler
    then takes these calls for the user's code, and fails at the first attribute of a group, an opaque object to it.

    Args:
        made: The class.
        also: Names with an underscore that torch calls.

    Returns:
        The class.
    """

    def mark(compiler: ModuleType) -> None:
        for name, method in list(vars(made).items()):
            if isinstance(method, FunctionType) and (not name.startswith("_") or name in also):
                setattr(made, name, compiler.disable(method))

    when_imported(COMPILER, mark)
    return made


#: torch's function that makes a group, and its variable with the back end of each device.
MAKER, CONFIG = "_new_process_group_helper", "backend_config"
#: Calls that go to the back end of their tensors' device.
CALLS = (
    *("send", "recv", "recv_anysource", "broadcast", "reduce", "gather", "scatter", "alltoall", "alltoall_base"),
    *("all_to_all_single", "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("gather_single", "gather_into_tensor"),
)


def register_devices(group: ProcessGroup, beside: Mapping[str, ProcessGroup]) -> None:
    """Register a back end for each device of a group: that of the group beside it, or one that refuses all calls.

    Torch takes a group's devices from what is registered, and from 2.15 on asks the default back end when a group is made.
    The group's own methods take the calls; one that got past them would not be made, and so it must fail.

    Args:
        group: A group whose calls are made in Python.
        beside: The groups of other back ends, by the type of their device.
    """
    # Torch's own of C++, which needs no network. One made in Python ends the process on Python 3.13 when torch 2.15 asks
    # it for a property that it inherits.
    fake = torch._C._distributed_c10d.FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    refusing = fake._create_internal(group.rank(), group.size(), options)
    kinds = []
    for device in map(torch.device, dict.fromkeys([*DEVICES, *beside])):
        kind, backend = ProcessGroup.BackendType.CUSTOM, refusing
        if device.type in beside:
            other = beside[device.type]
            kind, backend = getattr(ProcessGroup.BackendType, other.name().upper()), other._get_backend(device)
        elif device.type == "cuda" and not torch.cuda.is_available():
            continue
        group._register_backend(device, kind, backend)
        kinds.append(kind)
    group._set_default_backend(kinds[0])


def others_asked_for() -> dict[str, str]:
    """The other back ends of the group that torch is making now, by device; none where it was asked for this one alone."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != MAKER:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return {}
    asked = getattr(frame.f_locals.get(CONFIG), "device_backend_map", {})
    return {str(device): str(name) for device, name in asked.items() if str(name) != NAME}


def make_beside(options: Any, ranks: Sequence[int], asked: dict[str, str]) -> dict[str, ProcessGroup]:
    """A group of torch's own for each of these back ends, by device.

    Args:
        options: torch's, of the whole group.
        ranks: Its ranks in the job.
        asked: The name of a back end for each device.

    Raises:
        UsageError: It is neither gloo nor NCCL, or this torch does not have it.
    """
    return {device: _made(options, ranks, device, name) for device, name in asked.items()}


def _made(options: Any, ranks: Sequence[int], device: str, name: str) -> ProcessGroup:
    store = dist.PrefixStore(f"polytempo-beside-{device}", options.store)
    place = store, options.group_rank, options.group_size
    if name == "nccl":
        if not dist.is_nccl_available():
            raise UsageError(f"{device}:nccl was asked for, and this torch has no NCCL; use {device}:{NAME}")
        made = dist.ProcessGroupNCCL.Options()
        made._timeout, made.global_ranks_in_group, made.group_name = options.timeout, list(ranks), options.group_id
        kind, backend = ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(*place, made)
    elif name == "gloo":
        timeout: timedelta = options.timeout
        kind, backend = ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(*place, timeout)
    else:
        raise UsageError(f"expected gloo or nccl beside {NAME}, got {device}:{name}")
    backend._set_sequence_number_for_group()
    group = ProcessGroup(*place)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def hands_over(group: type) -> type:
    """A class of groups whose calls go to the group in `self.beside` that has the device of their tensors."""
    for name in CALLS:
        setattr(group, name, _handing_over(name, getattr(group, name)))
    return leave_uncompiled(group, CALLS)


def _handing_over(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.beside:
            beside = self.beside.get(_device_of((*arguments, *options.values())))
            if beside is not None:
                return getattr(beside, name)(*arguments, **options)
        return own(self, *arguments, **options)

    return call


def _device_of(arguments: Any) -> str:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return str(argument.device.type)
        if isinstance(argument, list | tuple) and (found := _device_of(argument)):
            return found
    return ""
