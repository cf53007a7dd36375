"""The machine measured between the ranks of a job: links, reductions, contention. All ranks take part together.

Every figure comes from the mechanism that a step uses, between the ranks that will use it. Nothing is assumed: what was not
measured is not predicted.

    inside, between   a stage's message, there and back between two ranks (`pipeline/point_to_point.py`), a small and a large
                      one: latency, and seconds a byte
    reductions        an all-reduce of a tensor group of each size that divides the ranks, all groups of that size at once;
                      with a session also the step of a `DistributedOptimizer` among the ranks of each size of the data axis,
                      less that of the optimizer that it wraps
    contention        the same work on one rank of each host, then on all of them at once: how much longer it keeps a core
                      busy, for memory bandwidth and caches are shared
    action_s          a stage's forward and backward around a layer, less the layer
    cores             that the ranks of a host may use, by their affinity, for each thread of a rank

For plans that are made outside of a job, `measured_machine` starts a short one with this file as its script: its ranks
measure what lies between them, and rank 0 writes it to a file. The environment of the user counts: threads, affinity, cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, thread_time

import torch
from torch import nn

from polytempo.collectives.group import RankGroup
from polytempo.collectives.world import World
from polytempo.errors import PolytempoError
from polytempo.mesh import ReplicaRanks
from polytempo.pipeline.partition import ModelPart
from polytempo.pipeline.point_to_point import BACKWARD, FORWARD, PointToPoint
from polytempo.pipeline.stage import Stage, drawing_apart
from polytempo.pipeline.stage_message import StageMessage
from polytempo.session.session import Session, current, init, rank, shutdown
from polytempo.strategy.costs import Machine, MeasuredLink, MeasuredReduction, as_data, from_data
from polytempo.train.optimizer import DistributedOptimizer

#: Bytes of the messages and reductions that are measured (gradients are large), and seconds that each may take.
SMALL, LARGE, GRADIENTS = 256, 1 << 20, 8 << 20
SECONDS = 0.05
#: The largest number of rounds of one measurement, and the least.
MOST, LEAST = 30, 3
#: Cores in an affinity mask.
MASK = 4096


def measure_machine(world: World, work: Callable[[], object] | None = None, session: Session | None = None) -> Machine:
    """Measure what lies between the ranks of a job. All ranks call this together, and get the same.

    Args:
        world: All ranks of the job.
        work: What ranks compute while contention is measured, a few milliseconds of it, such as a forward and backward of
            the model; by default a small perceptron.
        session: The job, where the data axis is to be measured, too, if its mode reduces among the ranks: optimizers that
            change nothing take some steps, beside the job's main one.

    Returns:
        The machine, as predictions need it.
    """
    with drawing_apart(torch.device("cpu")):
        group = world.new_group(range(world.size))
        assert group is not None
        hosts = tuple(tuple(host) for host in world.hosts)
        neighbours = next((host[:2] for host in hosts if len(host) > 1), None)
        between = _link(group, (hosts[0][0], hosts[1][0])) if len(hosts) > 1 else None
        inside = _link(group, neighbours) if neighbours is not None else between
        cores = _cores(group, hosts)
        sizes = [size for size in range(2, world.size + 1) if world.size % size == 0]
        reductions = [one for size in sizes for one in _tensor_reductions(world, group, size)]
        if session is not None and session.job.spec.capabilities.common:
            reductions += [one for size in sizes for one in _data_reductions(session, group, size)]
        of_two = {(one.axis, one.hosts): one.link for one in reductions if one.ranks == 2}
        return Machine(
            hosts=hosts,
            cores=cores,
            inside=inside or MeasuredLink(0.0, 0.0),  # one rank has no link
            between=between,
            reduce_inside=of_two.get(("tensor", 1)),
            reduce_between=of_two.get(("tensor", 2)),
            contention=_contention(group, hosts, cores, work or _perceptron()),
            action_s=_gathered(group, _action_seconds())[0][0],  # of the first rank, on every rank
            data_inside=of_two.get(("data", 1)),
            data_between=of_two.get(("data", 2)),
            reductions=tuple(reductions),
        )


# What all ranks know.


def _gathered(group: RankGroup, *values: float) -> list[list[float]]:
    """The figures of each rank, on every rank."""
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(group.size)]
    group.all_gather(rows, mine).wait()
    return [row.tolist() for row in rows]


def _cores(group: RankGroup, hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """For each host: how many of its ranks compute at full speed side by side."""
    mask = torch.zeros(MASK, dtype=torch.uint8)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    mask[[core % MASK for core in allowed]] = 1
    masks = [torch.empty_like(mask) for _ in range(group.size)]
    group.all_gather(masks, mask).wait()
    threads = max(1, round(max(row[0] for row in _gathered(group, float(torch.get_num_threads())))))
    together = [torch.stack([masks[rank] for rank in host]).amax(0) for host in hosts]
    return tuple(max(1, int(one.sum()) // threads) for one in together)


# Messages between stages.


def _link(group: RankGroup, pair: Sequence[int]) -> MeasuredLink:
    """The link between two ranks; the others wait."""
    p2p = PointToPoint(group, torch.device("cpu"))
    times: list[list[float]] = []
    core: list[float] = []
    for size in (SMALL, LARGE):
        if group.engine.rank == pair[0]:
            before = thread_time()
            times.append([seconds / 2 for seconds in _ping(p2p, pair[1], size)])
            core.append((thread_time() - before) / 2 / (1 + len(times[-1])))  # one sent and one received in each round
        elif group.engine.rank == pair[1]:
            number, going = 0, True
            while going:
                message = p2p.take(pair[0], FORWARD, number)
                p2p.send(pair[0], BACKWARD, StageMessage(message.values, number=number))
                number, going = number + 1, bool(message.version)
    p2p.settle()
    mine = (*_figures(times[0], times[1]), core[0]) if times else (0.0, 0.0, 0.0)
    return MeasuredLink(*_gathered(group, *mine)[group.ranks.index(pair[0])])


def _figures(small: Sequence[float], large: Sequence[float], nbytes: int = LARGE) -> tuple[float, float]:
    """Latency and seconds a byte: what a small message takes as a rule (the lower quartile: what other processes disturb is
    above it), and what a large one takes longer at best."""
    per_byte = max(0.0, (min(large) - min(small)) / (nbytes - SMALL))
    return max(0.0, quantiles(small, n=4, method="inclusive")[0] - SMALL * per_byte), per_byte


def _ping(p2p: PointToPoint, other: int, size: int) -> list[float]:
    """Seconds there and back. The version says that another round follows."""
    data, times, number = torch.zeros(size, dtype=torch.uint8), list[float](), 0
    going = True
    while going:
        going = len(times) < MOST and (len(times) < LEAST or sum(times) < SECONDS)
        started = perf_counter()
        p2p.send(other, FORWARD, StageMessage([data], number=number, version=int(going)))
        data = p2p.take(other, BACKWARD, number).values[0]
        times.append(perf_counter() - started)
        number += 1
    return times[1:]  # the first announces the form and makes the memory


# Reductions.


def _tensor_reductions(world: World, group: RankGroup, size: int) -> Iterator[MeasuredReduction]:
    """Adjacent ranks."""
    ranks = [range(first, first + size) for first in range(0, world.size, size)]
    made = [world.new_group(one) for one in ranks]  # all ranks make all groups, in the same order
    own = next(one for one in made if one is not None)
    times, core = [], []
    for nbytes in (SMALL, LARGE):
        tensor = torch.zeros(nbytes // 4)

        def reduce(tensor: torch.Tensor = tensor) -> None:
            own.all_reduce([tensor]).wait()

        times.append(timed_together(group, reduce))
        core.append(_call_on_core(reduce))
    return _of_groups(group, "tensor", ranks, (*_figures(times[0], times[1]), core[0]))


def _data_reductions(session: Session, group: RankGroup, size: int) -> Iterator[MeasuredReduction]:
    """Ranks as far apart as the replicas of a model."""
    apart = session.size // size
    ranks = [range(first, session.size, apart) for first in range(apart)]
    members = ReplicaRanks(tuple(ranks[session.rank % apart]), session.rank % apart == 0)
    times, core = [], []
    with session.measuring():
        for nbytes in (SMALL, GRADIENTS):
            param = nn.Parameter(torch.zeros(nbytes // 4))
            inner = torch.optim.SGD([param], lr=0.0)
            optimizer = DistributedOptimizer(inner, sync="bsp", group=members)
            together = timed_together(group, optimizer.step, partial(_make_gradient, param))
            alone = median([_seconds(inner.step) for _ in range(LEAST)])
            times.append([max(0.0, seconds - alone) for seconds in together])
            core.append(_call_on_core(optimizer.step, partial(_make_gradient, param)))
    return _of_groups(group, "data", ranks, (*_figures(times[0], times[1], GRADIENTS), core[0]))


def _make_gradient(param: nn.Parameter) -> None:
    param.grad = None
    param.sum().backward()


def _of_groups(
    group: RankGroup, axis: str, ranks: Sequence[Sequence[int]], figures: Sequence[float]
) -> Iterator[MeasuredReduction]:
    """Of groups with as many ranks on as many hosts, the slowest counts."""
    rows = _gathered(group, *figures)
    found: dict[int, list[list[float]]] = {}
    for members in ranks:
        hosts = sum(1 for host in group.place.hosts if set(host) & set(members))
        found.setdefault(hosts, []).extend(rows[member] for member in members)
    for hosts, those in sorted(found.items()):
        link = MeasuredLink(*(max(row[figure] for row in those) for figure in range(3)))
        yield MeasuredReduction(axis, len(ranks[0]), hosts, link)


def timed_together(group: RankGroup, call: Callable[[], object], prepare: Callable[[], object] | None = None) -> list[float]:
    """Seconds of a call that all ranks of a group make equally often, as often as fits into the time of the slowest.
    `prepare`: what each rank does before it, and all wait for."""

    def seconds() -> float:
        if prepare is not None:
            prepare()
            group.barrier().wait()
        return _seconds(call)

    slowest = max(row[0] for row in _gathered(group, median([seconds() for _ in range(LEAST)])))
    rounds = max(LEAST, min(MOST, int(SECONDS / max(1e-9, slowest))))
    group.barrier().wait()
    return [seconds() for _ in range(rounds)]


def _call_on_core(call: Callable[[], object], prepare: Callable[[], object] | None = None) -> float:
    """Seconds on a core of a call that all ranks of a group make; the rest of its time it waits."""
    total = 0.0
    for _ in range(LEAST):
        if prepare is not None:
            prepare()
        before = thread_time()
        call()
        total += thread_time() - before
    return total / LEAST


def _seconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


# Computing.


def _perceptron() -> Callable[[], object]:
    """Some milliseconds of matrix products and of traffic to memory, as a layer has both."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    inputs = torch.ones(256, 256)

    def work() -> None:
        model(inputs).sum().backward()

    return work


