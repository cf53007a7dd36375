"""One run of `asynchronous.py`: training in virtual time, or live (`asynchronous_live.py`), and what it ends with.

In virtual time the steps of all workers vary by a tenth; in the cluster `slow` the last worker is three times slower.
`delay:4` has a cluster whose exchange takes four steps, so that four pushes of each worker are really under way; the others
have one whose exchange takes none. `bsp` makes the same updates on all of them.

The GPT is that of `examples/gpt.py`: its model, its text, its schedule of rate and momentum, its clipping. Each worker has a
schedule of its own, over its own steps, as in a live job; where momentum is on the servers, theirs is over all updates.
"""

from __future__ import annotations

import math
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asynchronous_live import run_live
from polytempo.simulate.cluster import Cluster, Link, Lognormal
from polytempo.simulate.virtual_training import train_virtually
from polytempo.sync.mode import rate_of
from polytempo.sync.spec import parse_spec
from polytempo.tasks import TensorPair, TrainingTask, digits, fashion_mnist_cnn, fashion_mnist_cnn_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
STEP_TIME, SLOW, EXCHANGE = Lognormal(1.0, 0.1), 3.0, 4.0
#: Windows that all workers of the GPT take in a step, and their steps.
WINDOWS, GPT_STEPS = 32, 300
#: Samples that are evaluated at a time: activations stay small.
PART = 256


@dataclass(frozen=True)
class Run:
    """All settings of a run; the key of its line."""

    work: str
    workers: int
    cluster: str
    sync: str  #: with what it leaves to the optimizer written out
    rate: float
    momentum: float
    batch: int  #: of each worker
    samples: int  #: of all workers together
    seed: int
    live: bool = False
    data: str = ""  #: what tells the data from another machine's, where that may be


#: Accuracy or loss at the end, and the seconds that the run took.
Ended = dict[str, float]


def run(job: Run, folder: Path) -> Ended:
    """Make a run; `folder` has the files of Fashion-MNIST."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    ended = run_live(job, folder) if job.live else train(job, folder)
    return {**ended, "seconds": round(time.perf_counter() - began, 2)}


def train(job: Run, folder: Path) -> Ended:
    """In virtual time."""
    task = task_of(job.work, job.seed, folder)
    steps = {"steps_each": GPT_STEPS} if job.work == "gpt" else {"samples": job.samples}
    trained = train_virtually(
        task.model,
        (task.data[0], tuple(part[:1] for part in task.data[1])),  # what it ends with is looked at below, in parts
        task.loss,
        sync=job.sync,
        cluster=cluster_of(job),
        optimizer=optimizer_of(job),
        metric=lambda output, target: 0.0,
        evaluate_every=1e9,
        seed=job.seed,
        **steps,
    )
    if parse_spec(trained.outcome.sync).text != job.sync:
        raise SystemExit(f"expected a run of {job.sync}, and it was one of {trained.outcome.sync}")
    return ended_with(trained.model, task)


def cluster_of(job: Run) -> Cluster:
    """The machines of a run."""
    even = Cluster(job.workers, STEP_TIME, batch=job.batch)
    if job.cluster == "slow":
        even = replace(even, slow={job.workers - 1: SLOW})
    return replace(even, link=Link(latency=EXCHANGE / 2)) if job.sync.startswith("delay") else even


clothes = cache(partial(fashion_mnist_cnn, 0))  # the files are read once


def task_of(work: str, seed: int, folder: Path) -> TrainingTask:
    """Model, data and loss; the model from this seed."""
    if work == "digits":
        return digits(seed)
    if work == "cnn":
        return replace(clothes(folder), model=fashion_mnist_cnn_model(seed))
    names = example(seed)
    data, held_out = (tuple(part.contiguous() for part in names["source"](*given)) for given in ((4.0, False), (1.0, True)))
    return TrainingTask(names["model"], (data, held_out), names["loss"], names["options"].lr, 0.0, GPT_STEPS)


def optimizer_of(job: Run) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Of the job, or of each worker."""
    if job.work != "gpt":
        return partial(torch.optim.SGD, lr=job.rate, momentum=job.momentum)
    spec = parse_spec(job.sync)
    if spec.capabilities.rounds or spec.worker_momentum:
        return partial(scheduled_adam, rate=job.rate, steps=GPT_STEPS)
    share = rate_of(spec.options.get("scale"), job.workers)  # a rate that is set says this, too
    return partial(scheduled_adam, rate=job.rate * share, steps=GPT_STEPS * job.workers)


def scheduled_adam(parameters: list[nn.Parameter], rate: float, steps: int) -> torch.optim.Optimizer:
    """AdamW as `pt.fit` runs it in the example: the gradient is clipped, and the rate moves from step to step."""
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps + 1)

    def before(*_: object) -> None:
        if optimizer.state:  # not before the first
            schedule.step()
        nn.utils.clip_grad_norm_(parameters, 1.0)

    optimizer.register_step_pre_hook(before)
    return optimizer


def example(seed: int) -> dict[str, Any]:
    """The names of examples/gpt.py up to where its job begins: options, model from this seed, text and loss."""
    whole = EXAMPLE.read_text(encoding="utf-8")
    text = whole.partition("\npt.init()")[0].replace("torch.manual_seed(0)", f"torch.manual_seed({seed})")
    if text == whole or f"({seed})" not in text:
        raise SystemExit(f"{EXAMPLE} has no seed before pt.init(); adapt benchmarks/asynchronous_runs.py to it")
    names: dict[str, Any] = {"__name__": "gpt"}
    given, sys.argv = sys.argv, [str(EXAMPLE)]
    try:
        exec(compile(text, str(EXAMPLE), "exec", dont_inherit=True), names)
    finally:
        sys.argv = given
    return names


@cache
def text_digest() -> str:
    """Of the text that the GPT learns: it is the standard library's, which differs from Python to Python."""
    inputs, _ = example(0)["source"](4.0, False)
    return f"{zlib.crc32(inputs.to(torch.uint8).contiguous().numpy().tobytes()):08x}"


def ended_with(model: nn.Module, task: TrainingTask) -> Ended:
    """Loss and, of classes, accuracy, in evaluation mode."""
    loss, right = evaluated(model.eval(), task.data[1], task.loss)
    return {"loss": loss} if math.isnan(right) else {"accuracy": right, "loss": loss}


def evaluated(model: nn.Module, data: TensorPair, loss: Any) -> tuple[float, float]:
    """The mean loss on these data, and the share that is right (of sequences: nan)."""
    inputs, targets = data
    total, right = 0.0, 0.0
    with torch.no_grad():
        for x, y in zip(inputs.split(PART), targets.split(PART), strict=True):
            output = model(x)
            total += float(loss(output, y)) * len(x)
            right += float((output.argmax(1) == y).sum()) if y.ndim == 1 else math.nan
    return total / len(inputs), right / len(inputs)
