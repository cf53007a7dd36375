"""One rank of a pipeline over two hosts: what it has learnt, and what its links have sent."""

from __future__ import annotations

import json

import torch
from torch import nn

import polytempo as pt
from polytempo.session import session

ROWS, WIDTH, STEPS = 64, 256, 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """In one piece."""
    whole, losses = model(), []
    stepper = torch.optim.SGD(whole.parameters(), lr=0.5)
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(whole(x), y)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses, whole.state_dict()


if __name__ == "__main__":
    pt.init()
    world = session.current().world()
    pipe = pt.Pipeline(
        model(),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        schedule="1f1b",
        microbatches=4,
    )
    before = {rank: link.payload_sent for rank, link in world.engine.messages.links.items()}
    losses = [pipe.step(*batch(step)) for step in range(STEPS)]
    sent = {rank: link.payload_sent - before[rank] for rank, link in world.engine.messages.links.items()}
    wanted, state = alone()
    found = pipe.state_dict()
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-10)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
    pt.barrier()
    print(json.dumps({"rank": pt.rank(), "sent": sent}))
    pt.shutdown()
