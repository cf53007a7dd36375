"""Polytempo: distributed PyTorch training with a choice of synchronisation modes.

    import polytempo as pt
    pt.init()
    optimizer = pt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

All public names are here, in `polytempo.tables` (parameter tables on servers), `polytempo.simulate` (jobs in virtual time)
and `polytempo.horovod` (Horovod's names). They are loaded on first use: `import polytempo` imports neither torch nor ZeroMQ.
The import has one side effect: it registers the back end "polytempo" with `torch.distributed`, as soon as torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polytempo.lazy_imports import lazy_names
from polytempo.torch_backend.register import register
from polytempo.version import VERSION

if TYPE_CHECKING:
    from polytempo import simulate, tables
    from polytempo.cli.launch import launch
    from polytempo.collectives.tasks import Task
    from polytempo.errors import JobEnded, PeerError, PolytempoError, RankLost, UsageError
    from polytempo.optim.asup import AsuP
    from polytempo.pipeline.actions import Schedule
    from polytempo.pipeline.pipeline import Pipeline
    from polytempo.session.script_calls import describe_model, local_device, log, should_stop
    from polytempo.session.session import init, is_initialized, local_rank, local_size, rank, shutdown, size
    from polytempo.strategy.distributed_model import DistributedModel
    from polytempo.strategy.evaluate import evaluate
    from polytempo.strategy.explanation import Explanation
    from polytempo.strategy.fit import Callback, EarlyStop, FitRun, History, fit
    from polytempo.strategy.strategy import Strategy
    from polytempo.tensor_parallel.cross_entropy import cross_entropy
    from polytempo.train.communication import (
        Group,
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        broadcast_optimizer_state,
        broadcast_parameters,
        explain_algorithm,
        gather,
        irecv,
        isend,
        new_group,
        recv,
        reduce,
        reduce_scatter,
        reform,
        scatter,
        send,
    )
    from polytempo.train.evaluation_statistics import evaluation_statistics
    from polytempo.train.optimizer import DistributedOptimizer
    from polytempo.train.prepare import prepare
    from polytempo.train.sampler import DistributedBatchSampler, DistributedSampler
    from polytempo.train.script_state import RngState, register_for_checkpointing

__version__ = VERSION
register()

#: Module, below `polytempo`: the public names that it defines.
_MODULES = {
    "cli.launch": ("launch",),
    "collectives.tasks": ("Task",),
    "errors": ("JobEnded", "PeerError", "PolytempoError", "RankLost", "UsageError"),
    "optim.asup": ("AsuP",),
    "pipeline.actions": ("Schedule",),
    "pipeline.pipeline": ("Pipeline",),
    "session.script_calls": ("describe_model", "local_device", "log", "should_stop"),
    "session.session": ("init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"),
    "strategy.distributed_model": ("DistributedModel",),
    "strategy.evaluate": ("evaluate",),
    "strategy.explanation": ("Explanation",),
    "strategy.fit": ("Callback", "EarlyStop", "FitRun", "History", "fit"),
    "strategy.strategy": ("Strategy",),
    "tensor_parallel.cross_entropy": ("cross_entropy",),
    "train.communication": (
        *("Group", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_optimizer_state"),
        *("broadcast_parameters", "explain_algorithm", "gather", "irecv", "isend", "new_group", "recv", "reduce"),
        *("reduce_scatter", "reform", "scatter", "send"),
    ),
    "train.evaluation_statistics": ("evaluation_statistics",),
    "train.optimizer": ("DistributedOptimizer",),
    "train.prepare": ("prepare",),
    "train.sampler": ("DistributedBatchSampler", "DistributedSampler"),
    "train.script_state": ("RngState", "register_for_checkpointing"),
}

__all__ = [
    "AsuP",
    "Callback",
    "DistributedBatchSampler",
    "DistributedModel",
    "DistributedOptimizer",
    "DistributedSampler",
    "EarlyStop",
    "Explanation",
    "FitRun",
    "Group",
    "History",
    "JobEnded",
    "PeerError",
    "Pipeline",
    "PolytempoError",
    "RankLost",
    "RngState",
    "Schedule",
    "Strategy",
    "Task",
    "UsageError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_entropy",
    "describe_model",
    "evaluate",
    "evaluation_statistics",
    "explain_algorithm",
    "fit",
    "gather",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "launch",
    "local_device",
    "local_rank",
    "local_size",
    "log",
    "new_group",
    "prepare",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "reform",
    "register_for_checkpointing",
    "scatter",
    "send",
    "should_stop",
    "shutdown",
    "simulate",
    "size",
    "tables",
]


#: What to write here: names for it in torch.distributed, Horovod, Accelerate and Lightning, which users try.
_ELSEWHERE = {
    "import polytempo.horovod as hvd": ("horovod", "hvd"),
    "pt.all_gather(tensor_list, tensor), or import polytempo.horovod as hvd": ("allgather", "allgather_async"),
    "pt.all_gather(tensor_list, tensor)": ("all_gather_into_tensor",),
    "pt.all_reduce(tensor, op='mean'), or import polytempo.horovod as hvd": (
        *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_"),
    ),
    "pt.all_reduce(tensor, async_op=True)": ("all_reduce_async", "iall_reduce"),
    "pt.all_reduce(tensor, op='mean'), or 'sum', 'prod', 'min', 'max'": (
        *("Average", "Max", "Min", "Product", "ReduceOp", "Sum"),
    ),
    "pt.all_to_all(output_list, input_list)": ("all_to_all_single", "alltoall"),
    "pt.barrier()": ("monitored_barrier", "wait_for_everyone"),
    "pt.broadcast(tensor, src)": ("broadcast_", "broadcast_async", "broadcast_async_"),
    "pt.DistributedOptimizer(optimizer, model)": ("DDP", "DistributedDataParallel"),
    "pt.fit(...) or pt.prepare(model, optimizer, loader)": ("Fabric", "Trainer"),
    "pt.init()": ("init_distributed", "init_process_group", "initialize"),
    "pt.launch(function, args, n=4)": ("notebook_launcher", "spawn"),
    "pt.local_device()": ("device", "get_device"),
    "pt.local_rank()": ("get_local_rank", "get_node_local_rank", "local_process_index"),
    "pt.local_size()": ("get_local_size", "get_local_world_size", "local_world_size"),
    "pt.prepare(model, optimizer, loader)": ("Accelerator",),
    "pt.rank()": ("get_global_rank", "get_rank", "global_rank", "process_index"),
    "pt.rank() == 0": ("is_global_zero", "is_main_process", "on_main_process", "rank_zero_only"),
    "pt.reduce_scatter(output, input_list)": ("reduce_scatter_tensor", "reducescatter"),
    "pt.shutdown()": ("cleanup", "destroy_process_group", "end_training", "finalize"),
    "pt.size()": ("get_world_size", "num_processes", "world_size"),
}

_load, _ = lazy_names(__name__, _MODULES, _ELSEWHERE)


def __getattr__(name: str) -> Any:
    return import_module(f"polytempo.{name}") if name in ("simulate", "tables") else _load(name)


def __dir__() -> list[str]:
    return __all__
