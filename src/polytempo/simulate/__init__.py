"""A job in virtual time: the policies of a live job on a cluster that is data. Loads neither torch nor zmq.

    from polytempo.simulate import Cluster, simulate_job
    simulate_job(Cluster(workers=8, slow={3: 2.5}), "ssp:3", steps=1000)

`simulate_job` gives times only; `train_virtually` also trains a model, in the order of events that the simulator computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytempo.lazy_imports import lazy_names

if TYPE_CHECKING:
    from polytempo.simulate.cluster import Cluster as Cluster
    from polytempo.simulate.cluster import Constant as Constant
    from polytempo.simulate.cluster import Hiccup as Hiccup
    from polytempo.simulate.cluster import Hosts as Hosts
    from polytempo.simulate.cluster import Link as Link
    from polytempo.simulate.cluster import Lognormal as Lognormal
    from polytempo.simulate.description import cluster_from as cluster_from
    from polytempo.simulate.outcome import Outcome as Outcome
    from polytempo.simulate.run import simulate_job as simulate_job
    from polytempo.simulate.virtual_training import train_virtually as train_virtually
    from polytempo.tasks import digits as digits
    from polytempo.tasks import fashion_mnist as fashion_mnist
    from polytempo.tasks import fashion_mnist_cnn as fashion_mnist_cnn

__all__ = [
    "Cluster",
    "Constant",
    "Hiccup",
    "Hosts",
    "Link",
    "Lognormal",
    "Outcome",
    "cluster_from",
    "digits",
    "fashion_mnist",
    "fashion_mnist_cnn",
    "simulate_job",
    "train_virtually",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "cluster": ("Cluster", "Constant", "Hiccup", "Hosts", "Link", "Lognormal"),
        "polytempo.tasks": ("digits", "fashion_mnist", "fashion_mnist_cnn"),
        "description": ("cluster_from",),
        "outcome": ("Outcome",),
        "run": ("simulate_job",),
        "virtual_training": ("train_virtually",),
    },
)
