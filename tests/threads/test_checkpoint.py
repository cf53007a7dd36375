"""A job that goes on from a checkpoint, with other numbers of workers and servers, ends where an uninterrupted one does."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import STATEFUL
from helpers import (
    Batch,
    MakeOptimizer,
    assert_close,
    assert_equal,
    check_record,
    joined,
    loss_of,
    made_params,
    set_gradients,
    small_batches,
    small_model,
    trained_alone,
    weights,
)
from torch import nn

from polytempo.errors import PolytempoError, UsageError
from polytempo.session.session import Session
from polytempo.testing.threads import ThreadJob
from polytempo.train.optimizer import DistributedOptimizer

pytestmark = [pytest.mark.timeout(30), pytest.mark.both_wires]

JOINT = 12  # samples of a step, however many workers share them
MAKERS: dict[str, MakeOptimizer] = {
    **STATEFUL,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[2:]}, {"params": p[:2], "lr": 0.03}], lr=0.01),
}


def joint_batches(steps: int) -> list[Batch]:
    return [joined(step) for step in small_batches(steps, (JOINT,))]


def share(batch: Batch, rank: int, size: int) -> Batch:
    each = JOINT // size
    return batch[0][rank * each : (rank + 1) * each], batch[1][rank * each : (rank + 1) * each]


def run_job(
    workers: int, servers: int, model: nn.Module, make: MakeOptimizer, data: Sequence[Batch], first: int = 0, **options: Any
) -> list[torch.Tensor]:
    """Train on the data from step `first` on; the weights of all workers, which are equal."""

    def work(session: Session) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        optimizer = DistributedOptimizer(make(list(mine.parameters())))
        assert optimizer.stats["step"] == first
        for batch in data[first:]:
            optimizer.zero_grad()
            loss_of(mine, share(batch, session.rank, session.size)).backward()
            optimizer.step()
        return weights(mine)

    with ThreadJob(workers, servers, **options) as job:
        results = job.run(work)
    for result in results[1:]:
        assert_equal(result, results[0])
    return results[0]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("servers", [(1, 3), (3, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_with_as_many_workers_it_goes_on_bit_for_bit(maker: str, servers: tuple[int, int], tmp_path: Path) -> None:
    data, model = joint_batches(10), small_model()
    wanted = run_job(2, servers[0], model, MAKERS[maker], data)
    run_job(2, servers[0], model, MAKERS[maker], data[:6], checkpoint=tmp_path)
    other = small_model(seed=9)  # its values must not matter
    got = run_job(2, servers[1], other, MAKERS[maker], data, first=6, resume=tmp_path)
    assert_equal(got, wanted)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("workers", "servers"), [((2, 3), (1, 3)), ((3, 2), (3, 2)), ((1, 4), (2, 1))], ids=str)
def test_with_other_numbers_of_workers_and_servers_it_goes_on(
    maker: str, workers: tuple[int, int], servers: tuple[int, int], tmp_path: Path
) -> None:
    data, model = joint_batches(10), small_model()
    run_job(workers[0], servers[0], model, MAKERS[maker], data[:6], checkpoint=tmp_path)
    got = run_job(workers[1], servers[1], small_model(seed=9), MAKERS[maker], data, first=6, resume=tmp_path)
    assert_close(got, trained_alone(model, MAKERS[maker], [[batch] for batch in data]), rtol=1e-9)


def test_it_goes_on_from_any_checkpoint_that_is_named(tmp_path: Path) -> None:
    data, model = joint_batches(9), small_model()
    wanted = run_job(2, 1, model, MAKERS["adam"], data, checkpoint=tmp_path, checkpoint_every=3)
    assert names_in(tmp_path) == ["step-00000003", "step-00000006", "step-00000009"]
    got = run_job(2, 2, small_model(seed=9), MAKERS["adam"], data, first=3, resume=tmp_path / "step-00000003")
    assert_equal(got, wanted)


def test_checkpoints_are_made_every_so_many_steps_and_the_newest_are_kept(tmp_path: Path) -> None:
    data = joint_batches(11)
    run_job(
        2, 2, small_model(), MAKERS["momentum"], data, checkpoint=tmp_path, checkpoint_every=2, record=tmp_path / "record"
    )
    assert names_in(tmp_path) == ["record", "step-00000008", "step-00000010", "step-00000011"]
    lines = check_record(tmp_path / "record")
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [2, 4, 6, 8, 10]


def test_a_job_may_be_interrupted_more_than_once(tmp_path: Path) -> None:
    data, model = joint_batches(9), small_model()
    wanted = run_job(2, 2, model, MAKERS["adam"], data)
    run_job(2, 2, model, MAKERS["adam"], data[:3], checkpoint=tmp_path)
    for first, last in ((3, 6), (6, 9)):
        other = small_model(seed=first)
        got = run_job(2, 2, other, MAKERS["adam"], data[:last], first=first, resume=tmp_path, checkpoint=tmp_path)
    assert_equal(got, wanted)


def test_the_record_of_a_job_that_goes_on_keeps_every_promise(tmp_path: Path) -> None:
    data = joint_batches(8)
    run_job(2, 1, small_model(), MAKERS["adam"], data[:4], checkpoint=tmp_path)
    run_job(3, 2, small_model(), MAKERS["adam"], data, first=4, resume=tmp_path, record=tmp_path / "record")
    lines = check_record(tmp_path / "record")
    assert [line["step"] for line in lines if line["kind"] == "join"] == [4, 4, 4]


def test_parameters_that_had_no_gradient_are_as_they_were_after_a_resume(tmp_path: Path) -> None:
    """Their state has another age than the others': the runs of a shard are cut where its tensors are not."""
    shapes = [(4, 3), (5,), (3, 3)]
    start = made_params(shapes)
    present = [[True, step % 2 == 0, step > 5] for step in range(8)]
    generator = torch.Generator().manual_seed(8)
    make = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    gradients = [[make(shape) if there else None for shape, there in zip(shapes, own, strict=True)] for own in present]

    def steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, which: slice) -> list[torch.Tensor]:
        for own in gradients[which]:
            set_gradients(params, own)
            optimizer.step()
        return [param.detach().clone() for param in params]

    def job(servers: int, which: slice, **options: Any) -> list[torch.Tensor]:
        def work(session: Session) -> list[torch.Tensor]:
            params = [nn.Parameter(param.detach().clone()) for param in start]
            return steps(params, DistributedOptimizer(MAKERS["adam"](params)), which)

        with ThreadJob(1, servers, **options) as threads:
            return threads.run(work)[0]

    job(3, slice(4), checkpoint=tmp_path)
    got = job(2, slice(4, 8), resume=tmp_path)
    plain = [nn.Parameter(param.detach().clone()) for param in start]
    assert_close(got, steps(plain, MAKERS["adam"](plain), slice(8)), rtol=1e-12)


