"""The script of `benchmarks/gpu_asup.py`: a small convolutional network on Fashion-MNIST, by the rule of ASU-P in any mode.

Under `bsp` the servers run the same rule on the mean of all workers. A step is stretched to that of a larger model, so that
the modes are compared and not how four processes share one GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

import polytempo as pt
from polytempo.tasks import fashion_mnist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="the folder with the four files of Fashion-MNIST")
parser.add_argument("--device", default="cuda")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--compute", type=float, default=0.01, help="seconds a step takes at least")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()


def network() -> nn.Module:
    layers = (
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    return nn.Sequential(*layers)


torch.set_num_threads(1)
torch.manual_seed(options.seed)
pt.init()
device = torch.device(options.device)
(images, labels), (test_images, test_labels) = [
    (x.view(-1, 1, 28, 28).to(device), y.to(device)) for x, y in fashion_mnist(folder=options.data).data
]
model = network().to(device)
optimizer = pt.DistributedOptimizer(pt.AsuP(model.parameters(), lr=options.lr), model, via="ps")
sampler = pt.DistributedSampler(range(len(images)), seed=options.seed)


def train() -> None:
    """Until the job's budget is used up."""
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for chosen in torch.tensor(list(sampler), device=device).split(options.batch):
            began = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            time.sleep(max(0.0, options.compute - (time.perf_counter() - began)))
            optimizer.step(samples=len(chosen))
            if pt.should_stop():
                return


pt.barrier()
began = time.monotonic()
train()
seconds = time.monotonic() - began
pt.barrier()  # the slow worker's last push is in, too
optimizer.consolidate()
if pt.rank() == 0:
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in test_images.split(2000)])
    accuracy = float((found == test_labels).float().mean())
    print("result " + json.dumps({"seconds": seconds, "accuracy": accuracy}), flush=True)
pt.shutdown()
