"""Jobs in threads share one process: torch itself uses one thread, so that sums have one order.

Modules marked `both_wires` run twice: bytes through queues, buckets sent ahead, and through Unix sockets with all buffers in
shared memory, however small. `make check` runs them the second way.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train import ahead, rounds
from polytempo.transport import segments


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("both_wires"):
        queues = pytest.param("memory", marks=pytest.mark.long, id="memory")
        metafunc.parametrize("wire", [queues, "ipc"], indirect=True)


@pytest.fixture(autouse=True)
def wire(request: pytest.FixtureRequest) -> Iterator[None]:
    if not hasattr(request, "param"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test's must be undone before it looks what is left
        patch.setattr(ThreadJob, "wire", request.param)
        patch.setattr(GroupJob, "wire", request.param)
        patch.setattr(segments, "SHARE_FROM", 1)
        patch.setattr(ahead, "LIMIT", 100)  # small models, too, have several buckets
        patch.setattr(rounds, "BUCKET", 100)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
