"""A worker's own pushes that the values it has read lack, added to these values: `delay:k` with momentum at the worker.

While several pushes are in flight, an answer has the values of some pushes ago. A worker that computed on them as they are
would make the step that it has made already, once for each push in flight. So it computes on what it has read plus what is
under way. It knows its own pushes; the other n - 1 workers have as many under way, which it takes to be like its own:

    answer to push 0 --> values --> + n times push 1 and push 2 --> gradient 3        (these are not answered yet)

With 4 workers and 4 pushes of each really in flight, digits at the rate and momentum of bsp end at 11 % without this, at
14 % with its own pushes alone, and at 97 % like this, as bsp does.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from polytempo.protocol.layout import Layout
from polytempo.reducer.flat_buffer import Copier, FlatBuffer


class OwnPushes:
    """The unanswered pushes of one optimizer.

    Args:
        copier: Of its parameters; it has a flat buffer for each push in flight.
        layout: The group of each parameter.
        rate: The factor on the rate of a push that is sent now, with those that it stands for.
        changes: Are changes pushed? Otherwise gradients are.
    """

    def __init__(self, copier: Copier, layout: Layout, rate: Callable[[], float], changes: bool) -> None:
        self._copier, self._rate, self._changes = copier, rate, changes
        self._groups = {place.index: place.info.group for place in layout.places}
        self._sent: dict[int, tuple[FlatBuffer, list[float]]] = {}  # by step, with a factor for each group

    def sent(self, step: int, buffer: FlatBuffer, hyper: tuple[dict[str, Any], ...]) -> None:
        """This push was sent, and is not answered: the values go on from it."""
        rate = self._rate()
        factors = [rate if self._changes else -rate * float(group["lr"]) for group in hyper]
        self._sent[step] = buffer, factors
        self._add(buffer, factors)
        self._copier.watch.record()

    def add_to_values(self, unanswered: Container[int]) -> None:
        """Values were read that contain all pushes but these."""
        self._sent = {step: push for step, push in self._sent.items() if step in unanswered}
        for _, (buffer, factors) in sorted(self._sent.items()):
            self._add(buffer, factors)
        self._copier.watch.record()

    def _add(self, buffer: FlatBuffer, factors: list[float]) -> None:
        with torch.no_grad():
            for index, param in enumerate(self._copier.params):
                param.add_(buffer.views[index], alpha=factors[self._groups[index]])
