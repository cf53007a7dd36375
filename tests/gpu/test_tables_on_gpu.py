"""Tables for models on a GPU: the numbers of the CPU, the manners of `nn.Embedding`, and rows that come ahead of time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(120),
]

WORKERS = 2
X = torch.randint(0, 50, (64, 3), generator=torch.Generator().manual_seed(0))
Y = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.served = pt.tables.ServerEmbedding(50, 4, rule="adagrad", lr=0.1)
        self.mirrored = nn.Embedding(50, 4, sparse=True)
        self.top = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.top(torch.cat([self.served(ids).sum(1), self.mirrored(ids).sum(1)], 1))
        return result


def train(sync: str, device: str, ahead: bool = True, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    first = Model()

    def work(session: Session) -> torch.Tensor:
        model = copy.deepcopy(first).to(device)
        optimizer = DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.05), model, **options)
        x, y = X[session.rank :: WORKERS].to(device), Y[session.rank :: WORKERS].to(device)
        for _ in range(20):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            if ahead:
                model.served.prefetch(x)
            optimizer.step()
        optimizer.consolidate()
        with torch.no_grad():
            result: torch.Tensor = model(X.to(device)).cpu()
        return result

    with ThreadJob(WORKERS, 2, sync) as job:
        return job.run(work)[0]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("options", [{}, {"compression": "topk:0.2"}, {"compression": {"push": "bf16"}}], ids=str)
def test_rounds_on_a_gpu_have_the_numbers_of_the_cpu(options: dict[str, Any], ahead: bool) -> None:
    apart = (train("bsp", "cuda", ahead, **options) - train("bsp", "cpu", ahead, **options)).abs().max()
    assert apart < 1e-3


@pytest.mark.parametrize("sync", ["asp", "downpour:push=2,fetch=2", "delay:2"])
def test_tables_on_a_gpu_learn_in_modes_without_rounds(sync: str) -> None:
    assert ((train(sync, "cuda") - Y) ** 2).mean() < (Y**2).mean()


# The manners of nn.Embedding.


def on_one_worker(work: Callable[[Session], None], sync: str = "bsp") -> None:
    with ThreadJob(1, 2, sync) as job:
        job.run(work)


@contextmanager
def unsynchronised() -> Iterator[None]:
    """torch raises where the host waits for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it may not see every wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("padding", [None, 0, 7])
@pytest.mark.parametrize("mode", [None, "sum", "mean"])
def test_a_server_embedding_on_a_gpu_is_an_embedding(padding: int | None, mode: str | None) -> None:
    def work(session: Session) -> None:
        served = pt.tables.ServerEmbedding(20, 4, rule="sgd", lr=0.5, padding_idx=padding, mode=mode).cuda()
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1).cuda())]), served)
        rows = served.pull(torch.arange(20)).clone()
        if padding is not None:
            rows[padding] = 0
        plain: Any = nn.Embedding(20, 4, padding_idx=padding)
        if mode is not None:
            plain = nn.EmbeddingBag(20, 4, mode=mode, padding_idx=padding)
        plain = plain.cuda()
        plain.weight.data.copy_(rows)
        stepped = torch.optim.SGD(plain.parameters(), lr=0.5)
        ids = torch.tensor([[7, 0, 3], [3, 19, 7]]).cuda()
        for given in (ids, ids.cpu(), ids.int()):
            out, wanted = served(given), plain(ids)
            assert out.device == wanted.device
            torch.testing.assert_close(out, wanted)
            stepped.zero_grad()
            for one in (out, wanted):
                (one**2).sum().backward()
            optimizer.step()
            stepped.step()
            optimizer.zero_grad()
            now = served.pull(torch.arange(20))
            kept = [one for one in range(20) if one != padding]
            torch.testing.assert_close(now[kept], plain.weight.detach().cpu()[kept])
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert served(ids).dtype == plain(ids).dtype
        with pytest.raises(pt.UsageError, match="got 20"):
            served(torch.tensor([3, 20]).cuda())
        if mode is None:
            assert served(torch.empty(0, 3, dtype=torch.int64, device="cuda")).shape == (0, 3, 4)

    on_one_worker(work)


def test_several_forwards_in_a_step_are_added_up_on_the_gpu() -> None:
    def work(session: Session) -> None:
        served = pt.tables.ServerEmbedding(20, 4, rule="sgd", lr=0.5, start="zeros").cuda()
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1).cuda())]), served)
        for ids in ([1, 2, 2], [2, 5], [1]):
            served(torch.tensor(ids).cuda()).sum().backward()
        optimizer.step()
        moved = served.pull(torch.arange(6))[:, 0]
        assert moved.tolist() == [0.0, -1.0, -1.5, 0.0, 0.0, -0.5]

    on_one_worker(work)


# Ahead of time.


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:2"])
def test_prefetched_rows_have_this_workers_own_push_and_are_used_without_a_wait_for_the_gpu(sync: str) -> None:
    def work(session: Session) -> None:
        served = pt.tables.ServerEmbedding(1000, 16, rule="sgd", lr=0.5).cuda()
        optimizer = DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1).cuda())]), served)
        batches = [torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(n)).cuda() for n in range(6)]
        served(batches[0]).sum().backward()
        for number, following in enumerate(batches[1:]):
            served.prefetch(following)
            optimizer.step()
            optimizer.zero_grad()
            wanted = served.pull(following)
            with unsynchronised():
                out = served(following)
                out.sum().backward()
            assert torch.equal(out.detach().cpu(), wanted), number

    on_one_worker(work, sync)
