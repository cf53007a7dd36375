"""A slow reader and a fast server overlap for 10,000 steps: no answer or push is seen in part, and values never go back."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live import Bench

pytestmark = pytest.mark.timeout(150)
DEVICE = os.environ.get("POLYTEMPO_TEST_DEVICE", "cuda")
SCRIPT = str(Path(__file__).parent / "pushing_on_gpu.py")
STEPS = 5000 if DEVICE == "cuda" else 50  #: of each of the two workers


@pytest.mark.parametrize(("sync", "servers", "part"), [("asp", 1, 1), ("ssp:4", 2, 4)])
def test_no_torn_or_stale_read(sync: str, servers: int, part: int, bench: Bench) -> None:
    """Two shards: both parts of an answer are from one version, too."""
    flags = ("-n", "2", "--sync", sync, "--servers", str(servers))
    done = bench.run("run", *flags, SCRIPT, DEVICE, "4", f"steps={STEPS // part}", "slow=0:100", timeout=140)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"worker (\d): (\d+) torn or stale reads in (\d+) steps, values \[(\S+)\]", done.stdout)
    assert len(found) == 2, done.stdout[-2000:]
    for _, torn, steps, _ in found:
        assert (int(torn), int(steps)) == (0, STEPS // part)
    assert [float(value) for *_, value in found] == [-1.0 * (STEPS // part)] * 2, "every push was applied, once, by one half"
