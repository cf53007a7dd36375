"""Workers that train and exchange nothing are warned; those that exchange in whatever way are not."""

from __future__ import annotations

from live import Bench

#: The optimizer is not wrapped. That all start from the same weights does not make it one model.
FORGOTTEN = """
import torch
import polytempo as pt

pt.init()
torch.manual_seed(pt.rank())
model = torch.nn.Linear(4, 1)
pt.broadcast_parameters(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(101):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""

#: Each way is tried by itself, in one job: what is seen of it, as if the job had only trained so.
WAYS = """
import torch
import polytempo as pt
import polytempo.horovod as hvd
from polytempo.session.session import current

pt.init()
hvd.init()
pair, other = pt.new_group([0, 1]), 1 - pt.rank()


def new():
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model, optimizer, exchange=lambda model: None, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        exchange(model)
        optimizer.step()
    return model


def by_collectives(model, group=None):
    for parameter in model.parameters():
        pt.all_reduce(parameter.grad, "mean", group=group)


def by_messages(model):
    bias = torch.empty_like(model.bias.grad)
    sent = pt.isend(model.bias.grad, other)
    pt.recv(bias, other)
    sent.wait()


def by_horovod():
    model, optimizer = new()
    train(model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))


def evaluated():
    model, optimizer = new()
    for _ in range(3):
        model(torch.randn(8, 4))
        optimizer.step()  # without a gradient


def piped():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    pipe = pt.Pipeline(model, stages=2, optimizer=make, loss=torch.nn.functional.mse_loss, microbatches=2)
    for _ in range(3):
        pipe.step(torch.randn(8, 4), torch.randn(8, 2))


def by_torch():
    torch.distributed.init_process_group("gloo")
    train(*new(), lambda model: torch.distributed.all_reduce(model.bias.grad))


WAYS = {
    "alone": lambda: train(*new()),
    "a single step": lambda: train(*new(), steps=1),
    "evaluated": evaluated,
    "collectives": lambda: train(*new(), by_collectives),
    "a group made before": lambda: train(*new(), lambda model: by_collectives(model, pair)),
    "averaged at the end": lambda: pt.all_reduce(train(*new()).bias.data, "mean"),
    "messages": lambda: train(*new(), by_messages),
    "horovod": by_horovod,
    "piped": piped,
    "wrapped": lambda: train(*(lambda model, plain: (model, pt.DistributedOptimizer(plain, model)))(*new())),
    "kv": lambda: (pt.tables.KV({"x": pt.tables.Array(4)}), train(*new())),
    "torch.distributed": by_torch,
}
for name, way in WAYS.items():
    session = current()
    session._end_lone()
    session.watch_lone_training()
    way()
    print(name, session.lone.count() if session.lone is not None else "unwatched", flush=True)
session._end_lone()
"""


def test_workers_that_train_a_model_each_are_warned_early_and_at_the_end(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(FORGOTTEN)
    done = bench.run("run", "-n", "2", "train.py")
    assert done.returncode == 0, done.stderr
    what = "exchanged nothing with other workers; to train one model together, wrap the optimizer: "
    fix = "optimizer = pt.DistributedOptimizer(optimizer)"
    *_, early, late, last = done.stderr.splitlines()
    assert early == f"[0] polytempo: warning: rank 0 has trained a model of its own for 100 steps and {what}{fix}"
    assert late == f"polytempo: warning: each of 2 workers has trained a model of its own for 101 steps and {what}{fix}"
    assert last.startswith("polytempo: 2 workers finished after ")


def test_who_exchanges_in_any_way_is_not_warned(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(WAYS)
    done = bench.run("run", "-n", "2", "--via", "ps", "train.py")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        seen = dict(line[4:].rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith(f"[{rank}] "))
        assert {name: count for name, count in seen.items() if count not in ("0", "unwatched")} == {"alone": "3"}
        assert {name for name, count in seen.items() if count == "unwatched"} == {"wrapped", "kv"}
        assert len(seen) == 12
    assert "exchanged nothing" not in done.stderr
