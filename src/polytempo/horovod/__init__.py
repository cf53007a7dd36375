"""Horovod's names for PyTorch scripts: `import polytempo.horovod as hvd` where `import horovod.torch as hvd` was.

What differs is on one page: docs/from-horovod.md.
"""

from __future__ import annotations

from polytempo.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from polytempo.horovod.broadcast_state import (
    allgather_object,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from polytempo.horovod.compression import Compression
from polytempo.horovod.distributed_optimizer import DistributedOptimizer
from polytempo.horovod.errors import DuplicateNameError, HorovodInternalError, MismatchError
from polytempo.horovod.handles import poll, synchronize
from polytempo.horovod.negotiation import barrier, join
from polytempo.horovod.ops import Adasum, Average, Max, Min, Product, Sum
from polytempo.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from polytempo.horovod.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from polytempo.horovod.rows import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from polytempo.horovod.sync_batch_norm import SyncBatchNorm

#: Names of Horovod that are not here, and what to do instead.
NOT_OFFERED = {
    "elastic": "it comes later; until then a rank that is lost ends the job",
    "run": "start the script with polytempo run, torchrun or mpirun",
    "start_timeline": "use torch.profiler",
    "stop_timeline": "use torch.profiler",
    "HostsUpdatedInterrupt": "hosts do not change during a job",
    "check_extension": "there is no extension to look for",
    "check_installed_version": "there is no extension to look for",
}

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DuplicateNameError",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]


def __getattr__(name: str) -> object:
    if name in NOT_OFFERED:
        raise AttributeError(f"hvd.{name} is not offered by polytempo.horovod: {NOT_OFFERED[name]}")
    raise AttributeError(f"module 'polytempo.horovod' has no attribute {name!r}")
