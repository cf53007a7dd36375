"""The words that a worker and a server share for one optimizer: which fence says what (`docs/design/0013`).

The worker allocates `FENCE_BYTES` of shared host memory for each optimizer and shard, and sends it with `ShareDevice`, once
it has the first answer. Exchanges of a worker's incarnation with an optimizer are numbered 1, 2, 3, ...; in exchange k:

    PUSHED = k      worker's stream: its gradient is in the shared range, and the landing of exchange k - 1 has been read
    ANSWERED = k    server's stream: the landing holds what the push numbered k is answered with
    NONFINITE       worker's stream, before PUSHED = k: the word (`flag`) is not 0 where that gradient is not finite. The
                    server then counts the push as one with `skip` and `nonfinite`. Written before every PUSHED, or never

Every answer to a push with `fence=k` sets ANSWERED = k, whether it brings values or not. The landing of an exchange is
written once, however often its answer is sent. A server that ends releases ANSWERED of all its workers.
"""

from __future__ import annotations

import torch

from polytempo.device.device import SPACING, Fences

PUSHED = 0
ANSWERED = 1
NONFINITE = 2


def flag(fences: Fences) -> torch.Tensor:
    """The word NONFINITE as a tensor of one int32 on the host: the worker's stream copies into it, the server reads it."""
    return torch.from_numpy(fences.words[NONFINITE * SPACING : NONFINITE * SPACING + 4]).view(torch.int32)
