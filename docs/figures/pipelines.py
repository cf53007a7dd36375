"""Pictures of pipelines: what four stages did, in four processes, for each schedule. `make figures` writes them.

The stages sleep in place of computing, so that each has a processor of its own wherever this runs; all else is real. Each
picture shows 16 microbatches, after some for warming up: two steps of 8, or 16 minibatches where there is no flush. The last
picture is of two stages that do compute, and so have gradients of weights that are worth putting off.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent

STAGES, MICROBATCHES, STEPS = 4, 8, 2

#: Seconds of one stage.
FORWARD, BACKWARD, UPDATE = 0.05, 0.1, 0.01

#: Name of the picture: the schedule, and what the title says.
PICTURES = {
    "sequential": ("sequential", "sequential: one microbatch at a time"),
    "gpipe": ("gpipe,recompute=0", "gpipe: all forwards, then all backwards"),
    "1f1b": ("1f1b", "1f1b: a backward as soon as there is one"),
    "pipedream": ("pipedream", "pipedream: no flush, an update after every backward"),
    "later": ("1f1b", "1f1b, two stages that compute: gradients of weights done while the stage waits"),
}
#: Of the last picture: linear layers, their width, and the rows of a microbatch.
LAYERS, WIDTH, ROWS = 8, 1024, 64


def stages_of(name: str) -> int:
    return 2 if name == "later" else STAGES


def sleeping() -> tuple[Any, Any]:
    """A model, and what makes its optimizer."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(FORWARD)
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD)
            return gradients[0]

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sleep.apply(super().forward(x))

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(UPDATE)
            return super().step(closure)

    return nn.Sequential(*[Layer(4, 4) for _ in range(STAGES)]), lambda parameters: Slow(parameters, lr=0.01)


def computing() -> tuple[Any, Any]:
    """The same, of layers that compute."""
    import torch
    from torch import nn

    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), lambda parameters: torch.optim.SGD(parameters, lr=0.01)


def work(name: str, folder: str) -> None:
    """One of the processes: warm up, then do what is drawn."""
    import torch

    import polytempo as pt

    torch.set_num_threads(1)
    pt.init()
    endless = name == "pipedream"
    model, optimizer = computing() if name == "later" else sleeping()
    pipe = pt.Pipeline(
        model,
        loss=torch.nn.functional.mse_loss,
        optimizer=optimizer,
        schedule=PICTURES[name][0],
        microbatches=None if endless else MICROBATCHES,
    )
    batch = torch.ones(MICROBATCHES * ROWS, WIDTH) if name == "later" else torch.ones(MICROBATCHES, 4)
    for steps in (1, STEPS):
        for _ in range(steps * MICROBATCHES if endless else steps):
            pipe.step(batch, batch)
        pipe.flush()
        pt.barrier()
    pipe.record(folder)
    pt.shutdown()


def draw(name: str) -> None:
    """What each rank did last, without the warming up."""
    from polytempo.pipeline.trace_files import read_traces
    from polytempo.report.picture import draw_pipeline, last_updates

    title = PICTURES[name][1]
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "polytempo", "run", "-q", "-n", str(stages_of(name)), __file__, name, folder]
        subprocess.run(command, check=True)
        lines = last_updates(read_traces(folder), STEPS * MICROBATCHES if name == "pipedream" else STEPS)
        bubble = draw_pipeline(lines, HERE / f"pipeline-{name}.png", title)
    print(f"written: {HERE.name}/pipeline-{name}.png, bubble {100 * bubble:.1f} %")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(*sys.argv[1:])
    else:
        for picture in PICTURES:
            draw(picture)
