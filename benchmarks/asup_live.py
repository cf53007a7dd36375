"""The script of a live comparison: digits by the rule of ASU-P, under whatever mode the job has.

polytempo compare -n 4 --slow 3:3 --samples 24576 --sync bsp --sync asup --sync asup,momentum=async benchmarks/asup_live.py

Under `bsp` the servers run the same rule on the mean. A step is stretched to that of a larger model, so that it is the mode
and not the network that is compared.
"""

import argparse
import time

import torch
from torch import nn

import polytempo as pt
from polytempo.tasks import digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--compute", type=float, default=0.015, help="seconds a step takes at least")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
pt.init()
task = digits(seed=0)
(images, labels), (test_images, test_labels) = task.data
model = task.model
optimizer = pt.DistributedOptimizer(pt.AsuP(model.parameters(), lr=options.lr), model, via="ps")
data = torch.utils.data.TensorDataset(images, labels)
sampler = pt.DistributedSampler(data, seed=0)
loader = torch.utils.data.DataLoader(data, options.batch, sampler=sampler)


def look() -> None:
    """The accuracy of the job's model, for the record."""
    optimizer.consolidate()
    with torch.no_grad():
        pt.log(accuracy=float((model(test_images).argmax(1) == test_labels).float().mean()))


def train() -> None:
    """Until the job's budget is used up."""
    steps = 0
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            began = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(max(0.0, options.compute - (time.perf_counter() - began)))
            optimizer.step(samples=len(x))
            steps += 1
            if pt.rank() == 0 and steps % 5 == 0:
                look()
            if pt.should_stop():
                return


train()
if pt.rank() == 0:
    look()
pt.shutdown()
