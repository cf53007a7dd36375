"""One cause on all ranks: what fails on a rank is told to the whole job, and each rank raises what failed first.

A pipeline tells the ranks of its lane. Here the lanes, tensor groups and replicas of a job are put together: when a rank is
lost, ranks that wait for it learn so themselves, and end; ranks that wait for these would name the wrong one. Before a rank
ends it has told all others the cause, and messages come before the end of a link: a rank that sees another end knows why.
"""

from __future__ import annotations

import torch

from polytempo.collectives.group import RankGroup
from polytempo.errors import PeerError, PolytempoError, RankLost
from polytempo.mesh import Mesh
from polytempo.pipeline.point_to_point import PointToPoint


class JobFailures:
    """What has failed first in the job, as far as this rank has been told."""

    def __init__(self, job: RankGroup, mesh: Mesh) -> None:
        self._job, self._mesh = job, mesh
        self._board = PointToPoint(job, torch.device("cpu"))

    def cause(self, error: Exception) -> Exception:
        """The first cause, which may be this error; all other ranks are told."""
        if self._job.size == 1:
            return error
        self._job.engine.read_all()
        told = self._board.failed
        if told is not None:
            return told
        cause = self._in_words(error)
        self._board.fail(cause, [self._job])
        return cause if isinstance(error, PeerError) else error

    def _in_words(self, error: Exception) -> Exception:
        """The error with the place of the rank that it is about: of the rank that was lost first, or of this one."""
        own = self._job.engine.rank
        crashed = self._job.engine.messages.crashed
        if isinstance(error, PeerError) and crashed:
            first = min(crashed, key=lambda rank: crashed[rank])
            return RankLost(f"{self._name(first)} {self._board.loss_of(first)}: {self._name(own)} needs it", (first,))
        if isinstance(error, PeerError):
            return error
        name = "" if isinstance(error, PolytempoError) else f"{type(error).__name__}: "
        return PeerError(f"{self._name(own)} failed: {name}{' '.join(str(error).split())}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._mesh.point(rank)})"
