"""What the other axes of a mesh add to a pipeline: a pipeline is one of its axes, and knows nothing of the others.

    tensor   `prepare_part` replaces layers of this rank's part by their shards; the norm for clipping is over the ranks of
             the whole replica, where a replicated parameter is counted once; all shards stop at the same step
    data     the optimizer of a stage is a `DistributedOptimizer` (`stage.py`): nothing of it is in here

And what tests put in place of a GPU: `device`.

The defaults add nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polytempo.collectives.group import RankGroup
from polytempo.device.device import Device
from polytempo.pipeline.partition import ModelPart


def _counts_all(name: str) -> bool:
    return True


@dataclass(frozen=True)
class StageHooks:
    """Hooks of one rank; all ranks of a pipeline have the same kinds of them.

    Attributes:
        prepare_part: Called with this rank's part after the cut, before its optimizer is made.
        norm_group: The ranks over which the norm of the gradients is taken; None: those of the pipeline.
        counts: Does this rank add the gradient of a parameter, by its name in the whole model, to that norm?
        groups: Groups beside those of the pipeline whose ranks are told when this rank fails.
        agree_to_stop: Called on the last stage at each step of a job with a budget, with what this rank was told; returns
            what all lanes of the replica were.
        device: Whose memory this rank shares with other stages; None: that of its GPU, if it has one.
        title: What lines about the progress call the training; empty: the pipeline.
    """

    prepare_part: Callable[[ModelPart], None] | None = None
    norm_group: RankGroup | None = None
    counts: Callable[[str], bool] = _counts_all
    groups: tuple[RankGroup, ...] = ()
    agree_to_stop: Callable[[bool], bool] | None = None
    device: Device | None = None
    title: str = ""
