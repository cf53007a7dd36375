"""What is held back is what makes a lossy chain learn: with it small problems are solved, without it some are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from polytempo.compression.chain import CompressionChain, parse_chain

LOSSY = ("bf16", "fp16", "topk:0.1", "topk:0.1+bf16", "sign", "int8", "significant:0.5", "significant:0.5+fp16")

Gradient = Callable[[torch.Tensor, int], torch.Tensor]


def descend(
    gradients: list[Gradient], text: str, start: torch.Tensor, rate: float, steps: int, holding: bool = True
) -> torch.Tensor:
    """Plain SGD on the mean of what the workers' messages say."""
    spec, size = parse_chain(text), start.numel()
    chains, x = [spec.new(size, start.dtype) for _ in gradients], start.clone()
    for step in range(steps):
        messages = [
            spec.decode(chain.encode(gradient(x, step)), size, x.dtype)
            for chain, gradient in zip(chains, gradients, strict=True)
        ]
        x -= rate * torch.stack(messages).mean(dim=0)
        if not holding:
            forget(chains)
    return x


def forget(chains: list[CompressionChain]) -> None:
    for chain in chains:
        chain.load({"residual": torch.zeros_like(chain.residual)})


def quadratics(size: int = 20, workers: int = 3) -> tuple[list[Gradient], torch.Tensor]:
    """Workers that want different things, and what is best for all."""
    dice = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    factors = [normal(size, size) / size**0.5 for _ in range(workers)]
    matrices = [factor @ factor.T + 0.5 * torch.eye(size, dtype=torch.float64) for factor in factors]
    targets = [normal(size) for _ in range(workers)]
    best = torch.linalg.solve(torch.stack(matrices).sum(dim=0), sum(m @ t for m, t in zip(matrices, targets, strict=True)))
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]] = zip(matrices, targets, strict=True)
    return [lambda x, _, m=m, t=t: m @ (x - t) for m, t in pairs], best


@pytest.mark.parametrize("text", [pytest.param(text, marks=pytest.mark.proof) if "+" in text else text for text in LOSSY])
def test_every_lossy_chain_finds_the_least_of_a_quadratic(text: str) -> None:
    """As near as the rate allows; without what was held back at least ten times as far, whatever the rate."""
    gradients, best = quadratics()

    def far(holding: bool) -> tuple[float, float]:
        near = descend(gradients, text, torch.zeros_like(best), rate=0.02, steps=1000, holding=holding)
        nearer = descend(gradients, text, near, rate=0.002, steps=1000, holding=holding)
        return float((near - best).norm() / best.norm()), float((nearer - best).norm() / best.norm())

    near, nearer = far(holding=True)
    assert near < 0.06
    assert nearer < min(0.01, near / 4)
    assert far(holding=False)[1] > 10 * nearer


def test_topk_without_what_was_held_back_never_sends_what_all_agree_on() -> None:
    """Two workers pull the first number apart, ten times as strongly as both pull the second to 1."""

    def worker(pull: float) -> Gradient:
        return lambda x, _: torch.stack([x[0] + pull, x[1] - 1])

    gradients, start = [worker(10.0), worker(-10.0)], torch.zeros(2, dtype=torch.float64)
    alone = descend(gradients, "topk:0.5", start, rate=0.01, steps=1500, holding=False)
    held = descend(gradients, "topk:0.5", start, rate=0.01, steps=1500)
    assert alone[1] == 0
    assert abs(float(held[1]) - 1) < 0.1


def test_signs_without_what_was_held_back_only_ever_move_along_one_line() -> None:
    """Least squares whose two rows have opposite signs: every message is along (1, -1), and x0 + x1 never changes."""
    rows = [torch.tensor([1.5, -0.5], dtype=torch.float64), torch.tensor([-0.5, 1.5], dtype=torch.float64)]

    def gradient(x: torch.Tensor, step: int) -> torch.Tensor:
        return rows[step % 2] * (rows[step % 2] @ x)

    start = torch.tensor([1.0, 1.0], dtype=torch.float64)
    alone = descend([gradient], "sign", start, rate=0.02, steps=1000, holding=False)
    held = descend([gradient], "sign", start, rate=0.02, steps=1000)
    assert float(alone.sum()) == pytest.approx(2.0)
    assert float(held.norm()) < 1e-3
