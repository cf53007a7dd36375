"""Shared device memory and fences on a GPU: what the design note says was measured."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

PEER = str(Path(__file__).parent / "primitives_peer.py")


def peer(stack: ExitStack, role: str, *arguments: str, words: int) -> tuple[subprocess.Popen[str], str]:
    """A process in this role, and the first line that it prints."""
    command = [sys.executable, PEER, role, str(words), *arguments]
    other = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[words]))
    stack.callback(other.kill)
    return other, other.stdout.readline() if other.stdout is not None and role != "double" else ""


def settled() -> int:
    """Free bytes of the device once they no longer change: a process that ended may still be giving its memory back."""
    before = -1
    for _ in range(50):
        free = int(torch.cuda.mem_get_info()[0])
        if free == before:
            return free
        before = free
        time.sleep(0.1)
    return before


@pytest.mark.alone_on_gpu
def test_memory_and_fences_between_processes() -> None:
    with ExitStack() as stack:
        check_memory_and_fences(stack)


def check_memory_and_fences(stack: ExitStack) -> None:
    from polytempo.device.cuda_device import CudaDevice
    from polytempo.device.device import FENCE_BYTES
    from polytempo.transport.shared_memory import make_segment

    device, segment = CudaDevice(0), make_segment(FENCE_BYTES)
    fences = device.fences(segment.view(0, FENCE_BYTES))
    memory = device.allocate(1 << 20)
    free = settled()
    with device.own_stream():
        memory.tensor(torch.float32).fill_(3.0)
        fences.signal(0, 1)
        other, _ = peer(stack, "double", memory.handle.hex(), words=segment.descriptor)
        fences.wait(1, 1)  # the stream waits, the host does not
        total = memory.tensor(torch.float32).sum()
    assert other.stdout is not None
    assert other.stdout.readline() == "given\n"
    assert float(total) == 6.0 * (1 << 18)
    assert fences.reached(1, 1)
    other.wait(30)

    # A peer killed while its stream waits and kernels are queued behind it: this process goes on, memory returns.
    other, said = peer(stack, "blocked", memory.handle.hex(), words=segment.descriptor)
    assert said == "blocked\n"
    other.send_signal(signal.SIGKILL)
    other.wait(10)
    assert abs(settled() - free) < 64 << 20
    assert not fences.reached(2, 1)

    # Memory of a killed owner stays until its last reader closes it.
    other, said = peer(stack, "owner", words=segment.descriptor)
    theirs = device.open(bytes.fromhex(said), 1 << 28)
    other.send_signal(signal.SIGKILL)
    other.wait(10)
    tensor = theirs.tensor(torch.uint8)
    assert int(tensor.max()) == int(tensor.min()) == 5
    tensor.fill_(6)
    torch.cuda.synchronize()
    del theirs, tensor
    assert abs(settled() - free) < 64 << 20

    # A wait that nothing will end is ended by the host.
    with device.own_stream():
        fences.wait(3, 1)
        late = memory.tensor(torch.float32).sum()
    assert not torch.cuda.current_stream().query() or not fences.reached(3, 1)
    fences.release(3)
    torch.cuda.synchronize()
    assert float(late) == 6.0 * (1 << 18)
    assert device.allocated >= 1 << 20
    del memory, total, late
    assert device.allocated == 0


def test_too_much_memory_is_refused_with_what_is_free() -> None:
    from polytempo.device.cuda_device import CudaDevice
    from polytempo.errors import PeerError

    with pytest.raises(PeerError, match=r"bytes of cuda:0 were asked for, \d+ of \d+ are free"):
        CudaDevice(0).allocate(1 << 50)
