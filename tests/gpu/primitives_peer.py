"""The other process of `test_primitives.py`."""

from __future__ import annotations

import sys
import time

import torch

from polytempo.device.cuda_device import CudaDevice
from polytempo.device.device import FENCE_BYTES
from polytempo.transport.shared_memory import open_segment

role, words, *rest = sys.argv[1:]
device = CudaDevice(0)
fences = device.fences(open_segment(int(words)).view(0, FENCE_BYTES))
if role == "owner":
    memory = device.allocate(1 << 28)
    memory.tensor(torch.uint8).fill_(5)
    torch.cuda.synchronize()
    sys.stdout.write(memory.handle.hex() + "\n")
else:
    memory = device.open(bytes.fromhex(rest[0]), 1 << 20)
    tensor = memory.tensor(torch.float32)
    tensor.new_zeros(1).mul_(2.0)  # the kernel is loaded before the stream can block
    torch.cuda.synchronize()
    if role == "double":
        fences.wait(0, 1)
        tensor.mul_(2.0)
        fences.signal(1, 1)
        sys.stdout.write("given\n")
        sys.stdout.flush()
        torch.cuda.synchronize()
        sys.exit(0)
    fences.wait(2, 1)
    tensor.mul_(2.0)
    fences.signal(2, 1)
    sys.stdout.write("blocked\n")
sys.stdout.flush()
time.sleep(100)
