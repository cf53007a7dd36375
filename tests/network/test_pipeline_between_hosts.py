"""Stages on two hosts: bytes go over the encrypted link between them, and stay in shared memory on each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import Hosts, why_not
from pipeline_between_hosts import ROWS, STEPS, WIDTH
from test_collectives_between_hosts import Bench, new_key, ranks

REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON or "allowed"), pytest.mark.timeout(120)]
SCRIPT = str(Path(__file__).parent / "pipeline_between_hosts.py")


def test_a_pipeline_over_two_hosts_trains_as_one_piece(hosts: Hosts, bench: Bench) -> None:
    said = {}
    for process in ranks(bench, hosts, 2, new_key(bench), script=SCRIPT):
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        one = json.loads(out.splitlines()[-1])
        said[one["rank"]] = {int(rank): sent for rank, sent in one["sent"].items()}
    activations = 8 * ROWS * WIDTH * STEPS
    for rank, other in ((1, 2), (2, 1)):
        assert activations <= said[rank][other] < activations + 30_000, "between hosts, each way once, and little more"
    for rank, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        assert said[rank][other] < 30_000, "on a host only places travel, and announcements"
