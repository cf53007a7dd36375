"""The GPT of examples/gpt.py under every strategy, in threads: a few steps, equal to one process. (`make proof --only gpt`
trains it to a stated loss, in processes.)"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.testing.threads import GroupJob, ThreadJob

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
WIDTH, CONTEXT, CHARACTERS = 16, 8, 128


def parts_of_the_example() -> dict[str, Any]:
    """Its classes; it is a script, which trains when it is imported."""
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef)
    tree.body = [node for node in tree.body if isinstance(node, kept) or ast.unparse(node).startswith("CHARACTERS")]
    found: dict[str, Any] = {}
    exec(compile(tree, str(EXAMPLE), "exec"), found)
    return found


PARTS = parts_of_the_example()


def gpt() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [PARTS["Block"](WIDTH, 2) for _ in range(3)]
        ends = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)
        return nn.Sequential(PARTS["Start"](WIDTH, CONTEXT), *blocks, *ends).double()


def windows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(32, (count, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return pt.cross_entropy(logits.flatten(0, 1), following.flatten())


def fitted(strategy: str, ranks: int, steps: int = 3, job: Any = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The validation losses, and the model at the end."""
    models = [gpt() for _ in range(ranks)]

    def work(session: Any) -> list[float]:
        history = pt.fit(
            models[session.rank], windows(32, 1), loss, optimizer=partial(torch.optim.AdamW, lr=0.01), strategy=strategy,
            batch_size=16, max_steps=steps, validation=windows(11, 2), clip_norm=1.0, progress=False,
        )  # fmt: skip
        return history["val_loss"]

    with job or GroupJob(ranks) as running:
        found = running.run(work)
    assert all(losses == found[0] for losses in found)
    return found[0], models[-1].state_dict()


STRATEGIES = [
    *(("data=4", 4), ("data=2,pipe=2", 4), ("pipe=4", 4), ("tensor=2", 2), ("pipe=2,tensor=2", 4), ("data=2,tensor=2", 4)),
    ("data=2,pipe=2,schedule=gpipe,microbatches=4", 4),
]


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    return fitted("data=1", 1)


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES, ids=[name for name, _ in STRATEGIES])
def test_a_few_steps_equal_one_process(strategy: str, ranks: int, alone: tuple[list[float], dict[str, Any]]) -> None:
    losses, state = fitted(strategy, ranks)
    torch.testing.assert_close(losses, alone[0], rtol=0, atol=1e-8)
    for name, value in alone[1].items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("sync", ["ssp:1", "asp", "local:4"])
def test_replicas_of_two_stages_learn_under_modes_that_let_them_differ(sync: str) -> None:
    losses, _ = fitted(f"data=2,pipe=2,sync={sync}", 4, steps=8, job=ThreadJob(4, 1, sync))
    assert losses[-1] < losses[0] - 0.2
