"""Forwards alone: the loss or the outputs of a batch, in evaluation mode, through all stages. Nothing is kept, or learnt.

A batch goes through in as many pieces as a step has microbatches. They need not be equal; a piece that is empty is passed on
unseen. At the end everybody waits for the last stage, so that no stage runs ahead by more than a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from polytempo.errors import UsageError
from polytempo.pipeline.microbatches import inputs_of, rows, split
from polytempo.pipeline.point_to_point import EVALUATED, EVALUATION, PointToPoint
from polytempo.pipeline.runtime import Places
from polytempo.pipeline.stage import Loss, Stage, scalar
from polytempo.pipeline.stage_message import StageMessage
from polytempo.summation import in_order

NOTHING = StageMessage([None], single=True)
#: Operations of a graph that do one thing in training and another in evaluation, by parts of their names.
DEPENDS = ("dropout", "batch_norm")


class Evaluation:
    """One rank's share in batches that are evaluated."""

    def __init__(self, stage: Stage, places: Places, carrier: PointToPoint, rank: int, pieces: int) -> None:
        self._stage, self._places, self._carrier, self._rank, self._pieces = stage, places, carrier, rank, pieces
        self._replica = places.of(rank)[1]
        self._last = len(places.replicas) - 1
        self._batches = 0

    def loss(self, x: Any, y: Any, loss: Loss | None) -> float:
        """The mean loss of a batch; every rank gets it."""
        targets = split(y, self._pieces, self._stage.device, even=False) if loss is not None else []
        found: list[tuple[float, int]] = []

        def add(number: int, out: Any) -> None:
            assert loss is not None
            found.append((float(scalar(loss(out, targets[number]))), rows(out)))

        self._through(x, add)
        total, examples = self._told(in_order(mean * count for mean, count in found), sum(count for _, count in found))
        return total / examples

    def outputs(self, x: Any) -> Any:
        """The outputs for a batch: where the first replica of the last stage is; None elsewhere."""
        found: dict[int, Any] = {}
        self._through(x, found.__setitem__)
        gathered = self._gathered(found) if self._stage.number == self._last else None
        self._told()
        return gathered

    def _through(self, x: Any, finish: Callable[[int, Any], object]) -> None:
        """All pieces of this rank; at the last stage, `finish` gets them with their outputs."""
        stage, places = self._stage, self._places
        inputs = inputs_of(x, self._pieces, stage.device, even=False) if stage.number == 0 else []
        with evaluating(stage.part.module), torch.no_grad():
            for number in range(self._replica, self._pieces, places.replicas[stage.number]):
                if stage.number:
                    parcel = self._carrier.take(self._neighbour(stage.number - 1, number), EVALUATION, self._number(number))
                else:
                    parcel = inputs[number] if rows(inputs[number].values) else NOTHING
                there = parcel.values != [None]
                out = stage.infer(parcel) if there else None
                if stage.number < self._last:
                    self._send(self._neighbour(stage.number + 1, number), number, out if there else None)
                elif there:
                    finish(number, out)

    def _send(self, to: int, number: int, out: Any) -> None:
        single = not isinstance(out, tuple | list)
        self._carrier.send(to, EVALUATION, StageMessage([out] if single else list(out), single, self._number(number)))

    def _gathered(self, found: dict[int, Any]) -> Any:
        """All outputs, in order, at the first replica."""
        replicas = self._places.replicas[self._last]
        if self._replica:
            for number in range(self._replica, self._pieces, replicas):
                self._send(self._places.rank(self._last, 0), number, found.get(number))
            return None
        for number in range(self._pieces):
            if source := number % replicas:
                parcel = self._carrier.take(self._places.rank(self._last, source), EVALUATION, self._number(number))
                if parcel.values != [None]:
                    found[number] = parcel.values[0] if parcel.single else tuple(parcel.values)
        return _joined([found[number] for number in sorted(found)])

    def _told(self, mine: float = 0.0, examples: int = 0) -> tuple[float, int]:
        """The sums of what the replicas of the last stage have; all wait for them."""
        number, lasts = self._batches, self._places.ranks(self._last)
        own = StageMessage([], number=number, figure=mine, version=examples)
        if self._rank in lasts:
            for rank in range(self._places.size):
                if rank != self._rank:
                    self._carrier.send(rank, EVALUATED, own)
        told = [own if rank == self._rank else self._carrier.take(rank, EVALUATED, number) for rank in lasts]
        self._carrier.settle()
        self._batches += 1
        return in_order(parcel.figure for parcel in told), sum(parcel.version for parcel in told)

    def _number(self, piece: int) -> int:
        return self._batches * self._pieces + piece

    def _neighbour(self, stage: int, piece: int) -> int:
        return self._places.rank(stage, piece % self._places.replicas[stage])


def _joined(pieces: list[Any]) -> Any:
    if all(isinstance(piece, torch.Tensor) for piece in pieces):
        return torch.cat(pieces)
    if all(isinstance(piece, tuple | list) for piece in pieces):
        return tuple(_joined(list(column)) for column in zip(*pieces, strict=True))
    raise UsageError(f"predict() puts outputs together that are tensors, or tuples of them; got {type(pieces[0]).__name__}")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every member is in the mode in which it was."""
    before = [(member, member.training) for member in module.modules()]
    for member, _ in before:
        member.training = False
    try:
        yield
    finally:
        for member, training in before:
            member.training = training


def fixed_in_training(modules: Iterable[nn.Module]) -> str:
    """An operation of a traced module that has its mode written into it; none, if all can be told to evaluate."""
    graphs = [module.graph for module in modules if isinstance(module, fx.GraphModule)]
    functions = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    names = (getattr(function, "__name__", str(function)) for function in functions)
    return next((name for name in names if any(word in name for word in DEPENDS)), "")
