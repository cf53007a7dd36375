"""A clock of the sequencer for workers whose gradients do not go to servers: they push without data.

The sequencer decides which workers are in a round, and keeps the record and the budget, as for any other push.
"""

from __future__ import annotations

from polytempo.client.client import Client
from polytempo.client.client_state import ClientState, Outstanding
from polytempo.protocol.messages import Push
from polytempo.protocol.push import FirstValues, Measures, StepReport
from polytempo.protocol.values import OptimizerSpec, PushId
from polytempo.session.session import Session
from polytempo.transport.channel import Bytes


class SequencerClient:
    """One clock, as this worker sees it."""

    def __init__(self, session: Session, spec: OptimizerSpec, state: ClientState) -> None:
        assert session.client is not None
        self.client: Client = session.client
        self._session, self.state = session, state
        with session.lock:
            self.client.register(state.name, spec, lambda: (FirstValues(), self._no_data()), state)
        self.step = state.released
        self.waited = 0.0  #: seconds of the last round

    def _no_data(self) -> list[list[Bytes]]:
        return [[] for _ in range(self.client.shards)]

    def push(self, report: StepReport, measures: Measures, traffic: tuple[int, int]) -> None:
        """Report a step."""
        if measures.exchanged is None:
            measures.exchanged = self.waited
        push = Push(
            id=PushId(self.state.name, self.client.rank, self.client.incarnation, self.step),
            version=self.state.version,
            sent=traffic[0],
            received=traffic[1],
            measures=measures,
            body=report,
        )
        with self._session.lock:
            self.client.push(Outstanding(push, self._no_data()))

    def wait_for(self, step: int) -> None:
        """Wait until this worker may start a step."""
        with self._session.lock:
            self.client.wait_for_release(self.state.name, step)
