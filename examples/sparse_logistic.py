"""Sparse logistic regression: few of many features matter, and an L1 penalty finds them. No neural network.

    polytempo run -n 2 --servers 2 --sync delay:4 examples/sparse_logistic.py
    polytempo run -n 2 --servers 2 --sync bsp examples/sparse_logistic.py
    python examples/sparse_logistic.py

This is the delayed block proximal gradient method of the Parameter Server (Li et al., OSDI 2014). Examples are on the
workers, weights on the servers. A worker goes through the features block by block: it pulls the block's weights, pushes its
gradient there, and the servers take the proximal step, which makes weights exactly zero. Under `delay:4` the worker goes on
while up to four of its pushes are under way.

All of it is done twice, the second time with the paper's filters: a list of features that was sent before goes as a digest
(key caching), and what would not move a weight away from zero is not sent at all (KKT).
"""

import argparse
from dataclasses import dataclass

import torch

import polytempo as pt
from polytempo.compression.sparsification import kkt_keep

parser = argparse.ArgumentParser(description="Sparse logistic regression by proximal gradient steps on the servers.")
parser.add_argument("--features", type=int, default=20_000)
parser.add_argument("--examples", type=int, default=100_000)
parser.add_argument("--matter", type=int, default=500, help="features that have a weight")
parser.add_argument("--passes", type=int, default=40, help="over all blocks of features")
parser.add_argument("--blocks", type=int, default=8)
parser.add_argument("--l1", type=float, default=40.0, help="the penalty for a weight of 1")
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

FILLED = 50  # features that an example has
PARTS = 16  # of the data, dealt out to the workers: it is the same data for any number of them


def truth() -> torch.Tensor:
    """The weights behind the data: 1.5 to 2.5, or -1.5 to -2.5, for features that matter, and 0 for all others."""
    dice = torch.Generator().manual_seed(options.seed)
    weights = torch.zeros(options.features)
    chosen = torch.randperm(options.features, generator=dice)[: options.matter]
    signs = torch.randint(2, (options.matter,), generator=dice) * 2 - 1
    weights[chosen] = signs * (1.5 + torch.rand(options.matter, generator=dice))
    return weights


def examples(part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A part of the data: the features of each example, their values (1 or -1), and a label drawn by the truth."""
    dice = torch.Generator().manual_seed(1000 * (options.seed + 1) + part)
    shape = options.examples // PARTS, FILLED
    features = torch.randint(options.features, shape, generator=dice)
    values = torch.randint(2, shape, generator=dice) * 2.0 - 1
    odds = (truth()[features] * values).sum(1)
    return features, values, (torch.rand(len(odds), generator=dice) < odds.sigmoid()).float()


@dataclass
class Block:
    """What this worker's examples have of some features: a value for each pair of example and feature."""

    features: torch.Tensor  # those that occur, ascending
    places: torch.Tensor  # of each value: which of these features
    examples: torch.Tensor  # of each value: which example
    values: torch.Tensor
    weights: torch.Tensor  # as they were last pulled


def blocks_of(features: torch.Tensor, values: torch.Tensor) -> list[Block]:
    blocks = []
    for number in range(options.blocks):
        where, column = (features % options.blocks == number).nonzero(as_tuple=True)
        own, places = torch.unique(features[where, column], return_inverse=True)
        blocks.append(Block(own, places, where, values[where, column], torch.zeros(len(own))))
    return blocks


class Worker:
    """Its examples, and the log odds that it gives them with the weights it knows."""

    def __init__(self) -> None:
        features, values, labels = zip(*(examples(part) for part in range(pt.rank(), PARTS, pt.size())), strict=True)
        self.labels = torch.cat(labels)
        self.blocks = blocks_of(torch.cat(features), torch.cat(values))
        self.odds = torch.zeros(len(self.labels))

    def take(self, block: Block, weights: torch.Tensor) -> None:
        """Newer weights of a block."""
        change = (weights - block.weights)[block.places]
        self.odds.index_add_(0, block.examples, block.values * change)
        block.weights = weights

    def gradient(self, block: Block) -> torch.Tensor:
        """Of the loss of all examples of the job, as far as this worker can tell: its own, times the workers."""
        errors = (self.odds.sigmoid() - self.labels)[block.examples] * block.values
        return torch.zeros(len(block.features)).index_add_(0, block.places, errors) * pt.size()

    def objective(self, weights: torch.Tensor) -> float:
        """Of these weights and all examples."""
        for block in self.blocks:
            self.take(block, weights[block.features])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.odds, self.labels, reduction="sum").double()
        pt.all_reduce(loss)
        return float(loss + options.l1 * weights.abs().sum())


def learn(filters: bool) -> None:
    """From zero to the end, and what came of it."""
    worker, array = (
        Worker(),
        pt.tables.Array(options.features, rule="prox", lr=options.lr, l1=options.l1, cache_keys=filters),
    )
    kv = pt.tables.KV({"weights": array})
    asked = sent = 0
    before = kv.stats["bytes_sent"] + kv.stats["bytes_received"]
    for _ in range(options.passes):
        for block in worker.blocks:
            worker.take(block, kv["weights"].pull(rows=block.features).result())
            gradient = worker.gradient(block)
            # A gradient within the penalty leaves a weight at zero. Weights may have changed meanwhile, so stay below it.
            keep = kkt_keep(block.weights, gradient, 0.9 * options.l1) if filters else torch.ones(len(gradient)).bool()
            kv["weights"].push(gradient[keep], rows=block.features[keep])
            asked, sent = asked + len(keep), sent + int(keep.sum())
    kv.finish()
    traffic = kv.stats["bytes_sent"] + kv.stats["bytes_received"] - before
    pt.barrier()  # the last push of every worker is in
    report(worker, kv["weights"].pull().result(), filters, 1 - sent / asked, traffic)


def report(worker: Worker, weights: torch.Tensor, filters: bool, skipped: float, traffic: int) -> None:
    objective, start = worker.objective(weights), worker.objective(torch.zeros_like(weights))
    found, right = weights != 0, truth() != 0
    if pt.rank() == 0:
        print(
            f"{'with filters' if filters else 'without filters'}: objective {objective:.0f} ({start:.0f} at zero),", end=" "
        )
        print(f"{int(found.sum())} weights not zero, {int((found & right).sum())} of the true {int(right.sum())},", end=" ")
        print(f"{100 * skipped:.1f} % of entries skipped, {traffic / 1e6:.2f} MB of this worker")


torch.set_num_threads(1)
pt.init()
learn(filters=False)
learn(filters=True)
pt.shutdown()
