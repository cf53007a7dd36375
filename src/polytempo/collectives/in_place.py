"""The mean of what lies in the slots of a board, made where it lies; what a process that died has left undone is finished.

Each element is added up by one process, in the order of ranks. A process that dies leaves its slot readable. Where its part
of the result was not finished (its "done" number, which is set before anybody is told, says so to all survivors alike), each
survivor adds that part up itself, in memory of its own, and writes the sum once: they write the same bytes. (Adding up in
the result itself would add to what another is adding to.) They then meet once more, so that nobody writes to its slot while
another still reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polytempo.collectives.arithmetic import weighted_mean
from polytempo.collectives.board import Board
from polytempo.collectives.cuts import cuts


def own_part(members: Sequence[int], rank: int, length: int) -> slice:
    """What a member adds up."""
    return cuts(length, len(members))[list(members).index(rank)]


def mean_in_place(
    board: Board, members: Sequence[int], weights: Sequence[float], dtype: torch.dtype, length: int, offset: int
) -> None:
    """Make the result the weighted mean of what lies in the slots of these members, who have all said that it is there."""
    slots = [board.slot(member, dtype, length, offset) for member in members]
    result = board.result(dtype, length, offset)
    own = own_part(members, board.mesh.rank, length)
    weighted_mean([slot[own] for slot in slots], weights, result[own])
    board.finish()
    lost = board.meet("reduced", members)
    unfinished = [member for member in lost if not board.has_finished(member)]
    for member in unfinished:
        part = own_part(members, member, length)
        alone = torch.empty_like(result[part])
        weighted_mean([slot[part] for slot in slots], weights, alone)
        result[part] = alone
    if unfinished:
        board.meet("recovered", [member for member in members if member not in lost])
