"""Forward and backward of layers that two ranks split, ours beside torch's DTensor (`parallelize_module`) and the whole.

An MLP and a transformer layer, written as plain modules that all subjects take: torch's `ColwiseParallel` and
`RowwiseParallel` plan, which `find_plan` reads too. DTensor runs over gloo and over our own back end. The whole layer runs
in one process. One thread a process; the first loss is compared with that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cases import Bar, Case, Cell, Ratio, Subject
from rigs import Rig, RigFailed, Round, answer

RANKS, HEADS = 2, 8
MLP, LAYER = "MLP", "transformer layer"
SIZES = ((2, 32, 128), (8, 64, 512))  #: batch, length, width; in the small one calls cost more than products


def task(work: str) -> tuple[Any, Any, dict[str, Any]]:
    """Model, inputs, and the plan in torch's words."""
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.nn import functional

    kind, _, size = work.partition(", ")
    batch, length, width = map(int, size.split(" x "))

    class Block(nn.Module):
        """Attention and MLP. Queries, keys and values of a head lie side by side, so that heads are columns in a row."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, width // HEADS)).permute(3, 0, 2, 1, 4)
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.proj(attended.transpose(1, 2).flatten(2))
            return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))

    torch.manual_seed(0)
    inputs = torch.randn(batch, length, width, requires_grad=True)
    if kind == MLP:
        model: nn.Module = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        return model, inputs, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan = {"qkv": ColwiseParallel(), "proj": RowwiseParallel(), "fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    return Block(), inputs, plan


def rounds(split: Callable[[Any, dict[str, Any]], object], work: str) -> Round:
    """Forward and backward of the split model, after a look at its result."""
    import torch

    model, inputs, plan = task(work)
    wanted = model(inputs).detach()
    split(model, plan)
    if not torch.allclose(model(inputs), wanted, rtol=1e-4, atol=1e-4):
        raise RigFailed("a wrong result")

    def one_round() -> None:
        model.zero_grad()
        inputs.grad = None
        model(inputs).sum().backward()

    return one_round


def our_worker(pipe: Connection, rank: int, name: str) -> None:
    from polytempo.collectives.world import open_by_name
    from polytempo.tensor_parallel.group import RankTensorGroup
    from polytempo.tensor_parallel.plan import find_plan, parallelize

    world = open_by_name(name, rank, RANKS)
    group = RankTensorGroup(world.all_ranks)
    answer(pipe, lambda work, _: rounds(lambda model, plan: parallelize(model, find_plan(model, RANKS, plan), group), work))
    world.close()


def torch_worker(pipe: Connection, rank: int, directory: str, backend: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    import polytempo  # noqa: F401  tells torch the word

    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    answer(pipe, lambda work, _: rounds(lambda model, plan: parallelize_module(model, mesh, plan), work))
    dist.destroy_process_group()


def whole_worker(pipe: Connection, rank: int) -> None:
    answer(pipe, lambda work, _: rounds(lambda model, plan: None, work))


def start_ours(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(our_worker, workers, str(rig.directory))


def start_gloo(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(torch_worker, workers, str(rig.directory), "gloo")


def start_backend(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(torch_worker, workers, str(rig.directory), "polytempo")


def start_whole(rig: Rig, workers: int, servers: int) -> None:
    rig.add_workers(whole_worker, 1)


WORKS = [f"{kind}, {' x '.join(map(str, size))}" for kind in (MLP, LAYER) for size in SIZES]
CELLS = tuple(Cell(work, work, RANKS) for work in WORKS)
NAMES = tuple(cell.name for cell in CELLS)
GAIN = Ratio("DTensor over gloo / ours", ("DTensor over gloo",), ("ours",))

CASE = Case(
    name="tensor",
    title=f"Forward and backward of layers split over {RANKS} ranks (batch x length x width, float32), milliseconds",
    cells=CELLS,
    subjects=(
        Subject("ours", start_ours),
        Subject("DTensor over gloo", start_gloo),
        Subject("DTensor over polytempo", start_backend),
        Subject("whole, one process", start_whole),
    ),
    ratios=(
        GAIN,
        Ratio("DTensor over polytempo / ours", ("DTensor over polytempo",), ("ours",)),
        Ratio("whole / ours", ("whole, one process",), ("ours",)),
    ),
    bars=(Bar(GAIN, NAMES, least=1, mean=True),),
)
