"""`diloco:k`: DiLoCo (Douillard et al. 2023). k local steps, then one outer Nesterov step of the common model.

    anchor      theta, the same on all workers
    block       k steps of the worker's own optimizer, whose state stays with it and is neither averaged nor reset
    outer step  delta = theta - mean of all theta_i; m = mu m + delta; theta = theta - eta (delta + mu m)

The rounds are those of `local:k`: one step of the policy is one block, with a barrier at its end.

    outer_lr=0.7, outer_momentum=0.9    eta and mu
    fragments=P     the model in P parts, each averaged every k steps, one after another at equal distances (streaming
                    DiLoCo, Douillard et al. 2025); k must be a multiple of P. Each fragment has rounds of its own.
    overlap=S       a worker goes on for S local steps after it has sent a fragment, S < k / P, and takes the average then:
                    the new anchor and what its own steps have changed since the sending
    quorum=K        decoupled: no worker waits for a slow or dead one (`decoupled_diloco.py`)

Where this departs from the papers: with overlap a worker keeps its steps since the sending whole, where streaming DiLoCo
blends the local values with the global ones. The mean is weighted by samples.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from polytempo.errors import SpecError
from polytempo.options import fraction, positive_number, whole_number
from polytempo.sync.barrier import Barrier
from polytempo.sync.blocks import Averaging, machine_of_blocks
from polytempo.sync.capabilities import EACH_ROUND, MadeOf, Promises, Unsound
from polytempo.sync.decoupled_diloco import AUTO, OPTIONS, DecoupledDiloco, decoupled
from polytempo.sync.local_sgd import BLOCKS, FixedPeriod
from polytempo.sync.mode import Mode


def _averaging(
    period: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    overlap: int = 0,
    **of_quorum: object,
) -> Averaging:
    if of_quorum:
        option = next(iter(of_quorum))
        raise SpecError(f"option {option!r} of diloco needs a quorum; write for example diloco:{period},quorum=2,grace=0.5")
    if period % fragments:
        near = max(fragments, period // fragments * fragments)
        raise SpecError(f"diloco:{period} cannot be cut into {fragments} fragments evenly; use for example diloco:{near}")
    if overlap >= period // fragments:
        raise SpecError(
            f"overlap={overlap} must be below the {period // fragments} steps between two fragments; use a smaller one"
        )
    return Averaging(period, outer_lr, outer_momentum, nesterov=outer_momentum > 0, fragments=fragments, overlap=overlap)


def _decoupled_averaging(
    period: int, quorum: int, grace: float | str = AUTO, drop: int | None = None, **options: Any
) -> Averaging:
    return decoupled(_averaging(period, **options), grace)


_OPTIONS = {
    "outer_lr": positive_number("outer_lr", "0.7"),
    "outer_momentum": fraction("outer_momentum", "0.9"),
    "fragments": whole_number("fragments", at_least=1, example="4"),
    "overlap": whole_number("overlap", at_least=0, example="5"),
    **OPTIONS,
}

DECOUPLED = Mode(
    "diloco",
    "diloco:100,quorum=3",
    "diloco over servers, where no worker waits: pushes are merged by quorum and grace",
    lambda workers, period, quorum, grace=AUTO, drop=None, **of_worker: DecoupledDiloco(
        workers, period, quorum, grace, drop
    ),
    argument=whole_number("K", at_least=1),
    options=_OPTIONS,
    machine=machine_of_blocks(_decoupled_averaging),
    capabilities=lambda period, grace=AUTO, **options: replace(BLOCKS, update=MadeOf.EACH, waits=grace == math.inf),
    split=Unsound("stages could leave out different replicas from a merge (quorum=)", ()),
    averaging=_decoupled_averaging,
    promises=Promises(quorum=lambda workers, period, quorum, **_: quorum, alone=False, even=False),
)

DILOCO = Mode(
    "diloco",
    "diloco:100",
    "K local steps, then an outer Nesterov step of the common model; fragments=P, overlap=S: streaming; quorum=K: decoupled",
    lambda workers, period, **options: Barrier(workers, rule=FixedPeriod(period)),
    argument=whole_number("K", at_least=1),
    options=_OPTIONS,
    machine=machine_of_blocks(_averaging),
    capabilities=BLOCKS,
    split=None,
    averaging=_averaging,
    variants={"quorum": DECOUPLED},
    promises=replace(EACH_ROUND, alone=False, even=False),
)
