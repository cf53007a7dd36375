"""torch's own tests of what the back end offers, on the CPU, with three processes. docs/torch-backend.md has them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parent / "torch_suite.py"
PARTS = 3
#: What passes with torch 2.13, of all parts together. Another version may have some tests more or less.
PASSED = 121


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_torchs_own_tests_pass(tmp_path: Path, part: int) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it: pip install expecttest")
    command = [sys.executable, str(RUNNER), "--offered", "--part", f"{part}/{PARTS}", "--json", str(tmp_path / "lines")]
    (tmp_path / "temporary").mkdir()
    # With a GPU in sight torch's tests want one for each rank, also those of CPU tensors.
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if line["outcome"] == "failed"] == []
    assert done.returncode == 0, done.stderr[-2000:]
    assert sum(line["outcome"] == "passed" for line in lines) >= PASSED // PARTS - 2
