"""The devices of one process: a `Device` for each GPU, made when it is first asked for."""

from __future__ import annotations

import torch

from polytempo.device.device import Device


class Devices:
    """Gives the `Device` of a torch device.

    Args:
        stand_in: Is given for every torch device, also for the CPU: the stand-in for a GPU, in tests.
    """

    def __init__(self, stand_in: Device | None = None) -> None:
        self.stand_in = stand_in
        self._made: dict[int, Device] = {}

    def of(self, place: torch.device | str) -> Device | None:
        """The device, or None where torch's memory is not shared by device: on the CPU, and on other kinds of devices.

        Raises:
            PeerError: The CUDA driver cannot be loaded, or refuses.
        """
        if self.stand_in is not None:
            return self.stand_in
        place = torch.device(place)
        if place.type != "cuda":
            return None
        index = torch.cuda.current_device() if place.index is None else place.index
        if index not in self._made:
            from polytempo.device.cuda_device import CudaDevice

            self._made[index] = CudaDevice(index)
        return self._made[index]

    @property
    def allocated(self) -> int:
        """Bytes that this process has allocated by them and not given back."""
        made = list(self._made.values()) if self.stand_in is None else [self.stand_in]
        return sum(device.allocated for device in made)
