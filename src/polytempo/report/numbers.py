"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping


def plain_number(value: float) -> str:
    """Up to four figures, without powers of ten: 66070, 512.3, 4, 0.03125."""
    text = f"{value:.4g}"
    if "e" not in text:
        return text
    return f"{value:.0f}" if abs(value) >= 1 else f"{value:.7f}"


def percentages(parts: Mapping[str, float]) -> dict[str, int]:
    """Shares of a whole in percent, as whole numbers that add up to 100; what the parts leave over is "other".

    Parts that are measured on different clocks may come to more than the whole: then they are shares of their sum.
    """
    shares = {name: max(value, 0.0) for name, value in parts.items()}
    total = sum(shares.values())
    shares = {name: value / max(total, 1.0) for name, value in shares.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    exact = {name: 100 * value for name, value in shares.items()}
    whole = {name: int(value) for name, value in exact.items()}
    largest = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in largest[: 100 - sum(whole.values())]:
        whole[name] += 1
    return whole
