"""Mapped memory of a peer GPU is used where it is, never a copy of it: with a torch that copies as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polytempo.device import cuda_device
from polytempo.errors import PeerError


class FakeTorch:
    """Two GPUs; memory is on the one of this number."""

    device = torch.device

    def __init__(self, owner: int) -> None:
        self.cuda, self.owner = self, owner

    def device_count(self) -> int:
        return 2

    def as_tensor(self, of: Any, device: torch.device) -> Any:
        address = of.address if device.index == self.owner else of.address + 4096

        class Tensor:
            place = device

            def data_ptr(self) -> int:
                return int(address)

        return Tensor()


@pytest.mark.parametrize("owner", [0, 1])
def test_memory_is_a_tensor_on_the_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch, owner: int) -> None:
    monkeypatch.setattr(cuda_device, "torch", FakeTorch(owner))
    found: Any = cuda_device._in_place(cuda_device._Range(1 << 20, 512), 512, torch.device("cuda", 1))
    assert (found.place.index, found.data_ptr()) == (owner, 1 << 20)


def test_memory_that_torch_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "torch", FakeTorch(5))
    with pytest.raises(PeerError, match="cannot be used on cuda:0"):
        cuda_device._in_place(cuda_device._Range(1 << 20, 512), 512, torch.device("cuda", 0))
