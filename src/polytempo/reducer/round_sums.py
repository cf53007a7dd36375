"""`RoundSums`: how the workers of a round with a deadline add up their sums, once the sequencer has closed it.

SharedSums   on one host: every worker leaves its sum where all others can read it (`shared_sums.py`)
GroupSums    between hosts: an all-reduce in a group of exactly these ranks (`group_sums.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from polytempo.protocol.values import Share
from polytempo.reducer.flat_buffer import FlatBuffer


@dataclass(frozen=True)
class EndedRound:
    """A round that has ended, as its workers heard from the sequencer."""

    step: int  #: the number of the round that follows, the same on all
    shares: Sequence[Share]  #: its workers by rank, and their samples
    group: int  #: the number of this set of workers
    divisor: float  #: of the sum

    @property
    def ranks(self) -> list[int]:
        """The ranks of its workers."""
        return [share.worker for share in self.shares]


class RoundSums(ABC):
    """The sums of one optimizer, on one worker."""

    remade = False  #: a sum was made again without a rank that was lost in it: replicas are to be compared

    @abstractmethod
    def put(self, total: FlatBuffer | None, step: int) -> None:
        """Before this worker reports round `step`: its sum of it, which stays as it is until the round's sum is made; None
        where it has no sample."""

    @abstractmethod
    def make(self, result: FlatBuffer, closed: EndedRound) -> bool:
        """Make a flat buffer the sum of a round over its divisor.

        Returns:
            False where this rank has come too late for it, because it was stopped: it has missed the round.

        Raises:
            RankLost: A rank of the round is lost, and the sum cannot be made without it.
        """

    @abstractmethod
    def handed(self) -> int:
        """Bytes handed to other workers so far."""
