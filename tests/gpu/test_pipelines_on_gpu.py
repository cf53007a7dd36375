"""Pipelines, strategies and split layers whose ranks share one GPU train as one process; a killed stage blocks no other.

This file is also the script that the ranks run: `polytempo run -n 3 test_pipelines_on_gpu.py schedules`.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(240),
]

SCHEDULES = ("gpipe", "1f1b", "sequential", "1f1b,recompute=1", "pipedream")
WORDS, WIDTH, LENGTH, BATCH, STEPS = 64, 32, 8, 16, 20


def job(ranks: int, part: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polytempo", "run", "-n", str(ranks), *options, __file__, part]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def test_schedules_on_a_gpu_train_as_one_process_and_as_by_messages() -> None:
    done = job(3, "schedules")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("schedules: as one process") == 3, done.stdout


def test_a_stage_killed_while_its_gpu_still_computes_what_it_has_sent() -> None:
    done = job(3, "killed")
    said = [line for line in done.stdout.splitlines() if "released:" in line]
    assert len(said) == 2, done.stdout + done.stderr
    assert all("stage 0 (rank 0)" in line for line in said), said
    assert "killed by SIGKILL" in done.stderr


def test_models_spread_over_processes_on_one_gpu_train_as_one_process() -> None:
    done = job(4, "spread")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("spread: as one process") == 4 * 3, done.stdout
    assert done.stdout.count("split: as one process") == 2, done.stdout


def test_replicas_over_servers_on_one_gpu_train_as_one_process() -> None:
    command = [sys.executable, "-m", "polytempo", "run", "--strategy", "data=4,via=ps", __file__, "spread-job"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("spread: as one process") == 4, done.stdout


# What the ranks run.


def layered(layers: int = 6, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))).double()


def batches(count: int, width: int = 64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 24, width, generator=generator).double().cuda()) for _ in range(count)]


def schedules() -> None:
    from polytempo.pipeline import builder
    from polytempo.pipeline.point_to_point import DEVICE

    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    data, shared = batches(6), builder.shared_device

    def trained(schedule: str, device: Any) -> tuple[list[Any], dict[str, Tensor], pt.Pipeline]:
        options = {} if schedule == "pipedream" else {"microbatches": 4}
        pipe = pt.Pipeline(
            layered(), loss=nn.functional.mse_loss, optimizer=sgd, schedule=schedule, device=device, **options
        )
        losses = [pipe.step(*pair) for pair in data[:2]]
        unsynchronised(pipe)
        losses += [pipe.step(*pair) for pair in data[2:]]
        losses += [pipe.flush()] if schedule == "pipedream" else []
        losses += [pipe.evaluate(*data[0])]
        return losses, pipe.state_dict(), pipe

    for schedule in SCHEDULES:
        losses, state, pipe = trained(schedule, "cuda")
        ways = {one.how for one in pipe._built.p2p._outgoing.values() if one.form is not None and one.form.entries}
        assert ways == {DEVICE}, ways
        builder.shared_device = lambda place: None
        by_message = trained(schedule, ["cuda:0"] * 3)
        builder.shared_device = shared
        torch.testing.assert_close((losses, state), by_message[:2], rtol=0, atol=0)
        if schedule == "pipedream":
            continue
        alone = layered().cuda()
        optimizer = sgd(alone.parameters())
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.mse_loss(alone(x), y).backward()
            optimizer.step()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value.cpu(), rtol=0, atol=1e-9)
    print("schedules: as one process", flush=True)


def unsynchronised(pipe: pt.Pipeline) -> None:
    """From now on, torch raises where the host waits for the GPU in the actions of a step."""
    run = pipe._built.runtime.run

    def checked(*arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if pipe._built.p2p._on_device is not None else "default")
        try:
            run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    pipe._built.runtime.run = checked  # type: ignore[method-assign]


def killed() -> None:
    """Stage 0 dies behind a header whose message its GPU has not begun to write."""
    pipe = pt.Pipeline(
        layered(), loss=nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=4, device="cuda"
    )
    data = batches(3)
    for pair in data[:2]:
        pipe.step(*pair)
    before = {name: value.clone() for name, value in pipe.stage.state().items()}
    if pt.rank() == 0:
        send = pipe._built.p2p.send

        def dying(*arguments: Any) -> None:
            torch.cuda._sleep(20_000_000_000)
            send(*arguments)
            time.sleep(1.0)  # the others have taken the header, and their streams wait
            os.kill(os.getpid(), signal.SIGKILL)

        pipe._built.p2p.send = dying  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        pipe.step(*data[2])
    except pt.RankLost as error:
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun
        assert seconds < 30, seconds
        torch.testing.assert_close(pipe.stage.state(), before, rtol=0, atol=0)
        print(f"rank {pt.rank()} released: {error}", flush=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def of_words(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def spread(strategy: pt.Strategy) -> None:
    """A transformer by a strategy, against the same in one process."""
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator).cuda() for _ in range(STEPS)]
    model = strategy.distribute(network(), loss=of_words, optimizer=sgd, device="cuda", clip_norm=1.0)
    replica, replicas = model.point.data, model.mesh.data
    losses = [model.step(x[replica::replicas], y[replica::replicas]) for x, y in data]
    state, outputs = model.state_dict(), model.predict(data[0][0])
    alone = network().cuda()
    optimizer = sgd(alone.parameters())
    for x, y in data:
        optimizer.zero_grad()
        of_words(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    difference = max(float((state[name] - value.cpu()).abs().max()) for name, value in alone.state_dict().items())
    assert difference < 1e-4, difference
    assert all(param.is_cuda for _, param in model.pipeline.stage.part.parameters())
    alone.eval()
    with torch.no_grad():
        torch.testing.assert_close(outputs, alone(data[0][0]), rtol=1e-3, atol=1e-3)
    print(f"spread: as one process: {model.point}, largest difference {difference:.1e}, loss {losses[-1]:.4f}", flush=True)


def split_layers() -> None:
    """Two ranks split a model: gradients are the unsplit ones, and what is replicated stays equal."""
    from polytempo.tensor_parallel.cross_entropy import parallel_loss
    from polytempo.tensor_parallel.group import RankTensorGroup
    from polytempo.tensor_parallel.plan import find_plan, parallelize

    words, device = 11, torch.device("cuda")
    inner = pt.new_group([0, 1]).inner
    if inner is None:
        return
    group = RankTensorGroup(inner)

    def gpt(dropout: float) -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True, norm_first=True) for _ in range(2)]
        return nn.Sequential(nn.Embedding(words, 16), *layers, nn.LayerNorm(16), nn.Linear(16, words)).to(device)

    loss: Callable[..., Tensor] = partial(pt.cross_entropy, dim=-1)
    plan = find_plan(gpt(0.0), group.size, {"0": "vocab"}, loss)
    of_split = parallel_loss(loss, group, words)
    ids, target = torch.randint(words, (2, 4, 6), generator=torch.Generator().manual_seed(1)).to(device)
    whole, mine = gpt(0.0), gpt(0.0)
    parallelize(mine, plan, group)
    wanted, found = loss(whole(ids), target), of_split(mine(ids), target)
    torch.testing.assert_close(found, wanted)
    wanted.backward()
    found.backward()
    for name, param in mine.named_parameters():
        other = whole.get_parameter(name).grad
        assert other is not None
        if name in plan.sharding:
            other = plan.sharding[name].shard(other, group.rank, group.size)
        torch.testing.assert_close(param.grad, other, rtol=1e-3, atol=1e-5)
    model = gpt(0.3)
    parallelize(model, plan, group)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        of_split(model(ids), target).backward()
        optimizer.step()
    for name, param in model.named_parameters():
        assert not torch.equal(param, before[name]), name
        if name not in plan.sharding:
            copies: Tensor = group.all_gather(param.detach().unsqueeze(0), 0)
            assert all(torch.equal(other, param) for other in copies), name
    print("split: as one process", flush=True)


def main(part: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    pt.init()
    if part == "schedules":
        schedules()
    elif part == "killed":
        killed()
    elif part == "spread-job":
        spread(pt.Strategy.of_job())
    else:
        split_layers()
        for text in ("data=2,pipe=2,microbatches=4", "pipe=2,tensor=2", "data=2,tensor=2"):
            spread(pt.Strategy.parse(text))
    pt.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
