"""A simulation by one call: a cluster, a mode and a budget in, an outcome out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from polytempo.errors import UsageError, nearest
from polytempo.records.lines import RecordLine
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.engine import Engine
from polytempo.simulate.links import ALGORITHMS, best_all_reduce, make_route
from polytempo.simulate.outcome import Budget, Outcome, WorkerOutcome
from polytempo.summation import in_order
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.spec import Spec, parse_spec

if TYPE_CHECKING:
    from polytempo.simulate.virtual_model import VirtualModel

#: How gradients may travel in a simulation.
VIAS = ("auto", "ps", "allreduce", *ALGORITHMS, "peers")


def simulate_job(
    cluster: Cluster,
    sync: str | Spec,
    *,
    via: str = "auto",
    seed: int = 0,
    record: Callable[[RecordLine], None] | None = None,
    trainer: VirtualModel | None = None,
    observe_every: float | None = None,
    progress: Callable[[float], None] | None = None,
    figures: bool = False,
    **budget: Any,
) -> Outcome:
    """Simulate a job in virtual time: the policies of a live job on a described cluster.

    Args:
        cluster: The machines and links.
        sync: The mode, such as `"ssp:3"`.
        via: `"ps"`, `"allreduce"` (its cheapest algorithm on this cluster) or the name of one; `"auto"` is `"ps"`,
            `"allreduce"` where models are averaged, and `"peers"` where they are mixed with those of neighbours.
        seed: Of everything random.
        record: Called with every line of the record.
        trainer: Computes real gradients along the run; `train_virtually` makes one.
        observe_every: Virtual seconds between evaluations of the trainer.
        progress: Called with the share of the budget that is used up.
        figures: Push lines of the record say what the step took of its worker's own time, as live ones do.
        **budget: At least one of `seconds`, `steps`, `samples` (summed over all workers) and `steps_each`.

    Returns:
        Times, throughput, waiting and staleness.

    Raises:
        UsageError: The mode, the way or the budget cannot be used.
        StuckError: The run cannot go on: which worker waits for which.

    Example:
        ```python
        from polytempo.simulate import Cluster, simulate_job

        simulate_job(Cluster(workers=8, slow={7: 3.0}), "ssp:3", steps=1000).efficiency
        ```
    """
    spec = parse_spec(sync) if isinstance(sync, str) else sync
    way = resolve_via(spec, via, cluster)
    part = replace(cluster, model_bytes=cluster.model_bytes / spec.fragments)  # a message holds a fragment
    engine = Engine(
        cluster,
        spec,
        make_route(part, way),
        Budget(**budget),
        trainer,
        seed=seed,
        record=record,
        observe_every=observe_every,
        progress=progress,
        figures=figures,
    )
    engine.run()
    return _outcome_of(engine, way, part.model_bytes)


def _outcome_of(engine: Engine, via: str, message_bytes: float) -> Outcome:
    workers, seconds = engine.workers, engine.now
    parts = tuple(
        WorkerOutcome(
            worker=worker.rank,
            steps=worker.steps,
            samples=worker.steps * worker.batch if worker.samples is None else worker.samples,
            discarded=worker.discarded,
            computing_s=worker.computing,
            waiting_s=worker.waiting,
            communicating_s=worker.communicating,
            present_s=worker.present,
            bytes_sent=worker.messages * message_bytes,
            staleness_mean=worker.staleness_sum / max(worker.steps, 1),
            staleness_max=worker.staleness_max,
        )
        for worker in workers
    )
    present = in_order(part.present_s for part in parts) or 1.0
    steps = sum(part.steps for part in parts)
    samples = sum(part.samples for part in parts)
    return Outcome(
        sync=engine.spec.text,
        via=via,
        seconds=seconds,
        steps=steps,
        samples=samples,
        discarded=sum(part.discarded for part in parts),
        updates=engine.updates,
        samples_per_second=samples / seconds if seconds else 0.0,
        efficiency=in_order(worker.computing - worker.wasted for worker in workers) / present,
        waiting=in_order(part.waiting_s for part in parts) / present,
        communicating=in_order(part.communicating_s for part in parts) / present,
        staleness_mean=sum(worker.staleness_sum for worker in workers) / max(steps, 1),
        staleness_max=max(part.staleness_max for part in parts),
        max_lead=engine.max_lead,
        workers=parts,
        fragments=len(engine.clocks),
    )


def resolve_via(spec: Spec, via: str, cluster: Cluster) -> str:
    """The way gradients travel: "ps" or the name of an all-reduce; what the mode cannot use is refused."""
    if via not in VIAS:
        raise UsageError(f"unknown way {via!r}; known: {', '.join(VIAS)}{nearest(via, VIAS)}")
    by_peers, can = via == "peers", spec.capabilities
    wanted = {Feature.SIMULATED_PEERS: by_peers, Feature.SIMULATED_NO_PEERS: via not in ("auto", "peers")}
    check_features(spec, wanted, via=via)
    if can.neighbours:
        return "peers"
    if via == "auto":
        via = "allreduce" if can.averages and can.reduces else "ps"
    check_features(spec, {Feature.SIMULATED_ALLREDUCE: via != "ps"}, via=via)
    return best_all_reduce(cluster) if via == "allreduce" else via


def mean_step_time(cluster: Cluster, rank: int = -1) -> float:
    """Seconds of a rank's step without its slow-down, on average; without a rank, of a worker without times of its own."""
    draws = cluster.duration(rank).draw(Random(0), 0, 64)
    return in_order(draws) / len(draws)
