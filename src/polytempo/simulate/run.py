"""One call: a cluster, a mode and a budget in, an outcome out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from polytempo.errors import UsageError, nearest
from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.collective_cost import ALGORITHMS, best_all_reduce
from polytempo.simulate.engine import SimulationEngine
from polytempo.simulate.links import make_route, make_server_route
from polytempo.simulate.local_engine import LocalEngine
from polytempo.simulate.outcome import Budget, Outcome, sum_up
from polytempo.simulate.trainer import LocalTrainer, Trainer
from polytempo.sync.spec import Spec, parse_spec

#: How gradients may travel in a simulation.
VIAS = ("auto", "ps", "allreduce", *ALGORITHMS)


def simulate_job(
    cluster: Cluster,
    sync: str,
    *,
    via: str = "auto",
    seed: int = 0,
    record: Callable[[RecordLine], None] | None = None,
    trainee: Trainer | LocalTrainer | None = None,
    observe_every: float | None = None,
    progress: Callable[[float], None] | None = None,
    **budget: Any,
) -> Outcome:
    """Run a job in virtual time.

    The budget is any of `seconds`, `steps`, `samples` (summed over all workers) and `steps_each`. `via` is "ps" (the
    default), "allreduce" (its cheapest form here) or the name of one. `record` is called with every line of the record.
    """
    spec = parse_spec(sync)
    way = resolve_via(spec, via, cluster)
    engine = _engine(
        spec,
        cluster,
        way,
        Budget(**budget),
        trainee,
        seed=seed,
        record=record,
        observe_every=observe_every,
        progress=progress,
        corrections=spec.corrections,
    )
    engine.run()
    return sum_up(engine.workers, spec.text, way, engine.now, engine.updates, engine.max_lead, cluster.model_bytes)


def _engine(
    spec: Spec, cluster: Cluster, way: str, budget: Budget, trainee: Trainer | LocalTrainer | None, **options: Any
) -> SimulationEngine:
    policy, local = spec.policy(cluster.workers), spec.local
    if local is None:
        return SimulationEngine(cluster, policy, make_route(cluster, way), budget, trainee=trainee, **options)
    return LocalEngine(cluster, policy, make_server_route(cluster), budget, local, cast(LocalTrainer, trainee), **options)


def resolve_via(spec: Spec, via: str, cluster: Cluster) -> str:
    """The way gradients travel: "ps" or the name of an all-reduce; what the mode cannot use is refused."""
    if via not in VIAS:
        raise UsageError(f"unknown way {via!r}; known: {', '.join(VIAS)}{nearest(via, VIAS)}")
    if via in ("auto", "ps"):
        return "ps"
    if not (spec.mode.barrier and spec.mode.all_reduce):
        raise UsageError(f"{spec.text} needs a parameter server, got {via!r}; use ps, or bsp with {via}")
    return best_all_reduce(cluster) if via == "allreduce" else via
