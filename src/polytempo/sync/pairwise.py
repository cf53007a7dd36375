"""The averaging of a pair, as a state machine without values: who asks, who answers, and when which value is taken.

    asker                                answerer
    begin  -- PairRequest, its x -->     requested: x = mean of both, atomically; answers with it
    replied: takes it        <-- PairReply, averaged=True --

The asker does not change its x by other averages between `begin` and the reply, so the result is the mean of the two and
their sum is kept. A worker that waits for a reply of its own answers "not averaged" at once; its asker keeps its x and goes
on. So every request is answered without waiting for anything, and no order of messages can block a worker, whatever the
roles. Under AD-PSGD's roles (`adpsgd.py`) only active workers ask and only passive ones are asked: there each request is
granted, except in the moments in which roles change because a member left or joined.

A partner that is lost ends the wait: the asker keeps its x. What the partner had made of the request goes with it.

The driver supplies the values: it attaches its x (and push-sum weight w) to a request, and where `requested` says "averaged"
it averages and attaches the mean to the reply, under the same lock as the call. It delivers each message to the incarnation
of the worker it was sent to, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.errors import OrderError


@dataclass(frozen=True, slots=True)
class PairRequest:
    """`sender` asks `receiver` to average; `step` is the sender's."""

    sender: int
    receiver: int
    step: int


@dataclass(frozen=True, slots=True)
class PairReply:
    """The answer to the request of the same step; where it is not `averaged` both keep what they have."""

    sender: int
    receiver: int
    step: int
    averaged: bool


class PairAveraging:
    """One worker's side of all its averages."""

    __slots__ = ("_waiting", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._waiting: PairRequest | None = None

    @property
    def waiting_for(self) -> int | None:
        """The partner whose reply is awaited."""
        return None if self._waiting is None else self._waiting.receiver

    def begin(self, step: int, partner: int) -> PairRequest:
        """Ask a partner to average.

        Returns:
            The request to send, with this worker's values.

        Raises:
            OrderError: a reply is awaited already, or the partner is this worker.
        """
        if self._waiting is not None:
            raise OrderError(
                f"worker {self.rank} began to average with worker {partner} while it waits for worker {self.waiting_for}; "
                f"wait for that first"
            )
        if partner == self.rank:
            raise OrderError(f"worker {self.rank} cannot average with itself; expected another worker")
        self._waiting = PairRequest(self.rank, partner, step)
        return self._waiting

    def requested(self, request: PairRequest) -> PairReply:
        """A request has come. Where the reply is `averaged`, this worker's values become the mean of both and go with it."""
        return PairReply(self.rank, request.sender, request.step, self._waiting is None)

    def replied(self, reply: PairReply) -> bool:
        """A reply has come: is it the one awaited? Then the wait is over; its values are taken where it is `averaged`."""
        mine = self._waiting
        if mine is None or (reply.sender, reply.step) != (mine.receiver, mine.step):
            return False
        self._waiting = None
        return True

    def lost(self, member: int) -> bool:
        """A member is gone: was it the one waited for? Then the wait is over, and this worker keeps its values."""
        if self.waiting_for != member:
            return False
        self._waiting = None
        return True
