"""`Pipeline`: a model cut into stages, one process each, trained by a schedule.

Every rank builds the same model and calls the same methods; each keeps its own stage. Gradients are those of the mean of the
loss over the whole batch, so a schedule that flushes trains as the model would in one process, to rounding.

    builder      the model is partitioned, the schedule checked, ranks placed and connected: a `StageBuild`
    training     a step: microbatches in, the schedule's actions run (runtime, stage, point_to_point), losses out
    state        the whole model's state, checkpoints

An evaluation makes forwards alone through all stages, in evaluation mode. The batch is split into as many pieces as a step
has microbatches. They need not be equal; an empty piece is passed on without a forward. At the end all ranks wait for the
last stage, so that no stage is ahead by more than a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polytempo.collectives.group import RankGroup
from polytempo.errors import PeerError, PolytempoError, RankLost, UsageError
from polytempo.pipeline.actions import Schedule
from polytempo.pipeline.builder import StageBuild, StageBuilder, StageDevices, StageHooks
from polytempo.pipeline.partition import PartitionPlan
from polytempo.pipeline.point_to_point import EVALUATED, EVALUATION
from polytempo.pipeline.runtime import CompletedAction
from polytempo.pipeline.stage import Loss, MakeOptimizer, scalar
from polytempo.pipeline.stage_message import StageMessage, rows, split, stage_inputs
from polytempo.pipeline.state import PipelineState
from polytempo.pipeline.trace_files import write_trace
from polytempo.pipeline.training import PipelineBudget, TrainingLoop
from polytempo.session.session import current
from polytempo.summation import in_order
from polytempo.train.communication import Group
from polytempo.train.step_reports import ProgressReporter

Folder = str | Path


class Pipeline:
    """A model cut into stages, one process each, and trained by a schedule. This object is the stage of this rank.

    Every rank builds the same model and calls the same methods; each keeps its own part. A schedule that flushes trains
    as the
    model would in one process, to rounding.

    Args:
        model: An `nn.Sequential`, a list of layers, or a module that torch.fx can trace; the same on every rank.
        loss: A function of outputs and targets, the mean over its microbatch.
        optimizer: Makes the optimizer of a stage from a list of its parameters.
        stages: The number of stages (cut by their parameters), the number of layers of each, a plan, or `"auto"`: rank 0
            measures
            the layers on `example` and plans. One for each rank by default.
        schedule: `"sequential"`, `"gpipe"`, `"1f1b"`, `"pipedream"` with options (`"gpipe,recompute=0"`), a schedule
            written as
            text, or a `Schedule`.
        microbatches: Into how many parts a batch is split; must divide it.
        replicas: The number of ranks that share each stage; one by default.
        seed: Of dropout, whose masks do not depend on the schedule.
        device: Where this stage computes: a device, or one for each stage; `"cuda"` is GPU `local_rank` of this host, modulo
            those that this process sees. By default where the model is, and as `"cuda"` where only `example` is on a GPU.
        example: A tuple of inputs, for `stages="auto"` and for models that can only be traced on an input.
        checkpoint: A directory in which each stage writes its part: at `flush()` of a schedule without flushes, when another
            stage is lost, and with `checkpoint_every`.
        checkpoint_every: Write a checkpoint each time this number of steps is done; 0 for never.
        resume: A directory of checkpoints to resume from, at the last step that is complete at all stages.
        clip_norm: Clip the gradients of the whole model to this norm; not for schedules without a flush.
        group: The ranks of this pipeline, from `pt.new_group`, in the order of its stages; all ranks of the job by default.
            Only they make it and call its methods. Pipelines on disjoint groups run side by side.

    Raises:
        UsageError: The model cannot be cut so, or arguments do not fit each other or the number of ranks; or this rank is
            not in the group.
        RankLost: In any method: the rank and the stage that ended.

    Example:
        ```python
        pipe = pt.Pipeline(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), stages=4, microbatches=8)
        for x, y in loader:
            pipe.step(x, y)
        ```
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        stages: int | Sequence[int] | PartitionPlan | str | None = None,
        schedule: str | Schedule = "1f1b",
        microbatches: int | None = None,
        replicas: Sequence[int] | None = None,
        seed: int = 0,
        device: StageDevices = None,
        example: tuple[Any, ...] | None = None,
        checkpoint: Folder | None = None,
        checkpoint_every: int = 0,
        resume: Folder | None = None,
        clip_norm: float | None = None,
        group: Group | None = None,
        _hooks: StageHooks | None = None,
    ) -> None:
        session = current()
        self._hooks = _hooks or StageHooks()
        if group is not None and group.inner is None:
            ranks = ", ".join(map(str, group.ranks))
            raise UsageError(
                f"rank {session.rank} is not in the group of ranks {ranks}; make its pipeline on these ranks only"
            )
        members = group.inner if group is not None else None
        builder = StageBuilder(model, stages, schedule, microbatches, replicas, example, clip_norm, _hooks)
        self._built = builder.build(session.world(), members, loss, optimizer, seed, device)
        self.schedule, self.facts, self.stage = self._built.schedule, self._built.facts, self._built.stage
        self.microbatches = self._built.microbatches  #: of a batch
        self._broken: Exception | None = None
        self._training = TrainingLoop(self._built, PipelineBudget(session, self._built, self._hooks.agree_to_stop))
        self._state = PipelineState(
            self._built, self._training, Path(checkpoint) if checkpoint is not None else None, checkpoint_every
        )
        if resume is not None:
            with self._failing_together():
                self._state.resume(Path(resume))
        self._evaluation = Evaluation(self._built)
        distributed = self.stage.data_axis is not None or bool(session.job.strategy)
        title = self._hooks.title or pipeline_title(self.schedule)
        self._progress = ProgressReporter(session, title, distributed=distributed)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._built.rank

    @property
    def replica(self) -> int:
        """The index of this rank among the replicas of its stage."""
        return self._built.replica

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._training.steps

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this stage; None where the stage has no parameters."""
        return self.stage.optimizer

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the gradients of the whole model in the last step, before clipping; None without `clip_norm`."""
        clipping = self._built.runtime.gradient_sync.clipping
        return clipping.norm if clipping is not None else None

    @property
    def log(self) -> list[CompletedAction]:
        """The actions of this rank so far, with their times."""
        return list(self._built.runtime.log)

    def record(self, directory: Folder) -> Path:
        """Write a trace of this rank's actions; `polytempo picture DIRECTORY` draws those of all ranks.

        Args:
            directory: The folder, the same for all ranks.

        Returns:
            The file that was written.
        """
        rank = {"stage": self.stage.number, "replica": self.replica, "rank": self.rank, "ranks": self._built.layout.size}
        return write_trace(self.log, rank, directory)

    # Training.

    def step(self, x: Any = None, y: Any = None) -> float | None:
        """Train on a batch. All ranks call it.

        Args:
            x: The inputs; read by the first stage only.
            y: The targets; read by the last stage only.

        Returns:
            The mean loss of the batch, the same on every rank. Under a schedule without flushes the batch is still under
            way, and the
            loss is that of the newest batch that all stages have finished, or None.

        Raises:
            UsageError: The batch cannot be split into the microbatches.
            RankLost: Another stage has ended.
        """
        self._progress.begins()
        with self._failing_together():
            self._state.before_step()
            loss = self._training.step(x, y)
            if not self._training.in_flight:
                self._state.after_step()
        self._progress.made(1, loss)
        return loss

    def flush(self) -> float | None:
        """Finish the batches under way, under a schedule without flushes. All ranks call it.

        Returns:
            The loss of the last batch; None if none was under way.
        """
        if not self._training.in_flight:
            return None
        with self._failing_together():
            loss = self._training.flush()
            self._state.after_flush()
        self._progress.made(0, loss)
        return loss

    # Evaluation.

    def evaluate(self, x: Any = None, y: Any = None) -> float:
        """The mean loss of a batch of any size, without training; all modules are in evaluation mode. All ranks call it.

        Args:
            x: The inputs; read by the first stage only.
            y: The targets; read by the last stage only.

        Returns:
            The mean loss, the same on every rank.

        Raises:
            UsageError: Batches are under way (call `flush()`), or the model was traced in training mode.
        """
        self._check_evaluation("evaluate")
        with self._failing_together():
            return self._evaluation.loss(x, y, self.stage.loss)

    def predict(self, x: Any = None) -> Any:
        """The outputs of the model for a batch of any size, in evaluation mode. All ranks call it.

        Args:
            x: The inputs; read by the first stage only.

        Returns:
            The outputs, on the first replica of the last stage; None elsewhere.

        Raises:
            UsageError: Batches are under way (call `flush()`), or the model was traced in training mode.
        """
        self._check_evaluation("predict")
        with self._failing_together():
            return self._evaluation.outputs(x)

    def _check_evaluation(self, what: str) -> None:
        self._check_flushed(what)
        if fixed := self._built.training_only:
            raise UsageError(
                f"{fixed} was traced in training mode and cannot be switched to evaluation; use modules (nn.Dropout, "
                "nn.BatchNorm2d) in a model that torch.fx can trace, or a whole model with pipe.state_dict()"
            )

    # State.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The values of the whole model, by the names it had before it was cut. All ranks call it, and all get all values.

        Returns:
            A dict that the uncut model loads.

        Raises:
            UsageError: Batches are under way; call `flush()`.
        """
        self._check_flushed("state_dict")
        with self._failing_together():
            return self._state.gather()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the values of a whole model. All ranks call it, with the same values.

        Args:
            state: As `state_dict()` of the uncut model.

        Raises:
            UsageError: Names or shapes differ, or batches are under way.
        """
        self._check_flushed("load_state_dict")
        self._state.load(state)

    def save(self, directory: Folder) -> None:
        """Write a checkpoint of all stages. All ranks call it; it counts only if all have written.

        Args:
            directory: The folder, seen by all ranks.

        Raises:
            UsageError: Batches are under way; call `flush()`.
        """
        self._check_flushed("save")
        with self._failing_together():
            self._state.save(Path(directory))

    def _check_flushed(self, what: str) -> None:
        if self._training.in_flight:
            raise UsageError(f"{what}() while {self._training.in_flight} minibatches may be in flight; call flush() first")

    # Failures.

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """An error on one rank ends the pipeline on all: the others get the cause, and write their last state."""
        if self._broken is not None:
            raise PeerError(f"this pipeline has ended: {self._broken}")
        try:
            yield
        except Exception as error:
            cause = self._cause(error)
            self._broken = cause
            groups = [self._built.group, *self._built.runtime.gradient_sync.groups]
            self._built.p2p.fail(cause, [*groups, *self._other_groups()])
            try:
                self._state.write_last()
            except (OSError, PolytempoError) as problem:  # the first error is the one to raise
                sys.stderr.write(f"polytempo: rank {self.rank} cannot write its part: {problem}\n")
            if isinstance(error, PeerError) and cause is not error:
                raise cause from error
            raise

    def _other_groups(self) -> list[RankGroup]:
        """Groups of the other axes of the mesh: their ranks learn why this one cannot go on."""
        data_axis = self.stage.data_axis
        return [*self._hooks.groups, *(data_axis.optimizer.failure_groups() if data_axis is not None else ())]

    def _cause(self, error: Exception) -> Exception:
        """The error that all ranks report: the one that another rank sent, a lost rank, or this rank's own."""
        built, action, told = self._built, self._built.runtime.current, None
        own = built.layout.name(self.rank)
        if isinstance(error, RankLost) and built.p2p.failed is None and (others := self._other_groups()):
            told = built.p2p.told(error.ranks[0], [built.group, *others])  # it may have ended because of another
        if built.p2p.failed is not None:
            return built.p2p.failed
        if told is not None and told is not error:
            return told
        if isinstance(error, RankLost):
            rank, needed = error.ranks[0], f" for {action}" if action is not None else ""
            return RankLost(f"{built.layout.name(rank)} {built.p2p.loss_of(rank)}: {own} needs it{needed}", (rank,))
        if isinstance(error, PeerError):
            return error
        name = "" if isinstance(error, PolytempoError) else f"{type(error).__name__}: "
        where = f" in {action}" if action is not None else ""
        return PeerError(f"{own} failed{where}: {name}{' '.join(str(error).split())}")


