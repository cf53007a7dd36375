"""The same model cut and trained by torch.distributed.pipelining: a `PipelineStage` a process, over gloo."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from rigs import Round, answer


def torch_worker(pipe: Connection, rank: int, directory: str, size: int) -> None:
    """Its schedules by the names that ours have."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    answer(pipe, lambda work, _: _round(work, rank, size))
    dist.destroy_process_group()


def _round(work: str, rank: int, size: int) -> Round:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from pipelines import CUTS, ONE_F_ONE_B, loss, make_optimizer, task

    model, inputs, targets, microbatches = task(work)
    start = sum(CUTS[:rank])
    part = nn.Sequential(*model[start : start + CUTS[rank]])
    optimizer = make_optimizer(part.parameters())
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    kind: Any = Schedule1F1B if work.startswith(ONE_F_ONE_B) else ScheduleGPipe
    schedule = kind(stage, microbatches, loss_fn=loss)

    def one_round() -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return one_round
