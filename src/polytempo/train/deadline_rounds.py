"""`anytime` on the worker: micro-batches until the deadline, and a communication thread that a busy script cannot hold up.

When a round ends for this worker, what is late, and what becomes of that, its machine decides (`sync/anytime.py`). Here are
the threads, the sums and the values:

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

All that both threads touch is under one condition. The exchange itself runs without it (`round_exchange.py`).
It needs the client under the session's lock, which nothing that waits for other workers may keep: neither the ranks' first
meeting (`Session.world`) nor a wait of the client (`Client.share`). Else the rounds go on without this worker, and in the
last epoch no worker is left to use the samples that return.
"""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from polytempo.errors import PolytempoError, UsageError
from polytempo.profile_ranges import profiled
from polytempo.protocol.messages import LeaseSamples, SamplesLeased
from polytempo.protocol.push import Measures, no_steps
from polytempo.reducer.copier import Copier
from polytempo.reducer.exchange import Exchange, GroupValues
from polytempo.reducer.flat_buffer import FlatBuffer
from polytempo.session.leaving import LeavingStep
from polytempo.session.ledger import united
from polytempo.sync.machine import (
    Abandon,
    BudgetUsed,
    Computed,
    EndBlock,
    Fetched,
    SendPush,
    TimeUp,
    WorkerEvent,
    WorkerMachine,
)
from polytempo.train.driver import LivePerforms, MachineUpdate, StepRequest, nothing
from polytempo.train.gradient_sums import FlatSum
from polytempo.train.round_exchange import RoundExchange
from polytempo.train.update import Wrapped

#: Seconds between two looks at whether the communication thread is alive, while the script waits for it.
LOOK = 1.0


class RoundSum(FlatSum):
    """The micro-batches that a worker has finished in a round."""

    def __init__(self, copier: Copier, buffer: FlatBuffer) -> None:
        super().__init__(copier, buffer)
        self.hyper: GroupValues = ()  #: of the last of them
        self.in_vain = no_steps()  #: what is said of one that was abandoned


