"""What a script forgets is said, once: a share of the data for each worker, and to ask whether to stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import copied, made_params, set_gradients

from polytempo.server.job_plan import Limits
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob, ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.update import gradient_digest

pytestmark = pytest.mark.timeout(30)

START = made_params([(3,), (2, 2)])
ALIKE = (
    "warning: workers 0 and 2 pushed the same gradient in step 0: do they read the same batches? "
    "share the data out with DataLoader(..., sampler=pt.DistributedSampler(dataset))"
)
UNHEEDED = (
    "warning: the job's budget is used up and its workers go on: the script never asks pt.should_stop(); "
    "end its loop with `if pt.should_stop(): break`"
)


def trained(session: Session, like: int, steps: int = 6, asks: bool = True, zero: bool = False) -> None:
    """Rank 2 takes the data of rank `like`."""
    generator = torch.Generator().manual_seed(like if session.rank == 2 else session.rank)
    params = copied(START)
    optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    for _ in range(steps):
        set_gradients(params, [torch.randn(param.shape, generator=generator) * (not zero) for param in params])
        optimizer.step()
        if asks:
            session.should_stop()


@pytest.mark.parametrize(("sync", "via"), [("bsp", "ps"), ("bsp", "allreduce"), ("asp", "ps")])
@pytest.mark.parametrize("like", [0, 2], ids=["the same batches", "its own"])
def test_workers_that_push_the_same_gradients_are_named_once(sync: str, via: str, like: int) -> None:
    with ThreadJob(3, 2 if via == "ps" else 1, sync, via=via) as job:
        job.run(lambda session: trained(session, like, steps=1 if sync == "asp" else 6))
    assert job.notices in ([[], [ALIKE]] if (sync, like) == ("asp", 0) else [[ALIKE]] if like == 0 else [[]])


@pytest.mark.parametrize("like", [0, 2], ids=["the same batches", "its own"])
def test_the_same_without_a_sequencer(like: int, capfd: pytest.CaptureFixture[str]) -> None:
    with GroupJob(3) as job:
        job.run(lambda session: trained(session, like))
    said = [line for line in capfd.readouterr().err.splitlines() if "same gradient" in line]
    assert said == ([f"polytempo: {ALIKE}"] if like == 0 else [])


def test_gradients_that_say_nothing_are_not_compared() -> None:
    with ThreadJob(3) as job:
        job.run(lambda session: trained(session, 0, zero=True))
    assert job.notices == []
    missing = torch.nn.Parameter(torch.ones(3))
    sparse = torch.nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    assert gradient_digest([missing, sparse.weight]) == 0


@pytest.mark.parametrize(
    ("asks", "steps", "said"), [(False, 40, True), (False, 5, True), (False, 4, False), (True, 40, False)]
)
def test_a_budget_that_is_not_heeded_is_said(asks: bool, steps: int, said: bool) -> None:
    """At once after many steps beyond it, else at the end; not when the script ends with the budget."""
    with ThreadJob(2, limits=Limits(steps=8)) as job:
        job.run(lambda session: trained(session, 2, steps, asks))
    assert job.notices == ([UNHEEDED] if said else [])


def test_that_there_is_no_record_though_one_was_asked_for_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with ThreadJob(2, 1, record=tmp_path / "file" / "record") as job:
        job.run(lambda session: trained(session, 2))
    assert [notice for notice in job.notices if "record" in notice] == [
        f"cannot write {tmp_path}/file/record: Not a directory; the job goes on, its record is cut short"
    ]
