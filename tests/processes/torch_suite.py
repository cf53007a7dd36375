"""torch's own tests of process groups (`torch.testing._internal.distributed.distributed_test`), with polytempo under them.

    python tests/processes/torch_suite.py [--size 3] [--backend gloo] [--json FILE] [--offered] [NAME ...]

Its decorators know which back ends can do what, by name, when the module is loaded. So it is loaded with a word that is
"polytempo" where it is used, and passes for gloo, and for MPI, where it is compared: MPI is the one that torch asks for
exchanges of all with all. Everything else is as torch has it, but that processes are forked, which saves hours of imports,
and that `dist.monitored_barrier`, which torch keeps for gloo, goes to the group.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import polytempo  # noqa: F401  tells torch the word

ALIKE = ("gloo", "mpi")
FOLDER = tempfile.TemporaryDirectory()
#: Tests on the CPU of what is offered. The others need GPUs, or NCCL, or are of torch's own (samplers, logs, profiles).
OFFERED = re.compile(
    r"test_(all_gather|all_reduce|all_to_all|barrier|batch_isend_irecv_gloo|broadcast|reduce|gather|scatter|irecv|isend|send_recv"
    r"|monitored_barrier|destroy|get_(?!data)|accumulate|static_graph_api_cpu|grads_same|DistributedDataParallel(CPU|_requires)"
    r"|ddp_(create_graph|logging_data_cpu))(?!.*(cuda|nccl|_v_|allreduce_hang))"
)
#: Seconds for a test: none that passes takes half of it.
PATIENCE = 60


class Word(str):
    """The name of our back end, equal to those that can do the same."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in ALIKE

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(ALIKE[0])  # for `BACKEND in {"nccl", "gloo"}`


def barrier_of_any(original: Callable[..., None]) -> Callable[..., None]:
    """torch's `monitored_barrier`, which asks only whether the back end is gloo."""

    def monitored_barrier(*arguments: Any, **options: Any) -> None:
        with mock.patch.object(dist.distributed_c10d, "get_backend", return_value="gloo"):
            original(*arguments, **options)

    return monitored_barrier


def load(backend: str, size: int) -> type[unittest.TestCase]:
    """The tests as a class, for a number of processes."""
    os.environ.update(WORLD_SIZE=str(size), TEMP_DIR=FOLDER.name, INIT_METHOD=f"file://{FOLDER.name}/store")
    word = Word(backend) if backend == "polytempo" else backend
    from torch.testing._internal import common_distributed

    common_distributed.DistTestCases.backend_feature["plugin"].add(backend)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": word}):
        from torch.testing._internal.distributed import distributed_test as theirs
    os.environ["BACKEND"] = "mpi" if backend == "polytempo" and size > 2 else backend  # of others, some tests want eight
    common_distributed.TIMEOUT_DEFAULT = PATIENCE
    common_distributed.TIMEOUT_OVERRIDE.clear()
    if backend == "polytempo":
        dist.monitored_barrier = barrier_of_any(dist.monitored_barrier)

    class TestBackend(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestBackend


class Records(unittest.TestResult):
    """What came of each test."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self._file = file

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._began = time.monotonic()

    def _note(self, test: Any, outcome: str, why: str = "") -> None:
        seconds = round(time.monotonic() - self._began, 2)
        line = {"test": test._testMethodName, "outcome": outcome, "why": why, "seconds": seconds}
        self.lines.append(line)
        if self._file:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._note(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self._note(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure  # noqa: N815


def names_in(tests: type[unittest.TestCase]) -> list[str]:
    return unittest.TestLoader().getTestCaseNames(tests)  # type: ignore[return-value]


def offered(names: Sequence[str]) -> list[str]:
    return [name for name in names if OFFERED.match(name)]


def run(tests: type[unittest.TestCase], names: Sequence[str], file: Any = None) -> list[dict[str, Any]]:
    """Run these; a line for each."""
    records = Records(file)
    unittest.TestSuite(tests(name) for name in names).run(records)
    return records.lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--json")
    parser.add_argument("--offered", action="store_true", help="only what polytempo offers")
    parser.add_argument("--part", default="1/1", help="2/3: the second third")
    given = parser.parse_args()
    tests = load(given.backend, given.size)
    names = given.names or names_in(tests)
    part, parts = map(int, given.part.split("/"))
    names = (offered(names) if given.offered else names)[part - 1 :: parts]
    with open(given.json or os.devnull, "w", encoding="utf-8") as file:
        lines = run(tests, names, file)
    counts = {word: sum(line["outcome"] == word for line in lines) for word in ("passed", "failed", "skipped")}
    print(json.dumps(counts))
    for line in lines:
        if line["outcome"] == "failed":
            print(f"{line['test']}: {line['why'].strip().splitlines()[-1]}")
    return counts["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
