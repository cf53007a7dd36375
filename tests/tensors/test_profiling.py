"""Measured layers: sizes that can be counted by hand, a model that stays as it was, and the stages that follow from it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polytempo.cli.plan import look_into
from polytempo.errors import UsageError
from polytempo.pipeline.builder import topology_of
from polytempo.pipeline.pipeline import Pipeline
from polytempo.pipeline.planner import Level
from polytempo.pipeline.profiler import profile
from polytempo.session.session import Session
from polytempo.testing.threads import GroupJob

pytestmark = pytest.mark.timeout(60)


def layered() -> nn.Sequential:
    inner = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), inner, nn.Flatten(), nn.Linear(16, 4))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.first(x + y)
        return self.second(z.tanh()) + z


def test_bytes_of_each_layer() -> None:
    found = profile(layered(), torch.ones(10, 8), repeats=1)
    assert (found.model, found.batch) == ("Sequential", 10)
    assert [layer.name for layer in found.layers] == ["0", "1", "2.0", "2.1", "3", "4"]
    assert [layer.activation_bytes for layer in found.layers] == [640, 640, 640, 640, 640, 160]
    assert [layer.weight_bytes for layer in found.layers] == [4 * (8 * 16 + 16), 0, 4 * 32, 0, 0, 4 * (16 * 4 + 4)]
    kept = [layer.kept_bytes for layer in found.layers]
    assert kept[0] == 640
    assert kept[1] == kept[4] == 0  # in place, and a view
    assert kept[2] == 640 + 2 * 64  # and mean and variance of the batch, but not the running ones
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in found.layers)


def test_a_layer_with_more_work_takes_longer() -> None:
    class Repeated(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = super().forward(x)
            return x

    light, heavy = profile([nn.Tanh(), Repeated(8, 8)], torch.ones(4, 8)).layers
    assert heavy.forward_s > light.forward_s
    assert heavy.backward_s > light.backward_s
    assert heavy.kept_bytes == 300 * heavy.activation_bytes  # what torch saves, not only what passes on


def test_gradients_are_wanted_of_what_comes_from_weights() -> None:
    wanted: list[bool] = []

    class Asking(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wanted.append(x.requires_grad)
            return super().forward(x)

    profile([Asking(), nn.Linear(8, 8), Asking()], torch.ones(4, 8), repeats=2)
    assert wanted == [False] * 3 + [True] * 3  # once to warm up


def test_the_model_stays_as_it_was() -> None:
    model = layered()
    model[0].weight.grad = torch.ones(16, 8)
    before, state, gradient = copy.deepcopy(model.state_dict()), torch.get_rng_state(), model[0].weight.grad
    statistics = model[2][0].running_mean
    profile(model, torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), repeats=2, device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[2][0].running_mean is statistics
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(16, 8))
    assert model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_traced_modules_lists_and_progress() -> None:
    shares: list[float] = []
    found = profile(Residual(), (torch.ones(5, 8), torch.ones(5, 8)), repeats=1, progress=shares.append)
    assert sum(layer.weight_bytes for layer in found.layers) == 2 * 4 * 72
    assert shares == [(number + 1) / len(found.layers) for number in range(len(found.layers))]
    assert profile([nn.Embedding(9, 4)], torch.tensor([[1, 2]]), repeats=1, batch=7).batch == 7
    frozen = profile(nn.Sequential(nn.Tanh()), torch.ones(2, 3), repeats=1).layers[0]
    assert (frozen.kept_bytes, frozen.activation_bytes) == (24, 24)


@pytest.mark.parametrize(
    ("example", "options", "text"),
    [
        (torch.ones(3, 9), {}, r"layer '0' cannot be run on the example: it got \(3, 9\) and said RuntimeError"),
        ((1, "a"), {}, r"expected an example with a tensor of samples, got \(int, str\)"),
        (torch.ones(3, 8), {"repeats": 0}, "to be at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured(example: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        profile(layered(), example, **options)


def test_links_of_a_job() -> None:
    assert topology_of("auto", 3).levels == (Level(3, 5e9),)
    assert topology_of("auto:8Gb/s", 3).levels == (Level(3, 1e9),)
    assert topology_of("auto:2x2:1GB/s,8Mb/s", 4).levels == (Level(2, 1e9), Level(2, 1e6))
    with pytest.raises(UsageError, match="has 4 devices and the job 3 ranks; start 4"):
        topology_of("auto:2x2:1GB/s,8Mb/s", 3)
    with pytest.raises(UsageError, match="got 'atuo'; nearest: auto"):
        topology_of("atuo", 3)


def built(**options: Any) -> list[Any]:
    """What each of two ranks has: stage, replicas and losses; or its mistake."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(session: Session) -> Any:
        make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        try:
            pipe = Pipeline(models[session.rank], loss=nn.functional.mse_loss, optimizer=make, **options)
        except UsageError as error:
            return str(error)
        return pipe.stage.number, pipe.schedule.replicas, pipe.step(torch.ones(4, 8), torch.zeros(4, 8))

    with GroupJob(2) as job:
        return job.run(work)


def test_stages_by_measurement(capfd: pytest.CaptureFixture[str]) -> None:
    straight = built(stages="auto", replicas=[1, 1], example=(torch.ones(4, 8),))
    assert [(stage, replicas) for stage, replicas, _ in straight] == [(0, (1, 1)), (1, (1, 1))]
    assert straight[0][2] == straight[1][2]
    assert capfd.readouterr().out.count("2 stages (1-1) on 2 devices") == 1
    shared = built(stages="auto:1000GB/s", example=(torch.ones(4, 8),))
    assert shared[0][1] == shared[1][1]
    assert sum(shared[0][1]) == 2
    assert "data parallelism" in capfd.readouterr().out


def test_what_cannot_be_planned_is_said_by_all() -> None:
    for options, text in (
        ({}, "got none; give example=(x,)"),
        ({"example": (torch.ones(4, 7),)}, "layer '0' cannot be run on the example"),
        ({"example": (torch.ones(4, 8),), "replicas": [2]}, "chooses replicas itself, got replicas=[2]; leave them out"),
        ({"stages": "auto:1000TB/s", "schedule": "pipedream", "example": (torch.ones(4, 8),)}, "a schedule that flushes"),
        ({"schedule": "stage 0: F0 B0 U"}, "needs the name of a schedule"),
    ):
        first, second = built(**{"stages": "auto"} | options)
        assert text in first
        assert first == second


def test_plan_looks_into_a_module_as_python_m_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "parts.py").write_text("import torch\nmake = lambda width: torch.nn.Linear(width, width)\n")
    lines = [
        "import sys",
        "import torch",
        "from .parts import make",
        "model, example = make(int(sys.argv[1])), torch.ones(2, 3)",
    ]
    (tmp_path / "shop" / "net.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert look_into(Path("shop.net"), ["3"], is_module=True).model.in_features == 3
    assert sys.path == before
    with pytest.raises(UsageError, match=r"there is no module shop\.nets below"):
        look_into(Path("shop.nets"), [], is_module=True)
    for name in ("shop", "shop.parts"):
        monkeypatch.delitem(sys.modules, name)
