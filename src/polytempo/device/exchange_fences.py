"""The words that a worker and a server share for one optimizer: which fence says what (`docs/design/0013`).

The worker allocates `FENCE_BYTES` of shared host memory for each optimizer and shard, and sends it with `ShareDevice`, once
it has the first answer. Exchanges of a worker's incarnation with an optimizer are numbered 1, 2, 3, ...; in exchange k:

    PUSHED = k      worker's stream: its gradient is in the shared range, and the landing of exchange k - 1 has been read
    ANSWERED = k    server's stream: the landing holds what the push numbered k is answered with

Every answer to a push with `fence=k` sets ANSWERED = k, whether it brings values or not. The landing of an exchange is
written once, however often its answer is sent. A server that ends releases ANSWERED of all its workers.
"""

from __future__ import annotations

PUSHED = 0
ANSWERED = 1
