"""What goes wrong with a training that goes on is said at its first time, in one line: numbers that are not finite, and a
rank that has no more data while others go on."""

from __future__ import annotations

import pytest
import torch
from helpers import copied, made_params, set_gradients
from local_blocks import HostsJob

from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = pytest.mark.timeout(30)

JOBS = {
    "servers": lambda sync: ThreadJob(3, 1, sync),
    "shared memory": lambda sync: ThreadJob(3, 1, sync, via="allreduce"),
    "hosts": lambda sync: HostsJob(3, sync),
    "collectives": lambda sync: GroupJob(3),
}
#: Modes that make local steps look at values when they travel.
IN_BLOCKS = {"local:2": "model", "diloco:2": "model", "diloco:2,quorum=1,grace=0": "model"}
START = made_params([(4,), (3,)])


def train(job: ThreadJob | GroupJob, sync: str, steps: tuple[int, int, int], bad: dict[int, int] | None = None) -> list[str]:
    """All workers make so many steps, those of `bad` from one on with gradients that are not finite; what was said."""

    def work(session: Session) -> None:
        params = copied(START)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.01), sync=sync)
        for step in range(steps[session.rank]):
            value = torch.nan if step >= (bad or {}).get(session.rank, 1 << 30) else 1.0
            set_gradients(params, [torch.full((4,), value), torch.ones(3) + session.rank + step])
            optimizer.step()

    with job:
        job.run(work)
    return [notice for notice in getattr(job, "notices", []) if notice.startswith("warning: worker")]


def said(captured: pytest.CaptureFixture[str]) -> list[str]:
    lines = captured.readouterr().err.splitlines()
    return [line.removeprefix("polytempo: ") for line in lines if "warning: worker" in line]


def not_finite(what: str, worker: int, step: int) -> str:
    return (
        f"warning: worker {worker}, step {step}: its {what} is not finite (NaN or infinite), and the job goes on with it; "
    )


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:2", "delay:1", "downpour:push=2,fetch=2", "gossip:ring", *IN_BLOCKS])
def test_the_first_gradient_that_is_not_finite_is_said_with_rank_and_step(sync: str) -> None:
    (line,) = train(ThreadJob(3, 1, sync), sync, (6, 6, 6), {1: 3})
    at = 3 if sync not in IN_BLOCKS and "downpour" not in sync else None
    words = IN_BLOCKS.get(sync, "gradient")
    assert line.startswith("warning: worker 1, step ")
    assert at is None or line.startswith(not_finite(words, 1, at))
    assert f"its {words} is not finite" in line


def test_steps_of_blocks_are_optimizer_steps() -> None:
    (line,) = train(ThreadJob(3, 1, "local:4"), "local:4", (12, 12, 12), {1: 6})
    assert line.startswith(not_finite("model", 1, 7)), "the last of its block"


@pytest.mark.parametrize("way", ["shared memory", "hosts"])
def test_it_is_said_once_in_a_job_by_all_reduce(way: str) -> None:
    (line,) = train(JOBS[way]("bsp"), "bsp", (6, 6, 6), {2: 4, 0: 5})
    assert line.startswith(not_finite("gradient", 2, 4))


def test_without_a_coordinator_the_rank_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    train(GroupJob(3), "bsp", (6, 6, 6), {2: 4, 0: 5})  # by then the model is not finite either
    (line,) = said(capsys)
    assert line.startswith(not_finite("gradient", 2, 4))


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("sync", ["bsp", "local:2"])
def test_ranks_that_run_out_of_data_early_are_named_once(way: str, sync: str, capsys: pytest.CaptureFixture[str]) -> None:
    notices = train(JOBS[way](sync), sync, (12, 4, 12)) or said(capsys)
    assert [line.partition("; give")[0] for line in notices] == [
        "warning: worker 1 has no more data after step 4, and the other 2 go on: from here on worker 1 has weight zero, and "
        "means are over the rest"
    ]


@pytest.mark.parametrize("way", JOBS)
@pytest.mark.parametrize("sync", ["bsp", "local:2"])
def test_ranks_that_end_together_are_not_named(way: str, sync: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(JOBS[way](sync), sync, (5, 5, 5)) == said(capsys) == []


@pytest.mark.parametrize("sync", ["asp", "ssp:2", "bsp+backup:1"])
def test_where_no_worker_waits_for_another_an_early_end_is_as_it_should_be(sync: str) -> None:
    assert train(ThreadJob(3, 1, sync), sync, (12, 4, 12)) == []
