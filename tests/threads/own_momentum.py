"""Workers that keep momentum of their own and push in a given order: live, and by hand.

By hand SGD is the formula, and any other rule torch's own optimizer, whose change is extrapolated. As a mode is settled for
SGD, gradients that are far longer than usual are shortened: that is worked out here in plain Python.
"""

from __future__ import annotations

import copy
import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers import MakeOptimizer, copied, made_params, set_gradients
from torch import nn

from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

SHAPES = [(4, 3), (5,), (2, 2)]
START = made_params(SHAPES)
#: Who pushes when.
ORDER = [0, 1, 0, 0, 1, 1, 1, 0, 1, 0]

Tensors = list[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


def gradient(values: Sequence[torch.Tensor], worker: int, number: int) -> Tensors:
    """That of `loss`: each worker, in each of its steps, draws the values elsewhere."""
    return [(0.5 + index) * (value - _goal(index, worker, number)) for index, value in enumerate(values)]


def loss(params: Sequence[nn.Parameter], worker: int, number: int) -> torch.Tensor:
    parts = [(0.5 + i) * (p - _goal(i, worker, number)).square().sum() / 2 for i, p in enumerate(params)]
    return torch.stack(parts).sum()


def _goal(index: int, worker: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + 10 * number + index)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64)


def shortened(grad: torch.Tensor, usual: float, spike: float = 1.5) -> tuple[torch.Tensor, float]:
    """A gradient that is at most this many times as long as usual, and what is usual then, in numbers of 32 bits."""
    length = ctypes.c_float(math.sqrt(sum(x * x for x in grad.reshape(-1).tolist()))).value
    if not length:
        return grad, usual
    kept = min(length, spike * usual) if usual else length
    return grad * (kept / length), ctypes.c_float(usual + 0.05 * (kept - usual) if usual else length).value


