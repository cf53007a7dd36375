"""Layers that are split over the ranks of a group: linear ones by columns (outputs) and by rows (inputs), embeddings by
rows, attention by whole heads, and dropout between them.

With A cut by columns and B by rows, f(X) A_i is this rank's part of X A, and g(Y_i B_i) is the sum of Y B: between the two
no communication is needed, if what lies between works element by element. The bias of a column-parallel layer is split with
its outputs; that of a row-parallel one is added once, after the sum.

A split layer is the layer itself with another class and a shard as its parameter (`plan.py`): its name, its hooks and the
parameters that it shares with other layers stay.

All ranks of a tensor group draw the same random numbers outside of split regions: their default generators are in the same
state. Inside, where each rank has other features, they must differ: a seed is drawn from the common generator, alike on all
ranks, and mixed with the rank; afterwards the common generator goes on, still alike on all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.tensor_parallel.group import TensorGroup
from polytempo.tensor_parallel.mappings import copy_to, gather_from, reduce_from, split_to

#: An odd number, so that different ranks have different seeds (Knuth's multiplicative hash).
STRIDE = 0x9E3779B97F4A7C15
MASK = (1 << 63) - 1


@contextmanager
def shard_random(group: TensorGroup, device: torch.device) -> Iterator[None]:
    """Inside the block torch's default generator of this device is the rank's own."""
    if group.size == 1:
        yield
        return
    common = int(torch.randint(1 << 62, ()).item())
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed((common + group.rank * STRIDE) & MASK)
    try:
        yield
    finally:
        generator.set_state(state)


class ShardDropout(nn.Dropout):  # type: ignore[misc]
    """`nn.Dropout` inside a split region: each rank drops other elements."""

    group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Drop elements of this rank's features."""
        if not self.training or self.p == 0:
            return input
        with shard_random(self.group, input.device):
            return functional.dropout(input, self.p, True, self.inplace)


class ColumnLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer of which this rank computes some of the outputs.

    Where the number of outputs was padded, outputs that are not split are cut back to it.
    """

    group: TensorGroup
    gathers: bool  #: the output is gathered, else each rank keeps its part

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """This rank's outputs, or all of them."""
        output = functional.linear(copy_to(input, self.group), self.weight, self.bias)
        if not self.gathers:
            return output
        return gather_from(output, self.group).narrow(-1, 0, self.out_features)


class RowLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that adds up what each rank computes from its part of the inputs."""

    group: TensorGroup
    splits: bool  #: the input is whole and is split here, else each rank is given its part

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """The output, on all ranks."""
        part = split_to(input, self.group) if self.splits else input
        total = reduce_from(functional.linear(part, self.weight), self.group)
        return total if self.bias is None else total + self.bias.to(total.dtype)  # as torch does under autocast


class VocabularyEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding of which this rank has some rows. `num_embeddings` stays that of the whole.

    A rank looks up the ids that are its own, has zeros for all others, and the sum over ranks has every row. A vocabulary
    that does not divide is padded; ids outside it are refused as `nn.Embedding` does.
    """

    group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """The rows of all ids, on all ranks."""
        check_ids(input, self.num_embeddings)
        rows = self.weight.shape[0]
        start = self.group.rank * rows
        own = input - start
        elsewhere = (own < 0) | (own >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - start
        found = functional.embedding(
            own.masked_fill(elsewhere, 0), self.weight, padding if padding is not None and 0 <= padding < rows else None
        )
        return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


def check_ids(ids: Tensor, count: int, ignored: Tensor | None = None) -> None:
    """Refuse ids that no rank has. On a GPU there is no check: it would wait for the device."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    wrong = (ids < 0) | (ids >= count)
    if ignored is not None:
        wrong &= ~ignored
    if wrong.any():
        raise IndexError(f"expected ids from 0 to {count - 1}, got {int(ids[wrong][0])}")


class HeadsAttention(nn.MultiheadAttention):  # type: ignore[misc]
    """An attention of which this rank has some of the heads. `num_heads` and `embed_dim` stay those of the whole.

    Each rank projects to the queries, keys and values of its heads (column-parallel), attends, and projects back
    (row-parallel); the sum over ranks is the output. The bias of the output projection is added once. Attention weights are
    asked for rarely: their mean over heads is one more sum, and those of single heads are gathered.
    """

    group: TensorGroup

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        batched, first = query.dim() == 3, 0 if self.batch_first and query.dim() == 3 else 1
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        q, k, v = self._projections(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        q, k, v = (self._by_head(projected, first) for projected in (q, k, v))
        hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if hint else self._merged(attn_mask, key_padding_mask, q)
        attended, weights = self._attend(q, k, v, mask, hint, need_weights)
        attended = attended.flatten(2) if first == 0 else attended.transpose(0, 1).flatten(2)
        output = reduce_from(functional.linear(attended, self.out_proj.weight), self.group)
        if self.out_proj.bias is not None:
            output = output + self.out_proj.bias.to(output.dtype)
        if weights is not None and average_attn_weights:
            weights = reduce_from(weights.sum(1) / self.num_heads, self.group)
        elif weights is not None:
            weights = gather_from(weights, self.group, 1)
        if batched:
            return output, weights
        return output.squeeze(1), None if weights is None else weights.squeeze(0)

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads. A tensor that is given twice enters the split region once."""
        entered = {id(tensor): copy_to(tensor, self.group) for tensor in (query, key, value)}
        q, k, v = entered[id(query)], entered[id(key)], entered[id(value)]
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = functional.linear(q, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return q, k, v
        weights = (
            self.in_proj_weight.chunk(3)
            if self.in_proj_weight is not None
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = zip((q, k, v), weights, biases, strict=True)
        q, k, v = (functional.linear(tensor, weight, bias) for tensor, weight, bias in parts)
        return q, k, v

    def _by_head(self, projected: Tensor, first: int) -> Tensor:
        """As (batch, heads of this rank, length, features of a head)."""
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2) if first == 0 else heads.permute(1, 2, 0, 3)

    def _merged(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one that is added: (batch or 1, heads or 1, length, source length)."""
        batch, heads = q.shape[:2]
        mask = None
        if attn_mask is not None:
            mask = _added(attn_mask, q.dtype)
            if mask.dim() == 3:  # one for each sample and head, of all ranks
                mask = mask.unflatten(0, (batch, self.num_heads)).narrow(1, self.group.rank * heads, heads)
        if padding is not None:
            keys = _added(padding, q.dtype).view(-1, 1, 1, padding.shape[-1])
            mask = keys if mask is None else mask + keys
        return mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What each position of each head attends to: (batch, length, heads, features); and the weights, if needed."""
        drop = self.dropout if self.training else 0.0
        with shard_random(self.group, q.device) if drop else nullcontext():
            if not need_weights:
                attended = functional.scaled_dot_product_attention(q, k, v, mask, drop, causal)
                return attended.transpose(1, 2), None
            scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            if drop:
                weights = functional.dropout(weights, drop)
            return (weights @ v).transpose(1, 2), weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of either kind as numbers that are added to the scores."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
