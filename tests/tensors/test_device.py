"""Shared device memory and fences, on the stand-in."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.device.device import CYCLE, FENCE_BYTES, RELEASED, SPACING, Fences
from polytempo.device.host_device import HostDevice
from polytempo.errors import PeerError

READER = """
import sys, torch
from polytempo.device.host_device import HostDevice
memory = HostDevice().open(sys.argv[1].encode(), int(sys.argv[2]))
print(memory.tensor(torch.float32).tolist())
memory.tensor(torch.float32, 4, 2).fill_(7.0)
"""


def fences(device: HostDevice) -> Fences:
    return device.fences(numpy.zeros(FENCE_BYTES, dtype=numpy.uint8))


def test_another_process_reads_and_writes_memory_by_its_handle() -> None:
    memory = HostDevice().allocate(16)
    memory.tensor(torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    command = [sys.executable, "-c", READER, memory.handle.decode(), "16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[1.0, 2.0, 3.0, 4.0]"
    assert memory.tensor(torch.float32).tolist() == [1.0, 7.0, 7.0, 4.0]


def test_memory_of_a_process_that_has_ended_cannot_be_opened() -> None:
    with pytest.raises(PeerError, match="cannot be mapped"):
        HostDevice().open(b"/proc/0/fd/3", 16)


def test_allocated_bytes_are_given_back_with_the_last_tensor() -> None:
    device = HostDevice()
    memory = device.allocate(1000)
    tensor = memory.tensor(torch.uint8)
    del memory
    assert device.allocated == 1000
    del tensor
    assert device.allocated == 0


@given(st.integers(0, CYCLE - 1), st.integers(0, RELEASED - 1))
def test_a_fence_counts_modulo_two_to_the_32(value: int, ahead: int) -> None:
    of = fences(HostDevice())
    of.signal(3, value + ahead)
    assert of.reached(3, value)
    assert of.reached(3, (value + ahead) % CYCLE)
    assert not of.reached(3, (value + ahead + 1) % CYCLE)


@given(st.integers(0, CYCLE - 1), st.integers(0, RELEASED))
def test_a_released_fence_has_reached_what_may_be_waited_for(value: int, later: int) -> None:
    of = fences(HostDevice())
    of.signal(0, value)
    of.release(0)
    assert of.reached(0, (value + later) % CYCLE)
    of.wait(0, (value + later) % CYCLE)


def test_fences_do_not_share_a_cache_line() -> None:
    words = numpy.zeros(FENCE_BYTES, dtype=numpy.uint8)
    of = HostDevice().fences(words)
    of.signal(2, 1)
    assert list(numpy.nonzero(words)[0] // SPACING) == [2]
