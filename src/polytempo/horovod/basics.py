"""Who takes part, and what this is made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from polytempo.errors import UsageError
from polytempo.horovod.process_sets import ProcessSet, add_process_set, check_sets, global_process_set, group_of
from polytempo.horovod.session_state import state
from polytempo.session import session
from polytempo.train import communication


def init(comm: object = None, process_sets: Iterable[ProcessSet | list[int]] | str | None = None) -> None:
    """Join the job of the launcher; without one, be a job of one. Calling it again does nothing."""
    if comm is not None:
        raise UsageError("init(comm=...) is not offered; start the ranks you want, or use process_sets=")
    begun = not session.is_initialized()
    if begun:
        session.init()
    try:
        mode = session.current().job.sync
        if mode != "bsp":
            raise UsageError(f"Horovod scripts train in step, in no other mode: start with --sync bsp, got {mode}")
        sets = check_sets(process_sets) if process_sets is not None and not isinstance(process_sets, str) else []
        _learn_places()
    except UsageError:
        if begun:
            shutdown()
        raise
    if session.size() > 1:
        group_of(global_process_set)
    for process_set in sets:
        add_process_set(process_set)


def _learn_places() -> None:
    """The hosts of all ranks, gathered only in a job of several hosts, and once."""
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
    """Leave the job: done. Process sets are known no more."""
    if session.is_initialized():
        for process_set in state().sets:
            process_set.forget()
    session.shutdown()


is_initialized = session.is_initialized
rank = session.rank
size = session.size
local_rank = session.local_rank
local_size = session.local_size


def _counterparts() -> list[int]:
    """The ranks that have this one's number on their hosts: one a host."""
    if not state().local_ranks:
        raise UsageError("call polytempo.horovod.init() first")
    return [other for other, local in enumerate(state().local_ranks) if local == session.local_rank()]


def cross_rank() -> int:
    """The number of this host, among those that have a rank of this local rank."""
    return _counterparts().index(session.rank())


def cross_size() -> int:
    """How many hosts have a rank of this local rank."""
    return len(_counterparts())


def is_homogeneous() -> bool:
    """Are there equally many ranks on all hosts?"""
    _counterparts()
    return len(set(state().local_sizes)) == 1


def mpi_threads_supported() -> bool:
    """There is no MPI in it."""
    return False


def mpi_enabled() -> bool:
    """There is no MPI in it, even when mpirun starts it."""
    return False


def mpi_built() -> bool:
    """There is no MPI in it."""
    return False


def gloo_enabled() -> bool:
    """There is no gloo in it."""
    return False


def gloo_built() -> bool:
    """There is no gloo in it."""
    return False


def nccl_built() -> bool:
    """There is no NCCL in it."""
    return False


def ddl_built() -> bool:
    """There is no DDL in it."""
    return False


def ccl_built() -> bool:
    """There is no oneCCL in it."""
    return False


def cuda_built() -> bool:
    """Tensors on a GPU go through the CPU."""
    return False


def rocm_built() -> bool:
    """Tensors on a GPU go through the CPU."""
    return False
