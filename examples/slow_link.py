"""What a slow network does to a job, and what modes that talk less make of it, in under a minute on two cores.

    python examples/slow_link.py                                           runs itself under each mode: a table
    python examples/slow_link.py --link 20Mb/s,10ms --sync bsp --sync local:32
    polytempo run -n 2 --link 100Mb/s --sync local:8 examples/slow_link.py        one of these runs, by hand

A worker runs `train()`, a plain PyTorch script; the lines that make it distributed are marked with a number. Started without
a launcher, the script calls `polytempo run --link ... --sync MODE` on itself, mode by mode. The network is emulated: each of
the two workers behaves like a host of its own behind a link of 100 Mb/s.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import polytempo as pt
from polytempo.simulate import digits

#: AdaComm looks at the loss every second: a run takes a few.
MODES = ["bsp", "local:8", "adacomm:16,every=1", "gossip:ring"]

parser = argparse.ArgumentParser(description="Train a network of 2 MB on handwritten digits over a slow link.")
parser.add_argument("--link", default="100Mb/s,1ms", help="BANDWIDTH[,LATENCY] of each worker")
parser.add_argument("--sync", action="append", help=f"a mode; repeatable ({', '.join(MODES)})")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--steps", type=int, default=56, help="of each worker: all modes see the same number of samples")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--width", type=int, default=640, help="of the two hidden layers")
parser.add_argument("--target", type=float, default=0.9, help="accuracy on test images; the time until then is measured")
parser.add_argument("--figures", type=Path, help="a file for the figures of the run, as JSON")
options = parser.parse_args()


def train() -> None:
    """One worker of one run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = digits(seed=0).data
    wide = options.width
    model = nn.Sequential(nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = pt.DistributedOptimizer(optimizer, model)  # 2: --sync says when workers exchange what
    data = torch.utils.data.TensorDataset(images, labels)
    sampler = pt.DistributedSampler(data, seed=0)  # 3: each worker its shard of the data
    loader = torch.utils.data.DataLoader(data, options.batch, sampler=sampler, drop_last=True)

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(test_images).argmax(1) == test_labels).float().mean())

    steps, reached, began = 0, None, time.perf_counter()
    while steps < options.steps:
        sampler.set_epoch(steps // len(loader))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step(samples=len(x))
            steps += 1
            if reached is None and steps % 8 == 0 and accuracy() >= options.target:  # of this worker's copy, as it is
                reached = time.perf_counter() - began
            if steps == options.steps:
                break
    seconds, sent = time.perf_counter() - began, optimizer.stats["bytes_sent"]
    optimizer.consolidate()  # 4: the job's model, where workers' models differ
    if pt.rank() == 0:
        found = {"seconds": seconds, "reached": reached, "megabytes": sent / 1e6, "accuracy": accuracy()}
        print(f"{100 * found['accuracy']:.1f} % after {steps} steps in {seconds:.1f} s, {found['megabytes']:.1f} MB sent")
        if options.figures:
            options.figures.write_text(json.dumps(found), encoding="utf-8")
    pt.shutdown()


def run(mode: str) -> dict[str, float | None]:
    """Run this script under a mode; its figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "polytempo", "run", "--fork", "--quiet", "-n", str(options.workers)]
        command += ["--link", options.link, "--sync", mode, __file__, "--figures", str(figures)]
        for name in ("steps", "batch", "lr", "width", "target"):
            command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{mode}: {done.stderr.strip()}")
        found: dict[str, float | None] = json.loads(figures.read_text(encoding="utf-8"))
        return found


def show() -> None:
    """Run all modes, one after another, and print a row for each."""
    print(f"{options.workers} workers behind links of {options.link}, {options.steps} steps each, of the same samples\n")
    modes = options.sync or MODES
    wide = max(map(len, modes)) + 2
    head = (
        f"{'mode':<{wide}}{f'{100 * options.target:g} % at':>10}{'sooner':>9}{'all steps':>11}{'sent':>10}{'accuracy':>10}"
    )
    print(head, flush=True)
    first = None
    for mode in modes:
        found = run(mode)
        reached = found["reached"]
        first = first or reached
        when = f"{reached:.1f} s" if reached else "-"
        sooner = f"{first / reached:.1f} x" if first and reached else "-"
        rest = f"{found['seconds']:>9.1f} s{found['megabytes']:>7.0f} MB{100 * found['accuracy']:>8.1f} %"
        print(f"{mode:<{wide}}{when:>10}{sooner:>9}{rest}", flush=True)


pt.init()  # 1: join the job of `polytempo run`; alone, be a job of one
if pt.size() > 1:
    train()
else:
    show()
