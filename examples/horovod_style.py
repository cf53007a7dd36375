"""Handwritten digits, trained by a Horovod script: only the import was changed.

    polytempo run -n 4 examples/horovod_style.py
    torchrun --nproc-per-node 4 examples/horovod_style.py
    mpirun -n 4 python examples/horovod_style.py

Gradients are averaged over all workers while backward makes them; docs/from-horovod.md says what is offered.
"""

import argparse

import torch
from torch import nn

import polytempo.horovod as hvd  # was: import horovod.torch as hvd
from polytempo.simulate import digits

parser = argparse.ArgumentParser(description="Train a small network on 1,797 handwritten digits.")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.1, help="of one worker; it is multiplied by their number")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--fp16", action="store_true", help="send gradients as numbers of 16 bits")
options = parser.parse_args()

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())

task = digits(seed=hvd.rank())  # models that begin differently; rank 0's wins below
(images, labels), (test_images, test_labels) = task.data
model = task.model
data = torch.utils.data.TensorDataset(images, labels)
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, options.batch, sampler=sampler)

optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if options.fp16 else hvd.Compression.none,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def evaluate() -> float:
    """Accuracy in percent, each worker on its share of the test data."""
    share = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        right = (model(test_images[share]).argmax(1) == test_labels[share]).sum()
    counts = hvd.allreduce(torch.tensor([int(right), len(test_labels[share])]), op=hvd.Sum, name="counts")
    return 100 * int(counts[0]) / int(counts[1])


for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
accuracy = evaluate()
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.1f} %")
