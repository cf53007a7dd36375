"""The guard of a job: it gives the rule what workers have seen of their steps, and says once that a training has diverged.

push with vital signs   ->  the rule of its optimizer (`sync/divergence.py`)
the first divergence    ->  one effect, `Diverged`: the coordinator tells the user, or ends the job
the end of the job      ->  `summary`: whether it has diverged, for the last line and meta.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polytempo.protocol.messages import Push
from polytempo.protocol.push import Measures, PushedChange, PushedValues
from polytempo.protocol.training_troubles import Circumstances, diverged, not_finite
from polytempo.server.effects import Diverged
from polytempo.server.optimizer_clock import OptimizerClock
from polytempo.server.worker_statistics import WorkerStatistics
from polytempo.sync.divergence import Divergence, DivergenceRule, Seen


class DivergenceGuard:
    """Looks at the pushes of all optimizers of a job."""

    def __init__(self, size: int, statistics: Sequence[WorkerStatistics]) -> None:
        self._size, self._statistics = size, statistics
        self._rules: dict[str, DivergenceRule] = {}
        self._told = ""  # what has gone wrong first
        self._update = 0  # of its optimizer, by then

    def pushed(self, clock: OptimizerClock, push: Push, step: int) -> list[Diverged]:
        """A push was accepted; the first divergence, if it shows that. `step`: the worker's, for people."""
        found = self._look(clock, push.measures)
        if found is None or self._told:
            return []
        circumstances = circumstances_of(clock, push, self._statistics)
        self._update = clock.version
        if found.finite:
            self._told = diverged(clock.version, found.loss, found.start, found.change, found.gradient, found.size)
            return [Diverged(self._told, circumstances.advice)]
        averages = clock.spec.capabilities.averages
        on_values = not push.measures.nonfinite or averages or isinstance(push.body, PushedChange | PushedValues)
        self._told = not_finite(push.id.worker, step, "model" if on_values else "gradient")
        return [Diverged(self._told, circumstances.advice_on_nonfinite)]

    def _look(self, clock: OptimizerClock, measures: Measures) -> Divergence | None:
        nonfinite = measures.nonfinite and measures.samples > 0  # what weighs nothing changes nothing
        if not measures.vital_signs and not nonfinite:
            return None
        if clock.name not in self._rules:
            self._rules[clock.name] = DivergenceRule(len(clock.optimizer_spec.members) or self._size)
        rule = self._rules[clock.name]
        if nonfinite:
            return rule.add_nonfinite()
        return rule.add([Seen(signs.loss, signs.gradient, signs.change, signs.size) for signs in measures.vital_signs])

    def summary(self) -> dict[str, Any]:
        """What went wrong first, at which update, and whether the training has come back; empty where nothing did."""
        if not self._told:
            return {}
        found = [rule.found for rule in self._rules.values() if rule.found is not None]
        return {"update": self._update, "trouble": self._told, "recovered": all(one.recovered for one in found)}


def circumstances_of(clock: OptimizerClock, push: Push, statistics: Sequence[WorkerStatistics]) -> Circumstances:
    """How the optimizer of this push trains."""
    hyper = push.made.hyper
    group: dict[str, Any] = hyper[0] if hyper else {}
    rate = group.get("local lr", group.get("lr"))
    averages = clock.spec.capabilities.averages
    on_servers = clock.optimizer_spec.apply == "server" and not averages
    momentum = group.get("momentum") or (group.get("betas") or (0.0,))[0]
    pushes = sum(stats.pushes for stats in statistics)
    return Circumstances(
        sync=clock.spec.text,
        rate=float(rate) if isinstance(rate, int | float) else None,
        momentum=float(momentum) if on_servers and isinstance(momentum, int | float) else 0.0,
        movable=clock.spec.mode.keeps_momentum,
        staleness=sum(stats.staleness_sum for stats in statistics) / max(pushes, 1),
        local=averages,
    )
