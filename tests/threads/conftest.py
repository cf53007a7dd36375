"""Jobs in threads share one process: torch itself uses one thread, so that sums have one order.

Modules marked `both_wires` run twice: bytes through queues, buckets sent ahead, and through Unix sockets with all buffers in
shared memory, however small. `make check` runs them the second way.

Many tests here have dozens of cases: `make check` runs a few of each, `make test` all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polytempo.reducer import pushes, sums
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.transport import shared_memory

#: How many cases of a test `make check` runs at most.
CASES = 2


@pytest.hookimpl(tryfirst=True)  # before anything is left out for its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test with more cases, some that are spread over all of them stay; the others are long."""
    tests = defaultdict(list)
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("long") is None:
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        kept = {index * len(cases) // CASES for index in range(CASES)}
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker("long")


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
        patch.setattr(shared_memory, "SHARE_FROM", 1)
        patch.setattr(pushes, "LIMIT", 100)  # small models, too, have several buckets
        patch.setattr(sums, "BUCKET", 100)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
