"""What servers tell beside values: the model's manifest, and how far the workers' gradients are apart."""

from __future__ import annotations

import threading

import pytest
import torch
from sessions import under
from torch import nn

from polytempo.errors import UsageError
from polytempo.launcher.job_facts import JobFacts
from polytempo.session.script_calls import describe_model
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.server_embedding import ServerEmbedding
from polytempo.transport.buffer_pool import Arena, Pool
from polytempo.transport.shared_memory import SHARE_FROM, SharedMemoryRegistry


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ServerEmbedding(1000, 4)
        self.top = nn.Linear(4, 2)


def test_a_worker_learns_what_the_model_is_before_it_has_built_one() -> None:
    known = threading.Event()

    def work(session: Session) -> None:
        if session.rank == 1:  # it comes later, and knows nothing
            told = describe_model()
            assert [tensor["name"] for tensor in told["tensors"]] == ["top.weight", "top.bias"]
            assert told["tensors"][0] == {"name": "top.weight", "shape": [2, 4], "dtype": "float32", "group": 0}
            assert (told["optimizer"], told["sync"], told["groups"][0]["lr"]) == ("AsuP", "asup", 0.25)
            assert [(table["name"], table["rows"], table["dim"]) for table in told["tables"]] == [("rows", 1000, 4)]
            known.set()
        model = Model()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.top.parameters(), lr=0.25), model)
        assert known.wait(20)
        top = model.top(model.rows(torch.tensor([3, 5])))
        top.sum().backward()
        optimizer.step()

    with ThreadJob(2, 2, "asup") as job:
        job.run(work)


def test_alone_there_is_no_manifest() -> None:
    with pytest.raises(UsageError, match="polytempo run"):
        under(Session(None, JobFacts(1, ()), 0), describe_model)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_spread_of_gradients_is_measured_and_told(sync: str, servers: int) -> None:
    """Three workers push constant gradients: the spread is known."""
    given = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    mean = given.mean(0)
    expected = float(((given - mean) ** 2).sum(1).mean().sqrt() / mean.norm())
    together = threading.Barrier(3)

    def work(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(2 * servers))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
        for _ in range(16):
            weight.grad = given[session.rank].repeat(servers)
            optimizer.step()
            together.wait(20)
        return float(optimizer.stats["spread"])

    with ThreadJob(3, servers, sync) as job:
        told = job.run(work)
    assert job.summary["spread"] == pytest.approx(expected, rel=0.25 if sync == "asp" else 1e-6)
    assert max(told) > 0


def test_one_worker_has_no_spread() -> None:
    def work(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
        for _ in range(16):
            weight.grad = torch.ones(2)
            optimizer.step()
        return float(optimizer.stats["spread"])

    with ThreadJob(1, 1, "asp") as job:
        assert job.run(work) == [0.0]


def test_an_arena_uses_its_blocks_again() -> None:
    for pool in (Pool(), Pool(SharedMemoryRegistry())):
        arena = Arena(pool)
        first = arena.take(100)
        assert first.nbytes >= SHARE_FROM
        large = arena.take(3 * SHARE_FROM)
        assert large.nbytes == 4 * SHARE_FROM
        arena.give([first, large])
        assert arena.take(3 * SHARE_FROM + 1) is large
        assert arena.take(1) is first
        assert arena.take(1) is not first
