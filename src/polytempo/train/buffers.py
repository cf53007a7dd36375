"""The mean of everybody's floating point buffers (running means of batch norm, and the like)."""

from __future__ import annotations

import torch

from polytempo.protocol.values import Proposal
from polytempo.train.exchange import Exchange
from polytempo.train.flat import describe
from polytempo.train.session import Session


def average_buffers(session: Session, model: torch.nn.Module) -> None:
    """All workers must call this."""
    floating = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    tensors = [buffer for _, buffer in floating]
    if not floating:
        return
    if session.client is None:
        session.world().everybody.all_reduce(tensors, "mean").wait()
        return
    infos = describe(tensors, [name for name, _ in floating], [0] * len(floating))
    proposal = Proposal(sync="bsp", apply="mean", optimizer="", tensors=infos, groups=({},))
    side = Exchange(session, f"{session.next_track()}/mean", proposal, tensors)
    side.line.take = side.copier.scatter
    flat, _ = side.flat_of(lambda buffer: buffer)
    side.push(flat, ())
