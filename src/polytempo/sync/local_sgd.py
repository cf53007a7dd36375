"""`local:k`: local SGD (periodic averaging). Every worker makes k steps of its own optimizer, then all models are averaged.

    block       k local steps, on each worker's own values and data
    average     x = mean of all x_i, weighted by the samples of their blocks; all workers go on from it

One step of the policy is one block: its push is held until all active workers have pushed theirs (`barrier.py`), and the
release carries the number of local steps of the next block. A worker that dies inside a block is left out of its average;
one that joins starts at the open block, from the last average.

    after=N         post-local SGD (Lin et al. 2018): an average after each of the first N steps, then after each k
    after=decay     the same until the learning rate first falls
    momentum=B      block momentum (BMUF, Chen and Huo 2016; Wang and Joshi 2018): the average moves on with momentum,
                    u = B u - (mean - anchor) / lr; anchor = anchor - lr u; and local momentum starts from zero again
    state=keep      what an average does to the optimizer state of each worker: it stays ("keep"), is averaged as the values
                    are ("mean"), or is dropped ("reset"); by default it stays, and under block momentum it is dropped

Where this departs from the papers: the mean is weighted by samples, so workers with smaller batches or shorter blocks count
less. Block momentum is stated by its authors for a constant rate inside a block; here lr is that of the block's last step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polytempo.options import ArgumentReader, choice, fraction, whole_number
from polytempo.sync.barrier import Barrier, RoundRule, with_data
from polytempo.sync.blocks import Averaging, machine_of_blocks
from polytempo.sync.capabilities import EACH_ROUND, Capabilities, MadeOf, PushedWork, Pushes
from polytempo.sync.events import Pushed
from polytempo.sync.mode import Mode


class FixedPeriod(RoundRule):
    """The same number of local steps in every block, after a start with one."""

    def __init__(self, period: int, after: int | str = 0) -> None:
        self.period = 1 if after else period
        self._period, self._after = period, after
        self._round = 0
        self._rate: float | None = None  # the learning rate at the start

    def begin_at(self, step: int) -> None:
        self._round = step
        self._look()

    def close(self, pushes: tuple[Pushed, ...], members: Collection[int], now: float) -> None:
        self._round += 1
        rate = with_data(pushes)[0].measured.lr
        self._rate = rate if self._rate is None else self._rate
        if self._after == "decay" and rate is not None and self._rate is not None and rate < self._rate:
            self.period = self._period
        self._look()

    def _look(self) -> None:
        if isinstance(self._after, int) and self._round >= self._after:
            self.period = self._period


def _read_after(text: str) -> int | str:
    return text if text == "decay" else int(whole_number("after", at_least=1).read(text))


#: Of modes in which all workers average their models after a block.
BLOCKS = Capabilities(Pushes.VALUES, MadeOf.ALL, PushedWork.LOCAL)
#: Options of modes that average by a mean; `state`: what that does to the optimizer state of each worker.
MEAN_OPTIONS: dict[str, ArgumentReader] = {
    "momentum": fraction("momentum", "0.3"),
    "state": choice("state", ("keep", "mean", "reset")),
}


def mean_of_models(period: int, momentum: float = 0.0, state: str | None = None, **more: bool) -> Averaging:
    """Averaging by a mean, with block momentum where one is given."""
    kept = state or ("reset" if momentum else "keep")
    return Averaging(period, outer_momentum=momentum, in_lr=bool(momentum), state=kept, **more)


def _averaging(period: int, after: int | str = 0, momentum: float = 0.0, state: str | None = None) -> Averaging:
    return mean_of_models(period, momentum, state, lr=after == "decay")


LOCAL = Mode(
    "local",
    "local:8",
    "K local steps, then the mean of all models; after=N|decay: each step at first; momentum=B: block momentum",
    lambda workers, period, after=0, momentum=0.0, state=None: Barrier(workers, rule=FixedPeriod(period, after)),
    argument=whole_number("K", at_least=1),
    options={"after": ArgumentReader("a whole number of at least 1, or decay,", _read_after, "1000"), **MEAN_OPTIONS},
    capabilities=BLOCKS,
    split=None,
    machine=machine_of_blocks(_averaging),
    averaging=_averaging,
    promises=replace(EACH_ROUND, alone=lambda period, momentum=0.0, **_: momentum == 0),
)
