"""`Strategy`: one declaration of how a model is spread over the workers of a job. Loads no torch.

    data=4                                      four replicas (data parallelism)
    data=2,pipe=2,schedule=gpipe,microbatches=8 two replicas of two stages each
    pipe=2,tensor=2                             as many replicas as there are workers for
    data=2,pipe=2,sync=ssp:1                    a mode between the replicas; options of a mode or schedule follow it
    auto,memory=16GB                            chosen for a model by its predicted step time

A strategy is a text both ways: `Strategy.parse`, `str`. It is checked as far as it can be when it is made (`soundness.py`),
against the number of workers by `mesh`, and against a model by `distribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import log
from typing import TYPE_CHECKING, Any

from polytempo.errors import UsageError, counted, nearest
from polytempo.mesh import Mesh
from polytempo.options import whole_number
from polytempo.pipeline.schedules import make
from polytempo.strategy.soundness import check_pair, refusal
from polytempo.sync.spec import Spec, parse_spec
from polytempo.units import parse_size, written_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from polytempo.pipeline.partition import PartitionPlan
    from polytempo.strategy.distributed_model import DistributedModel
    from polytempo.strategy.explanation import Explanation

#: The field of a strategy text that an item without a known name continues: it is an option of the mode or the schedule.
WITH_OPTIONS = ("sync", "schedule")
AXES = ("data", "pipe", "tensor")
EXAMPLE = "data=2,pipe=2"


@dataclass(frozen=True)
class Strategy:
    """How a model is spread over the workers: replicas, stages and shards, and how replicas synchronise.

    The product of `data`, `pipe` and `tensor` is the number of workers. The same text is what
    `polytempo run --strategy data=2,pipe=2` takes.

    Args:
        data: The number of replicas of the model, each with its own part of the data; by default what is left of the
            workers.
        pipe: Into how many stages a replica is cut, one after the other.
        tensor: Into how many shards the layers of a stage are split.
        sync: The synchronisation mode between replicas; the job's by default. Modes that are not sound for a model that is
            split are refused with the reason.
        schedule: The schedule of the stages: "1f1b", "gpipe" or "sequential", with options.
        microbatches: Into how many parts a replica's batch is split; as many as there are stages by default.
        via: How gradients travel between replicas: "ps", "allreduce" or "auto"; the job's way by default.
        automatic: Choose data, pipe, tensor, schedule and microbatches for the model; what `Strategy.auto()` sets.
        memory: With `automatic`: the bytes that a worker may need.

    Raises:
        UsageError: A count below 1, an unknown mode or schedule, or a pair that is not sound.

    Example:
        ```python
        strategy = pt.Strategy(data=2, pipe=2, microbatches=4)
        trained = strategy.distribute(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        for x, y in loader:
            trained.step(x, y)
        ```
    """

    data: int | None = None
    pipe: int = 1
    tensor: int = 1
    sync: str | None = None
    schedule: str = "1f1b"
    microbatches: int | None = None
    via: str | None = None
    automatic: bool = False
    memory: float | None = None

    def __post_init__(self) -> None:
        for name in (*AXES, "microbatches"):
            count = getattr(self, name)
            optional = name in ("data", "microbatches")
            if (count is None and optional) or (type(count) is int and count >= 1):
                continue
            raise UsageError(f"expected {name} to be a whole number of at least 1, got {count!r}; write {name}=2")
        ways = ("auto", "ps", "allreduce")
        if self.via is not None and self.via not in ways:
            raise UsageError(f"expected via to be {', '.join(ways)}, got {self.via!r}{nearest(str(self.via), ways)}")
        if self.memory is not None and not self.automatic:
            raise UsageError(
                "memory= is the limit under which strategy='auto' chooses; leave it out, or use Strategy.auto()"
            )
        if self.automatic and (self.data, self.pipe, self.tensor) != (None, 1, 1):
            raise UsageError(f"auto chooses data, pipe and tensor by itself; write auto, or {EXAMPLE} without auto")
        make(self.schedule, self.pipe, self.microbatches or self.pipe)  # refuses an unknown one
        check_pair(self.spec, self.pipe, self.tensor, self.schedule)

    # Texts.

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read a strategy from a text.

        Args:
            text: Such as `data=2,pipe=2,schedule=gpipe,microbatches=8`, `data=2,sync=every:8,wait=2`, `auto,memory=16GB`, or
                a preset: `mirrored`, `multi_worker`, `parameter_server`, `central_storage`.

        Returns:
            The strategy; `str(strategy)` is a text that gives it again.

        Raises:
            UsageError: The text cannot be read, or the strategy is not sound.
        """
        head, *rest = [item.strip() for item in text.split(",")]
        if head in PRESETS and "=" not in head:
            base, items = PRESETS[head](), rest
        else:
            base, items = cls(), [head, *rest]
        given: dict[str, str] = {}
        last = ""
        for item in items:
            last = _take_item(item, last, given, text)
        return replace(base, **{name: READERS[name](value) for name, value in given.items()})

    def __str__(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) != _DEFAULTS[name]]
        for name in ("sync", "schedule", "microbatches", "via"):
            shown += [f"{name}={getattr(self, name)}"] if getattr(self, name) != _DEFAULTS[name] else []
        shown += [f"memory={self.memory!r}"] if self.memory is not None else []
        return ",".join((["auto"] if self.automatic else []) + shown) or "data=all"

    # The number of workers.

    @property
    def each(self) -> int:
        """The number of workers of one replica."""
        return self.pipe * self.tensor

    @property
    def spec(self) -> Spec:
        """The mode between replicas, parsed; bsp where the job's is meant."""
        return parse_spec(self.sync or "bsp")

    @property
    def is_split(self) -> bool:
        """Whether the model of a replica is on several workers."""
        return self.each > 1

    def mesh(self, size: int) -> Mesh:
        """The mesh of this strategy in a job of a number of workers.

        Args:
            size: The number of workers.

        Returns:
            Which rank is which replica, stage and shard.

        Raises:
            UsageError: The product is another number; the text names the nearest strategies that fit.
        """
        if self.automatic:
            raise UsageError("strategy auto is chosen for a model: use distribute(model, example=...) or explain(...)")
        data = self.data if self.data is not None else size // self.each
        if data >= 1 and data * self.each == size:
            return Mesh(data, self.pipe, self.tensor)
        asked = _axes(self.data, self.pipe, self.tensor)
        needed = counted(self.data * self.each, "worker") if self.data is not None else f"a multiple of {self.each} workers"
        raise UsageError(f"{asked} needs {needed}, the job has {size}; nearest: {' or '.join(self.nearest(size))}")

    def nearest(self, size: int) -> list[str]:
        """The strategies of this number of workers that are most like this one, and data parallelism.

        Args:
            size: The number of workers.

        Returns:
            One or two texts, the nearest first.
        """
        wanted = (self.data, self.pipe, self.tensor)
        found = [
            (data, pipe, size // data // pipe)
            for data in range(1, size + 1)
            for pipe in range(1, size + 1)
            if size % (data * pipe) == 0
        ]
        sound = [one for one in found if refusal(self.spec, one[1], one[2]) is None]

        def distance(one: tuple[int, int, int]) -> tuple[float, int, int]:
            pairs = [(have, want) for have, want in zip(one, wanted, strict=True) if want is not None]
            apart = sum(abs(log(have / want)) for have, want in pairs)
            new = sum(have > 1 and want == 1 for have, want in pairs)
            return apart + new, -one[0], one[2]

        best = min(sound, key=distance)
        return list(dict.fromkeys([_axes(*best), _axes(size, 1, 1)]))

    def resolved(self, size: int, sync: str = "bsp", via: str | None = None) -> Strategy:
        """This strategy with all that a job of `size` workers fills in: data, the mode, the number of microbatches.

        Args:
            size: The number of workers.
            sync: The job's mode, where the strategy has none.
            via: The job's way of gradients, where the strategy has none.

        Returns:
            A strategy without open fields.

        Raises:
            UsageError: As `mesh`, or the job's mode is not sound for this strategy.
        """
        return replace(
            self,
            data=self.mesh(size).data,
            sync=self.sync or sync,
            via=self.via or via,
            microbatches=self.microbatches or self.pipe,
        )

    def describe(self) -> str:
        """The strategy in words, in one line.

        Returns:
            Such as `2 replicas x 2 stages = 4 workers: bsp between replicas, 1f1b with 4 microbatches`.
        """
        if self.automatic:
            limit = f" within {written_bytes(self.memory)} a worker" if self.memory is not None else ""
            return f"chosen for the model by predicted step time{limit}"
        replicas = counted(self.data, "replica") if self.data is not None else "replicas"
        axes = [replicas, *([counted(self.pipe, "stage")] if self.pipe > 1 else [])]
        axes += [counted(self.tensor, "shard")] if self.tensor > 1 else []
        total = f" = {counted(self.data * self.each, 'worker')}" if self.data is not None else ""
        between = f"{self.sync or 'the mode of the job'} between replicas"
        between += {"ps": " over parameter servers", "allreduce": " by all-reduce"}.get(self.via or "", "")
        count = self.microbatches or self.pipe
        parts = f"{count} microbatch{'es' * (count != 1)}"
        staged = f", {self.schedule} with {parts}" if self.pipe > 1 else f", {parts}" if count > 1 else ""
        return f"{' x '.join(axes)}{total}: {between}{staged}"

    # Presets, in TensorFlow's words.

    @classmethod
    def mirrored(cls) -> Strategy:
        """A replica on each worker, mirrored: bsp by all-reduce. What `tf.distribute.MirroredStrategy` does with the GPUs
        of one host; here the workers of the host are the processes that `polytempo run -n` starts.

        Returns:
            `Strategy(sync="bsp", via="allreduce")`.
        """
        return cls(sync="bsp", via="allreduce")

    @classmethod
    def multi_worker(cls) -> Strategy:
        """A replica on each worker of all hosts: bsp by all-reduce over all of them. What
        `tf.distribute.MultiWorkerMirroredStrategy` does. Start it with `--listen` and `--expect`, torchrun, mpirun or srun.

        Returns:
            `Strategy(sync="bsp", via="allreduce")`; here one host and several are the same strategy.
        """
        return cls(sync="bsp", via="allreduce")

    @classmethod
    def parameter_server(cls, sync: str = "asp") -> Strategy:
        """Values on parameter servers, to which each worker pushes at its own pace. What
        `tf.distribute.ParameterServerStrategy` does; here the staleness can be bounded.

        Args:
            sync: The mode: "asp" as in TensorFlow, or "ssp:3", "dssp:1..6", "every:8" and others.

        Returns:
            `Strategy(sync=sync, via="ps")`.
        """
        return cls(sync=sync, via="ps")

    @classmethod
    def central_storage(cls) -> Strategy:
        """Values in one place, replicas on the workers, in step: bsp over a parameter server. What
        `tf.distribute.experimental.CentralStorageStrategy` does with the host's memory; here it is the server's.

        Returns:
            `Strategy(sync="bsp", via="ps")`; `--servers 1`, the default, keeps all values on one server.
        """
        return cls(sync="bsp", via="ps")

    @classmethod
    def auto(cls, memory: float | str | None = None, sync: str | None = None) -> Strategy:
        """Choose data, pipe, tensor, schedule and microbatches for a model: the least predicted step time of all that fit.

        Args:
            memory: What a worker may need: bytes, or a text such as "16GB"; no limit by default.
            sync: The mode between replicas; the job's by default.

        Returns:
            A strategy that is chosen by `distribute`, `fit` and `explain`, which are given a model and an example.
        """
        limit = None if memory is None else parse_size(memory, "a memory limit")
        return cls(automatic=True, memory=limit, sync=sync)

    # In a job.

    @classmethod
    def of_job(cls) -> Strategy:
        """The strategy of this job: what `polytempo run --strategy` was given; else a replica on each worker.

        Returns:
            The strategy; its mode is the job's (`--sync`).

        Raises:
            UsageError: `init` was not called.
        """
        from polytempo.session.session import current

        job = current().job
        return cls.parse(job.strategy) if job.strategy else cls(data=job.size, sync=job.sync)

    @classmethod
    def current(cls) -> Strategy:
        """The strategy of the `scope()` that this call is in; outside of any, that of the job.

        Returns:
            The strategy.

        Raises:
            UsageError: `init` was not called.
        """
        from polytempo.session.session import current

        inside = current().scope
        return inside.strategy if inside is not None else cls.of_job()

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Inside, this strategy is the current one.

        `pt.DistributedSampler` and `pt.prepare` share the data out over the replicas, `pt.DistributedOptimizer` uses the
        strategy's mode and way, `pt.fit` uses it all.

        Yields:
            The strategy, with all that the job fills in.

        Raises:
            UsageError: The strategy does not fit the number of workers, or `init` was not called.
        """
        from polytempo.session.session import StrategyScope, current

        session = current()
        found = self.resolved(session.size, session.job.sync)
        before = session.scope, session.data_axis
        place = found.mesh(session.size).point(session.rank)
        assert found.data is not None
        session.scope = StrategyScope(str(found), found.sync, found.via, found.is_split, found)
        session.data_axis = (place.data, found.data) if found.is_split else None
        try:
            yield found
        finally:
            session.scope, session.data_axis = before

    def distribute(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        example: tuple[Any, ...] | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        clip_norm: float | None = None,
        tensor_plan: Mapping[str, Any] | None = None,
        stages: Sequence[int] | PartitionPlan | str | None = None,
        target: Any = None,
    ) -> DistributedModel:
        """Spread a model over the workers of the job. All ranks call it, with the same model; all start from rank 0's
        weights.

        Args:
            model: The whole model, built alike on every rank: an `nn.Sequential`, a list of layers, or a module that
                torch.fx can trace. Its layers become this rank's part.
            loss: A function of outputs and targets, the mean over its microbatch.
            optimizer: Makes the optimizer from a list of parameters; called with those of this rank's part.
            example: A tuple of inputs for one replica's batch: for models that can only be traced on an input, and for
                `stages="auto"`. For strategy auto: of a step of the whole job, whose samples the replicas share.
            seed: Of dropout.
            device: Where this rank computes.
            clip_norm: Clip the gradients of the whole model to this norm.
            tensor_plan: How layers are split, by name patterns; found by itself for what it does not name.
            stages: The number of layers of each stage, a plan, or "auto" to measure; balanced by parameters by default.
            target: For strategy auto: an example of the targets, with which the loss is measured, too.

        Returns:
            The model, spread: `step(x, y)` trains it.

        Raises:
            UsageError: The strategy does not fit the workers or the model: heads, features or stages that do not divide,
                with the nearest choice; or ranks whose models or strategies differ.
        """
        from torch import nn

        from polytempo.session.session import current
        from polytempo.strategy.distributed_model import DistributedModel
        from polytempo.strategy.distribution import Distributor

        whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        strategy = self
        if self.automatic:
            from polytempo.strategy.planning import PlannedModel, decided

            planned = PlannedModel(whole, example, loss, optimizer, target, tensor_plan, device)
            strategy, stages = decided(self, planned, current(), stages)
        making = Distributor(strategy, whole, loss, optimizer, example, seed, device, clip_norm, tensor_plan, stages)
        return DistributedModel(making.build(current()))

    def explain(
        self,
        model: nn.Module | Sequence[nn.Module],
        example: Any,
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        batch: int,
        memory: float | str | None = None,
        world: int | None = None,
        target: Any = None,
        tensor_plan: Mapping[str, Any] | None = None,
        stages: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> Explanation:
        """What this strategy costs for a model, before anything is trained, beside data, pipeline and tensor parallelism
        alone: samples, bytes, memory, balance and step time, predicted from measured layers and links.

        In a job all ranks call it; the links are those of the job, and rank 0 prints it. Outside of one, a short job of
        `world` processes on this host measures them.

        Args:
            model: The whole model; afterwards it is as it was.
            example: An example of its inputs: a tensor, or a tuple of them.
            loss: A function of outputs and targets; measured where `target` is given.
            optimizer: Makes the optimizer from a list of parameters; without it updates and their state count nothing.
            batch: The samples of a step of the whole job, which the replicas share.
            memory: What a worker may need: bytes, or a text such as "2GB"; of auto its own limit by default.
            world: Outside of a job: the number of workers; what the strategy says by default.
            target: An example of the targets.
            tensor_plan: As for `distribute`.
            stages: The layers of each stage, where `distribute` is given them.
            device: Where to measure, if not where the model is.

        Returns:
            The explanation: `print` shows its tables, `compare(spread.stats)` puts what was measured beside them.

        Raises:
            UsageError: The number of workers is not known, or nothing is possible or fits.
        """
        from torch import nn

        from polytempo.session.session import current, is_initialized
        from polytempo.strategy.planning import PlannedModel, explain, say

        whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        planned = PlannedModel(whole, example, loss, optimizer, target, tensor_plan, device)
        session = current() if is_initialized() else None
        limit = None if memory is None else parse_size(memory, "a memory limit")
        found = explain(self, planned, batch, limit, session, world, None if stages is None else tuple(stages))
        if session is not None and session.size > 1 and session.rank == 0:
            say(str(found))
        return found


_DEFAULTS = {field.name: field.default for field in fields(Strategy)}

#: Words that stand for a strategy.
PRESETS: dict[str, Callable[[], Strategy]] = {
    "auto": Strategy.auto,
    "mirrored": Strategy.mirrored,
    "multi_worker": Strategy.multi_worker,
    "parameter_server": Strategy.parameter_server,
    "central_storage": Strategy.central_storage,
}


def _take_item(item: str, last: str, given: dict[str, str], text: str) -> str:
    """Read one item of a strategy text into `given`; the field that an item behind it may continue."""
    name, equals, value = item.partition("=")
    if name in READERS and equals:
        if name in given:
            raise UsageError(f"{name} stands twice in strategy {text!r}; give it once")
        given[name] = value
        return name
    if last in WITH_OPTIONS:
        given[last] += f",{item}"
        return last
    known = (*READERS, *PRESETS)
    raise UsageError(
        f"expected items NAME=VALUE such as {EXAMPLE}, got {item!r} in strategy {text!r}; known: {', '.join(known)}"
        f"{nearest(name, known)}"
    )


def _whole(name: str) -> Callable[[str], int]:
    reader = whole_number(name, at_least=1)

    def read(value: str) -> int:
        try:
            return int(reader.read(value))
        except ValueError:
            raise UsageError(f"expected {reader.expected}, got {name}={value}; write {name}=2") from None

    return read


#: The fields of a strategy text, and how their values are read.
READERS: dict[str, Callable[[str], Any]] = {
    "data": lambda value: None if value == "all" else _whole("data")(value),
    "pipe": _whole("pipe"),
    "tensor": _whole("tensor"),
    "sync": lambda value: parse_spec(value).text,
    "schedule": str,
    "microbatches": _whole("microbatches"),
    "via": str,
    "memory": lambda value: parse_size(value, "a memory limit"),
}


def _axes(data: int | None, pipe: int, tensor: int) -> str:
    """The axes that have several ranks: `data=2,pipe=2`."""
    counts = {"data": data, "pipe": pipe, "tensor": tensor}
    shown = [f"{name}={count}" for name, count in counts.items() if count is not None and count > 1]
    return ",".join(shown) or "data=1"
