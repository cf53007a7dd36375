"""ResNet-50: a plain PyTorch loop, and the two lines that make it distributed. It reports images a second of all ranks.

    python examples/resnet50.py --way plain                                       one process, no communication
    polytempo run -n 2 --sync asp examples/resnet50.py --batch 64                 over a parameter server
    polytempo run -n 2 --sync bsp examples/resnet50.py --batch 64                 by all-reduce
    torchrun --nproc-per-node 2 examples/resnet50.py --way ddp --backend gloo     DistributedDataParallel
    torchrun --nproc-per-node 2 examples/resnet50.py --way plain                  two processes that only share the GPU

Images are random numbers, or those of a folder with one subfolder for each class (`--images DIR`, needs torchvision). On a
GPU it computes in bfloat16 with channels last. Ranks start together; images are counted from the moment at which the last
rank has warmed up until the first has finished.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
#: Steps that the host may be ahead of its GPU.
AHEAD = 2


class Bottleneck(nn.Module):
    """Three convolutions and a way around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(*convolution(before, width, 1), nn.ReLU(inplace=True)),
            *(*convolution(width, width, 3, stride), nn.ReLU(inplace=True)),
            *convolution(width, after, 1),
        )
        same = before == after and stride == 1
        self.around = nn.Identity() if same else nn.Sequential(*convolution(before, after, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.body(x) + self.around(x))


def convolution(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)


def resnet50(classes: int = 1000) -> nn.Module:
    """torchvision's where it is installed, else one of the same 25.6 million parameters."""
    try:
        import torchvision
    except ImportError:
        layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        before = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(before, width, stride if block == 0 else 1))
                before = 4 * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    model: nn.Module = torchvision.models.resnet50(num_classes=classes)
    return model


def synthetic(batch: int, side: int, device: torch.device) -> Iterator[Batch]:
    """The same random images again and again, on the device: what is measured is the training, not the loading."""
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device)
    while True:
        yield images, labels


def from_folder(folder: str, batch: int, side: int, device: torch.device, place: tuple[int, int]) -> Iterator[Batch]:
    """Images of a folder with a subfolder for each class: each rank has its part of them, in an order of its own epoch."""
    from torchvision import datasets, transforms

    steps = transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), transforms.ToTensor()
    data = datasets.ImageFolder(folder, transforms.Compose(steps))
    rank, size = place
    sampler = torch.utils.data.DistributedSampler(data, size, rank, shuffle=True, drop_last=True)
    loader = torch.utils.data.DataLoader(
        data, batch, sampler=sampler, num_workers=4, pin_memory=device.type == "cuda", drop_last=True
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield images, labels.to(device, non_blocking=True)
        epoch += 1


class StepClock:
    """When each step was done: on a GPU when the GPU has done it, which the host notices up to `AHEAD` steps later."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self._cuda = device.type == "cuda"
        self._pending: list[torch.cuda.Event] = []

    def tick(self) -> None:
        """A step has been given to the device."""
        if not self._cuda:
            self.times.append(time.monotonic())
            return
        event = torch.cuda.Event()
        event.record()
        self._pending.append(event)
        if len(self._pending) > AHEAD:
            self._note()

    def finish(self) -> list[float]:
        """The times of all steps."""
        while self._pending:
            self._note()
        return self.times

    def _note(self) -> None:
        self._pending.pop(0).synchronize()
        self.times.append(time.monotonic())


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    """What every PyTorch loop has."""
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def steps_at(times: Sequence[float], moment: float) -> float:
    """Steps done at a moment, with the part of the one under way."""
    if moment >= times[-1]:
        return len(times)
    index = next(i for i, t in enumerate(times) if t > moment)
    if index == 0:
        return 0.0
    return index + (moment - times[index - 1]) / (times[index] - times[index - 1])


def common_rate(times: Sequence[Sequence[float]], warm_up: int) -> float:
    """Steps a second of all ranks together, from when the last has warmed up until the first has finished.

    Args:
        times: For each rank the times at which its steps were done, by a clock that they share.
        warm_up: The steps that do not count.
    """
    begin, end = max(of[warm_up - 1] for of in times), min(of[-1] for of in times)
    if end <= begin:
        raise SystemExit("the ranks were never all at work at one time after warming up; give more --steps")
    return sum(steps_at(of, end) - steps_at(of, begin) for of in times) / (end - begin)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train ResNet-50 and report images a second.")
    parser.add_argument("--way", choices=("ours", "ddp", "plain"), default="ours", help="plain: ranks do not communicate")
    parser.add_argument("--backend", choices=("gloo", "polytempo", "nccl"), default="gloo", help="of --way ddp")
    parser.add_argument("--batch", type=int, default=128, help="images of each rank in each step")
    parser.add_argument("--steps", type=int, default=100, help="after those to warm up")
    parser.add_argument("--warm-up", type=int, default=10, help="steps that are not measured")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", metavar="DIR", help="a folder of images, one subfolder a class; random ones by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


def main() -> None:
    given = options()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if given.way == "ours":
        import polytempo as pt

        pt.init()  # line 1 of 2
        rank, size = pt.rank(), pt.size()
    elif size > 1:
        import torch.distributed as dist

        if given.backend == "polytempo":
            import polytempo  # noqa: F401 - so that torch.distributed knows it

        dist.init_process_group(given.backend if given.way == "ddp" else "gloo")
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = resnet50().to(device, memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
    if given.way == "ours":
        optimizer = pt.DistributedOptimizer(optimizer, model)  # line 2 of 2
    elif given.way == "ddp" and size > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    torch.manual_seed(1 + rank)  # each rank has images of its own
    if given.images:
        batches = from_folder(given.images, given.batch, given.image_size, device, (rank, size))
    else:
        batches = synthetic(given.batch, given.image_size, device)
    clock = StepClock(device)
    for _ in range(given.warm_up + given.steps):
        training_step(model, optimizer, *next(batches))
        clock.tick()
    times = torch.tensor(clock.finish(), dtype=torch.float64)

    everyone = [torch.empty_like(times) for _ in range(size)]
    if size == 1:
        everyone = [times]
    elif given.way == "ours":
        pt.all_gather(everyone, times)
    else:
        dist.all_gather_object(everyone, times)
    if rank == 0:
        rate = given.batch * common_rate([of.tolist() for of in everyone], given.warm_up)
        how = {"ours": "Polytempo", "ddp": f"DDP on {given.backend}", "plain": "no communication"}[given.way]
        print(f"{how}, {size} x {given.batch} images of {given.image_size}, {device.type}: {rate:.1f} images/s", flush=True)
    if given.way == "ours":
        pt.shutdown()
    elif size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
