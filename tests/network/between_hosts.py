"""One rank: all collectives, and what its links have sent."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch

import polytempo as pt
from polytempo.session import session

pt.init(timeout=float(os.environ.get("PATIENCE", "60")))
rank, size = pt.rank(), pt.size()
world = session.current().world()
here = next(host for host in world.hosts if rank in host)


def sent(away: bool = False) -> int:
    return sum(link.payload_sent for other, link in world.engine.messages.links.items() if not away or other not in here)


def tensor(of: int, length: int = 1000) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64) * (of + 1)


serial = sum(tensor(other) for other in range(size))
for algorithm in ("ring", "tree", "double-tree", "halving-doubling", "hierarchical", "auto"):
    x = tensor(rank)
    pt.all_reduce(x, algorithm=algorithm)
    assert torch.equal(x, serial), algorithm
parts = [torch.empty(1000, dtype=torch.float64) for _ in range(size)]
pt.all_gather(parts, tensor(rank))
assert all(torch.equal(part, tensor(other)) for other, part in enumerate(parts))
pt.all_to_all(parts, [tensor(rank) + other for other in range(size)])
assert all(torch.equal(part, tensor(other) + rank) for other, part in enumerate(parts))
x = tensor(rank)
pt.broadcast(x, size - 1)
assert torch.equal(x, tensor(size - 1))
out = torch.empty(1000, dtype=torch.float64)
pt.reduce_scatter(out, [tensor(rank)] * size)
assert torch.equal(out, serial)
handle = pt.isend(tensor(rank), (rank + 1) % size, tag=3)
assert pt.recv(out, (rank - 1) % size, tag=3) == (rank - 1) % size
handle.wait()
assert torch.equal(out, tensor((rank - 1) % size))
pt.barrier()

length = 60_000 * size
said: dict[str, Any] = {"n": length * 4}
x = torch.rand(length, generator=torch.Generator().manual_seed(rank))
before = sent()
y = x.clone()
pt.all_reduce(y, algorithm="ring")
said["ring"] = sent() - before
pt.barrier()
before = sent(away=True)
y = x.clone()
pt.all_reduce(y, algorithm="hierarchical")
said["hierarchical away"] = sent(away=True) - before
said["bits"] = hashlib.sha256(y.numpy().tobytes()).hexdigest()
said["choice"] = pt.explain_algorithm("all_reduce", 25_000_000).algorithm
pt.barrier()
print(json.dumps(said))
