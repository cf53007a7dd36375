"""How many bytes a compressed message has, said a second time and without encoding anything."""

from __future__ import annotations

import torch

from polytempo.compression.chain import CASTS, parse_chain
from polytempo.compression.encoding import Dense
from polytempo.compression.quantization import BLOCK, Int8
from polytempo.compression.sign import Sign
from polytempo.compression.sparsification import TopK


def stated_bytes(text: str, size: int, dtype: torch.dtype) -> int | None:
    """Bytes of every message of a chain about such a tensor; None where its values decide."""
    spec = parse_chain(text)
    wire = CASTS.get(spec.cast, dtype).itemsize
    wide = max(4, dtype.itemsize)
    match spec.code:
        case Dense():
            return size * wire
        case TopK() as code:
            return code.count(size) * (4 + wire)
        case Sign():
            return wide + -(-size // 8)
        case Int8():
            return size + -(-size // BLOCK) * wide
    return None
