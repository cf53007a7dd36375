"""How far a job's replicas were in their data, for checkpoints: one figure for each replica and sampler.

The ranks of a replica draw the same samples, so its first rank says how many. The form is that of the servers' checkpoints
(`server/job_figures.py`): parts of an epoch by jobs of some size, which `train/epoch_order.py` leaves out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polytempo.collectives.group import RankGroup
from polytempo.mesh import Mesh
from polytempo.session.session import Session
from polytempo.strategy.state import exchanged
from polytempo.sync.epoch_parts import parts_of

Parts = list[dict[str, Any]]


def joint_positions(job: RankGroup, mesh: Mesh, session: Session, earlier: Parts) -> Parts:
    """The parts of this job behind those of the jobs that it goes on from. All ranks call this."""
    mine = [[one.sampler, one.epoch, one.taken] for one in session.positions.now()]
    each = mesh.pipe * mesh.tensor
    return parts_of_all(exchanged(job, mine)[::each], earlier)


def parts_of_all(replicas: list[list[list[Any]]], earlier: Parts) -> Parts:
    """From each replica's samplers (name, epoch, samples taken): the parts of each sampler."""
    named = dict.fromkeys(name for mine in replicas for name, _, _ in mine)
    result = [part for part in earlier if part.get("sampler", "") not in named]
    for name in named:
        found = [next(((epoch, taken) for other, epoch, taken in mine if other == name), None) for mine in replicas]
        result += parts_of(name, found, earlier)
    return result


def resume_positions(session: Session, parts: Parts) -> Parts:
    """Samplers that are made from now on go on where these parts end."""
    session.job = replace(session.job, positions=tuple(parts))
    return list(parts)
