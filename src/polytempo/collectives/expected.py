"""What each collective must leave where, said a second time and without an algorithm, for `check.py`.

At the start chunk c of rank r holds the part (r, c). At the end a chunk holds the sum of some parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.errors import UsageError

#: What a chunk of a rank held at the start: (rank, chunk).
Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Expected:
    """A collective among so many ranks, on so many chunks."""

    collective: str
    size: int
    chunks: int
    root: int = 0

    def held(self, rank: int, chunk: int) -> bool:
        """Whether the rank has this chunk at all."""
        return self.collective not in ("gather", "scatter") or rank in (self.root, chunk)

    def wanted(self, rank: int, chunk: int) -> list[Part] | None:
        """The parts whose sum this chunk must be at the end, in order; None where it does not matter."""
        everybody = [(other, chunk) for other in range(self.size)]
        owner = chunk * self.size // self.chunks
        match self.collective:
            case "broadcast":
                return [(self.root, chunk)]
            case "all_reduce":
                return everybody
            case "reduce":
                return everybody if rank == self.root else None
            case "reduce_scatter":
                return everybody if rank == owner else None
            case "all_gather":
                return [(owner, chunk)]
            case "gather":
                return [(chunk, chunk)] if self.held(rank, chunk) else None
            case "scatter":
                return [(self.root, chunk)] if self.held(rank, chunk) else None
            case "all_to_all":
                return [(rank, chunk)] if chunk < self.size else [(chunk - self.size, rank)]
            case "barrier":
                return None
        raise UsageError(f"nobody has said what {self.collective!r} must leave")
