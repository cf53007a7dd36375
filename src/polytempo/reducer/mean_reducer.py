"""Exchanges whose outcome is a mean that every worker has, and on which each runs the wrapped optimizer itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polytempo.client.client_state import ClientState
from polytempo.errors import UsageError
from polytempo.protocol.layout import Layout
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.gradient_hooks import GradientHooks
from polytempo.server.in_place_changes import ADVICE

#: These only read gradients, so the mean may be handed to them where it lies; not to their foreach forms.
READERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


class MeanReducer(ABC):
    """A track as its worker sees it, where values stay with the workers."""

    name: str
    proposal: OptimizerSpec
    layout: Layout
    line: ClientState
    copier: Copier
    step: int
    absent: tuple[int, ...]  #: parameters for which nobody had a gradient in the last round
    _mean: FlatBuffer
    _staging: GradientHooks | None

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    @abstractmethod
    def push(self, flat: FlatBuffer | None, hyper: tuple[dict[str, Any], ...], average: bool = True, **about: Any) -> None:
        """Take part in a round with what lies in the bucket; without one, in a step that changes nothing."""

    @abstractmethod
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""

    def gradients(self) -> tuple[FlatBuffer, tuple[int, ...]]:
        """The bucket, with the gradients as they are now, and the parameters that have none."""
        flat = self.copier.next_flat()
        absent = self.copier.gather(flat, lambda param: param.grad)
        if self._staging is not None:
            self._staging.adopt()
        return flat, absent

    def take_mean(self) -> None:
        """Make `.grad` of every parameter the mean, to be looked at and changed."""
        for index, param in enumerate(self.copier.params):
            if index in self.absent:
                param.grad = None  # this worker's own may be there, and weigh nothing
                continue
            if param.grad is None or param.grad.layout != torch.strided:
                param.grad = torch.empty_like(param)
            param.grad.copy_(self._mean.views[index])

    @contextmanager
    def reading_mean(self, in_place: bool) -> Iterator[None]:
        """Inside, `.grad` of every parameter is the mean: where it lies, to be read only, or a copy that may be changed."""
        params = self.copier.params
        own = [param.grad for param in params]
        for index, param in enumerate(params):
            mean = self._mean.views[index] if in_place else self._copy_of_mean(index)
            param.grad = None if index in self.absent else mean
        try:
            yield
        finally:
            for param, grad in zip(params, own, strict=True):
                param.grad = grad

    def _copy_of_mean(self, index: int) -> torch.Tensor:
        if index not in self._copies:
            self._copies[index] = torch.empty_like(self.copier.params[index])
        return self._copies[index].copy_(self._mean.views[index])

    def may_read_in_place(self, optimizer: torch.optim.Optimizer) -> bool:
        """Will this optimizer leave the gradients as they are?"""
        plain = not any(group.get("foreach") for group in optimizer.param_groups)
        usual = all(param.device.type == "cpu" and param.is_contiguous() for param in self.copier.params)
        return plain and usual and type(optimizer) in READERS

    # What the job holds: every worker holds it.

    def renew(self, compare: bool = True) -> None:
        """Look at the parameters: they may lie elsewhere, or have been written to."""
        if self.copier.look(compare):
            self._copies.clear()
            if self._staging is not None:
                self._staging.renew()

    def carry_changes(self) -> None:
        """What the script has written to parameters stays here; the next round finds out whether it is the same on all."""

    def push_values(self) -> None:
        """The script says that it has written."""
        self.copier.watch.touched = self.copier.watch.touched or self.copier.watch.name_of(0)

    def check_alike(self, digests: Mapping[int, bytes], name: str = "") -> None:
        """Refuse values that are not the same on all workers, given digests of them: eight bytes for each parameter, or
        for all together, with the name of one."""
        first = min(digests)
        for worker, theirs in digests.items():
            if theirs != digests[first]:
                unlike = (i for i in range(0, len(theirs), 8) if theirs[i : i + 8] != digests[first][i : i + 8])
                which = name or self.copier.watch.name_of(next(unlike) // 8)
                raise UsageError(f"workers {first} and {worker} hold different {which} after a change in place; {ADVICE}")

    def settle(self) -> None:
        """Nothing is ever under way between steps."""

    def read_values(self) -> None:
        """All replicas are the same."""

    def check_same(self, params: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that were added or replaced after the start."""
        self.copier.check_same(params)
