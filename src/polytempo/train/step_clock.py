"""A clock of the sequencer for training without pushes (a pipeline): it counts steps, for the budget of the job.

Steps are reported as pushes without data, by one worker or a few; each answer says whether the budget is used up. Of
several pipelines side by side that of rank 0 is counted; the others are told the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from polytempo.client.client_state import ClientState
from polytempo.protocol.optimizer_names import name_in_group
from polytempo.protocol.values import OptimizerSpec
from polytempo.reducer.sequencer_client import SequencerClient
from polytempo.session.session import Session


class StepClock:
    """One worker's part in counting.

    Args:
        session: The job.
        number: In the order of the job's optimizers: the budget counts the first.
        members: The workers that report steps, ascending; each step is reported by one of them.
        main: Does the budget count them, of several that are made side by side?
    """

    def __init__(self, session: Session, number: str, members: Sequence[int], main: bool) -> None:
        name = name_in_group(number, members, main)
        spec = OptimizerSpec(
            sync="bsp" if len(members) == 1 else "asp",
            apply="peers",
            optimizer="",
            tensors=(),
            groups=({},),
            members=tuple(members),
        )
        self._clock = SequencerClient(session, spec, ClientState(name))
        self._returned = time.perf_counter()

    def count(self, samples: float) -> bool:
        """Report a step of this worker.

        Returns:
            Whether the budget of the job is used up.
        """
        clock, began = self._clock, time.perf_counter()
        traffic = clock.client.bytes_sent, clock.client.bytes_received
        clock.push(({},), traffic, samples=samples, computed=began - self._returned)
        clock.wait_for(clock.step + 1)
        clock.step = clock.state.released
        self._returned = time.perf_counter()
        clock.waited = self._returned - began
        return clock.client.stop
