"""Plain torch.distributed: blocking messages, messages with wait, a sum in a group. Only the back end's name is ours."""

from __future__ import annotations

import torch
import torch.distributed as dist

import polytempo  # noqa: F401  its name is known from here on

dist.init_process_group("polytempo")
rank = dist.get_rank()

tensor = torch.zeros(1)
if rank == 0:
    tensor += 1
    dist.send(tensor=tensor, dst=1)
elif rank == 1:
    dist.recv(tensor=tensor, src=0)
    assert tensor.item() == 1.0

if rank == 0:
    request = dist.isend(tensor=tensor + 1, dst=1)
    request.wait()
elif rank == 1:
    request = dist.irecv(tensor=tensor, src=0)
    request.wait()
    assert tensor.item() == 2.0

group = dist.new_group([0, 1])
tensor = torch.ones(1)
if rank < 2:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    assert tensor.item() == 2.0
dist.destroy_process_group()
print(f"done {rank}\n", end="")  # one write: lines of several ranks stay whole where output is not buffered
