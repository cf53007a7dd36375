"""Checkpoints hold the unsplit model: written under one strategy, they load under any other and in plain PyTorch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from spreading import OPTIMIZERS, assert_same, cross_entropy, everywhere, sentences, size_of, spread, train, transformer
from test_strategy_equality import factorisations
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from polytempo.errors import UsageError
from polytempo.session.session import Session
from polytempo.strategy.checkpoint import read_checkpoint
from polytempo.strategy.strategy import Strategy
from polytempo.testing.threads import GroupJob, ThreadJob

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]
STRATEGIES = ["data=1", "data=4", "data=2,pipe=2", "pipe=2,tensor=2", "tensor=4", "data=2,pipe=2,tensor=2"]


def assert_same_entries(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sorted(found["state"]) == sorted(wanted["state"])
    for name, entries in wanted["state"].items():
        assert set(found["state"][name]) == set(entries)
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(found["state"][name][key]), torch.as_tensor(value)), (name, key)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each strategy, after two steps of AdamW."""
    found = {}
    for strategy in STRATEGIES:
        folder = tmp_path_factory.mktemp("saved")

        def work(session: Session, strategy: str = strategy, folder: Path = folder) -> None:
            model = spread(strategy, OPTIMIZERS["adamw"])
            train(model, sentences(2))
            model.save(folder, {"note": strategy})

        everywhere(size_of(strategy), work)
        found[strategy] = folder
    return found


@pytest.mark.parametrize("after", STRATEGIES)
@pytest.mark.parametrize("before", STRATEGIES)
def test_a_checkpoint_loads_under_every_other_strategy(before: str, after: str, written: dict[str, Path]) -> None:
    saved = read_checkpoint(written[before])

    def work(session: Session) -> Any:
        model = spread(after, OPTIMIZERS["adamw"], seed=7)
        extra = model.resume(written[before])
        return model.state_dict(), model.optimizer_state_dict(), model.steps, model.samples, extra

    for state, optimizer, steps, samples, extra in everywhere(size_of(after), work):
        assert_same(state, saved.model, atol=0)
        assert_same_entries(optimizer, saved.optimizer)
        assert optimizer["param_groups"][0]["betas"] == (0.9, 0.999)
        assert (steps, extra) == (2, {"note": before})
        assert samples == saved.facts["samples"]


@pytest.mark.parametrize("before", STRATEGIES)
def test_training_goes_on_in_plain_pytorch(before: str, written: dict[str, Path]) -> None:
    folder = written[before] / "step-00000002"
    model = transformer(seed=5)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    set_optimizer_state_dict(model, optimizer, read_checkpoint(folder).optimizer)
    ((x, y),) = sentences(3)[2:]
    cross_entropy(model(x), y).backward()
    optimizer.step()

    def work(session: Session) -> Any:
        spreaded = spread(before, OPTIMIZERS["adamw"])
        train(spreaded, sentences(3))
        return spreaded.state_dict()

    assert_same(everywhere(size_of(before), work)[0], model.state_dict())


def test_state_dicts_go_both_ways_on_every_mesh() -> None:
    wanted = transformer(seed=3).state_dict()

    def work(session: Session) -> None:
        for strategy in factorisations(4):
            model = spread(strategy)
            model.load_state_dict(wanted)
            assert_same(model.state_dict(), wanted, atol=0)
            assert list(model.state_dict()) == list(wanted), "in the order of the model"
            train(model, sentences(1))
            assert not torch.equal(model.state_dict()["0.weight"], wanted["0.weight"])

    everywhere(4, work)


class Buffered(nn.Sequential):
    """With buffers that change, parameters in groups, and one that is frozen."""


def buffered() -> nn.Sequential:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    model[0].bias.requires_grad_(False)
    return model


