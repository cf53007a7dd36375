"""A worker with one large parameter, which prints how much memory it and the server took beyond the start, in megabytes."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

import polytempo as pt
from polytempo.parameter_server.optimizers import spare_dynamo

MEGABYTES = 48


def memory(pid: int | str, what: str) -> float:
    return int(re.findall(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


spare_dynamo()
torch.set_num_threads(1)
pt.init()
me = psutil.Process()
server = next(p.pid for p in me.parent().children() if "polytempo.launch.server_process" in p.cmdline())
server_before = memory(server, "VmRSS")
parameter = torch.nn.Parameter(torch.zeros(MEGABYTES << 18))
parameter.grad = torch.ones_like(parameter)
before = memory("self", "VmRSS")
optimizer = pt.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
for _ in range(6):
    optimizer.step()
print(f"worker {memory('self', 'VmHWM') - before:.0f}")
if pt.rank() == 0:
    print(f"server {memory(server, 'VmHWM') - server_before:.0f}")