def pipeline_title(schedule: Schedule) -> str:
    """For the progress line: `pipeline of 4 stages, 1f1b, 8 microbatches`."""
    stages = f"{schedule.stages} stage{'s' * (schedule.stages != 1)}"
    shared = f" (replicas {'-'.join(map(str, schedule.replicas))})" if max(schedule.replicas) > 1 else ""
    split = f", {schedule.microbatches} microbatch{'es' * (schedule.microbatches != 1)}" if schedule.flushes else ""
    return f"pipeline of {stages}{shared}, {schedule.name}{split}"


EMPTY = StageMessage([None], single=True)


class Evaluation:
    """One rank's part of an evaluation."""

    def __init__(self, built: StageBuild) -> None:
        self._stage, self._layout, self._p2p, self._rank = built.stage, built.layout, built.p2p, built.rank
        self._pieces, self._replica, self._last = built.microbatches, built.replica, built.layout.last_stage
        self._batches = 0

    def loss(self, x: Any, y: Any, loss: Loss | None) -> float:
        """The mean loss of a batch, on every rank."""
        targets = split(y, self._pieces, self._stage.device, even=False) if loss is not None else []
        found: list[tuple[float, int]] = []

        def add(number: int, out: Any) -> None:
            assert loss is not None
            found.append((float(scalar(loss(out, targets[number]))), rows(out)))

        self._through(x, add)
        total, examples = self._reduced(in_order(mean * count for mean, count in found), sum(count for _, count in found))
        return total / examples

    def outputs(self, x: Any) -> Any:
        """The outputs for a batch, on the first replica of the last stage; None elsewhere."""
        found: dict[int, Any] = {}
        self._through(x, found.__setitem__)
        outputs = self._gathered(found) if self._stage.number == self._last else None
        self._reduced()
        return outputs

    def _through(self, x: Any, finish: Callable[[int, Any], object]) -> None:
        """Run all pieces of this rank; at the last stage, call `finish` with each number and output."""
        stage, layout = self._stage, self._layout
        inputs = stage_inputs(x, self._pieces, stage.device, even=False) if stage.number == 0 else []
        with evaluating(stage.part.module), torch.no_grad():
            for number in range(self._replica, self._pieces, layout.replicas[stage.number]):
                if stage.number:
                    message = self._p2p.take(self._neighbour(stage.number - 1, number), EVALUATION, self._number(number))
                else:
                    message = inputs[number] if rows(inputs[number].values) else EMPTY
                present = message.values != [None]
                out = stage.infer(message) if present else None
                if stage.number < self._last:
                    self._send(self._neighbour(stage.number + 1, number), number, out if present else None)
                elif present:
                    finish(number, out)

    def _send(self, to: int, number: int, out: Any) -> None:
        single = not isinstance(out, tuple | list)
        self._p2p.send(to, EVALUATION, StageMessage([out] if single else list(out), single, self._number(number)))

    def _gathered(self, found: dict[int, Any]) -> Any:
        """All outputs in order, on the first replica."""
        replicas = self._layout.replicas[self._last]
        if self._replica:
            for number in range(self._replica, self._pieces, replicas):
                self._send(self._layout.rank(self._last, 0), number, found.get(number))
            return None
        for number in range(self._pieces):
            if source := number % replicas:
                message = self._p2p.take(self._layout.rank(self._last, source), EVALUATION, self._number(number))
                if message.values != [None]:
                    found[number] = message.values[0] if message.single else tuple(message.values)
        return _joined([found[number] for number in sorted(found)])

    def _reduced(self, mine: float = 0.0, examples: int = 0) -> tuple[float, int]:
        """The sums over the replicas of the last stage, sent to all ranks, which wait for them."""
        self._p2p.confirm()
        number, lasts = self._batches, self._layout.ranks(self._last)
        own = StageMessage([], number=number, figure=mine, version=examples)
        if self._rank in lasts:
            for rank in self._layout.members:
                if rank != self._rank:
                    self._p2p.send(rank, EVALUATED, own)
        received = [own if rank == self._rank else self._p2p.take(rank, EVALUATED, number) for rank in lasts]
        self._p2p.settle()
        self._batches += 1
        return in_order(message.figure for message in received), sum(message.version for message in received)

    def _number(self, piece: int) -> int:
        return self._batches * self._pieces + piece

    def _neighbour(self, stage: int, piece: int) -> int:
        return self._layout.rank(stage, piece % self._layout.replicas[stage])


def _joined(pieces: list[Any]) -> Any:
    if all(isinstance(piece, torch.Tensor) for piece in pieces):
        return torch.cat(pieces)
    if all(isinstance(piece, tuple | list) for piece in pieces):
        return tuple(_joined(list(column)) for column in zip(*pieces, strict=True))
    raise UsageError(f"predict() joins outputs that are tensors or tuples of tensors; got {type(pieces[0]).__name__}")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every member is in the mode that it had before."""
    before = [(member, member.training) for member in module.modules()]
    for member, _ in before:
        member.training = False
    try:
        yield
    finally:
        for member, training in before:
            member.training = training