def _contention(group: RankGroup, hosts: Sequence[Sequence[int]], cores: Sequence[int], work: Callable[[], object]) -> float:
    """How much longer the work takes on all ranks at once than on one of them, of the host where it grows most. That ranks
    share cores is known, and does not count."""
    if max(map(len, hosts)) == 1:
        return 1.0
    work()
    first = any(group.engine.rank == host[0] for host in hosts)
    alone = min(_core_seconds(work) for _ in range(LEAST + 2)) if first else 0.0
    slowest = max(row[0] for row in _gathered(group, alone))
    rounds = max(LEAST, min(MOST, int(SECONDS / max(1e-9, slowest))))
    group.barrier().wait()
    together = median([_core_seconds(work) for _ in range(rounds)])
    rows, single = _gathered(group, alone, together), torch.get_num_threads() == 1
    found = [1.0]
    for host, free in zip(hosts, cores, strict=True):
        shared = 1.0 if single else max(1.0, len(host) / free)
        found.append(sum(rows[member][1] for member in host) / len(host) / rows[host[0]][0] / shared)
    return max(found)


def _core_seconds(call: Callable[[], object]) -> float:
    """Seconds on the core. Where torch computes with several threads, seconds of the clock: threads that wait for each
    other spin, and the more ranks compute the longer, which no layer has to wait for."""
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    started = clock()
    call()
    return max(1e-9, clock() - started)


