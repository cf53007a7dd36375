"""The ResNet-50 example, small and on the CPU: over a server it counts the images of both ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live import Bench

pytestmark = pytest.mark.long
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "resnet50.py")


def test_two_ranks_over_a_server_report_images_a_second(bench: Bench) -> None:
    small = ("--device", "cpu", "--batch", "2", "--image-size", "32", "--steps", "2", "--warm-up", "1")
    done = bench.run("run", "-n", "2", "--via", "ps", EXAMPLE, *small)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Polytempo, 2 x 2 images of 32, cpu: \d+\.\d images/s", done.stdout)
