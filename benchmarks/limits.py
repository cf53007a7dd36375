"""The limit beside the figures: every worker copies the same bytes once, all at the same time."""

from __future__ import annotations

from multiprocessing.connection import Connection

from cases import Subject, bytes_of
from rigs import Rig, Round, answer


def _copier(pipe: Connection, rank: int) -> None:
    import torch

    def make(size: str, variant: str) -> Round:
        source = torch.ones(bytes_of(size) // 4)  # not zeros: memory that was never written is not read
        target = torch.ones_like(source)
        return lambda: target.copy_(source)

    answer(pipe, make)


def start_copiers(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(_copier, workers)


COPY = Subject("limit: copy_", start_copiers)