# What is not a checkpoint, or not this job's.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run_job(2, 2, small_model(), MAKERS["adam"], joint_batches(4), checkpoint=tmp_path, checkpoint_every=2)
    assert names_in(tmp_path) == ["step-00000002", "step-00000004"]
    return tmp_path


def test_a_damaged_file_is_refused_by_name(saved: Path) -> None:
    file = saved / "step-00000004" / "shard-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"step-00000004/shard-1.safetensors is damaged") as refused:
        ThreadJob(2, resume=saved)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("what", ["shard-0.safetensors", "manifest.json"])
def test_a_file_that_is_cut_short_is_refused(saved: Path, what: str) -> None:
    file = saved / "step-00000004" / what
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UsageError, match=r"step-00000004"):
        ThreadJob(2, resume=saved)


def test_a_missing_file_is_refused(saved: Path) -> None:
    (saved / "step-00000004" / "shard-0.safetensors").unlink()
    with pytest.raises(UsageError, match=r"step-00000004 cannot be read: .*shard-0"):
        ThreadJob(2, resume=saved)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        ThreadJob(2, resume=tmp_path)


@pytest.mark.parametrize("whole", [False, True], ids=["without a manifest", "not renamed yet"])
def test_a_partial_checkpoint_is_ignored(saved: Path, whole: bool) -> None:
    partial = saved / "step-00000099.partial"
    shutil.copytree(saved / "step-00000002", partial)
    if whole:
        manifest = json.loads((partial / "manifest.json").read_text())
        (partial / "manifest.json").write_text(json.dumps({**manifest, "step": 99}))
    else:
        (partial / "manifest.json").unlink()
    data = joint_batches(6)
    got = run_job(2, 1, small_model(seed=9), MAKERS["adam"], data, first=4, resume=saved)
    assert_equal(got, run_job(2, 1, small_model(), MAKERS["adam"], data))


def test_another_model_is_refused_with_the_first_difference(saved: Path) -> None:
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    words = r"step-00000004 is of another model: parameter 0 is .*\[8, 5\].* here and .*\[7, 5\].* there"
    with pytest.raises(PolytempoError, match=words):
        run_job(2, 2, other, MAKERS["adam"], joint_batches(6), first=4, resume=saved)


def test_another_optimizer_is_refused(saved: Path) -> None:
    with pytest.raises(PolytempoError, match="step-00000004 was made with Adam, the script uses SGD"):
        run_job(2, 1, small_model(), MAKERS["momentum"], joint_batches(6), first=4, resume=saved)


def test_a_new_job_in_an_old_directory_leaves_its_own_values_there(saved: Path) -> None:
    """It is as long as the old one, so that its last checkpoint has the old one's name."""
    data, model = joint_batches(6), small_model(seed=7)
    run_job(2, 2, model, MAKERS["adam"], data[:4], checkpoint=saved)
    got = run_job(2, 2, small_model(seed=9), MAKERS["adam"], data, first=4, resume=saved)
    assert_equal(got, run_job(2, 2, model, MAKERS["adam"], data))
