"""torch's own tests of what the back end offers, on the CPU, with three processes. docs/torch-backend.md has them all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fork_server
import pytest
import torch

RUNNER = Path(__file__).parent / "torch_suite.py"
PARTS = 6
#: Tests of torch 2.13 that match what is offered, of all parts together. Another version may have some more or less.
OFFERED = 125
#: Tests that are skipped, and why: by torch itself, or because they want another number of ranks.
SKIPPED = {
    "test_barrier_timeout_arg": "https://github.com/pytorch/pytorch/issues/179691",
    "test_broadcast_object_list": "Test is failing, see https://github.com/pytorch/pytorch/pull/113620",
    "test_gather_object": "Test requires an exact world size of 4",
    "test_gather_object_subgroup": "Test requires an exact world size of 4",
}


@pytest.mark.long
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[] if part in (1, 3) else pytest.mark.proof) for part in range(1, PARTS + 1)]
)
def test_torchs_own_tests_pass(tmp_path: Path, part: int) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it: pip install expecttest")
    command = [sys.executable, str(RUNNER), "--offered", "--part", f"{part}/{PARTS}", "--json", str(tmp_path / "lines")]
    (tmp_path / "temporary").mkdir()
    # With a GPU in sight torch's tests want one for each rank, also those of CPU tensors.
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = fork_server.run(command, env=environment, timeout=400)
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if line["outcome"] == "failed"] == []
    assert done.returncode == 0, done.stderr[-2000:]
    skipped = {line["test"]: line["why"] for line in lines if line["outcome"] == "skipped"}
    assert skipped == {line["test"]: SKIPPED.get(line["test"]) for line in lines if line["test"] in {**SKIPPED, **skipped}}
    if torch.__version__.startswith("2.13."):
        assert len(lines) == len(range(part - 1, OFFERED, PARTS)), "not all that is offered was run"
