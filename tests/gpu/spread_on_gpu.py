"""Run by `test_cuda.py`: a transformer spread over processes on one GPU by a strategy trains as in one process."""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt

torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
torch.use_deterministic_algorithms(True, warn_only=True)
WORDS, WIDTH, LENGTH, BATCH, STEPS = 64, 32, 8, 16, 20


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


pt.init()
generator = torch.Generator().manual_seed(1)
data = [torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator).cuda() for _ in range(STEPS)]

spread = pt.Strategy.of_job().distribute(network(), loss=loss, optimizer=sgd, device="cuda", clip_norm=1.0)
replica, replicas = spread.point.data, spread.mesh.data
losses = [spread.step(x[replica::replicas], y[replica::replicas]) for x, y in data]
state, outputs = spread.state_dict(), spread.predict(data[0][0])

alone = network().cuda()
optimizer = sgd(list(alone.parameters()))
for x, y in data:
    optimizer.zero_grad()
    loss(alone(x), y).backward()
    nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    optimizer.step()
difference = max(float((state[name] - value.cpu()).abs().max()) for name, value in alone.state_dict().items())
assert difference < 1e-4, difference
assert all(param.is_cuda for _, param in spread.pipeline.stage.part.parameters())
alone.eval()
with torch.no_grad():
    torch.testing.assert_close(outputs, alone(data[0][0]), rtol=1e-3, atol=1e-3)
print(f"as one process: {spread.point}, largest difference {difference:.1e}, last loss {losses[-1]:.4f}")
