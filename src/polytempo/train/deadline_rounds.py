"""`anytime` on the worker: micro-batches until the deadline, and a communication thread that a busy script cannot hold up.

    step           `samples * .grad` is added to the round's sum. While another micro-batch fits before the deadline, by this
                   worker's own pace, `step()` returns at once; else the sum goes out, and `step()` waits for the round's end
    deadline       it counts from the moment at which the answer to the round before has come. If the script is in the middle
                   of a micro-batch then, or does something else, the communication thread hands over what is finished, maybe
                   nothing, takes the answer, and goes on with the next deadline, any number of times
    new values     are put into the parameters by the script's thread in its next `step()`, never under a backward
    late           the micro-batch of that `step()` was computed on older values: with `late=drop` it is abandoned, and its
                   samples are used again; with `late=keep` it is added to the sum of the round that is open, once, however
                   many rounds have passed; unless the budget is used up
    no deadline    in the first round of `anytime:auto` each worker takes `micro` micro-batches

A micro-batch that a `GradScaler` skips is left out of the sum, as in a job of one; its samples are used up. Hyper-parameters
of a push are those of its last micro-batch. `step()` calls are micro-batches: the budget's `--steps` counts those in pushes.

`consolidate()` inside a pass over the data shows the values of the round, which are the job's newest; after a pass, or when
the budget is used up, it ends this worker's part of the round and waits for its end, so that all that was computed is in.

All that both threads touch is under one condition. The exchange itself runs without it (`reducer/round_exchange.py`).
It needs the client under the session's lock, which nothing that waits for other workers may keep: neither the ranks' first
meeting (`Session.world`) nor a wait of the client (`Client.share`). Else the rounds go on without this worker, and in the
last epoch no worker is left to use the samples that return.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polytempo.errors import PolytempoError, UsageError
from polytempo.profile_ranges import profiled
from polytempo.protocol.messages import LeaseSamples, SamplesLeased
from polytempo.protocol.push import Measures, no_steps
from polytempo.reducer.flat_buffer import Copier, FlatBuffer
from polytempo.reducer.reducer import GroupValues, Reducer
from polytempo.reducer.round_exchange import RoundExchange, RoundOutcome
from polytempo.session.ledger import united
from polytempo.session.session import Session
from polytempo.sync.anytime import Pace, fits, latest
from polytempo.sync.spec import Spec
from polytempo.train.driver import StepRequest, StepUpdate
from polytempo.train.update import Wrapped

#: Seconds between two looks at whether the communication thread is alive, while the script waits for it.
LOOK = 1.0


@dataclass
class RoundSum:
    """The micro-batches that a worker has finished in a round."""

    buffer: FlatBuffer
    taken: int = 0  #: micro-batches, with those that were left out
    measures: Measures = field(default_factory=no_steps)
    absent: frozenset[int] = frozenset()
    hyper: GroupValues = ()
    version: int | None = None  #: of the oldest values that one of them was computed on
    in_vain: Measures = field(default_factory=no_steps)  #: of a micro-batch that was abandoned

    def add(self, copier: Copier, measures: Measures) -> None:
        """Add the gradients as they are now, times their samples."""
        views, samples = self.buffer.views, measures.samples
        if not self.measures.count:
            self.absent = frozenset(copier.gather(self.buffer, lambda param: param.grad))
            torch._foreach_mul_(list(views.values()), samples)
        else:
            have = copier.here(lambda param: param.grad)
            dense = [grad if grad.layout == torch.strided else grad.to_dense() for grad in have.values()]
            torch._foreach_add_([views[index] for index in have], dense, alpha=samples)
            self.absent -= frozenset(have)
        self.measures.add(measures)
        self.measures.vital_signs = measures.vital_signs  # the last: those before were made on the same values

    def leave_out(self, measures: Measures) -> None:
        """A micro-batch does not count; its samples are used up."""
        positions, digest = measures.positions, measures.gradient_digest
        self.measures.add(Measures(samples=0.0, count=0, positions=positions, gradient_digest=digest))

    def said(self, busy: bool, exchanged: float) -> Measures:
        """What its push says. Where nothing counts, the seconds and the work are those that were in vain."""
        said, vain = self.measures, self.in_vain
        said.busy, said.exchanged, said.positions = busy, exchanged, united(said.positions)
        if not said.count:
            said.computed, said.input, said.work = vain.computed, vain.input, vain.work
        return said


class DeadlineUpdate(StepUpdate):
    """The rounds of one optimizer.

    Args:
        session: The job.
        wrapped: The script's optimizer.
        rounds: How this worker takes part in rounds.
        spec: The mode.
        deals: Do samplers hand out batches for this optimizer's steps? It is the first of its worker then.
    """

    def __init__(self, session: Session, wrapped: Wrapped, rounds: RoundExchange, spec: Spec, deals: bool = True) -> None:
        assert spec.anytime is not None
        self._session, self._wrapped, self._rounds, self._deals = session, wrapped, rounds, deals
        self._spec = spec.anytime
        self._copier = rounds.reducer.copier
        self._clock = session.round_clock
        self._pace = Pace()
        self._made = self._abandoned = self._late = self._ended = 0
        self._turn = threading.Condition()
        first, second = rounds.buffers()
        self._sum, self._spare = RoundSum(first), second
        self._round = rounds.first()
        self._opened = self._clock.now()
        self._version = rounds.reducer.client_state.version  # of the values that are installed
        self._outcomes: list[RoundOutcome] = []  # that are not installed
        self._waiting = False  # the script waits for the end of the round
        self._exchanging = False
        self._closed = False
        self._error: BaseException | None = None
        self._exchanged = 0.0  # seconds that the script has waited since the last push
        self._ledger = session.ledger
        if deals and session.client is not None:
            self._ledger.ask = self._ask
        context = contextvars.copy_context()
        name = f"polytempo rounds {rounds.reducer.name}"
        self._thread = threading.Thread(target=lambda: context.run(self._run), name=name, daemon=True)
        if session.client is not None:
            session.client.share(session.lock)
        session.flushing.append(self.flush)
        session.closing.append(self._close)
        self._thread.start()

    @property
    def steps(self) -> int:
        return self._made

    def stats(self) -> dict[str, Any]:
        with self._turn:
            figures = {"rounds": self._ended, "abandoned": self._abandoned, "late": self._late}
            return {**figures, "deadline": self._round.starts.seconds}

    # The script's thread.

    def step(self, request: StepRequest) -> None:
        """A micro-batch is finished: count it, and end the round where no other fits before the deadline."""
        if request.agreed:
            raise UsageError("synchronize() is not possible in anytime; clip with clip_norm= of DistributedOptimizer")
        self._made += 1
        if self._deals:
            self._look_at_batch(request)
        with self._turn:
            self._raise_error()
            self._pace.add(request.measures.computed)
            late = self._exchanging or bool(self._outcomes)
            if self._exchanging:  # the script comes back while its communication thread waits for the end of the round
                self._wait(lambda: not self._exchanging)
            if late and (self._spec.late == "drop" or self._is_last()):
                self._abandoned += 1
                self._sum.in_vain = request.measures
                if self._deals:
                    self._ledger.abandon()
            else:
                self._late += late
                self._add(request)
            self._install()
            if not self._goes_on():
                self._end_round()
        self._ledger.give_back()

    def _ask(self, asked: LeaseSamples) -> SamplesLeased:
        with self._session.lock:
            assert self._session.client is not None
            return self._session.client.lease(asked)

    def _is_last(self) -> bool:
        """Has the last round ended? All workers leave after it, so nothing is kept for another."""
        return self._session.client is not None and self._session.client.stop

    def _look_at_batch(self, request: StepRequest) -> None:
        """What the micro-batch was made of, where a sampler has dealt it."""
        batches = self._ledger.batches
        if batches:
            if not request.weighed:
                request.measures.samples = self._ledger.samples(upcoming=False)
            request.measures.work = float(sum(batch.cost for batch in batches))

    def _add(self, request: StepRequest) -> None:
        total, wrapped, measures = self._sum, self._wrapped, request.measures
        total.taken += 1
        total.version = self._version if total.version is None else min(total.version, self._version)
        total.hyper = wrapped.hyper()
        if request.skip or not measures.samples:
            total.leave_out(measures)
            return
        total.add(self._copier, measures)
        total.measures.nonfinite = total.measures.nonfinite or wrapped.finite.check(total.buffer, self._made)

    def _goes_on(self) -> bool:
        """Is there time for another micro-batch? One that takes longer than a whole round is begun at its start."""
        deadline = self._round.starts.seconds
        if not deadline:
            return self._sum.taken < self._spec.micro
        elapsed, pace = self._clock.now() - self._opened, self._pace.seconds
        return fits(elapsed, pace, deadline) or (not self._sum.taken and pace > latest(deadline))

    def _end_round(self) -> None:
        """Hand over what is finished, wait for the end of the round, and take its values."""
        self._waiting = True
        self._turn.notify_all()
        with profiled("wait round"):
            self._wait(lambda: not self._waiting)
        self._install()

    def _install(self) -> None:
        if self._outcomes:
            self._rounds.install(self._outcomes)
            self._outcomes.clear()
            self._version = self._rounds.reducer.client_state.version

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait for the communication thread, which names the ranks that it waits for."""
        began = self._clock.now()
        while not done():
            self._raise_error()
            if not self._thread.is_alive():
                raise PolytempoError(f"worker {self._session.rank}: its communication thread has ended; start the job again")
            self._turn.wait(LOOK)
        self._exchanged += self._clock.now() - began

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def look(self, reducer: Reducer, params: Sequence[torch.Tensor]) -> None:
        reducer.check_same(params)
        reducer.renew()
        self._rounds.look()

    def consolidate(self, reducer: Reducer) -> None:
        over = not self._ledger.in_pass or reducer.client_state.answer.stop
        with self._turn:
            self._settle(ends_round=over)
            reducer.renew()
            if reducer.copier.watch.touched:
                self._rounds.reload()
                reducer.copier.watch.touched = ""

    def flush(self) -> None:
        """This worker leaves: send what is finished, and wait for the end of its round."""
        with self._turn, torch.no_grad():
            self._settle(ends_round=self._sum.taken > 0)
        if self._deals:
            self._ledger.leave()

    def _settle(self, ends_round: bool) -> None:
        """Take the newest values; `ends_round`: those at the end of the round, to which this worker adds no more."""
        self._raise_error()
        self._wait(lambda: not self._exchanging)
        self._install()
        if ends_round:
            self._end_round()

    # The communication thread.

    def _run(self) -> None:
        try:
            while self._take_turn():
                pass
        except BaseException as error:  # noqa: BLE001  it is raised in the script's thread
            with self._turn:
                self._error = error
                self._turn.notify_all()

    def _take_turn(self) -> bool:
        """Wait for the end of this worker's part of a round, and hand it over; False when there are no more."""
        with self._turn:
            while not self._waiting and not self._closed and not (self._is_over() and self._rounds.has_room):
                self._clock.wait(self._turn, self._ends_at() if self._rounds.has_room else None)
            if self._closed:
                return False
            total, busy = self._sum, not self._waiting
            self._sum, self._spare = RoundSum(self._spare), total.buffer
            self._exchanging = True
            exchanged, self._exchanged = self._exchanged, 0.0
        outcome = self._exchange(total, busy, exchanged)
        with self._turn:
            self._round, self._opened = outcome, self._clock.now()
            self._outcomes.append(outcome)
            self._exchanging = self._waiting = False
            self._ended += 1
            self._turn.notify_all()
        return True

    def _ends_at(self) -> float | None:
        deadline = self._round.starts.seconds
        return self._opened + latest(deadline) if deadline else None

    def _is_over(self) -> bool:
        ends = self._ends_at()
        return ends is not None and self._clock.now() >= ends

    def _exchange(self, total: RoundSum, busy: bool, exchanged: float) -> RoundOutcome:
        state = self._rounds.reducer.client_state
        if total.version is not None:
            state.version = total.version
        measures = total.said(busy, exchanged)
        buffer, absent = (total.buffer, sorted(total.absent)) if measures.count else (None, [])
        return self._rounds.exchange(buffer, total.hyper, measures, absent)

    def _close(self) -> None:
        """End the communication thread: this worker leaves the job."""
        with self._turn:
            self._closed = self._rounds.given_up = True
            self._turn.notify_all()
        self._thread.join(10 * LOOK)
        self._rounds.close()
