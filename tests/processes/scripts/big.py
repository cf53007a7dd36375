"""A worker with one large parameter, which prints how much memory it and the server took beyond the start, in megabytes.

Memory that several processes map is counted in equal shares (proportional set size), so that the sum over all processes is
what they really take. Shares change when others come and go: it is looked at again and again between the end of the first
step and the beginning of the last, while everybody is there.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import psutil
import torch

import polytempo as pt

MEGABYTES = 48
STEPS = 6


def memory(pid: int) -> float:
    return int(re.findall(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[0]) / 1024


class Watch(threading.Thread):
    """The most that each of some processes has, as long as it is watched."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.most = dict.fromkeys(pids, 0.0)
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.002):
            self.look()

    def look(self) -> None:
        for pid, most in self.most.items():
            self.most[pid] = max(most, memory(pid))

    def end(self) -> None:
        self._over.set()
        self.join()
        self.look()


torch.set_num_threads(1)
pt.init()
small = torch.nn.Parameter(torch.zeros(1))
small.grad = torch.ones(1)
torch.optim.SGD([small], lr=0.1).step()  # what torch loads in the first step of any optimizer is not counted
me = psutil.Process()
server = next(p.pid for p in me.parent().children() if "polytempo.launcher.server_process" in p.cmdline())
parameter = torch.nn.Parameter(torch.zeros(MEGABYTES << 18))
parameter.grad = torch.ones_like(parameter)
before = {pid: memory(pid) for pid in (me.pid, server)}
optimizer = pt.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
optimizer.step()
watch = Watch([me.pid, server])
for _ in range(STEPS - 2):
    optimizer.step()
watch.end()
optimizer.step()
print(f"worker {watch.most[me.pid] - before[me.pid]:.0f}")
if pt.rank() == 0:
    print(f"server {watch.most[server] - before[server]:.0f}")
