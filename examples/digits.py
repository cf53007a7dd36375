"""Handwritten digits, trained by several workers.

    polytempo run -n 4 --sync bsp     --samples 30720 examples/digits.py
    polytempo run -n 4 --sync ssp:3   --samples 30720 --slow 3:3 examples/digits.py
    polytempo run -n 4 --sync anytime:auto --samples 30720 --slow 3:3 examples/digits.py
    polytempo compare -n 4 --slow 3:3 --samples 30720 examples/digits.py

A plain PyTorch script; the lines that make it distributed are marked with a number.
"""

import argparse
import time

import torch
from torch import nn

import polytempo as pt
from polytempo.simulate import digits

parser = argparse.ArgumentParser(description="Train a small network on 1,797 handwritten digits.")
parser.add_argument("--batch", type=int, default=32, help="samples of a worker's step, on average")
parser.add_argument("--lr", type=float, default=0.4)
parser.add_argument("--compute", type=float, default=0.015, help="seconds such a step takes at least, as for a larger model")
parser.add_argument("--epochs", type=int, default=60, help="at most; a budget (--samples) ends earlier")
options = parser.parse_args()

torch.set_num_threads(1)
pt.init()  # 1: join the job of `polytempo run`; alone, a job of one

task = digits(seed=0)
(images, labels), (test_images, test_labels) = task.data
model = task.model
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
optimizer = pt.DistributedOptimizer(optimizer, model)  # 2: gradients go to the servers, new values come back

data = torch.utils.data.TensorDataset(images, labels)
sampler = pt.DistributedBatchSampler(data, options.batch, seed=0)  # 3: each worker its shard, by speed where the mode says
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)


def evaluate() -> float:
    """Accuracy of the job's model, not of this worker's copy."""
    optimizer.consolidate()
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def train() -> None:
    """Until the job's budget is used up, or the epochs are."""
    trained = evaluated = 0
    for _ in sampler.epochs(options.epochs):  # a resumed job goes on where it was
        for x, y in loader:
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            time.sleep(max(0.0, options.compute * len(x) / options.batch - (time.perf_counter() - began)))
            optimizer.step(samples=len(x))
            trained += len(x)
            if pt.rank() == 0 and trained >= evaluated + 5 * options.batch:
                evaluated = trained
                pt.log(accuracy=evaluate())
            if pt.should_stop():  # 4: the budget is the job's, not the worker's
                return


train()
if pt.rank() == 0:
    accuracy = evaluate()
    pt.log(accuracy=accuracy)
    print(f"accuracy {100 * accuracy:.1f} %")
pt.shutdown()
