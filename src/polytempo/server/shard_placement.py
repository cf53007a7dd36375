"""Where a shard's values are made: in the CPU's memory, or on a GPU (`--server-device`).

    cpu      in the CPU's memory
    auto     on a GPU where the first worker's parameters are on one and CUDA works in this process; else as with cpu
    cuda     on a GPU: shard i on visible GPU i modulo their number
    cuda:I   on visible GPU I

CUDA is not initialised before an optimizer needs it.
"""

from __future__ import annotations

import re
import sys

import torch

from polytempo.device.device import Device
from polytempo.errors import PeerError, UsageError
from polytempo.protocol.values import OptimizerSpec

AUTO, CPU = "auto", "cpu"
_GPU = re.compile(r"cuda(?::(\d{1,4}))?")


def check_server_device(option: str, gpus: int) -> None:
    """Refuse an option that there is not, or that this host cannot fulfil.

    Args:
        option: The value of `--server-device`.
        gpus: The number of GPUs that are visible here.

    Raises:
        UsageError: One line, with what is there.
    """
    match = _GPU.fullmatch(option)
    if option in (AUTO, CPU):
        return
    if match is None:
        raise UsageError(f"expected --server-device auto, cpu, cuda or cuda:I, got {option!r}")
    if not gpus:
        raise UsageError(f"--server-device {option}: there is no GPU that CUDA can use on this host; use auto or cpu")
    if match[1] and int(match[1]) >= gpus:
        there = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise UsageError(f"--server-device {option}: there is {there} (CUDA_VISIBLE_DEVICES counts); use one of them")


def gpu_of_shard(option: str, shard: int, gpus: int, wanted: bool) -> int | None:
    """The visible GPU on which a shard is made; None for the CPU's memory.

    Args:
        option: The value of `--server-device`, checked.
        shard: Which shard.
        gpus: The number of GPUs that are visible.
        wanted: Are the first worker's parameters on a GPU?
    """
    match = _GPU.fullmatch(option)
    if match is not None and match[1]:
        return int(match[1])
    return shard % gpus if gpus and (match is not None or (option == AUTO and wanted)) else None


class ShardPlacement:
    """Gives the device of one shard's optimizers.

    Args:
        option: The value of `--server-device`.
        shard: Which shard.
        device: Is given for every optimizer instead: the stand-in of tests.
    """

    def __init__(self, option: str = CPU, shard: int = 0, device: Device | None = None) -> None:
        self._option, self._shard = option, shard
        self._device, self._fixed = device, device is not None

    def device_for(self, spec: OptimizerSpec) -> Device | None:
        """Where the values of this optimizer are made; None: in the CPU's memory.

        Raises:
            PeerError: A GPU was asked for by name, and cannot be used.
        """
        if self._fixed or not spec.tensors or spec.apply == "peers" or self._option == CPU:
            return self._device if spec.tensors and spec.apply != "peers" else None
        wanted = spec.device == "cuda"
        if self._option == AUTO and not wanted:
            return None
        index = gpu_of_shard(self._option, self._shard, torch.cuda.device_count(), wanted)
        return None if index is None else self._gpu(index)

    def _gpu(self, index: int) -> Device | None:
        if self._device is None:
            from polytempo.device.cuda_device import CudaDevice

            try:
                self._device = CudaDevice(index)
            except (PeerError, RuntimeError) as error:  # torch raises the latter
                said = f"server {self._shard} cannot use cuda:{index}: {' '.join(str(error).split())}"
                if self._option != AUTO:
                    raise PeerError(f"{said}; use --server-device cpu") from None
                sys.stderr.write(f"polytempo: {said}; its values are in the memory of the CPU\n")
                sys.stderr.flush()
        return self._device