class ByHand:
    """One worker: what its gradients make of the values, at the full rate.

    Args:
        make: Its optimizer.
        ahead: Does it push the look-ahead? Otherwise what it steps along.
        decoupled: Weight decay that is no part of what is extrapolated.
        spike: A gradient of SGD is at most this many times as long as usual; 0: as long as it is.
    """

    def __init__(self, make: MakeOptimizer, ahead: bool = True, decoupled: float = 0.0, spike: float = 1.5) -> None:
        self.params = copied(START)
        self._spike, self._usual = spike, [0.0 for _ in self.params]
        self.optimizer = make(self.params)
        self._ahead, self._decay, self._is_unknown = ahead, decoupled, False
        self._before: list[torch.Tensor | None] = [None for _ in self.params]  # at a rate of 1
        self._velocity = [torch.zeros_like(param) for param in self.params]

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state of torch's, which says nothing of the change before: the next is pushed as it is."""
        self.optimizer.load_state_dict(copy.deepcopy(saved))
        self._velocity = [own.get("momentum_buffer", torch.zeros(())).clone() for own in saved["state"].values()]
        self._usual = [float(own.get("usual_length", 0.0)) for own in saved["state"].values()]
        self._is_unknown = "momentum_buffer" not in saved["state"][0]

    def change(self, values: Tensors, gradients: Gradients) -> Tensors:
        is_sgd = type(self.optimizer) is torch.optim.SGD and not self.optimizer.param_groups[0]["dampening"]
        return (self._of_sgd if is_sgd else self._of_any)(values, gradients)

    def _of_sgd(self, values: Tensors, gradients: Gradients) -> Tensors:
        changes = []
        for index, (value, grad) in enumerate(zip(values, gradients, strict=True)):
            group = self._group(index)
            if grad is None:
                changes.append(torch.zeros_like(value))
                continue
            grad = self._calmed(index, grad)
            grad = (-grad if group["maximize"] else grad) + group["weight_decay"] * value
            self._velocity[index] = group["momentum"] * self._velocity[index] + grad
            ahead = grad + group["momentum"] * self._velocity[index]
            changes.append(-group["lr"] * (ahead if self._ahead or group["nesterov"] else self._velocity[index]))
        return changes

    def _calmed(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if self._spike:
            grad, self._usual[index] = shortened(grad, self._usual[index], self._spike)
        return grad

    def _of_any(self, values: Tensors, gradients: Gradients) -> Tensors:
        with torch.no_grad():
            for param, value in zip(self.params, values, strict=True):
                param.copy_(value)
        set_gradients(self.params, gradients)
        self.optimizer.step()
        pairs = enumerate(zip(values, gradients, strict=True))
        changes = [self._extrapolated(index, value, grad) for index, (value, grad) in pairs]
        self._is_unknown = False
        return changes

    def _extrapolated(self, index: int, value: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
        group, change = self._group(index), self.params[index].detach() - value
        if grad is None or not group["lr"]:
            return change
        plain = not self._ahead or self._is_unknown or group.get("nesterov") or type(self.optimizer) is torch.optim.NAdam
        ahead = 0.0 if plain else group.get("momentum", group.get("betas", (0.0,))[0])
        own = change + group["lr"] * self._decay * value
        before = self._before[index]
        if before is None:  # the first is extrapolated of rules that are linear in the gradient
            before = torch.zeros_like(own) if type(self.optimizer) is torch.optim.SGD else own / group["lr"]
        pushed = change + ahead * (own - group["lr"] * before)
        self._before[index] = own / group["lr"]
        return pushed

    def _group(self, index: int) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if any(p is self.params[index] for p in g["params"]))


@dataclass
class Turn:
    """One step of a worker, live."""

    worker: int
    number: int  #: of the worker's steps
    params: list[nn.Parameter]
    optimizer: DistributedOptimizer
    job: ThreadJob


def differentiate(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    loss(turn.params, turn.worker, turn.number).backward()


def plain_turn(turn: Turn) -> None:
    """Backward, so that hooks are used; the gradient stays what it was."""
    differentiate(turn)
    wanted = gradient([param.detach() for param in turn.params], turn.worker, turn.number)
    turn.optimizer.step()
    for param, grad in zip(turn.params, wanted, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-12, atol=1e-14)


def played(
    sync: str,
    make: MakeOptimizer,
    take: Callable[[Turn], None] = plain_turn,
    *,
    order: Sequence[int] = ORDER,
    servers: int = 2,
    fresh: bool = False,
    skip: int = 0,
    look: Callable[[ThreadJob, list[DistributedOptimizer]], Any] | None = None,
    job_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensors, ThreadJob, list[dict[str, Any]]]:
    """Workers take their turns: the values at the end, the job, and what each worker's `state_dict()` says then.

    Args:
        sync: The mode.
        make: The optimizer of each.
        take: A turn.
        order: Who takes each turn.
        servers: How many.
        fresh: Each worker reads the newest values before its turn: then nothing is stale.
        skip: Turns that an earlier job has taken.
        look: Called by the worker of the last turn, while all are there.
        job_options: Of the job.
        options: Of the optimizer.
    """
    turns = [threading.Event() for _ in range(len(order) + 1)]
    turns[skip].set()
    size = max(order) + 1
    made: dict[int, DistributedOptimizer] = {}
    done = threading.Barrier(size)

    def work(session: Session) -> tuple[Tensors, dict[str, Any]]:
        params = copied(START)
        optimizer = made[session.rank] = DistributedOptimizer(make(params), **options)
        count = 0
        for number, worker in enumerate(order):
            if worker != session.rank:
                continue
            if number >= skip:
                assert turns[number].wait(20)
                if fresh:
                    optimizer.consolidate()
                take(Turn(worker, count, params, optimizer, job))
                turns[number + 1].set()
            count += 1
        assert turns[-1].wait(20)
        optimizer.consolidate()  # what is under way is answered then
        done.wait(20)
        optimizer.consolidate()
        if look is not None and session.rank == order[-1]:
            look(job, [made[rank] for rank in range(size)])
        done.wait(20)  # who leaves changes the others' rate
        return [param.detach().clone() for param in params], optimizer.state_dict()

    with ThreadJob(size, servers, sync, **(job_options or {})) as job:
        ends = job.run(work)
    assert all(torch.equal(a, b) for end, _ in ends[1:] for a, b in zip(end, ends[0][0], strict=True))
    return ends[0][0], job, [state for _, state in ends]


def by_hand(
    make: MakeOptimizer,
    scale: float,
    *,
    order: Sequence[int] = ORDER,
    fresh: bool = False,
    ahead: bool = True,
    decoupled: float = 0.0,
    spike: float = 1.5,
    of: Callable[[ByHand, Tensors, int, int], Tensors] | None = None,
) -> Tensors:
    """The same in one process. `of`: what a turn pushes, of the worker, the values it has read, and its numbers."""
    now = [start.detach().clone() for start in START]
    workers = [ByHand(make, ahead, decoupled, spike) for _ in range(max(order) + 1)]
    read, counts = [now for _ in workers], [0] * len(workers)
    for worker in order:
        values = now if fresh else read[worker]
        turn = of or (lambda one, values, worker, number: one.change(values, gradient(values, worker, number)))
        changes = turn(workers[worker], values, worker, counts[worker])
        counts[worker] += 1
        now = read[worker] = [value + scale * change for value, change in zip(now, changes, strict=True)]
    return now
