"""Where a shard's values are made: in the CPU's memory, or on a GPU (`server/server_device.py` decides).

CUDA is not initialised before an optimizer needs it.
"""

from __future__ import annotations

import sys

import torch

from polytempo.device.device import Device
from polytempo.errors import PeerError
from polytempo.protocol.values import OptimizerSpec
from polytempo.server.server_device import AUTO, CPU, gpu_of_shard


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
        gpus = torch.cuda.device_count()
        if not gpus and self._option != AUTO:
            raise PeerError(f"server {self._shard}: --server-device {self._option}, and torch sees no GPU; use auto or cpu")
        index = gpu_of_shard(self._option, self._shard, gpus, wanted)
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
