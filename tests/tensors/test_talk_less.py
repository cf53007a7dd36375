"""A small fixed sample of the bars of `benchmarks/talk_less.py`, which `make proof` measures over five seeds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from polytempo.records.lines import RecordLine
from polytempo.simulate.run import simulate_job
from talk_less import BSP_AT_MOST, DECOUPLED, LOSS, QUICK, SLOW_LINK, SOONER, USEFUL, WAYS, failing, trained, useful


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [4, 2])
def test_local_steps_reach_a_loss_three_times_sooner_than_bsp(workers: int) -> None:
    cluster, samples = replace(SLOW_LINK, workers=workers), 80 * workers * SLOW_LINK.batch
    lengths = {way: simulate_job(cluster, "bsp", samples=samples, via=way).seconds for way in WAYS}
    bsp, _ = trained("bsp", cluster, 0, looks=80, samples=samples, via=min(lengths, key=lengths.__getitem__))
    reached = bsp.time_to(-LOSS)
    assert reached is not None
    for sync in QUICK:
        run, _ = trained(sync, cluster, 0, looks=80, samples=samples)
        assert (run.time_to(-LOSS) or float("inf")) * SOONER <= reached


def test_under_failures_bsp_is_useful_for_a_third_and_decoupled_diloco_for_most_of_its_time() -> None:
    cluster = failing(0)
    assert sum(crash.at < 600 for crash in cluster.crashes) > 20
    assert max(useful(simulate_job(cluster, "bsp", seconds=600, via=way)) for way in WAYS) < BSP_AT_MOST
    outcome = simulate_job(cluster, DECOUPLED, seconds=600)
    assert useful(outcome) >= USEFUL
    assert outcome.waiting == 0


def test_adacomm_sends_one_model_a_block() -> None:
    lines: list[RecordLine] = []
    run, _ = trained("adacomm:16,every=2", SLOW_LINK, 0, looks=10, steps_each=120, record=lines.append)
    blocks = [line.get("count", 1) for line in lines if line["kind"] == "push" and line["worker"] == 0]
    assert sum(blocks) == 120
    assert max(blocks) == 16 > 4 >= min(blocks)
    assert {worker.bytes_sent for worker in run.outcome.workers} == {len(blocks) * SLOW_LINK.model_bytes}
