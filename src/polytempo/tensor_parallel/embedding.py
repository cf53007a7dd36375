"""An embedding whose vocabulary is split: each rank has some of the rows.

A rank looks up the ids that are its own, has zeros for all others, and the sum over ranks has every row. A vocabulary that
does not divide is padded; ids outside it are refused as `nn.Embedding` does.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from polytempo.tensor_parallel.group import TensorGroup
from polytempo.tensor_parallel.mappings import reduce_from


class VocabularyEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding of which this rank has some rows. `num_embeddings` stays that of the whole."""

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