class DeadlineUpdate(MachineUpdate):
    """The rounds of one optimizer, as its machine orders them.

    Args:
        machine: The worker's half of the mode.
        rounds: How this worker takes part in rounds.
        wrapped: The script's optimizer.
        deals: Do samplers hand out batches for this optimizer's steps? It is the first of its worker then.
    """

    _machine: Any  # a `DeadlineMachine`, maybe one that is logged

    def __init__(self, machine: WorkerMachine, rounds: RoundExchange, wrapped: Wrapped, deals: bool = True) -> None:
        super().__init__(machine, rounds.reducer)
        self._session = session = rounds.reducer.session
        assert session.client is not None  # the sequencer ends rounds
        self._client, self._ledger, self._clock = session.client, session.ledger, session.round_clock
        self._wrapped, self._rounds, self._deals = wrapped, rounds, deals
        self._made = self._abandoned = self._late = self._ended = 0
        self._turn = threading.Condition()
        first, self._spare = rounds.buffers()
        self._sum = RoundSum(self._reducer.copier, first)
        self._version = self._reducer.client_state.version  # of the values that are installed
        self._push: SendPush | None = None  # the communication thread is to make it
        self._exchanging = False
        self._has_newer = False  # a round has ended, and its values are not installed
        self._closed = False
        self._error: BaseException | None = None
        self._exchanged = 0.0  # seconds that the script has waited since the last push
        if deals:
            self._ledger.ask = self._ask
        self.start()
        context = contextvars.copy_context()
        name = f"polytempo rounds {self._reducer.name}"
        self._thread = threading.Thread(target=lambda: context.run(self._run), name=name, daemon=True)
        self._client.share(session.lock)
        session.on_leave(LeavingStep.FLUSH, self.flush)
        session.on_leave(LeavingStep.CLOSE, self._close)
        self._thread.start()

    @property
    def steps(self) -> int:
        return self._made

    def stats(self) -> dict[str, Any]:
        with self._turn:
            figures = {"rounds": self._ended, "abandoned": self._abandoned, "late": self._late}
            return {**figures, "deadline": self._machine.seconds}

    # The machine, in both threads.

    def performs(self) -> LivePerforms:
        return {Abandon: nothing, SendPush: self._hand_over}

    def _tell(self, event: WorkerEvent, part: int = 0) -> None:
        self._obey(self._machine.handle(event, self._clock.now(), part))

    def _hand_over(self, order: SendPush) -> None:
        self._push = order
        self._turn.notify_all()

    # The script's thread.

    def step(self, request: StepRequest) -> None:
        """A micro-batch is computed: what becomes of it, and whether another follows, is the machine's."""
        if request.agreed:
            raise UsageError("synchronize() is not possible in anytime; clip with clip_norm= of DistributedOptimizer")
        self._made += 1
        measures, batches = request.measures, self._ledger.batches if self._deals else []
        if batches:
            if not request.weighed:
                measures.samples = self._ledger.samples(upcoming=False)
            measures.work = float(sum(batch.cost for batch in batches))
        with self._turn:
            self._raise_error()
            # The script may come back while its communication thread waits for the end of the round.
            self._wait_until(lambda: not self._exchanging)
            if self._client.stop:
                self._tell(BudgetUsed())
            late = self._machine.late
            orders = self._machine.handle(Computed(measures.computed), self._clock.now())
            if Abandon() in orders:
                self._abandoned += 1
                self._sum.in_vain = measures
                if self._deals:
                    self._ledger.abandon()
            else:
                self._late += late
                self._add(request)
            self._install()
            self._obey(orders)
            self._go_on()
        self._ledger.give_back()

    def _ask(self, asked: LeaseSamples) -> SamplesLeased:
        with self._session.lock:
            return self._client.lease(asked)

    def _add(self, request: StepRequest) -> None:
        total, wrapped, measures = self._sum, self._wrapped, request.measures
        total.hyper = wrapped.hyper()
        if request.skip or not measures.samples:  # it does not count; its samples are used up
            positions, digest = measures.positions, measures.gradient_digest
            total.measures.add(Measures(samples=0.0, count=0, positions=positions, gradient_digest=digest))
            return
        total.add(measures.samples, self._version)
        total.say(measures)
        nonfinite = wrapped.finite.check(total.buffer, self._made)
        total.measures.nonfinite = total.measures.nonfinite or nonfinite

    def _go_on(self) -> None:
        """Wait until the machine orders another micro-batch; on the values that are there then."""
        if not self._machine.computes:
            with profiled("wait round"):
                self._wait_until(lambda: self._machine.computes)
            self._install()

    def _install(self) -> None:
        if self._has_newer:
            self._rounds.install()
            self._has_newer = False
            self._version = self._reducer.client_state.version

    def _wait_until(self, done: Callable[[], bool]) -> None:
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

    def look(self, reducer: Exchange, params: Sequence[torch.Tensor]) -> None:
        reducer.copier.check_same(params)
        reducer.renew()
        self._rounds.look()

    def consolidate(self, reducer: Exchange) -> None:
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
            self._settle(ends_round=self._machine.finished > 0)
        if self._deals:
            self._ledger.leave()

    def _settle(self, ends_round: bool) -> None:
        """Take the newest values; `ends_round`: those at the end of the round, to which this worker adds no more."""
        self._raise_error()
        self._wait_until(lambda: not self._exchanging)
        self._install()
        self._tell(EndBlock() if ends_round else Fetched())
        self._go_on()

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
            while self._push is None and not self._closed:
                # Without room for what a round brings its deadline passes, and it may close without this worker.
                takes_part = self._machine.in_round and self._rounds.has_room
                ends_at = self._machine.ends_at if takes_part else math.inf
                if self._clock.now() < ends_at:
                    self._clock.wait(self._turn, ends_at)
                else:
                    self._tell(TimeUp(self._machine.step))
            if self._closed or self._push is None:
                return False
            total, measures = self._sum, self._sum.measures
            measures.fields, measures.busy, measures.exchanged = self._push.measured, self._push.beside, self._exchanged
            self._sum, self._spare = RoundSum(self._reducer.copier, self._spare), total.buffer
            self._push, self._exchanging, self._exchanged = None, True, 0.0
        self._exchange(total)
        with self._turn:
            self._has_newer, self._exchanging = True, False
            self._ended += 1
            self._hear()
            self._turn.notify_all()
        return True

    def _exchange(self, total: RoundSum) -> None:
        measures, vain = total.measures, total.in_vain
        measures.positions = united(measures.positions)
        if total.version is None:  # no gradient: the seconds and the work are those that were in vain
            measures.computed, measures.input, measures.work = vain.computed, vain.input, vain.work
            self._rounds.exchange(None, total.hyper, measures, [])
            return
        self._reducer.client_state.version = total.version
        self._rounds.exchange(total.buffer, total.hyper, measures, sorted(total.absent))

    def _close(self) -> None:
        """End the communication thread: this worker leaves the job."""
        with self._turn:
            self._closed = True
            self._rounds.give_up()
            self._turn.notify_all()
        self._thread.join(10 * LOOK)
        self._rounds.close()
