"""Where a stage computes, and whose memory it shares.

device="cuda:1", torch.device(...), "cpu"      this rank's stage is there
device="cuda"                                  GPU `local_rank` of this host, modulo the GPUs that this process sees
device=["cuda:0", "cuda:0", "cpu"]             one for each stage, the same on every rank
device=None                                    where the model is; but as "cuda" if the example is on a GPU and the model
                                               is not
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from polytempo.device.device import Device
from polytempo.errors import PeerError, UsageError

StageDevice: TypeAlias = torch.device | str | None
StageDevices: TypeAlias = StageDevice | Sequence[torch.device | str]


def chosen(
    device: StageDevices, stage: int, stages: int, local_rank: int, gpus: int, asks: bool = False
) -> torch.device | None:
    """Where a stage computes; None: where its parameters are.

    Args:
        device: As the user gave it.
        stage: The number of the stage.
        stages: How many there are.
        local_rank: Of this process among those of its host.
        gpus: How many this process sees.
        asks: The example is on a GPU and the model is not.

    Raises:
        UsageError: There is no such device, or a list is not of one device for each stage.
    """
    if isinstance(device, Sequence) and not isinstance(device, str):
        if len(device) != stages:
            raise UsageError(
                f"expected a device for each of {stages} stages, got {len(device)}; give {stages}, or one for all"
            )
        device = device[stage]
    if device is None and not asks:
        return None
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        return place
    if not gpus:
        raise UsageError(f"expected a GPU for device={str(place)!r}, and this process sees none; use device='cpu'")
    index = local_rank % gpus if place.index is None else place.index
    if index >= gpus:
        raise UsageError(f"expected a GPU from cuda:0 to cuda:{gpus - 1}, got {str(place)!r}; see CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", index)


def asks_for_gpu(example: Any, parameters: Sequence[torch.Tensor]) -> bool:
    """Is the example on a GPU, and the model not?"""
    given = example if isinstance(example, tuple | list) else (example,)
    there = any(isinstance(value, torch.Tensor) and value.is_cuda for value in given)
    return there and not any(tensor.is_cuda for tensor in parameters)


def shared_device(place: torch.device) -> Device | None:
    """The device whose memory a stage shares with others: its GPU; None on the CPU, or where the driver refuses."""
    if place.type != "cuda":
        return None
    from polytempo.device.cuda_device import CudaDevice

    try:
        return CudaDevice(place.index if place.index is not None else torch.cuda.current_device())
    except PeerError:
        return None
