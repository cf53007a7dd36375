"""A deep network that is cut into as many stages as there are processes.

    python examples/pipeline.py                                              one process: not cut
    polytempo run -n 4 examples/pipeline.py                                  four stages, one in each process
    polytempo run -n 4 examples/pipeline.py --schedule gpipe --microbatches 16
    polytempo run -n 4 examples/pipeline.py --record out/pipeline            and what each stage did, when

A plain PyTorch script; the lines that cut the model are marked with a number. With a schedule that flushes, the result is
the same however many processes there are, to rounding; `pipedream` does not flush: its gradients are of older weights, which
momentum and high rates do not forgive.
"""

import argparse

import torch
from torch import nn

import polytempo as pt
from polytempo.simulate import digits

parser = argparse.ArgumentParser(description="Train a deep network, cut into stages, on 1,797 handwritten digits.")
parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe, sequential or pipedream")
parser.add_argument("--microbatches", type=int, default=4, help="that a batch is cut into; pipedream moves whole batches")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--blocks", type=int, default=8)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--record", help="a folder for what each stage did, when: `polytempo picture` draws it")
options = parser.parse_args()


class Block(nn.Module):
    """Adds to its input what two layers make of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.change(x)


torch.set_num_threads(1)
torch.manual_seed(0)  # every process makes the same model, and keeps its part of it
pt.init()  # 1: join the job of `polytempo run`; alone, be a job of one

(images, labels), (test_images, test_labels) = digits(seed=0).data
blocks = [Block(options.width) for _ in range(options.blocks)]
model = nn.Sequential(nn.Linear(64, options.width), *blocks, nn.LayerNorm(options.width), nn.Linear(options.width, 10))

pipe = pt.Pipeline(  # 2: a stage for each process
    model,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=options.lr),
    schedule=options.schedule,
    microbatches=None if options.schedule.startswith("pipedream") else options.microbatches,
)

for epoch in range(options.epochs):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for chosen in order[: len(order) // options.batch * options.batch].split(options.batch):
        loss = pipe.step(images[chosen], labels[chosen])  # 3: forward, backward and update of all stages
    if pt.rank() == 0 and loss is not None and (epoch + 1) % 4 == 0:
        print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
rest = pipe.flush()  # 4: batches that are still on their way, where the schedule leaves any
loss = rest if rest is not None else loss

if options.record:
    pipe.record(options.record)
scores = pipe.predict(test_images)  # 5: forwards alone; all ranks call this, and the last stage has the result
if scores is not None:
    accuracy = float((scores.argmax(1) == test_labels).float().mean())
    print(f"{pt.size()} stages: loss {loss:.4f}, accuracy {100 * accuracy:.1f} %")
pt.shutdown()
