"""Ready-made tasks: the 8x8 digits, which travel in the package, and Fashion-MNIST, where it is installed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from polytempo.errors import UsageError, nearest
from polytempo.simulate.sharded_data import TensorPair

#: Where Debian's package dataset-fashion-mnist puts its files.
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class TrainingTask:
    """A model, its data, its loss and settings that suit them."""

    model: nn.Module
    data: tuple[TensorPair, TensorPair]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    lr: float
    target: float  #: the accuracy whose time is compared
    steps: int  #: of each worker, on average, to get there


def digits(seed: int = 0) -> TrainingTask:
    """1,797 handwritten digits of 8 by 8 pixels, 360 of them for testing; a network of one hidden layer."""
    with files("polytempo").joinpath("data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.tensor(arrays["images"], dtype=torch.float32).flatten(1) / 16
        labels = torch.tensor(arrays["labels"], dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
    test, train = order[:360], order[360:]
    data = ((images[train], labels[train]), (images[test], labels[test]))
    return TrainingTask(_perceptron([64, 64, 10], seed), data, nn.functional.cross_entropy, lr=0.4, target=0.95, steps=240)


def fashion_mnist(seed: int = 0, folder: Path = FASHION_MNIST) -> TrainingTask:
    """60,000 pictures of clothes of 28 by 28 pixels, 10,000 for testing; a network of one hidden layer."""
    train = _idx_images(folder, "train-images-idx3-ubyte"), _idx_labels(folder, "train-labels-idx1-ubyte")
    test = _idx_images(folder, "t10k-images-idx3-ubyte"), _idx_labels(folder, "t10k-labels-idx1-ubyte")
    return TrainingTask(
        _perceptron([784, 128, 10], seed),
        (train, test),
        nn.functional.cross_entropy,
        lr=0.2,
        target=0.87,
        steps=1600,
    )


TASKS: dict[str, Callable[[int], TrainingTask]] = {"digits": digits, "fashion-mnist": fashion_mnist}


def find_task(name: str) -> Callable[[int], TrainingTask]:
    """The maker of a task by its name."""
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}; known: {', '.join(TASKS)}{nearest(name, TASKS)}")
    return TASKS[name]


def _perceptron(widths: list[int], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _idx_images(folder: Path, name: str) -> torch.Tensor:
    return (torch.tensor(_idx(folder, name), dtype=torch.float32).flatten(1) / 255 - 0.286) / 0.353  # mean 0, deviation 1


def _idx_labels(folder: Path, name: str) -> torch.Tensor:
    return torch.tensor(_idx(folder, name), dtype=torch.int64)


def _idx(folder: Path, name: str) -> np.ndarray:
    """An array in the IDX format: two zero bytes, type 8 (bytes), the number of dimensions, their sizes, the values."""
    path = next((p for p in (folder / f"{name}.gz", folder / name) if p.exists()), None)
    if path is None:
        raise UsageError(f"{name} is not in {folder}; on Debian: apt-get install dataset-fashion-mnist")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise UsageError(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape).copy()
