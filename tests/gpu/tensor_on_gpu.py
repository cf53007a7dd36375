"""Ranks that share one GPU and split a model: gradients are the unsplit ones, and what is replicated stays equal."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.tensor_parallel.cross_entropy import parallel_loss
from polytempo.tensor_parallel.group import RankTensorGroup
from polytempo.tensor_parallel.plan import find_plan, parallelize

WORDS = 11
torch.backends.cuda.matmul.allow_tf32 = False
pt.init()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
inner = pt.new_group().inner
assert inner is not None
group = RankTensorGroup(inner)


def gpt(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, 16), *layers, nn.LayerNorm(16), nn.Linear(16, WORDS)).to(device)


def split(model: nn.Module) -> nn.Module:
    parallelize(model, plan, group)
    return model


loss = partial(pt.cross_entropy, dim=-1)
plan = find_plan(gpt(0.0), group.size, {"0": "vocab"}, loss)
of_split = parallel_loss(loss, group, WORDS)
ids, target = torch.randint(WORDS, (2, 4, 6), generator=torch.Generator().manual_seed(1)).to(device)

whole, mine = gpt(0.0), split(gpt(0.0))
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

model = split(gpt(0.3))
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
pt.shutdown()
