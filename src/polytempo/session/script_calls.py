"""What scripts ask of their job, and tell it: its device, its budget, the servers' model, and metrics for its record."""

from __future__ import annotations

import json
import numbers
from typing import Any

import numpy
import torch

from polytempo.errors import PeerError, UsageError
from polytempo.protocol.messages import MetricReport
from polytempo.session.connecting import PATIENCE
from polytempo.session.session import current, local_rank

#: Whole numbers from here on do not fit a message.
_SMALL = 1 << 63


def local_device() -> torch.device:
    """The device of this worker: the GPU that its local rank picks, or the CPU where there is none.

    Ranks take the GPUs of their host in turn: with more ranks than GPUs, several share one. The GPU is made torch's current
    one, so that `"cuda"` means it from then on. Which GPUs there are, and in which order, `CUDA_VISIBLE_DEVICES` says; an
    instance of MIG counts as a GPU.

    Returns:
        `torch.device("cuda", local_rank() % torch.cuda.device_count())`, or `torch.device("cpu")`.

    Raises:
        UsageError: `init` was not called.

    Example:
        ```python
        pt.init()
        model = Model().to(pt.local_device())
        ```
    """
    place = local_rank()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    chosen = torch.device("cuda", place % count)
    torch.cuda.set_device(chosen)
    return chosen


def should_stop() -> bool:
    """True on every worker once the budget of the job (`--steps`, `--samples`, `--seconds`) is used up.

    The coordinator decides it, and each worker learns it with the answer to its last push, so that all leave after the same
    round. In a pipeline the last stage learns it, and all ranks with the loss of that step. Without a budget it is always
    False.

    Raises:
        UsageError: `init` was not called.

    Example:
        ```python
        while not pt.should_stop():
            train_one_batch()
        ```
    """
    return current().should_stop()


def describe_model(optimizer: int = 0) -> dict[str, Any]:
    """Describe the model that the servers hold, for a worker that joins before it has built one.

    Waits until some worker has wrapped that optimizer.

    Args:
        optimizer: Which `DistributedOptimizer` of the script, counted from 0 in the order in which they are made.

    Returns:
        A dict with `tensors` (name, shape, dtype and group of each parameter), `tables`, `groups` (hyper-parameters),
        `optimizer` and `sync`.

    Raises:
        UsageError: The job has no servers.
        PeerError: No worker has made that optimizer within 60 s.
    """
    session = current()
    session.check_part()
    if session.client is None:
        raise UsageError("describe_model() asks the servers, and this job has none; start it with polytempo run")
    with session.lock:
        found = session.client.find(f"manifest/{optimizer}", PATIENCE)
    if found is None:
        raise PeerError(f"timed out after {PATIENCE:g} s waiting for a worker to register optimizer {optimizer}")
    described: dict[str, Any] = json.loads(found)
    return described


def log(**values: Any) -> None:
    """Record metrics of this worker in the job's record (`--record DIR`), with the time.

    Args:
        **values: Numbers of any kind (Python's, NumPy's, a tensor of one element) or texts. A value that is not finite is
            written as the text "NaN", "Infinity" or "-Infinity".

    Raises:
        UsageError: A value is neither a number nor a text, or its name is one that every line of the record has.

    Example:
        ```python
        pt.log(accuracy=0.93, epoch=4)
        ```
    """
    session = current()
    session.check_part()
    taken = {"t", "kind", "worker"} & values.keys()
    if taken:
        raise UsageError(f"log() cannot use the name {min(taken)}; every line of the record has it already")
    figures = plain_figures(values)
    if session.client is None:
        session.metrics.append(figures)
    else:
        with session.lock:
            session.client.send(0, MetricReport(worker=session.rank, values=figures))


def plain_figures(values: dict[str, Any]) -> dict[str, float | int | str]:
    """What `log` was given, as plain numbers and texts; the first that is neither is refused by name."""
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any) -> float | int | str:
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        shape = list(value.shape)
        if any(length != 1 for length in shape):
            raise UsageError(
                f"log({name}=...) expected one number, got {len(shape)}-d data of shape {shape}; log its mean()"
            )
        value = value.item()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral) and -_SMALL <= int(value) < _SMALL:
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    kind = "None" if value is None else f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"
    raise UsageError(f"log({name}=...) expected a number or a text, got {kind}; leave it out, or make it one")
