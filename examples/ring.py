"""A ring all-reduce by hand, with send and receive, beside the library's own.

polytempo run -n 4 examples/ring.py
torchrun --nproc-per-node 4 examples/ring.py
mpirun -n 4 python examples/ring.py
"""

import torch

import polytempo as pt
from polytempo.collectives.plans import plan_for
from polytempo.collectives.steps import Place, text_of


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Every rank sends to the next. First each part goes around and is added up, then the sums go around."""
    rank, size = pt.rank(), pt.size()
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    parts = list(tensor.chunk(size))
    received = torch.empty_like(parts[0])
    for step in range(2 * (size - 1)):
        out, into = (rank - step) % size, (rank - step - 1) % size
        sending = pt.isend(parts[out], ahead)
        pt.recv(received, behind)
        sending.wait()
        if step < size - 1:
            parts[into] += received
        else:
            parts[into].copy_(received)


def main() -> None:
    pt.init()
    rank, size = pt.rank(), pt.size()
    own = torch.arange(8.0 * size) * (rank + 1)
    if size > 1:
        by_hand = own.clone()
        ring_all_reduce(by_hand)
        ours = own.clone()
        pt.all_reduce(ours, algorithm="ring")
        assert torch.equal(by_hand, ours)
    pt.barrier()
    if rank == 0:
        print(f"{size} ranks, the same sum on all; what rank 0 did:")
        _, steps = plan_for("all_reduce", "ring", Place(0, (tuple(range(size)),)), pieces=1)
        print(text_of(steps))
        print("for 25 MB, auto takes", pt.explain_algorithm("all_reduce", 25_000_000).reason)
    pt.shutdown()


if __name__ == "__main__":
    main()
