"""`stages="auto"`: the first rank measures the model and plans stages for the ranks of the job; all build the same plan.

    auto                          every rank behind a link of 5 GB/s, about what shared memory carries between two processes
    auto:10Gb/s                   the same with another bandwidth
    auto:4x4:12GB/s,10Gb/s        a topology (see pipeline/topology.py), the ranks of a host after each other

The plan uses every rank. Its unit of work is the example, so it should have as many samples as a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from polytempo.collectives.group import RankGroup
from polytempo.errors import PolytempoError, UsageError, nearest
from polytempo.pipeline.plan_report import explain
from polytempo.pipeline.planner import PlannedStage, StagePlan, plan
from polytempo.pipeline.profiler import profile
from polytempo.pipeline.topology import Topology, parse_topology

DEFAULT_RATE = "5GB/s"
_EXAMPLES = "auto, auto:10Gb/s or auto:4x4:12GB/s,10Gb/s"


def planned(
    spec: str,
    model: nn.Module | Sequence[nn.Module],
    example: tuple[Any, ...] | None,
    group: RankGroup,
    *,
    straight: bool = False,
    microbatches: int | None = None,
    device: torch.device | str | None = None,
) -> StagePlan:
    """The plan that the first rank makes and shows, on every rank. `straight`: without replicas."""
    topology = topology_of(spec, group.size)
    if example is None:
        raise UsageError(f"stages={spec!r} measures the model on an example of its inputs, got none; give example=(x,)")
    told: dict[str, Any] = {}
    if group.rank == 0:
        try:
            measured = profile(model, example, device=device)
            found = plan(measured, topology, straight=straight)
            sys.stdout.write("\n".join([*explain(measured, found, microbatches=microbatches or group.size), ""]))
            sys.stdout.flush()
            told = asdict(found)
        except PolytempoError as error:
            told = {"error": str(error)}
    told = _shared(group, told)
    if "error" in told:
        raise UsageError(told["error"])
    return StagePlan(**told | {"stages": tuple(PlannedStage(**stage) for stage in told["stages"])})


def topology_of(spec: str, ranks: int) -> Topology:
    """The links of a job with so many ranks, from "auto", "auto:RATE" or "auto:TOPOLOGY"."""
    word, _, rest = spec.partition(":")
    if word != "auto":
        hint = nearest(word, ["auto"])
        raise UsageError(f"expected stages as a number, layers for each, a plan, or {_EXAMPLES}; got {spec!r}{hint}")
    topology = parse_topology(rest if ":" in rest else f"{ranks}:{rest or DEFAULT_RATE}")
    if topology.devices != ranks:
        raise UsageError(
            f"stages={spec!r} has {topology.devices} devices and the job {ranks} ranks; start {topology.devices}, "
            "or give a topology with one device for each rank"
        )
    return topology


def _shared(group: RankGroup, told: dict[str, Any]) -> dict[str, Any]:
    """What the first rank tells, on every rank."""
    text = json.dumps(told).encode()
    size = torch.tensor([len(text)])
    group.broadcast([size], 0).wait()
    letters = torch.zeros(int(size), dtype=torch.uint8)
    if group.rank == 0:
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    group.broadcast([letters], 0).wait()
    found: dict[str, Any] = json.loads(bytes(letters.tolist()))
    return found
