"""Files that version 0.1.0 wrote still load: a checkpoint of servers, one of a pipeline, a record, a key file."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from piped import ADAM, everywhere
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from polytempo.cli.records import check
from polytempo.pipeline.pipeline import Pipeline
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.transport.keys import read_key_file

OLD = Path(__file__).parents[1] / "golden" / "old"


@pytest.mark.parametrize("servers", [1, 3])
def test_a_checkpoint_of_servers(servers: int) -> None:
    """Two optimizers of two workers on two servers; other counts of servers read it, too."""
    read = threading.Barrier(2)
    files = [load_file(OLD / "server_checkpoint" / f"shard-{shard}.safetensors") for shard in range(2)]

    def work(session: Session) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        layer, table = nn.Linear(3, 2), nn.Embedding(20, 3)
        adam = DistributedOptimizer(torch.optim.Adam(layer.parameters(), lr=0.01))
        adagrad = DistributedOptimizer(torch.optim.Adagrad(table.parameters(), lr=0.01))
        values = [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in (layer, table)]
        moments = [torch.cat([adam.state_dict()["state"][p][name].flatten() for p in (0, 1)]) for name in ("exp_avg",)]
        sums = adagrad.state_dict()["state"][0]["sum"].flatten()
        read.wait(20)  # before a step of either worker changes what the other reads
        layer(table(torch.arange(4)).mean(0)).sum().backward()
        adam.step()
        adagrad.step()
        return values, [*moments, sums]

    with ThreadJob(2, servers, "ssp:2", resume=OLD / "server_checkpoint") as job:
        assert job.plan.first_step == 12
        for values, states in job.run(work):
            for optimizer, got in enumerate(values):
                assert_close(got, torch.cat([file[f"{optimizer}.value.0"] for file in files]), rtol=0, atol=0)
            for name, got in zip(("0.state.0.exp_avg", "1.state.0.sum"), states, strict=True):
                assert_close(got, torch.cat([file[name] for file in files]), rtol=0, atol=0)


def test_a_checkpoint_of_a_pipeline() -> None:
    def work(session: Session) -> tuple[int, dict[str, torch.Tensor]]:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        pipe = Pipeline(
            model,
            loss=nn.functional.cross_entropy,
            optimizer=ADAM,
            schedule="1f1b",
            microbatches=2,
            resume=OLD / "pipeline_checkpoint",
        )
        resumed = pipe.steps
        pipe.step(torch.ones(8, 4), torch.arange(8) % 3)
        return resumed, {name: value.clone() for name, value in pipe.stage.state().items()}

    outcomes = everywhere(2, work)
    assert [resumed for resumed, _ in outcomes] == [4, 4]
    for stage, (_, state) in enumerate(outcomes):
        saved = load_file(OLD / "pipeline_checkpoint" / "step-00000004" / f"stage-{stage}-of-2.safetensors")
        for got, kept in zip(state.values(), (saved["0"], saved["1"]), strict=True):
            assert_close(got, kept, rtol=0, atol=0.02)  # one step of Adam at lr=0.01 from there


def test_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    check(OLD / "record")
    assert "keep every promise; replay gives the same" in capsys.readouterr().out


def test_a_key_file(tmp_path: Path) -> None:
    own = tmp_path / "keys.json"
    shutil.copyfile(OLD / "keys.json", own)
    own.chmod(0o600)
    keys = read_key_file(own)
    assert all(len(key) == 40 for key in (keys.server_public, keys.worker_public, keys.worker_secret))
