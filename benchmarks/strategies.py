"""What is predicted of a strategy against what is then counted and measured: bytes, memory, seconds of a step.

Each job of four processes measures its own links and, on rank 0, the model; then it trains by the strategy, and all ranks
count. Bytes are those that ranks hand to the transport in a step, memory is that of parameters, gradients, optimizer state
and saved activations, counted by hooks; of both the rank counts that is furthest off. Seconds are the median of steps.

    gpt     the model of examples/gpt.py, on the cores of this machine
    sleep   stages that sleep: what the cores cannot disturb

    python benchmarks/strategies.py [--quick]
    python benchmarks/strategies.py --device cuda    the GPT, wider, all processes on one GPU, some strategies in one job:
                                                     memory is that of torch's allocator (max_memory_allocated); seconds
                                                     have no bar there
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import save
from polytempo.report.table import TextTable

OUT = Path("out/proof")
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
WORKERS, BATCH = 4, 32
STRATEGIES: dict[str, tuple[str, ...]] = {
    "sleep": (
        "data=4",
        "data=2,pipe=2,microbatches=4",
        "pipe=4,microbatches=8",
        "pipe=4,schedule=gpipe,microbatches=8",
    ),
    "gpt": (
        "data=4",
        "data=2,pipe=2,microbatches=4",
        "data=2,pipe=2,schedule=gpipe,microbatches=4",
        "pipe=4,microbatches=4",
        "data=2,tensor=2",
        "pipe=2,tensor=2,microbatches=2",
        "tensor=4",
    ),
}
#: On a GPU, where starting processes takes longest.
ON_GPU = ("data=2,pipe=2,microbatches=4", "pipe=4,microbatches=4", "data=2,tensor=2")
#: How far bytes, memory and seconds may be off.
BYTES, MEMORY, SECONDS = 0.02, 0.10, {"sleep": 0.20, "gpt": 0.30}
#: Seconds of a sleeping layer for each sample; backward takes twice as long.
SLEEP = 0.5e-3


# What the processes run.


def gpt(width: int = 128, context: int = 64) -> tuple[Any, Any, Any, Any]:
    """The model of the example, its loss, and a batch. The example is a script: its classes alone are taken from it."""
    import torch
    from torch import nn
    from torch.nn import functional

    wanted = (ast.Import, ast.ImportFrom, ast.ClassDef)
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, wanted) or "CHARACTERS" in ast.unparse(node)[:10]]
    found: dict[str, Any] = {}
    exec(compile(tree, str(EXAMPLE), "exec"), found)
    torch.manual_seed(0)
    blocks = [found["Block"](width, 4) for _ in range(4)]
    ends = nn.LayerNorm(width), nn.Linear(width, found["CHARACTERS"])
    model = nn.Sequential(found["Start"](width, context), *blocks, *ends)
    text = torch.randint(found["CHARACTERS"], (BATCH, context + 1))

    def loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    return model, loss, text[:, :-1].contiguous(), text[:, 1:].contiguous()


def sleeping() -> tuple[Any, Any, Any, Any]:
    """Eight layers that sleep."""
    import torch
    from torch import nn

    class Slept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(len(x) * SLEEP)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * len(gradient) * SLEEP)
            return gradient

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slept.apply(self.layer(x).tanh())

    torch.manual_seed(0)
    return (
        nn.Sequential(*(Sleeper() for _ in range(8))),
        nn.functional.mse_loss,
        torch.randn(BATCH, 64),
        torch.randn(BATCH, 64),
    )


def worker(case: str, texts: str, steps: int, file: str, device: str) -> None:
    """The training script: for one strategy after another it predicts, trains and counts; rank 0 writes what all ranks have
    found."""
    import polytempo as pt
    from polytempo.session.session import current
    from polytempo.strategy.links import measure_machine

    pt.init()
    session, on_gpu = current(), device != "cpu"
    model, loss, x, y = sleeping() if case == "sleep" else gpt(512, 256) if on_gpu else gpt()
    first = pt.Strategy.parse(texts.split(";")[0])
    few = _planned(first, model, first.mesh(session.size)).microbatch

    def work() -> None:
        loss(model(x[:few]), y[:few]).backward()

    machine = measure_machine(session.world(), None if on_gpu else work, session)
    model.zero_grad()
    told = [_one_strategy(text, machine, (copy.deepcopy(model), loss, x, y), steps, device) for text in texts.split(";")]
    if session.rank == 0:
        Path(file).write_text(json.dumps(told), encoding="utf-8")
    pt.shutdown()


def _planned(strategy: Any, model: Any, mesh: Any) -> Any:
    from polytempo.pipeline.partition import cut
    from polytempo.strategy.parallel_plan import ParallelPlan

    layers = tuple(len(part.names) for part in cut(model, mesh.pipe))
    return ParallelPlan(mesh, layers, BATCH, strategy.microbatches or mesh.pipe, strategy.schedule)


def _one_strategy(text: str, machine: Any, given: tuple[Any, ...], steps: int, device: str) -> dict[str, Any]:
    """What is predicted of a strategy, and what all ranks count."""
    import torch

    import polytempo as pt
    from counting import ByteCounter, counted_memory
    from polytempo.session.session import current
    from polytempo.strategy.costs import as_data, from_data
    from polytempo.strategy.measure import measure_model
    from polytempo.strategy.prediction import predict
    from polytempo.strategy.state import exchanged

    session, strategy = current(), pt.Strategy.parse(text)
    model, loss, x, y = given
    mesh = strategy.mesh(session.size)
    plan = _planned(strategy, model, mesh)
    optimizer = partial(torch.optim.AdamW, lr=1e-4)
    group = session.world().new_group(range(session.size))
    assert group is not None
    told: dict[str, Any] = {}
    if session.rank == 0:
        profile = measure_model(
            model, x, microbatch=plan.microbatch, tensor=mesh.tensor, optimizer=optimizer, loss=loss, target=y,
            seconds=4.0 if device == "cpu" else 1.0, device=device,
        )  # fmt: skip
        told = as_data([profile], machine)
    (profile,), machine = from_data(exchanged(group, told)[0])
    predicted = predict(plan, profile, machine)

    own = strategy.distribute(model, loss=loss, optimizer=optimizer, device=device)
    mine = x.chunk(mesh.data)[own.point.data], y.chunk(mesh.data)[own.point.data]
    for _ in range(4):
        own.step(*mine)
    ends, busy = [time.perf_counter()], time.process_time()
    for _ in range(steps):
        own.step(*mine)
        ends.append(time.perf_counter())
    busy = (time.process_time() - busy) / steps
    counter = ByteCounter(lambda: own.stats["bytes_sent"])
    with counted_memory(own.pipeline.stage) as memory:
        own.step(*mine)
    moved, held = counter.read(), memory.read()
    seconds = [end - start for start, end in pairwise(ends)]
    kinds = astuple(held) if memory.allocated is None else (memory.allocated,)
    counted = exchanged(group, [astuple(moved), kinds, statistics.median(seconds), busy])
    return {
        "strategy": text,
        "predicted": {
            "bytes": [astuple(one) for one in predicted.moved],
            "memory": [astuple(one) for one in predicted.memory],
            "seconds": predicted.seconds,
            "busy": list(predicted.time.busy),
        },
        "counted": {
            "bytes": [one[0] for one in counted],
            "memory": [one[1] for one in counted],
            "seconds": statistics.median(one[2] for one in counted),
            "busy": [one[3] for one in counted],  # on cores: of use where other processes disturb
        },
        "machine": asdict(machine),
        "layers": [asdict(one) for one in profile.layers],
    }


# What compares.


def measured(case: str, strategies: Sequence[str], steps: int, device: str = "cpu") -> list[dict[str, Any]]:
    """One job, which tries these strategies."""
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        file = Path(folder) / "counted.json"
        command = [sys.executable, "-m", "polytempo", "run", "-q", "-n", str(WORKERS), __file__, "worker"]
        subprocess.run([*command, case, ";".join(strategies), str(steps), str(file), device], check=True, timeout=600)
        jobs: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return [_judged(case, found, device) for found in jobs]


def _judged(case: str, found: dict[str, Any], device: str) -> dict[str, Any]:
    predicted, counted = found["predicted"], found["counted"]
    found["off"] = {
        "bytes": _furthest([sum(one) for one in predicted["bytes"]], [sum(one) for one in counted["bytes"]]),
        # parameters, gradients, optimizer state, activations
        "memory": _furthest([sum(one[:4]) for one in predicted["memory"]], [sum(one[:4]) for one in counted["memory"]]),
        "seconds": predicted["seconds"] / counted["seconds"] - 1,
    }
    bars = (BYTES, MEMORY, SECONDS[case] if device == "cpu" else math.inf)
    found["ok"] = all(abs(off) <= bar for off, bar in zip(found["off"].values(), bars, strict=True))
    return found


def _furthest(predicted: list[float], counted: list[float]) -> float:
    """Of all ranks, the one that is furthest off."""
    return max((one / other - 1 for one, other in zip(predicted, counted, strict=True) if other), key=abs, default=0.0)


def strategies(quick: bool = False, out: Path = OUT, device: str = "cpu") -> None:
    """Every strategy of both cases, each in a job of its own; on a GPU some of the GPT, in one job."""
    results: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for case, texts in STRATEGIES.items() if device == "cpu" else [("gpt", ON_GPU)]:
        wanted = texts[1:3] if quick else texts
        for job in [[text] for text in wanted] if device == "cpu" else [wanted]:
            for found in measured(case, job, 10 if quick or device != "cpu" else 30, device):
                results.setdefault(case, []).append(found)
                rows.append(_row(case, found["strategy"], found))
    heads = (
        "model",
        "strategy",
        "most bytes\n(KB)",
        "off",
        "memory\n(MB)",
        "off",
        "step\n(ms)",
        "predicted\n(ms)",
        "off",
        "bar",
    )
    title = (
        f"Four processes: predicted against counted; bars: {100 * BYTES:.0f} % of bytes, {100 * MEMORY:.0f} % of memory, "
        f"{100 * SECONDS['sleep']:.0f} % of the seconds of sleeping stages, {100 * SECONDS['gpt']:.0f} % of the GPT's"
    )
    save(out, "strategies", [TextTable(title, heads, tuple(rows))], results)


def _row(case: str, text: str, found: dict[str, Any]) -> tuple[str, ...]:
    counted, off = found["counted"], found["off"]
    return (
        case,
        text,
        f"{max(sum(one) for one in counted['bytes']) / 1e3:,.0f}",
        f"{100 * off['bytes']:+.2f} %",
        f"{max(sum(one[:4]) for one in counted['memory']) / 1e6:,.2f}",
        f"{100 * off['memory']:+.1f} %",
        f"{1e3 * counted['seconds']:.1f}",
        f"{1e3 * found['predicted']['seconds']:.1f}",
        f"{100 * off['seconds']:+.0f} %",
        "ok" if found["ok"] else "MISSED",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="some of the strategies, fewer steps")
        parser.add_argument("--device", default="cpu", help="cpu or cuda")
        options = parser.parse_args()
        strategies(options.quick, device=options.device)
