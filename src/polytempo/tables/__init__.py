"""Tables on the servers: rows of numbers under int64 ids, updated by row optimizers.

    from polytempo.tables import KV, Array, ServerEmbedding

These three are what a training script uses; they live in `polytempo.train`, above the client. The modules of this package
are what servers and clients share: shards of rows, routing of ids, row optimizers, initial values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytempo.lazy_imports import lazy_names

if TYPE_CHECKING:
    from polytempo.train.kv import KV as KV
    from polytempo.train.kv import Array as Array
    from polytempo.train.server_embedding import ServerEmbedding as ServerEmbedding

__all__ = ["KV", "Array", "ServerEmbedding"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "polytempo.train.kv": ("KV", "Array"),
        "polytempo.train.server_embedding": ("ServerEmbedding",),
    },
)
