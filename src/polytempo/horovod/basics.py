"""`init` and `shutdown`, ranks and hosts, and what Horovod says of its build."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from polytempo.errors import UsageError
from polytempo.horovod.process_sets import ProcessSet, add_process_set, check_sets, global_process_set, group_of, state
from polytempo.session import session
from polytempo.train import communication


def init(comm: object = None, process_sets: Iterable[ProcessSet | list[int]] | str | None = None) -> None:
    """Join the job of the launcher (`polytempo run`, torchrun, mpirun, srun); a second call does nothing.

    Args:
        comm: Not offered.
        process_sets: Process sets to add, as `add_process_set` takes them.

    Raises:
        UsageError: `comm` was given, the job runs in another mode than `bsp`, or a process set is wrong.
        PeerError: A rank could not be reached in time.
    """
    if comm is not None:
        raise UsageError("init(comm=...) is not offered; start the ranks you want, or use process_sets=")
    begun = not session.is_initialized()
    if begun:
        session.init()
    try:
        mode = session.current().job.sync
        if mode != "bsp":
            raise UsageError(f"expected --sync bsp for a Horovod script, got {mode}; start it with --sync bsp")
        sets = check_sets(process_sets) if process_sets is not None and not isinstance(process_sets, str) else []
        _gather_local_ranks()
    except UsageError:
        if begun:
            shutdown()
        raise
    if session.size() > 1:
        group_of(global_process_set)
    for process_set in sets:
        add_process_set(process_set)


def _gather_local_ranks() -> None:
    """Learn the local rank and local size of all ranks, once; a message only where there are several hosts."""
    known, size = state(), session.size()
    if known.local_ranks:
        return
    places = [[rank, size] for rank in range(size)]
    if session.local_size() != size:
        rows = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
        communication.all_gather(rows, torch.tensor([session.local_rank(), session.local_size()]))
        places = [row.tolist() for row in rows]
    known.local_ranks, known.local_sizes = tuple(p[0] for p in places), tuple(p[1] for p in places)


def shutdown() -> None:
    """Leave the job; process sets have to be added again after another `init`."""
    if session.is_initialized():
        for process_set in state().sets:
            process_set.forget()
    session.shutdown()


is_initialized = session.is_initialized
"""True between `init` and `shutdown`, as `polytempo.is_initialized`."""
rank = session.rank
"""The rank of this worker, as `polytempo.rank`."""
size = session.size
"""The number of workers, as `polytempo.size`."""
local_rank = session.local_rank
"""The rank of this worker on its host, as `polytempo.local_rank`."""
local_size = session.local_size
"""The number of workers on this host, as `polytempo.local_size`."""


def _counterparts() -> list[int]:
    """The ranks with the same local rank, one on each host."""
    if not state().local_ranks:
        raise UsageError("call polytempo.horovod.init() first")
    return [other for other, local in enumerate(state().local_ranks) if local == session.local_rank()]


def cross_rank() -> int:
    """The index of this host among the hosts that have a worker with the same local rank.

    Raises:
        UsageError: `init` was not called.
    """
    return _counterparts().index(session.rank())


def cross_size() -> int:
    """The number of hosts that have a worker with the same local rank.

    Raises:
        UsageError: `init` was not called.
    """
    return len(_counterparts())


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks.

    Raises:
        UsageError: `init` was not called.
    """
    _counterparts()
    return len(set(state().local_sizes)) == 1


def mpi_threads_supported() -> bool:
    """False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """False: MPI is not used, even where mpirun started the job."""
    return False


def mpi_built() -> bool:
    """False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """False: gloo is not used."""
    return False


def gloo_built() -> bool:
    """False: gloo is not used."""
    return False


def nccl_built() -> bool:
    """False: NCCL is not used."""
    return False


def ddl_built() -> bool:
    """False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """False: tensors on a GPU are staged through host memory."""
    return False


def rocm_built() -> bool:
    """False: tensors on a GPU are staged through host memory."""
    return False
