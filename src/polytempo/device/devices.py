"""`Devices`: the GPUs that a session uses, each made when its first tensor is seen; none on a machine without."""

from __future__ import annotations

import torch

from polytempo.device.device import Device


class Devices:
    """The devices of one worker.

    Args:
        stand_in: In tests, the device of tensors on the CPU (`host_device.py`).
    """

    def __init__(self, stand_in: Device | None = None) -> None:
        self._stand_in = stand_in
        self._gpus: dict[int, Device] = {}

    def of(self, place: torch.device) -> Device | None:
        """The device of tensors at this place; None where these are not in memory that processes share by handles.

        Raises:
            PeerError: There is a GPU, and its driver refuses.
        """
        if place.type == "cpu":
            return self._stand_in
        if place.type != "cuda":
            return None
        index = torch.cuda.current_device() if place.index is None else place.index
        if index not in self._gpus:
            from polytempo.device.cuda_device import CudaDevice

            self._gpus[index] = CudaDevice(index)
        return self._gpus[index]
