"""A script as Horovod's own examples are, in which only the import was changed. Usage: horovod_classic.py FOLDER"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

import polytempo.horovod as hvd  # was: import horovod.torch as hvd

hvd.init()
torch.manual_seed(42 + hvd.rank())  # models begin differently; broadcast_parameters makes them alike
torch.set_num_threads(1)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())  # ranks may share one

generator = torch.Generator().manual_seed(7)
dataset = torch.utils.data.TensorDataset(
    torch.randn(96, 10, generator=generator), torch.randint(0, 3, (96,), generator=generator)
)
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
compression = hvd.Compression.fp16 if "fp16" in sys.argv else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
if hvd.rank() == 0:
    torch.save(model.state_dict(), f"{sys.argv[1]}/start.pt")


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


for epoch in range(3):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    average = metric_average(loss.item(), "avg_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: {average:.4f}")
torch.save(model.state_dict(), f"{sys.argv[1]}/end-{hvd.rank()}.pt")
