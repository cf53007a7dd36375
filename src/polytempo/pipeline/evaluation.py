"""Evaluation: forwards alone through all stages, for the loss or the outputs of a batch, in evaluation mode.

A batch is split into as many pieces as a step has microbatches. They need not be equal; an empty piece is passed on
without a forward. At the end all ranks wait for the last stage, so that no stage is ahead by more than a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from polytempo.errors import UsageError
from polytempo.pipeline.builder import StageBuild
from polytempo.pipeline.point_to_point import EVALUATED, EVALUATION
from polytempo.pipeline.stage import Loss, scalar
from polytempo.pipeline.stage_message import StageMessage, rows, split, stage_inputs
from polytempo.summation import in_order

EMPTY = StageMessage([None], single=True)


class Evaluation:
    """One rank's part of an evaluation."""

    def __init__(self, built: StageBuild) -> None:
        self._stage, self._layout, self._p2p, self._rank = built.stage, built.layout, built.p2p, built.rank
        self._pieces, self._replica, self._last = built.microbatches, built.replica, built.layout.last_stage
        self._batches = 0

    def loss(self, x: Any, y: Any, loss: Loss | None) -> float:
        """The mean loss of a batch, on every rank."""
        targets = split(y, self._pieces, self._stage.device, even=False) if loss is not None else []
        found: list[tuple[float, int]] = []

        def add(number: int, out: Any) -> None:
            assert loss is not None
            found.append((float(scalar(loss(out, targets[number]))), rows(out)))

        self._through(x, add)
        total, examples = self._reduced(in_order(mean * count for mean, count in found), sum(count for _, count in found))
        return total / examples

    def outputs(self, x: Any) -> Any:
        """The outputs for a batch, on the first replica of the last stage; None elsewhere."""
        found: dict[int, Any] = {}
        self._through(x, found.__setitem__)
        gathered = self._gathered(found) if self._stage.number == self._last else None
        self._reduced()
        return gathered

    def _through(self, x: Any, finish: Callable[[int, Any], object]) -> None:
        """Run all pieces of this rank; at the last stage, call `finish` with each number and output."""
        stage, layout = self._stage, self._layout
        inputs = stage_inputs(x, self._pieces, stage.device, even=False) if stage.number == 0 else []
        with evaluating(stage.part.module), torch.no_grad():
            for number in range(self._replica, self._pieces, layout.replicas[stage.number]):
                if stage.number:
                    message = self._p2p.take(self._neighbour(stage.number - 1, number), EVALUATION, self._number(number))
                else:
                    message = inputs[number] if rows(inputs[number].values) else EMPTY
                present = message.values != [None]
                out = stage.infer(message) if present else None
                if stage.number < self._last:
                    self._send(self._neighbour(stage.number + 1, number), number, out if present else None)
                elif present:
                    finish(number, out)

    def _send(self, to: int, number: int, out: Any) -> None:
        single = not isinstance(out, tuple | list)
        self._p2p.send(to, EVALUATION, StageMessage([out] if single else list(out), single, self._number(number)))

    def _gathered(self, found: dict[int, Any]) -> Any:
        """All outputs in order, on the first replica."""
        replicas = self._layout.replicas[self._last]
        if self._replica:
            for number in range(self._replica, self._pieces, replicas):
                self._send(self._layout.rank(self._last, 0), number, found.get(number))
            return None
        for number in range(self._pieces):
            if source := number % replicas:
                message = self._p2p.take(self._layout.rank(self._last, source), EVALUATION, self._number(number))
                if message.values != [None]:
                    found[number] = message.values[0] if message.single else tuple(message.values)
        return _joined([found[number] for number in sorted(found)])

    def _reduced(self, mine: float = 0.0, examples: int = 0) -> tuple[float, int]:
        """The sums over the replicas of the last stage, sent to all ranks, which wait for them."""
        self._p2p.confirm()
        number, lasts = self._batches, self._layout.ranks(self._last)
        own = StageMessage([], number=number, figure=mine, version=examples)
        if self._rank in lasts:
            for rank in self._layout.members:
                if rank != self._rank:
                    self._p2p.send(rank, EVALUATED, own)
        received = [own if rank == self._rank else self._p2p.take(rank, EVALUATED, number) for rank in lasts]
        self._p2p.settle()
        self._batches += 1
        return in_order(message.figure for message in received), sum(message.version for message in received)

    def _number(self, piece: int) -> int:
        return self._batches * self._pieces + piece

    def _neighbour(self, stage: int, piece: int) -> int:
        return self._layout.rank(stage, piece % self._layout.replicas[stage])


def _joined(pieces: list[Any]) -> Any:
    if all(isinstance(piece, torch.Tensor) for piece in pieces):
        return torch.cat(pieces)
    if all(isinstance(piece, tuple | list) for piece in pieces):
        return tuple(_joined(list(column)) for column in zip(*pieces, strict=True))
    raise UsageError(f"predict() joins outputs that are tensors or tuples of tensors; got {type(pieces[0]).__name__}")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every member is in the mode that it had before."""
    before = [(member, member.training) for member in module.modules()]
    for member, _ in before:
        member.training = False
    try:
        yield
    finally:
        for member, training in before:
            member.training = training
