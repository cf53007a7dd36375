"""A few random training scripts in real jobs, each of which runs several; `threads/test_scripts.py` has more of them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import fork_server
import pytest
from live import Bench

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzzed"))

from fuzz_processes import SETTINGS, run_job, seeds_for
from fuzz_program import Setting, script_of
from fuzz_verdict import report


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS[:2], ids=str)
def test_in_a_real_job_they_end_as_plain_pytorch_does(setting: Setting, bench: Bench) -> None:
    seeds = seeds_for(setting, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in threads
        verdicts = run_job(setting, seeds, bench.folder, bench.environment, fork_server.popen)
    for seed, verdict in zip(seeds, verdicts, strict=True):
        assert not verdict.failed, report(script_of(seed, setting), verdict.why)
    assert sum(verdict.kind == "same" for verdict in verdicts) >= 2
