"""Click-through prediction: categorical features whose embeddings live on the servers.

    polytempo run -n 2 --servers 2 --sync asp --samples 400000 examples/clicks.py
    polytempo run -n 2 --servers 2 --sync ssp:3 --samples 400000 examples/clicks.py
    python examples/clicks.py

A million people, 10,000 advertisements and 1,000 pages, some much more frequent than others. No worker holds a table: it
pulls the rows of its batch and pushes their gradients. The data has a hidden truth, one effect for each id, so at the end
we know the best that any model could do.
"""

import argparse
import math

import numpy as np
import torch
from torch import nn

import polytempo as pt

parser = argparse.ArgumentParser(description="Train a click model whose embeddings live on the servers.")
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--steps", type=int, default=800, help="of each worker, at most; a budget (--samples) ends earlier")
parser.add_argument("--lr", type=float, default=0.1, help="of the rows, which learn by row-wise Adagrad")
parser.add_argument("--held-out", type=int, default=50_000, help="samples to evaluate with")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

#: How many ids there are, and how much they matter.
FIELDS = {"person": (1_000_000, 0.5), "advertisement": (10_000, 2.0), "page": (1_000, 2.0)}
BASE = -1.5
HELD_OUT = 1 << 40  # samples from here on are never trained on
WORD = (1 << 64) - 1


def dice(seed: int, numbers: np.ndarray) -> np.ndarray:
    """A number from 0 to 1 for each of `numbers`: always the same one (splitmix64)."""
    words = numbers.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 & WORD)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return (words >> np.uint64(11)) * 2.0**-53


def samples(first: int, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Samples by their numbers: ids, whether there was a click, and the log odds of it that only the truth knows."""
    index = np.arange(first, first + count)
    ids, odds = {}, np.full(count, BASE)
    for number, (name, (rows, weight)) in enumerate(FIELDS.items()):
        seed = 100 * options.seed + 10 * number
        own = (rows ** dice(seed, index)).astype(np.int64) - 1  # Zipf's law: id k is met in proportion to 1 / (k + 1)
        odds += weight * (2 * dice(seed + 1, own) - 1)
        ids[name] = torch.from_numpy(own)
    clicks = dice(100 * options.seed + 99, index) < 1 / (1 + np.exp(-odds))
    return ids, torch.from_numpy(clicks).float(), torch.from_numpy(odds).float()


class ClickModel(nn.Module):
    """An embedding for each field, and a small network on top of them."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        # rows=None: any id from 0 to 2**63 - 1, and memory only for those that come. With a number of rows it is faster.
        tables = {
            name: pt.tables.ServerEmbedding(None if name == "person" else rows, dim, lr=options.lr, start="normal:0.01")
            for name, (rows, _) in FIELDS.items()
        }
        self.tables = nn.ModuleDict(tables)
        self.tower = nn.Sequential(nn.Linear(dim * len(FIELDS), 32), nn.ReLU(), nn.Linear(32, 1))

    def prefetch(self, ids: dict[str, torch.Tensor]) -> None:
        for name, table in self.tables.items():
            table.prefetch(ids[name])

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = [table(ids[name]) for name, table in self.tables.items()]
        return self.tower(torch.cat(rows, dim=1)).squeeze(1)


def area_under_curve(odds: torch.Tensor, clicks: torch.Tensor) -> float:
    """How often a sample with a click is rated above one without."""
    ranks = torch.empty(len(odds), dtype=torch.float64)
    ranks[odds.argsort()] = torch.arange(len(odds), dtype=torch.float64)
    positive = int(clicks.sum())
    return float((ranks[clicks > 0].sum() - positive * (positive - 1) / 2) / (positive * (len(clicks) - positive)))


def train() -> None:
    """Until the job's budget is used up, or the steps are. Batches are dealt out to the workers in turn."""
    ids, clicks, _ = samples(pt.rank() * options.batch, options.batch)
    for step in range(options.steps):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(ids), clicks).backward()
        ids, clicks, _ = samples(((step + 1) * pt.size() + pt.rank()) * options.batch, options.batch)
        model.prefetch(ids)  # these rows come with the answer to the push, as they are then
        optimizer.step(samples=options.batch)
        if pt.should_stop():
            return


def report() -> None:
    """On held-out samples: the model, the true probabilities, and a constant predictor."""
    ids, clicks, truth = samples(HELD_OUT, options.held_out)
    with torch.no_grad():
        odds = model(ids)
    base = torch.full_like(truth, math.log(clicks.mean() / (1 - clicks.mean())))
    for name, of in (("model", odds), ("truth", truth), ("base rate", base)):
        loss = nn.functional.binary_cross_entropy_with_logits(of, clicks)
        area = 0.5 if of is base else area_under_curve(of, clicks)
        print(f"{name:9}  log loss {float(loss):.4f}  AUC {area:.4f}")


torch.set_num_threads(1)
torch.manual_seed(options.seed)
pt.init()
model = ClickModel()
optimizer = pt.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.02), model)
train()
pt.barrier()  # the last push of every worker is in
if pt.rank() == 0:
    optimizer.consolidate()
    report()
    sent = optimizer.stats["bytes_sent"] / max(1, optimizer.stats["step"])
    print(f"{optimizer.stats['step']} steps of this worker, {sent / 1e3:.0f} KB sent a step")
pt.shutdown()