def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weights decay, biases do not; frozen ones are left out."""
    known = [param for param in params if param.requires_grad]
    weights, biases = [p for p in known if p.ndim > 1], [p for p in known if p.ndim == 1]
    groups = [{"params": some, "weight_decay": decay} for some, decay in ((weights, 0.1), (biases, 0.0)) if some]
    return torch.optim.Adam(groups, lr=0.01)


def test_buffers_groups_and_frozen_parameters(tmp_path: Path) -> None:
    start, data = buffered(), [(torch.randn(8, 4).double(), torch.randn(8, 2).double()) for _ in range(4)]

    def work(session: Session) -> Any:
        model = Strategy(pipe=2).distribute(copy.deepcopy(start), loss=nn.functional.mse_loss, optimizer=grouped)
        for x, y in data[:2]:
            model.step(x, y)
        model.save(tmp_path)
        for x, y in data[2:]:
            model.step(x, y)
        return model.state_dict(), model.optimizer_state_dict()

    wanted, optimizer = everywhere(2, work)[0]
    groups = [(group["weight_decay"], sorted(group["params"])) for group in optimizer["param_groups"]]
    assert groups[0] == (0.1, ["0.weight", "2.weight", "4.weight"])
    assert all("0.bias" not in names for _, names in groups)
    assert any("running_mean" in name for name in wanted)

    def resumed(session: Session) -> Any:
        model = Strategy(data=1, microbatches=2).distribute(buffered(), loss=nn.functional.mse_loss, optimizer=grouped)
        model.resume(tmp_path)
        for x, y in data[2:]:
            model.step(x, y)
        return model.state_dict()

    assert_same(everywhere(1, resumed)[0], wanted)


@pytest.mark.parametrize("sync", ["bsp", "ssp:1", "ssp:1,momentum=server", "local:2"])
def test_state_that_servers_hold_is_saved_and_resumed(sync: str, tmp_path: Path) -> None:
    def work(session: Session) -> Any:
        model = spread(f"data=2,pipe=2,sync={sync}", OPTIMIZERS["adamw"])
        train(model, sentences(3))
        model.save(tmp_path)
        return model.state_dict(), model.optimizer_state_dict()

    def resumed(session: Session) -> Any:
        model = spread(f"data=2,pipe=2,sync={sync}", OPTIMIZERS["adamw"], seed=9)
        model.resume(tmp_path)
        return model.state_dict(), model.optimizer_state_dict()

    with ThreadJob(4, servers=2, sync=sync) as job:
        before = job.run(work)
    saved = read_checkpoint(tmp_path)
    assert saved.optimizer["state"]["0.weight"]["exp_avg"].abs().sum() > 0
    with ThreadJob(4, servers=2, sync=sync) as job:
        after = job.run(resumed)
    for (state, own), (again, optimizer) in zip(before, after, strict=True):
        assert_same(state, saved.model, atol=0)
        assert_same(again, saved.model, atol=0)
        assert_same_entries(optimizer, own)  # with local steps, or momentum at the workers, each replica's own
        if sync not in ("local:2", "ssp:1"):
            assert_same_entries(optimizer, saved.optimizer)


def test_a_checkpoint_is_whole_or_none(tmp_path: Path) -> None:
    def work(session: Session) -> Any:
        model = spread("pipe=2")
        for _ in range(3):
            train(model, sentences(1))
            model.save(tmp_path, keep=2)
        blocked = tmp_path / "file"
        if session.rank == 0:
            blocked.write_text("no folder")
        with pytest.raises(UsageError, match="cannot write a checkpoint to"):
            model.save(blocked)
        return model.steps

    assert everywhere(2, work) == [3, 3]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    manifest = json.loads((tmp_path / "step-00000003" / "manifest.json").read_text())
    assert (manifest["strategy"], manifest["samples"]) == ("data=1,pipe=2,sync=bsp,microbatches=2", 48)
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UsageError, match="is damaged"):
        read_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="no checkpoint"):
        read_checkpoint(tmp_path / "nowhere")


def test_states_that_do_not_fit_are_refused_on_all_ranks() -> None:
    state = transformer().state_dict()

    def work(session: Session) -> None:
        model = spread("pipe=2")
        with pytest.raises(UsageError, match=r"missing: \['0.weight'\], unknown: \['wrong'\]"):
            model.load_state_dict({"wrong" if name == "0.weight" else name: value for name, value in state.items()})
        with pytest.raises(UsageError, match=r"0\.weight has shape \(16, 8\); got one of shape \(8, 16\)"):
            model.load_state_dict(state | {"0.weight": state["0.weight"].T})
        with pytest.raises(UsageError, match=r"it has no parameter"):
            model.load_optimizer_state_dict({"state": {}, "param_groups": []})
        train(model, sentences(1))

    everywhere(2, work)


def test_sampler_positions_are_saved_and_gone_on_from(tmp_path: Path) -> None:
    """Each sample of the epoch is trained on once, by jobs of 2 replicas x 2 stages and of 1 replica x 2 stages."""
    from polytempo.train.sampler import DistributedSampler

    data = list(range(24))
    x, y = sentences(1, 24)[0]

    def work(session: Session, strategy: Strategy, batches: int, resume: bool) -> list[int]:
        used: list[int] = []
        with strategy.scope():
            model = spread(strategy)
            if resume:
                model.resume(tmp_path)
            sampler = DistributedSampler(data, seed=1)
            sampler.set_epoch(sampler.epoch)
            loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
            for indices in list(loader)[:batches] if resume else loader:
                used += indices.tolist()
                model.step(x[indices], y[indices])
                if not resume and len(used) == 4 * batches:
                    break
            model.save(tmp_path)
        return used

    with GroupJob(4) as job:
        first = job.run(lambda session: work(session, Strategy(2, 2), 2, False))
    assert first[0] == first[1] != first[2] == first[3]
    with GroupJob(2) as job:
        second = job.run(lambda session: work(session, Strategy(1, 2), 99, True))
    assert sorted([*first[0], *first[2], *second[0]]) == data
