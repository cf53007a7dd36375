"""A character-level GPT that learns to write like Python's own standard library.

    python examples/gpt.py                                            one process
    polytempo run --strategy data=4 examples/gpt.py                   four replicas of the model
    polytempo run --strategy data=2,pipe=2 examples/gpt.py            two replicas, each cut into two stages
    polytempo run --strategy tensor=2 examples/gpt.py                 every layer split over two processes
    polytempo run -n 4 --strategy auto examples/gpt.py                whichever is predicted to be fastest
    polytempo run --strategy data=2,pipe=2 examples/gpt.py --explain  with what each worker computes, sends and keeps

The model is a plain `nn.Sequential` of torch's layers: where it is cut and how its layers are split is found from it. All
of these make the same steps of the same samples, and end with the same loss, to rounding.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
from torch import nn

import polytempo as pt

parser = argparse.ArgumentParser(description="Train a character-level GPT on the source of the standard library.")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=32, help="windows in a step, of all workers together")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--megabytes", type=float, default=4.0, help="source to read")
parser.add_argument("--checkpoint", help="a folder for checkpoints; a run goes on from the last, under any strategy")
parser.add_argument("--explain", action="store_true", help="print what each worker computes, sends and keeps, first")
options = parser.parse_args()
CHARACTERS = 128  # ASCII


class Start(nn.Module):
    """Characters and their places become vectors."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.character(text) + self.place(torch.arange(text.shape[1], device=text.device))


class Block(nn.Module):
    """A transformer layer in which a character sees those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return self.layer(x, mask, is_causal=True)


def source(megabytes: float, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the standard library's text, and the same one character on; every tenth file is held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for number, file in enumerate(files) if (number % 10 == 9) == held_out)
    text = bytes(byte for byte in text if byte < CHARACTERS)[: int(megabytes * 1e6) // (10 if held_out else 1)]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = windows[: len(windows) // (options.context + 1) * (options.context + 1)].view(-1, options.context + 1)
    return windows[:, :-1], windows[:, 1:]


def loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Nats for each character."""
    return pt.cross_entropy(logits.flatten(0, 1), following.flatten())


def write(model: nn.Module, text: str, count: int) -> str:
    """Go on with a text."""
    line = torch.tensor([list(text.encode())])
    for _ in range(count):
        chances = model(line[:, -options.context :])[0, -1].div(0.7).softmax(0)
        line = torch.cat([line, chances.multinomial(1)[None]], 1)
    return bytes(line[0].tolist()).decode()


torch.manual_seed(0)  # every process makes the same model
blocks = [Block(options.width, options.heads) for _ in range(options.blocks)]
ends = nn.LayerNorm(options.width), nn.Linear(options.width, CHARACTERS)
model = nn.Sequential(Start(options.width, options.context), *blocks, *ends)

pt.init()
data, adam = source(options.megabytes, held_out=False), partial(torch.optim.AdamW, lr=options.lr)
if options.explain:
    x, y = data[0][: options.batch], data[1][: options.batch]
    pt.Strategy.current().explain(model, x, target=y, loss=loss, optimizer=adam, batch=options.batch)
history = pt.fit(  # the strategy is the job's (--strategy); alone, one process
    model,
    data,
    loss,
    optimizer=adam,
    scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=options.lr, total_steps=options.steps + 1),
    clip_norm=1.0,
    batch_size=options.batch,
    max_steps=options.steps,
    validation=source(options.megabytes / 4, held_out=True),
    evaluate_every=max(1, options.steps // 4),
    checkpoint=options.checkpoint,
    resume=options.checkpoint is not None,
)
if pt.rank() == 0:
    print(f"{history.model.strategy}: validation loss {history['val_loss'][-1]:.4f} after {history['step'][-1]} steps")
    with torch.no_grad():
        print(write(model.eval(), "def ", 200))
