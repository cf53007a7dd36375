"""Polytempo: distributed training in which synchronisation is a dial, not a fate.

This is the one door: names below are loaded on first use, so that `import polytempo` costs nothing and a simulation never
loads torch. One thing happens on import: torch, if and when it is loaded, is told the name of our back end.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polytempo.torch_backend.register import register
from polytempo.version import VERSION

if TYPE_CHECKING:
    from polytempo.errors import JobEnded as JobEnded
    from polytempo.errors import PolytempoError as PolytempoError
    from polytempo.errors import UsageError as UsageError
    from polytempo.optim.asup import AsuP as AsuP
    from polytempo.pipeline.pipeline import Pipeline as Pipeline
    from polytempo.session.session import init as init
    from polytempo.session.session import is_initialized as is_initialized
    from polytempo.session.session import local_rank as local_rank
    from polytempo.session.session import local_size as local_size
    from polytempo.session.session import log as log
    from polytempo.session.session import manifest as manifest
    from polytempo.session.session import rank as rank
    from polytempo.session.session import should_stop as should_stop
    from polytempo.session.session import shutdown as shutdown
    from polytempo.session.session import size as size
    from polytempo.simulate.cluster import Cluster as Cluster
    from polytempo.simulate.description import cluster_from as cluster_from
    from polytempo.simulate.run import simulate_job as simulate_job
    from polytempo.simulate.virtual_training import train_virtually as train_virtually
    from polytempo.sync.spec import parse_spec as parse_spec
    from polytempo.train.broadcast_state import broadcast_optimizer_state as broadcast_optimizer_state
    from polytempo.train.broadcast_state import broadcast_parameters as broadcast_parameters
    from polytempo.train.communication import all_gather as all_gather
    from polytempo.train.communication import all_reduce as all_reduce
    from polytempo.train.communication import all_to_all as all_to_all
    from polytempo.train.communication import barrier as barrier
    from polytempo.train.communication import broadcast as broadcast
    from polytempo.train.communication import explain as explain
    from polytempo.train.communication import gather as gather
    from polytempo.train.communication import irecv as irecv
    from polytempo.train.communication import isend as isend
    from polytempo.train.communication import new_group as new_group
    from polytempo.train.communication import recv as recv
    from polytempo.train.communication import reduce as reduce
    from polytempo.train.communication import reduce_scatter as reduce_scatter
    from polytempo.train.communication import reform as reform
    from polytempo.train.communication import scatter as scatter
    from polytempo.train.communication import send as send
    from polytempo.train.evaluation_statistics import statistics as statistics
    from polytempo.train.kv import KV as KV
    from polytempo.train.kv_arrays import Array as Array
    from polytempo.train.optimizer import DistributedOptimizer as DistributedOptimizer
    from polytempo.train.prepare import prepare as prepare
    from polytempo.train.sampler import DistributedSampler as DistributedSampler
    from polytempo.train.server_embedding import ServerEmbedding as ServerEmbedding

__version__ = VERSION
register()

_WHERE = {
    "PolytempoError": "polytempo.errors",
    "UsageError": "polytempo.errors",
    "Cluster": "polytempo.simulate.cluster",
    "cluster_from": "polytempo.simulate.description",
    "simulate_job": "polytempo.simulate.run",
    "parse_spec": "polytempo.sync.spec",
    "train_virtually": "polytempo.simulate.virtual_training",
    "broadcast_optimizer_state": "polytempo.train.broadcast_state",
    "broadcast_parameters": "polytempo.train.broadcast_state",
    "DistributedOptimizer": "polytempo.train.optimizer",
    "DistributedSampler": "polytempo.train.sampler",
    "JobEnded": "polytempo.errors",
    "Array": "polytempo.train.kv_arrays",
    "AsuP": "polytempo.optim.asup",
    "KV": "polytempo.train.kv",
    "Pipeline": "polytempo.pipeline.pipeline",
    "ServerEmbedding": "polytempo.train.server_embedding",
    "prepare": "polytempo.train.prepare",
    "statistics": "polytempo.train.evaluation_statistics",
    **dict.fromkeys(
        ("init", "is_initialized", "local_rank", "local_size", "log", "manifest", "rank", "should_stop", "shutdown", "size"),
        "polytempo.session.session",
    ),
    **dict.fromkeys(
        (
            "all_gather",
            "all_reduce",
            "all_to_all",
            "barrier",
            "broadcast",
            "explain",
            "gather",
            "irecv",
            "isend",
            "new_group",
            "recv",
            "reduce",
            "reduce_scatter",
            "reform",
            "scatter",
            "send",
        ),
        "polytempo.train.communication",
    ),
}

__all__ = [
    "KV",
    "Array",
    "AsuP",
    "Cluster",
    "DistributedOptimizer",
    "DistributedSampler",
    "JobEnded",
    "Pipeline",
    "PolytempoError",
    "ServerEmbedding",
    "UsageError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cluster_from",
    "explain",
    "gather",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "local_rank",
    "local_size",
    "log",
    "manifest",
    "new_group",
    "parse_spec",
    "prepare",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "reform",
    "scatter",
    "send",
    "should_stop",
    "shutdown",
    "simulate_job",
    "size",
    "statistics",
    "train_virtually",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'polytempo' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
