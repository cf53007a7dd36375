"""The mesh of a job: D x K x T ranks, and which of them form the groups of each axis.

    data     replicas of the model, each with its own part of the batch
    pipe     stages of one replica
    tensor   shards of the layers of one stage

rank = (d K + k) T + t: the ranks of a tensor group are adjacent, those of a replica follow each other, and the data axis is
outermost, so that between hosts go gradients. (Megatron-LM puts the pipeline outermost.)
"""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.errors import UsageError


@dataclass(frozen=True)
class MeshPoint:
    """The place of a rank: its index on each axis."""

    data: int
    pipe: int
    tensor: int

    def __str__(self) -> str:
        return f"data {self.data}, stage {self.pipe}, shard {self.tensor}"


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks that take their steps together on the data axis: one in each replica, with the same part of the model.

    Attributes:
        ranks: The ranks, ascending: the place of a rank is the number of its replica.
        main: Does the job's budget count their steps? Of the groups side by side one is the main one.
        refused: Modes that do not go with a model that is split so, of those that advice compares.
    """

    ranks: tuple[int, ...]
    main: bool = False
    refused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks or any(one >= other for one, other in zip(self.ranks, self.ranks[1:], strict=False)):
            raise UsageError(f"expected the ranks of a group ascending, each once, got {list(self.ranks)}")


@dataclass(frozen=True)
class Mesh:
    """The number of ranks on each axis."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "pipe", "tensor"):
            if getattr(self, name) < 1:
                raise UsageError(f"expected {name} of at least 1, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.data * self.pipe * self.tensor

    def rank(self, point: MeshPoint) -> int:
        """The rank at a place."""
        return (point.data * self.pipe + point.pipe) * self.tensor + point.tensor

    def point(self, rank: int) -> MeshPoint:
        """The place of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        return MeshPoint(*divmod(rest, self.pipe), tensor)

    def pipe_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's lane: the stages of its replica at its shard, first stage first."""
        point = self.point(rank)
        return tuple(self.rank(MeshPoint(point.data, stage, point.tensor)) for stage in range(self.pipe))

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold shards of the same layers, in the same replica."""
        point = self.point(rank)
        return tuple(self.rank(MeshPoint(point.data, point.pipe, shard)) for shard in range(self.tensor))

    def data_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shard of the same stage, one in each replica."""
        point = self.point(rank)
        return tuple(self.rank(MeshPoint(replica, point.pipe, point.tensor)) for replica in range(self.data))

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """All ranks of this rank's replica of the model."""
        each = self.pipe * self.tensor
        first = rank // each * each
        return tuple(range(first, first + each))
