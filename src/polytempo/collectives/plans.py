"""Which algorithms there are for each collective, and the plan of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from polytempo.collectives import direct, halving_doubling, hierarchical, ring, shared_memory, tree
from polytempo.collectives.steps import Place, Step
from polytempo.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class RankPlan:
    """An algorithm: the steps of a rank, and into how many chunks the caller divides its tensor."""

    steps: Callable[[Place, int, int], list[Step]]
    chunk_count: Callable[[Place, int], int]


def _one(place: Place, pieces: int) -> int:
    return 1


def _pieces(place: Place, pieces: int) -> int:
    return pieces


def _ranks(place: Place, pieces: int) -> int:
    return place.size


def _in_and_out(place: Place, pieces: int) -> int:
    return 2 * place.size


def _parts(place: Place, pieces: int) -> int:
    return place.size * pieces


#: (collective, algorithm): the plan.
PLANS: dict[tuple[str, str], RankPlan] = {
    ("broadcast", "ring"): RankPlan(ring.broadcast, _pieces),
    ("broadcast", "tree"): RankPlan(tree.broadcast, _pieces),
    ("broadcast", "shared-memory"): RankPlan(shared_memory.broadcast, _pieces),
    ("reduce", "tree"): RankPlan(tree.reduce, _pieces),
    ("reduce", "shared-memory"): RankPlan(shared_memory.reduce, _one),
    ("all_reduce", "ring"): RankPlan(ring.all_reduce, _parts),
    ("all_reduce", "halving-doubling"): RankPlan(
        halving_doubling.all_reduce, lambda place, pieces: halving_doubling.core_size(place.size) * pieces
    ),
    ("all_reduce", "tree"): RankPlan(tree.all_reduce, _pieces),
    ("all_reduce", "double-tree"): RankPlan(tree.all_reduce_twice, lambda place, pieces: 2 * pieces),
    ("all_reduce", "hierarchical"): RankPlan(hierarchical.all_reduce, lambda place, pieces: len(place.hosts) * pieces),
    ("all_reduce", "shared-memory"): RankPlan(shared_memory.all_reduce, _ranks),
    ("gather", "linear"): RankPlan(direct.gather, _ranks),
    ("gather", "shared-memory"): RankPlan(shared_memory.gather, _ranks),
    ("all_gather", "ring"): RankPlan(ring.all_gather, _parts),
    ("all_gather", "shared-memory"): RankPlan(shared_memory.all_gather, _ranks),
    ("scatter", "linear"): RankPlan(direct.scatter, _ranks),
    ("scatter", "shared-memory"): RankPlan(shared_memory.scatter, _ranks),
    ("reduce_scatter", "ring"): RankPlan(ring.reduce_scatter, _parts),
    ("reduce_scatter", "shared-memory"): RankPlan(shared_memory.reduce_scatter, _ranks),
    ("all_to_all", "linear"): RankPlan(direct.all_to_all, _in_and_out),
    ("all_to_all", "shared-memory"): RankPlan(shared_memory.all_to_all, _in_and_out),
    ("barrier", "tree"): RankPlan(tree.barrier, _one),
    ("barrier", "shared-memory"): RankPlan(shared_memory.barrier, _one),
}

#: Plans on device memory that the ranks of one host map, by collective.
CUDA_IPC = "cuda-ipc"
ON_DEVICE: dict[str, RankPlan] = {
    "all_reduce": RankPlan(shared_memory.all_reduce_whole, _one),
    **{name: plan for (name, algorithm), plan in PLANS.items() if algorithm == "shared-memory" and name != "all_reduce"},
}

COLLECTIVES = tuple(dict.fromkeys(collective for collective, _ in PLANS))


def algorithms_for(collective: str) -> tuple[str, ...]:
    """The algorithms that there are for a collective."""
    if collective not in COLLECTIVES:
        hint = nearest(collective, COLLECTIVES)
        raise UsageError(f"there is no collective {collective!r}; there are: {', '.join(COLLECTIVES)}{hint}")
    return tuple(algorithm for known, algorithm in PLANS if known == collective)


def find_plan(collective: str, algorithm: str) -> RankPlan:
    """The plan by its names; says which there are when there is no such one."""
    known = algorithms_for(collective)
    if algorithm == CUDA_IPC:
        return ON_DEVICE[collective]
    if algorithm not in known:
        hint = nearest(algorithm, known)
        raise UsageError(f"there is no algorithm {algorithm!r} for {collective}; there are: {', '.join(known)}{hint}")
    return PLANS[collective, algorithm]


@lru_cache(maxsize=256)
def plan_for(collective: str, algorithm: str, place: Place, pieces: int, root: int = 0) -> tuple[int, tuple[Step, ...]]:
    """The number of chunks, and the steps of this rank on them; kept, since a job repeats the same calls."""
    plan = find_plan(collective, algorithm)
    if pieces < 1:
        raise UsageError(f"pieces must be 1 or more, not {pieces}")
    if not 0 <= root < place.size:
        raise UsageError(f"root must be a rank from 0 to {place.size - 1}, not {root}")
    return plan.chunk_count(place, pieces), tuple(plan.steps(place, pieces, root))
