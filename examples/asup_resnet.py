"""ASU-P: a small ResNet with batch norm, trained by workers of which one is three times slower.

    polytempo run -n 4 --slow 3:3 --sync asup --samples 20000 examples/asup_resnet.py
    polytempo run -n 4 --slow 3:3 --sync asup,bound=3 --samples 20000 examples/asup_resnet.py
    polytempo run -n 4 --slow 3:3 --sync bsp --samples 20000 examples/asup_resnet.py --lr 0.5

The mode `asup` brings its own update rule: of the optimizer below it takes the learning rate. The running statistics of
batch norm stay with each worker, so at the end there is a choice of three to evaluate with.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import polytempo as pt
from polytempo.simulate import digits, fashion_mnist

parser = argparse.ArgumentParser(description="Train a small ResNet on 1,797 handwritten digits, or on Fashion-MNIST.")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--epochs", type=int, default=60, help="at most; a budget (--samples) ends earlier")
parser.add_argument("--fashion-mnist", type=Path, metavar="FOLDER", help="with the four files of Fashion-MNIST")
options = parser.parse_args()


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(width, width), nn.ReLU(), *convolution(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def convolution(before: int, after: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after)


def resnet() -> nn.Module:
    first = nn.Sequential(*convolution(1, 8, 2), nn.ReLU(), Block(8))
    second = nn.Sequential(*convolution(8, 16, 2), nn.ReLU(), Block(16))
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


torch.set_num_threads(1)
torch.manual_seed(0)
pt.init()

task = fashion_mnist(folder=options.fashion_mnist) if options.fashion_mnist else digits()
side = 28 if options.fashion_mnist else 8
(images, labels), (test_images, test_labels) = [(x.view(-1, 1, side, side), y) for x, y in task.data]

model = resnet()
optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=options.lr), model)
data = torch.utils.data.TensorDataset(images, labels)
sampler = pt.DistributedSampler(data, seed=0)
loader = torch.utils.data.DataLoader(data, options.batch, sampler=sampler, drop_last=True)


def accuracy() -> float:
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def train() -> None:
    """Until the job's budget is used up, or the epochs are."""
    for _ in sampler.epochs(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step(samples=len(x))
            if pt.should_stop():
                return


train()
pt.barrier()  # the slow worker's last push is in, too
optimizer.consolidate()
model.eval()
some = images[torch.randperm(len(images))].split(128)[:10]  # for new statistics: batches of the training data
for how in ("worker", "merged", "recalibrated"):
    with pt.evaluation_statistics(model, how, batches=some):  # the first two are collective
        if pt.rank() == 0:
            print(f"statistics {how:12}  accuracy {100 * accuracy():.1f} %")
pt.shutdown()
