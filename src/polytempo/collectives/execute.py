"""Carries out a plan on a board, and finishes what a process that died has left undone.

A process that dies leaves its slot readable. Where its part of the result was not finished (its "done" number, which is set
before anybody is told, says so to all survivors alike), each survivor adds that part up itself, in memory of its own, and
writes the sum once: they write the same bytes. (Adding up in the result itself would add to what another is adding to.)
They then meet once more, so that nobody writes to its slot while another still reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from polytempo.collectives.arithmetic import reduce_into, weighted_mean
from polytempo.collectives.board import Board
from polytempo.collectives.plan import Meet, Put, Reduce, Span, Step, Take, own_part, shared_all_reduce
from polytempo.errors import PeerError

#: Terms in the order of ranks, and where their sum or mean goes.
Combine = Callable[[list[torch.Tensor], torch.Tensor], None]


@dataclass
class Operands:
    """What a plan's elements are. `own`: this process's tensor, where it does not lie in its slot."""

    slots: dict[int, torch.Tensor]
    result: torch.Tensor
    combine: Combine
    own: torch.Tensor | None = None


def execute(board: Board, steps: Sequence[Step], operands: Operands) -> None:
    """Carry out the steps of this process."""
    for step in steps:
        if isinstance(step, Put):
            assert operands.own is not None
            _cut(operands.slots[board.mesh.rank], step.span).copy_(_cut(operands.own, step.span))
        elif isinstance(step, Meet):
            lost = board.meet(step.name, step.members)
            if lost:
                _make_up_for(board, step, operands, lost)
        elif isinstance(step, Reduce):
            _reduce(board, step, operands, _cut(operands.result, step.span))
            board.finish()
        elif isinstance(step, Take):
            assert operands.own is not None
            _cut(operands.own, step.span).copy_(_cut(operands.result, step.span))


def _reduce(board: Board, step: Reduce, operands: Operands, out: torch.Tensor) -> None:
    mine = {board.mesh.rank: operands.own} if operands.own is not None else {}
    terms = [_cut(mine.get(member, operands.slots[member]), step.span) for member in step.members]
    operands.combine(terms, out)
    if operands.own is not None:
        _cut(operands.own, step.span).copy_(out)


def _make_up_for(board: Board, step: Meet, operands: Operands, lost: Sequence[int]) -> None:
    if step.name != "reduced" or operands.own is not None:
        raise PeerError(f"worker {lost[0]} ended in the middle of an all-reduce, and what it had to give with it")
    unfinished = [member for member in lost if not board.has_finished(member)]
    for member in unfinished:
        span = own_part(step.members, member, operands.result.numel())
        alone = torch.empty_like(_cut(operands.result, span))
        _reduce(board, Reduce(span, step.members), operands, alone)
        _cut(operands.result, span).copy_(alone)
    if unfinished:
        board.meet("recovered", [member for member in step.members if member not in lost])


def all_reduce(board: Board, tensor: torch.Tensor, factor: float = 1.0) -> None:
    """Make a flat tensor, which fits into a slot, the sum over all members times a factor."""
    board.round += 1
    length, dtype = tensor.numel(), tensor.dtype
    slots = {member: board.slot(member, dtype, length) for member in board.members}
    combine: Combine = lambda terms, out: reduce_into(terms, out, factor)  # noqa: E731
    operands = Operands(slots, board.result(dtype, length), combine, tensor)
    execute(board, shared_all_reduce(board.members, board.mesh.rank, length), operands)


def mean_in_place(
    board: Board, members: Sequence[int], weights: Sequence[float], dtype: torch.dtype, length: int, offset: int
) -> None:
    """Make the result the weighted mean of what lies in the slots of these members, who have all said that it is there."""
    slots = {member: board.slot(member, dtype, length, offset) for member in members}
    combine: Combine = lambda terms, out: weighted_mean(terms, weights, out)  # noqa: E731
    operands = Operands(slots, board.result(dtype, length, offset), combine)
    execute(board, shared_all_reduce(members, board.mesh.rank, length, in_place=True), operands)


def _cut(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    return tensor[span.start : span.stop]
