"""The bytes that each rank hands to the transport in a step, by axis.

What counts is what a rank hands over, whether it then goes through a socket or lies in shared memory:

    pipe     messages between stages: a head and the tensors, each way, for each microbatch; the loss to all stages of the
             lane; gradients of parameters that several stages hold
    tensor   for each collective, what this rank's plan of it sends and puts (`collectives/plans.py`)
    data     the gradients: put into shared memory once on one host; by the plan of the all-reduce between hosts, bucket by
             bucket; over servers pushed and pulled. Modes that average every k steps move a k-th of that.

Heads of frames, announcements of the first step, and the votes and pushes without data that order the rounds are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from polytempo.collectives.cost import Speeds, choose
from polytempo.collectives.plans import plan_for
from polytempo.collectives.steps import GRAIN, Place, Put, Send, cuts
from polytempo.strategy.costs import Machine, ModelProfile
from polytempo.strategy.parallel_plan import ParallelPlan, stage_sum, tied_groups

#: The head of a message between stages, and what its tensors are padded to.
HEAD = 64
#: The bytes of a bucket of gradients between hosts.
BUCKET = 8 << 20
#: The bytes of an element; borders of chunks fall on whole ones.
ITEM = 4


@dataclass(frozen=True)
class RankBytes:
    """What one rank hands over in a step."""

    pipe: float = 0.0
    tensor: float = 0.0
    data: float = 0.0

    @property
    def total(self) -> float:
        """All axes."""
        return self.pipe + self.tensor + self.data


def message_bytes(activation_bytes: float) -> int:
    """The size of a message between stages."""
    return HEAD + -(-int(activation_bytes) // HEAD) * HEAD


def bytes_moved(plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> tuple[RankBytes, ...]:
    """By rank."""
    found = []
    for rank in range(plan.mesh.size):
        about = rank, plan.mesh.point(rank).pipe, plan, profile, machine
        found.append(RankBytes(_pipe(*about), _tensor(*about), _data(*about)))
    return tuple(found)


def _pipe(rank: int, stage: int, plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> float:
    last, first = plan.mesh.pipe - 1, plan.stage_layers(stage)[0]
    moved = 0.0
    if stage < last:
        moved += plan.microbatches * message_bytes(profile.layers[plan.stage_layers(stage)[-1]].layer.activation_bytes)
    if stage > 0:
        moved += plan.microbatches * message_bytes(profile.layers[first - 1].layer.activation_bytes)
    if stage == last:
        moved += last * HEAD
    lane = plan.mesh.pipe_group(rank)
    for stages, nbytes in tied_groups(plan, profile):
        if stage in stages:
            moved += collective_bytes("all_reduce", nbytes, tuple(lane[held] for held in stages), rank, machine)
    return moved


def _tensor(rank: int, stage: int, plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> float:
    group = plan.mesh.tensor_group(rank)
    if len(group) == 1:
        return 0.0
    again = len(plan.actions.recomputed(stage, 0))
    moved = 0.0
    for held in plan.held_layers(profile, stage):
        for call in held.calls:
            times = plan.microbatches + (0 if call.backward else again)
            moved += times * collective_bytes(call.op, call.nbytes, group, rank, machine)
    return moved


def _data(rank: int, stage: int, plan: ParallelPlan, profile: ModelProfile, machine: Machine) -> float:
    group, exchange = plan.mesh.data_group(rank), plan.exchange
    if len(group) == 1:
        return 0.0
    nbytes = stage_sum(plan, profile, stage, "gradient_bytes")
    if exchange.servers:
        return 2 * nbytes / exchange.period
    if sum(any(rank in host for rank in group) for host in machine.hosts) == 1:
        return nbytes / exchange.period
    buckets = [min(BUCKET, int(nbytes) - start) for start in range(0, int(nbytes), BUCKET)]
    return sum(collective_bytes("all_reduce", size, group, rank, machine) for size in buckets) / exchange.period


def collective_bytes(op: str, nbytes: float, group: tuple[int, ...], rank: int, machine: Machine) -> float:
    """What a rank's plan of a collective sends and puts."""
    hosts = tuple(tuple(group.index(member) for member in host if member in group) for host in machine.hosts)
    # The speeds by which groups between hosts choose; only their own measurement, made once, can differ.
    between = machine.between
    speeds = Speeds() if between is None else Speeds(alpha=between.latency, beta=between.per_byte)
    return _plan_bytes(op, int(nbytes), Place(group.index(rank), tuple(host for host in hosts if host)), speeds)


@lru_cache(maxsize=4096)
def _plan_bytes(op: str, nbytes: int, place: Place, speeds: Speeds) -> int:
    if place.size == 1:
        return 0
    # What a group takes: shared memory on one host, the least prediction between several.
    algorithm = "shared-memory" if len(place.hosts) == 1 else choose(op, nbytes, place.hosts, speeds).algorithm
    count, steps = plan_for(op, algorithm, place, 1)
    if op == "all_gather":
        sizes = [nbytes // place.size] * count
    else:
        grain = GRAIN if algorithm == "shared-memory" else 1
        sizes = [(part.stop - part.start) * ITEM for part in cuts(nbytes // ITEM, count, grain)]
    return sum(sizes[step.chunk] for step in steps if isinstance(step, Send | Put))
