"""Ready-made training tasks: a model, its data, its loss and settings that suit them.

The 8x8 digits are in the package; Fashion-MNIST is read where it is installed.
"""

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

#: Inputs and targets.
TensorPair = tuple[torch.Tensor, torch.Tensor]
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
    momentum: float = 0.0  #: of SGD


def digits(seed: int = 0) -> TrainingTask:
    """A training task: 1,797 handwritten digits of 8 by 8 pixels, 360 of them for testing, and a perceptron with one hidden
    layer.

    Args:
        seed: Of the initial weights.

    Returns:
        Model, data, loss and suggested learning rate and target.
    """
    with files("polytempo").joinpath("data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.tensor(arrays["images"], dtype=torch.float32).flatten(1) / 16
        labels = torch.tensor(arrays["labels"], dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
    test, train = order[:360], order[360:]
    data = ((images[train], labels[train]), (images[test], labels[test]))
    return TrainingTask(_perceptron([64, 64, 10], seed), data, nn.functional.cross_entropy, lr=0.4, target=0.95, steps=240)


def fashion_mnist(seed: int = 0, folder: Path = FASHION_MNIST) -> TrainingTask:
    """A training task: 60,000 pictures of clothes of 28 by 28 pixels, 10,000 for testing, and a perceptron with one hidden
    layer.

    Args:
        seed: Of the initial weights.
        folder: Where the files of the data set are; by default where Debian's package puts them.

    Returns:
        Model, data, loss and suggested learning rate and target.

    Raises:
        UsageError: The files are not there.
    """
    data, loss = _clothes(folder), nn.functional.cross_entropy
    return TrainingTask(fashion_mnist_model(seed), data, loss, lr=0.2, target=0.87, steps=1600)


def fashion_mnist_model(seed: int) -> nn.Module:
    """The perceptron of `fashion_mnist`, without its data."""
    return _perceptron([784, 128, 10], seed)


def fashion_mnist_cnn(seed: int = 0, folder: Path = FASHION_MNIST) -> TrainingTask:
    """A training task: the pictures of `fashion_mnist`, and a small convolutional network with BatchNorm, for SGD with
    momentum. Forward and backward of 64 pictures take about 3 ms on one core.

    Args:
        seed: Of the initial weights.
        folder: As in `fashion_mnist`.

    Returns:
        Model, data, loss and suggested learning rate, momentum and target.

    Raises:
        UsageError: The files are not there.
    """
    data, loss = _clothes(folder), nn.functional.cross_entropy
    return TrainingTask(fashion_mnist_cnn_model(seed), data, loss, lr=0.05, target=0.87, steps=720, momentum=0.9)


def fashion_mnist_cnn_model(seed: int) -> nn.Module:
    """The network of `fashion_mnist_cnn`, without its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)), *_halving(1, 8), *_halving(8, 16), nn.Flatten(), nn.Linear(16 * 7 * 7, 10)
        )


def _halving(channels: int, filters: int) -> tuple[nn.Module, ...]:
    """A convolution that halves width and height, and what follows it."""
    return nn.Conv2d(channels, filters, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()


TASKS: dict[str, Callable[[int], TrainingTask]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "fashion-mnist-cnn": fashion_mnist_cnn,
}


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


def _clothes(folder: Path) -> tuple[TensorPair, TensorPair]:
    """Training and test data; pixels have mean 0 and deviation 1."""
    images = [torch.tensor(_idx(folder, f"{name}-images-idx3-ubyte"), dtype=torch.float32) for name in ("train", "t10k")]
    labels = [torch.tensor(_idx(folder, f"{name}-labels-idx1-ubyte"), dtype=torch.int64) for name in ("train", "t10k")]
    train, test = ((one.flatten(1) / 255 - 0.286) / 0.353 for one in images)
    return (train, labels[0]), (test, labels[1])


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
