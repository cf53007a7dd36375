"""Multi-head attention split by whole heads: the signature and the results of `nn.MultiheadAttention`.

Each rank projects to the queries, keys and values of its heads (column-parallel), attends, and projects back (row-parallel);
the sum over ranks is the output. The bias of the output projection is added once. Attention weights are asked for rarely:
their mean over heads is one more sum, and those of single heads are gathered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.tensor_parallel.group import TensorGroup
from polytempo.tensor_parallel.mappings import copy_to, gather_from, reduce_from
from polytempo.tensor_parallel.shard_random import shard_random


class HeadsAttention(nn.MultiheadAttention):  # type: ignore[misc]
    """An attention of which this rank has some of the heads. `num_heads` and `embed_dim` stay those of the whole."""

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
        if weights is not None:
            weights = self._of_all_heads(weights, average_attn_weights)
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
        if drop:
            with shard_random(self.group, q.device):
                return _attention(q, k, v, mask, causal, need_weights, drop)
        return _attention(q, k, v, mask, causal, need_weights, 0.0)

    def _of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        if average:
            return reduce_from(weights.sum(1) / self.num_heads, self.group)
        return gather_from(weights, self.group, 1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool, drop: float
) -> tuple[Tensor, Tensor | None]:
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
