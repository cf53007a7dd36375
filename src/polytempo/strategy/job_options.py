"""What `polytempo run --strategy` means for the other options of the command, decided before any process starts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.errors import UsageError, counted
from polytempo.strategy.soundness import check_pair
from polytempo.strategy.strategy import Strategy
from polytempo.sync.spec import refused_of

#: Workers where neither -n nor a strategy says how many.
DEFAULT_WORKERS = 2


@dataclass(frozen=True)
class JobOptions:
    """Options of the command that a strategy has a say in; None where the user has not given one."""

    strategy: str | None = None
    workers: int | None = None  #: on this host (-n)
    expect: int = 0  #: workers of other hosts
    sync: str | None = None
    via: str | None = None
    min_workers: int | None = None
    saves: str = ""  #: --checkpoint or --resume, where one is given

    def settled(self) -> dict[str, object]:
        """The fields of the request that follow: `workers`, `sync`, `via`, `min_workers`, `strategy`, `replica`, `refused`.

        Raises: UsageError, one line with the nearest choice, for what cannot work."""
        if self.strategy is None:
            workers = DEFAULT_WORKERS if self.workers is None else self.workers
            plain = {"workers": workers, "sync": self.sync or "bsp", "via": self.via or "auto"}
            return plain | {"min_workers": self.min_workers, "strategy": "", "replica": 1, "refused": ()}
        declared = Strategy.parse(self.strategy)
        sync = _one("sync", declared.sync, self.sync) or "bsp"
        via = _one("via", declared.via, self.via) or "auto"
        workers = self._workers(declared)
        strategy = self._resolved(declared, workers, sync)
        if strategy.is_split:
            self._check_split(strategy, workers + self.expect)
        least = workers + self.expect if strategy.is_split else self.min_workers
        refused = refused_of(lambda spec: self._resolved(declared, workers, spec.text))
        spread = {"strategy": str(strategy), "replica": strategy.each, "refused": refused}
        return {"workers": workers, "sync": sync, "via": via, "min_workers": least, **spread}

    def _resolved(self, declared: Strategy, workers: int, sync: str) -> Strategy:
        """The strategy on these workers with that mode, refused where they do not go together; `auto` as it is."""
        _one("sync", declared.sync, sync)
        if declared.automatic:
            return declared
        strategy = declared.resolved(workers + self.expect, sync)
        check_pair(strategy.spec, strategy.pipe, strategy.tensor, strategy.schedule)
        return strategy

    def _workers(self, strategy: Strategy) -> int:
        """The workers of this host: -n, or the product less those of other hosts."""
        if self.workers is not None:
            return self.workers
        if strategy.automatic:
            raise UsageError("--strategy auto chooses among ways to use a number of workers; give -n, such as -n 4")
        total = (strategy.data or 1) * strategy.each
        if strategy.data is None and not strategy.is_split:
            total = DEFAULT_WORKERS + self.expect
        if total < self.expect:
            raise UsageError(
                f"--strategy {self.strategy} has {counted(total, 'worker')}, and --expect {self.expect} are to join from "
                f"other hosts; nearest: --expect {total}"
            )
        return total - self.expect

    def _check_split(self, strategy: Strategy, size: int) -> None:
        split = " and ".join(f"{name}={n}" for name, n in (("pipe", strategy.pipe), ("tensor", strategy.tensor)) if n > 1)
        if self.saves:
            raise UsageError(
                f"{self.saves} is about checkpoints of the servers, which hold parts of parts with {split}; "
                "use fit(checkpoint=...) or DistributedModel.save(DIR) in the script"
            )
        if self.min_workers is not None and self.min_workers < size:
            raise UsageError(
                f"--min-workers {self.min_workers} does not go with {split}: without one worker a part of the model is "
                f"missing; use --min-workers {size}, or leave it out"
            )


def _one(name: str, declared: str | None, given: str | None) -> str | None:
    """The value of an option that stands in the strategy, on the command line, or in both alike."""
    if declared is not None and given is not None and declared != given:
        raise UsageError(f"--strategy has {name}={declared} and --{name} is {given}; give one of them")
    return declared if declared is not None else given
