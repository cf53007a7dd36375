"""Free memory of the GPU, and what shared memory has names, once they no longer change."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass

import torch

#: What may differ although nothing was left: the driver keeps some for itself.
TOLERANCE = 16 << 20
PATIENCE = 20.0


def free_memory() -> int:
    """Free bytes of the device once they no longer change: a process that ended may still be giving its memory back."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    before, same = -1, 0
    for _ in range(100):
        free = int(torch.cuda.mem_get_info()[0])
        same = same + 1 if free == before else 0
        if same == 3:
            break
        before = free
        time.sleep(0.1)
    return before


def shared_names() -> set[str]:
    """What stands in /dev/shm under names of CUDA, torch or this library."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch", "cuda", "polytempo", "pt-", "psm_"))}


@dataclass
class Holdings:
    """What the GPU and the host hold now, to be compared with later."""

    free: int
    names: set[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(free_memory(), shared_names())

    def assert_returned(self) -> None:
        """Memory comes back within some seconds, and no name is left."""
        deadline = time.monotonic() + PATIENCE
        while self.free - free_memory() > TOLERANCE:
            assert time.monotonic() < deadline, f"{self.free - free_memory()} bytes of the GPU did not return"
        assert shared_names() <= self.names, shared_names() - self.names