def _action_seconds() -> float:
    """What a stage adds to its module: half of what it adds to a forward and a backward."""
    layer, inputs = nn.Linear(8, 8), torch.ones(1, 8)
    part = ModelPart(nn.Sequential(layer), ("0",))
    stage = Stage(part, 0, lambda params: torch.optim.SGD(params, 0.0), None)
    gradient = StageMessage([torch.ones(1, 8)])

    def action() -> None:
        stage.forward(0, StageMessage([inputs], single=True))
        stage.backward(0, gradient)

    def module() -> None:
        part.module(inputs).backward(gradient.values[0])

    action()
    around, alone = (median([_seconds(call) for _ in range(MOST)]) for call in (action, module))
    return max(0.0, around - alone) / 2


#: Seconds that the job may take.
PATIENCE = 300.0


def measured_machine(workers: int, link: str | None = None) -> Machine:
    """Measure a machine by a job of its own.

    Args:
        workers: The number of processes, all on this host.
        link: A network between them to emulate, as `polytempo run --link` takes it.

    Returns:
        What lies between the ranks.

    Raises:
        PolytempoError: The job has failed; the text is its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.json"
        options = ["-n", str(workers), "-q", *(["--link", link] if link else [])]
        command = [sys.executable, "-m", "polytempo", "run", *options, __file__, str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            raise PolytempoError(f"measuring the links of {workers} processes took more than {PATIENCE:g} s") from None
        if done.returncode or not file.exists():
            said = (done.stderr or done.stdout).strip().splitlines()
            raise PolytempoError(f"measuring the links of {workers} processes failed: {said[-1] if said else 'no output'}")
        return from_data(json.loads(file.read_text(encoding="utf-8")))[1]


if __name__ == "__main__":  # what each rank runs
    init()
    found = measure_machine(current().world(), session=current())
    if rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(as_data([], found)), encoding="utf-8")
    shutdown()
