"""Run by `test_cuda.py`: tables, filters and Downpour with models on a GPU have the same numbers as on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import polytempo as pt
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

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


def train(sync: str, device: str, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    first = Model()

    def work(session: Session) -> torch.Tensor:
        model = copy.deepcopy(first).to(device)
        optimizer = DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.05), model, **options)
        x, y = X[session.rank :: WORKERS].to(device), Y[session.rank :: WORKERS].to(device)
        for _ in range(20):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            model.served.prefetch(x)
            optimizer.step()
        optimizer.consolidate()
        with torch.no_grad():
            result: torch.Tensor = model(X.to(device)).cpu()
        return result

    with ThreadJob(WORKERS, 2, sync) as job:
        return job.run(work)[0]


if __name__ == "__main__":
    assert torch.cuda.is_available(), "there is no GPU here"
    for options in ({}, {"compression": "topk:0.2"}, {"compression": {"push": "bf16"}}):
        apart = (train("bsp", "cuda", **options) - train("bsp", "cpu", **options)).abs().max()
        print(f"bsp {options}: {apart:.1e} apart")
        assert apart < 1e-3
    for sync in ("asp", "downpour:push=2,fetch=2", "delay:2"):
        loss = ((train(sync, "cuda") - Y) ** 2).mean()
        print(f"{sync}: loss {loss:.3f}, at first about {float((Y**2).mean()):.2f}")
        assert loss < (Y**2).mean()
    print("tables: as on the CPU")
