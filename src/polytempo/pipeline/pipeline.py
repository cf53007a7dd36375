"""`Pipeline`: a model cut into stages, one process each, trained by a schedule.

Every rank builds the same model and calls the same methods; each keeps its own part. Gradients are those of the mean of
the loss over the whole batch, so a schedule that flushes trains as the model would in one process, to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polytempo.errors import PeerError, PolytempoError, RankLost, UsageError
from polytempo.pipeline.actions import Schedule
from polytempo.pipeline.builder import StageBuild, StageBuilder
from polytempo.pipeline.checkpoint import newest, prune, read_part, write_manifest, write_part
from polytempo.pipeline.evaluation import Evaluation
from polytempo.pipeline.microbatches import inputs_of, split
from polytempo.pipeline.partition import PartitionPlan
from polytempo.pipeline.point_to_point import LOSS
from polytempo.pipeline.runtime import CompletedAction
from polytempo.pipeline.stage import Loss, MakeOptimizer
from polytempo.pipeline.stage_message import StageMessage
from polytempo.pipeline.trace_files import write_log
from polytempo.session.session import current
from polytempo.summation import in_order
from polytempo.train.progress_reporter import ProgressReporter

Folder = str | Path


class Pipeline:
    """One stage of a model, and links to the others.

    `stages`: how many (cut by their parameters), how many layers each, a plan, or "auto" (the first rank measures the model
    on `example` and plans; see auto.py); one for each rank by default.
    `schedule`: a spec ("1f1b", "gpipe,recompute=0", "pipedream,vertical_sync=1", ...), a schedule written down as text, or a
    `Schedule`. `replicas`: how many ranks share each stage. `seed`: of dropout. `example`: inputs, for a model that
    cannot be traced otherwise. `clip_norm`: the gradients of the whole model are clipped to it. With `checkpoint`, each
    stage writes its part there when others are lost, at every flush, and every so many steps; `resume` goes on from there.
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
        device: torch.device | str | None = None,
        example: tuple[Any, ...] | None = None,
        checkpoint: Folder | None = None,
        checkpoint_every: int = 0,
        resume: Folder | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self._session = current()
        building = StageBuilder(model, stages, schedule, microbatches, replicas, example, clip_norm)
        built: StageBuild = building.build(self._session.world(), loss, optimizer, seed, device)
        self.schedule, self.facts, self.places, self.stage = built.schedule, built.facts, built.places, built.stage
        self._runtime, self._group, self._carrier = built.runtime, built.group, built.carrier
        self._endless, self._lag, self._line = built.endless, built.lag, built.line
        self._names, self._catalogue, self._aside, self._fixed = built.names, built.catalogue, built.aside, built.fixed
        self.microbatches = built.microbatches  #: that a batch is cut into
        self.steps = 0  #: that are done
        self._numbers = 0  # microbatches before this step, or since the last flush
        self._fed = 0  # minibatches since the last flush
        self._losses: dict[int, float] = {}  # own ones
        self._broken: Exception | None = None
        self._checkpoint = Path(checkpoint) if checkpoint is not None else None
        self._checkpoint_every = checkpoint_every
        self._before: dict[str, torch.Tensor] = {}  # buffers, before the step
        self._version_before = 0
        self._last = len(self.places.replicas) - 1
        if resume is not None:
            self._resume(Path(resume))
        self._evaluation = Evaluation(self.stage, self.places, self._carrier, self.rank, self.microbatches)
        self._telling = ProgressReporter(self._session, in_words(self.schedule))

    # What users look at.

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    @property
    def replica(self) -> int:
        """Which replica of its stage this rank is."""
        return self.places.of(self.rank)[1]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """That of this stage; None where it has no parameters."""
        return self.stage.optimizer

    @property
    def gradient_norm(self) -> float | None:
        """Of the whole model in the last step, before it was clipped; None without `clip_norm`."""
        clipping = self._runtime.exchange.clipping
        return clipping.norm if clipping is not None else None

    @property
    def log(self) -> list[CompletedAction]:
        """What this rank did, and when."""
        return list(self._runtime.log)

    def record(self, directory: Folder) -> Path:
        """Write what this rank did, and when, to a file there; `polytempo picture DIRECTORY` draws what all wrote."""
        return write_log(self, directory)

    # Training.

    def step(self, x: Any = None, y: Any = None) -> float | None:
        """Train on a batch; its mean loss, the same on every rank. Only the first stage looks at x, only the last at y.

        Without flushes, a batch is on its way when this returns; the loss is that of the newest batch that all stages are
        done with, or None.
        """
        self._telling.begins()
        with self._telling_others():
            loss = self._whole_step(x, y) if self._endless is None else self._feed(x, y)
        self._telling.made(1, loss)
        return loss

    def _whole_step(self, x: Any, y: Any) -> float:
        self._remember()
        self._hand_in(range(self.microbatches), x, y)
        self._runtime.run(self._line, self._numbers)
        loss = self._mean_loss()
        self._carrier.settle()
        self.stage.settle()
        self.steps += 1
        self._numbers += self.microbatches
        self._version_before, self._before = self.stage.version, {}
        if self._checkpoint is not None and self._checkpoint_every and self.steps % self._checkpoint_every == 0:
            self._write_own(self._checkpoint)
        return loss

    def flush(self) -> float | None:
        """Finish what is under way; the loss of the last batch, if there was any under way."""
        if self._endless is None or not self._fed:
            return None
        with self._telling_others():
            self._runtime.run(self._endless.rest(self._fed), self._numbers)
            losses = [self._loss_of(number) for number in range(max(0, self._fed - self._lag), self._fed)]
            self._carrier.settle()
            self.stage.settle()
            self._numbers += self._fed
            self._fed = 0
            self._version_before, self._before = self.stage.version, {}
            if self._checkpoint is not None:
                self._write_own(self._checkpoint)
        loss = losses[-1] if losses else None
        self._telling.made(0, loss)
        return loss

    def _feed(self, x: Any, y: Any) -> float | None:
        assert self._endless is not None
        self._remember()
        number = self._fed
        self._fed += 1
        self.steps += 1
        self._hand_in([number], x, y)
        self._runtime.run(self._endless.call(number), self._numbers)
        for found, loss in self._runtime.losses.items():
            self._tell_loss(self._numbers + found, float(loss))
        self._runtime.losses.clear()
        return self._loss_of(number - self._lag) if number >= self._lag else None

    def _hand_in(self, numbers: Sequence[int], x: Any, y: Any) -> None:
        """Inputs and targets of these microbatches, to who needs them."""
        mine = [number % self.places.replicas[self.stage.number] == self.replica for number in numbers]
        if self.stage.number == 0 and any(mine):
            pieces = inputs_of(x, len(numbers), self.stage.device)
            self._runtime.inputs |= {n: piece for n, piece, own in zip(numbers, pieces, mine, strict=True) if own}
        if self.stage.number == self._last and any(mine):
            targets = split(y, len(numbers), self.stage.device)
            self._runtime.targets |= {n: piece for n, piece, own in zip(numbers, targets, mine, strict=True) if own}

    # Losses: the last stage finds them, everybody is told.

    def _mean_loss(self) -> float:
        found, self._runtime.losses = self._runtime.losses, {}
        lasts = self.places.ranks(self._last)
        if self.rank in lasts:
            self._tell_loss(self.steps, in_order(float(found[number]) for number in sorted(found)))
        return in_order(self._told_loss(rank, self.steps) for rank in lasts) / self.microbatches

    def _loss_of(self, number: int) -> float:
        """Of a minibatch since the last flush."""
        rank = self.places.rank(self._last, number % self.places.replicas[self._last])
        return self._told_loss(rank, self._numbers + number)

    def _tell_loss(self, number: int, loss: float) -> None:
        self._losses[number] = loss
        for rank in range(self.places.size):
            if rank != self.rank:
                self._carrier.send(rank, LOSS, StageMessage([], number=number, figure=loss))

    def _told_loss(self, rank: int, number: int) -> float:
        return self._losses.pop(number) if rank == self.rank else self._carrier.take(rank, LOSS, number).figure

    # Evaluating.

    def evaluate(self, x: Any = None, y: Any = None) -> float:
        """The mean loss of a batch, the same on every rank; nothing is learnt. All modules are in evaluation mode, and the
        batch may have any size. All ranks call this; only the first stage looks at x, only the last at y."""
        self._between("evaluate")
        self._can_evaluate()
        with self._telling_others():
            return self._evaluation.loss(x, y, self.stage.loss)

    def predict(self, x: Any = None) -> Any:
        """What the model makes of a batch of any size, in evaluation mode: at the first replica of the last stage. None
        elsewhere. All ranks call this; only the first stage looks at x."""
        self._between("predict")
        self._can_evaluate()
        with self._telling_others():
            return self._evaluation.outputs(x)

    def _can_evaluate(self) -> None:
        if self._fixed:
            raise UsageError(
                f"{self._fixed} was traced in training mode, and cannot be told to evaluate; use modules (nn.Dropout, "
                "nn.BatchNorm2d) in a model that torch.fx can trace, or a whole model with pipe.state_dict()"
            )

    # The whole model.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model, in the names it had before it was cut. All ranks call this, and all get all."""
        self._between("state_dict")
        found = dict(self._aside)
        with self._telling_others():
            for stage, catalogue in enumerate(self._catalogue):
                mine = self.stage.state() if stage == self.stage.number else {}
                values = {
                    name: mine[name].detach().cpu().clone() if name in mine else torch.empty(shape, dtype=dtype)
                    for name, (shape, dtype) in catalogue.items()
                }
                if values:
                    self._group.broadcast(list(values.values()), self.places.rank(stage, 0)).wait()
                found |= values
        return {name: found[name] for name in self._names}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take the values of a whole model; all ranks call this, with the same."""
        self._between("load_state_dict")
        missing = [name for name in self._names if name not in state]
        unknown = [name for name in state if name not in self._names]
        if missing or unknown:
            raise UsageError(
                f"expected the names of the whole model; missing: {missing[:4] or 'none'}, unknown: {unknown[:4] or 'none'}"
            )
        for name, value in self._aside.items():
            value.copy_(state[name])
        self._load(state)
        self.stage.renew()

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in self.stage.state().items():
            if value.shape != state[name].shape:
                raise UsageError(f"{name} has shape {tuple(value.shape)}; got one of shape {tuple(state[name].shape)}")
            value.copy_(state[name])

    # Checkpoints.

    def save(self, directory: Folder) -> None:
        """Write a checkpoint: all stages, or none that counts. All ranks call this."""
        self._between("save")
        with self._telling_others():
            if self.replica == 0:
                self._write_own(Path(directory))
            self._group.barrier().wait()
            if self.rank == 0:
                facts = {"stages": self._last + 1, "schedule": self.schedule.name, "names": self._names}
                write_manifest(Path(directory), self.steps, facts)
            self._group.barrier().wait()

    def _write_own(self, directory: Path) -> None:
        self._write(directory, self.steps, self._numbers, self.stage.state())
        if directory == self._checkpoint:
            prune(directory, self.stage.number, self._last + 1)

    def _write(self, directory: Path, step: int, numbers: int, state: dict[str, torch.Tensor]) -> None:
        optimizer = self.stage.optimizer.state_dict() if self.stage.optimizer is not None else None
        part = {"step": step, "numbers": numbers, "version": self.stage.version, "model": state, "optimizer": optimizer}
        write_part(directory, step, self.stage.number, self._last + 1, part)

    def _resume(self, directory: Path) -> None:
        step = torch.zeros(1, dtype=torch.int64)
        with self._telling_others():
            if self.rank == 0:  # what is wrong here is said here, before others may say what is wrong there
                step.fill_(newest(directory, self._last + 1))
                part = self._read_own(directory, int(step))
            self._group.broadcast([step], 0).wait()
            if self.rank != 0:
                part = self._read_own(directory, int(step))
            self._load(part["model"])
            if self.stage.optimizer is not None:
                self.stage.optimizer.load_state_dict(part["optimizer"])
            self.steps, self._numbers = part["step"], part["numbers"]
            self.stage.renew(part["version"])

    def _read_own(self, directory: Path, step: int) -> dict[str, Any]:
        part = read_part(directory, step, self.stage.number, self._last + 1)
        if strange := set(part["model"]) ^ set(self.stage.state()):
            raise UsageError(
                f"the checkpoint in {directory} was cut elsewhere: stage {self.stage.number} differs in "
                f"{sorted(strange)[:4]}; use the same model and the same stages"
            )
        return part

    # When something goes wrong.

    def _between(self, what: str) -> None:
        if self._fed:
            raise UsageError(f"{what}() while {self._fed} minibatches may be under way; call flush() first")

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """An error here ends the pipeline everywhere: all others learn of it, and write what they have."""
        if self._broken is not None:
            raise PeerError(f"this pipeline has ended: {self._broken}")
        try:
            yield
        except Exception as error:
            said = self._understood(error)
            self._broken = said
            self._carrier.fail(said, [self._group, *self._runtime.exchange.groups])
            try:
                self._write_last()
            except OSError as problem:  # what is to be raised is why it was to be written
                sys.stderr.write(f"polytempo: rank {self.rank} cannot write its part: {problem}\n")
            if isinstance(error, PeerError) and said is not error:
                raise said from error
            raise

    def _understood(self, error: Exception) -> Exception:
        """What everybody is to be told: who is lost, or what went wrong here."""
        told, own = self._carrier.failed, self.places.name(self.rank)
        doing = f" for {self._runtime.doing}" if self._runtime.doing is not None else ""
        if told is not None:
            return told
        if isinstance(error, RankLost):
            rank = error.ranks[0]
            return RankLost(f"{self.places.name(rank)} {self._carrier.loss_of(rank)}: {own} needs it{doing}", (rank,))
        if isinstance(error, PeerError):
            return error
        name = "" if isinstance(error, PolytempoError) else f"{type(error).__name__}: "
        where = f" in {self._runtime.doing}" if self._runtime.doing is not None else ""
        return PeerError(f"{own} failed{where}: {name}{' '.join(str(error).split())}")

    def _remember(self) -> None:
        """What a checkpoint needs that a step which fails has already changed."""
        self.stage.check_memory()
        self._version_before = self.stage.version
        if self._checkpoint is not None and not self._fed:
            params = {name for name, _ in self.stage.part.parameters()}
            self._before = {name: value.clone() for name, value in self.stage.state().items() if name not in params}

    def _write_last(self) -> None:
        """This stage's part as of the last step that it has done completely; nothing, where it is between two."""
        if self._checkpoint is None or self._fed or self.stage.updating:
            return
        made = self.stage.version - self._version_before
        whole = sum(action.kind == "U" for action in self._line)
        if made == 0:
            self._write(self._checkpoint, self.steps, self._numbers, self.stage.state() | self._before)
        elif made == whole:
            self._write(self._checkpoint, self.steps + 1, self._numbers + self.microbatches, self.stage.state())


def in_words(schedule: Schedule) -> str:
    """What a pipeline with this schedule is."""
    stages = f"{schedule.stages} stage{'s' * (schedule.stages != 1)}"
    shared = f" (replicas {'-'.join(map(str, schedule.replicas))})" if max(schedule.replicas) > 1 else ""
    cut = f", {schedule.microbatches} microbatch{'es' * (schedule.microbatches != 1)}" if schedule.flushes else ""
    return f"pipeline of {stages}{shared}, {schedule.name}{cut}"
