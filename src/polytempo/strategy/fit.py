"""`fit`: the training loop, over public calls.

    a step    this replica's part of the job's batch goes through `DistributedModel.step`
    a vote    when an evaluation, a checkpoint, or the end of an epoch or of the run is due on any rank: one small all-reduce
              after which all ranks do the same

Replicas need not be in step (asp, ssp): one that has used up the job's budget votes for the end while another votes for an
evaluation, and all carry out both. Evaluations, checkpoints and stops need no other agreement.

Rank 0 shows how far it is: a bar on a terminal, plain lines elsewhere (a launcher's pipe, a file).
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from polytempo.checkpoints import MANIFEST, remove_checkpoint, step_name, whole_checkpoints
from polytempo.errors import UsageError, WrongType, nearest
from polytempo.session.script_calls import log, should_stop
from polytempo.session.session import current, init, is_initialized, rank, size
from polytempo.strategy.checkpoint import KIND, read_checkpoint
from polytempo.strategy.evaluate import Metric, first_of_replica, mean_over, named_metrics
from polytempo.strategy.sample_source import Batch, Part, SampleSource
from polytempo.strategy.strategy import Strategy
from polytempo.summation import in_order
from polytempo.sync.compatibility import Feature, check_features
from polytempo.train.communication import all_reduce, barrier

if TYPE_CHECKING:
    from polytempo.strategy.distributed_model import DistributedModel


@dataclass(frozen=True)
class EarlyStop:
    """Stop when a figure has not improved for a number of evaluations.

    Args:
        metric: A column of the history: `"val_loss"`, `"val_accuracy"` for the metric `accuracy`, or `"loss"`.
        patience: The number of evaluations without improvement after which the run stops.
        min_delta: The least change that counts as an improvement.
        largest: Larger is better.
    """

    metric: str = "val_loss"
    patience: int = 3
    min_delta: float = 0.0
    largest: bool = False

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far.

        Args:
            value: The value.
            best: The best so far; None for the first.

        Returns:
            False for a value that is not a number.
        """
        change = math.inf if best is None else (value - best if self.largest else best - value)
        return change > self.min_delta and not math.isnan(value)


class Callback:
    """What is called during `fit`, on every rank; override what is needed. Any method may call `run.stop()`.

    Example:
        ```python
        class Target(pt.Callback):
            def on_evaluation(self, run):
                if run.row["val_loss"] < 1.5:
                    run.stop()
        ```
    """

    def on_start(self, run: FitRun) -> None:
        """Before the first step."""

    def on_step(self, run: FitRun) -> None:
        """After a step: `run.step`, `run.loss`."""

    def on_evaluation(self, run: FitRun) -> None:
        """After an evaluation: `run.row` has its figures, the same on all ranks."""

    def on_epoch(self, run: FitRun) -> None:
        """After an epoch: `run.row`, `run.epoch`."""

    def on_end(self, run: FitRun) -> None:
        """After the last step: `run.history`."""


@dataclass
class History:
    """What `fit` returns; `history["val_loss"]` is a column.

    Attributes:
        rows: A dict for each evaluation and each end of an epoch: epoch, step, loss, val_loss, val_* of the metrics,
            seconds of training, samples_per_s.
        stopped: Why the run ended: `"epochs"`, `"max_steps"`, `"budget"` (of the launcher), `"early stop"` or `"callback"`.
        best: The row with the best value so far; by `val_loss` without `early_stop`.
        checkpoint: The folder of the last checkpoint.
        best_checkpoint: The folder of the checkpoint of the best row.
        model: The distributed model, for `evaluate` and `predict`.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    stopped: str = ""
    best: dict[str, float] | None = None
    checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    model: DistributedModel | None = None

    def __getitem__(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


#: Why a run has stopped, in the order in which reasons count.
REASONS = ("budget", "max_steps", "callback")
#: Steps between votes where callbacks may stop the run.
VOTE_EVERY = 10
#: `fit` itself removes checkpoints: all but the last and the best.
EVERY_CHECKPOINT = 1 << 31


def fit(
    model: torch.nn.Module,
    data: Any,
    loss: Callable[[Any, Any], torch.Tensor],
    *,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    strategy: Strategy | str | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    validation: Any = None,
    evaluate_every: int = 0,
    metrics: Mapping[str, Metric] | Sequence[Metric] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 0,
    resume: bool = False,
    early_stop: EarlyStop | int | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    tensor_plan: Mapping[str, Any] | None = None,
) -> History:
    """Train a model under a strategy. All ranks call it with the same arguments; alone it trains in this process.

    With schedules that flush and `bsp`, every strategy makes the same steps of the same samples, to rounding. At the end
    `model` has the trained values, on every rank.

    Args:
        model: The model, the same on every rank.
        data: A `Dataset`, a `DataLoader`, or a pair of tensors (inputs, targets). An `IterableDataset` must give the same
            samples on every rank, each of which takes its part.
        loss: A function of outputs and targets, the mean over its batch.
        optimizer: Makes an optimizer from a list of parameters: `functools.partial(torch.optim.Adam, lr=1e-3)`.
        strategy: A `Strategy`, its text, or `"auto"`; by default that of `strategy.scope()`, else the job's (`--strategy`).
        epochs: The number of passes over the data; one by default, or with `max_steps` as many as it takes. An epoch has
            `len(data) // batch_size` steps; the rest is left out.
        max_steps: Stop after this number of steps, earlier runs included.
        batch_size: Samples of a step of the whole job, shared by the replicas; the loader's, or 32.
        shuffle: A new order in each epoch; True by default, with a loader as it has it.
        validation: Data as above, evaluated at the end of each epoch, of the run, and each `evaluate_every` steps.
        evaluate_every: Steps between evaluations; 0 for the ends of epochs only.
        metrics: Functions of outputs and targets by name, for evaluations: a mean over the batch, or values of its samples.
        scheduler: Makes a learning-rate scheduler from an optimizer. It is stepped after each step;
            `ReduceLROnPlateau` after each evaluation.
        clip_norm: Clip the gradients of the whole model to this norm.
        checkpoint: A folder, seen by all ranks, for checkpoints; the last and the best are kept.
        checkpoint_every: Steps between checkpoints; 0 for the ends of epochs only.
        resume: Go on from the last checkpoint in `checkpoint`, written under any strategy; without one, start.
        early_stop: When to stop early; a number is the patience with `val_loss`.
        callbacks: Called on every rank.
        progress: Show progress on rank 0; True by default.
        seed: Of the order of samples and of dropout.
        device: Where this rank computes.
        tensor_plan: Styles by name pattern, where tensor parallelism is not to find its plan.

    Returns:
        The history, the same on all ranks.

    Raises:
        UsageError: Arguments that do not go together, or a batch that cannot be shared out.
        RankLost: A rank has ended.

    Example:
        ```python
        history = pt.fit(model, data, F.cross_entropy, optimizer=partial(torch.optim.Adam, lr=1e-3),
                         strategy="data=2,pipe=2", epochs=3, validation=held_out)
        ```
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        made = f"functools.partial(torch.optim.{type(optimizer).__name__}, lr=...)"
        raise WrongType(
            f"optimizer: expected a function of parameters, such as {made}, got an optimizer; each rank has its own"
        )
    if not is_initialized():
        init()
    chosen = Strategy.parse(strategy) if isinstance(strategy, str) else strategy or Strategy.current()
    source = SampleSource(data, batch_size, shuffle, seed)
    held = None if validation is None else SampleSource(validation, batch_size, False, seed, "validation", otherwise=False)
    functions = named_metrics(metrics)
    rule = _rule(early_stop, ["loss"] if held is None else ["loss", "val_loss", *(f"val_{name}" for name in functions)])
    if resume and checkpoint is None:
        raise UsageError("resume=True needs checkpoint=, the folder in which the checkpoints are")
    if not chosen.automatic:
        _check_batch(source.batch_size, chosen.mesh(size()).data, chosen.microbatches or chosen.pipe)
    check_features(chosen.spec if chosen.sync else current().job.spec, Feature.FIT)
    there = whole_checkpoints(Path(checkpoint)) if resume and checkpoint is not None else []
    if there and json.loads((there[-1] / MANIFEST).read_text(encoding="utf-8")).get("kind") == KIND:
        # Before the optimizer is made: some modes take values from the script only then. What is wrong with the checkpoint
        # is said later, where all of it is loaded.
        with suppress(RuntimeError):  # it is of another model
            model.load_state_dict(read_checkpoint(there[-1]).model)
    in_place = not (chosen.automatic or chosen.is_split)
    example, target = source.example()
    spread = chosen.distribute(
        model if in_place else copy.deepcopy(model),
        loss=loss,
        optimizer=optimizer,
        example=example,
        target=target,
        seed=seed,
        device=device,
        clip_norm=clip_norm,
        tensor_plan=tensor_plan,
    )
    _check_batch(source.batch_size, spread.mesh.data, spread.strategy.microbatches or 1)
    passes = epochs or (1 if max_steps is None else math.inf)
    run = FitRun(
        model=spread,
        data=source,
        validation=held,
        metrics=functions,
        scheduler=scheduler(spread.optimizer) if scheduler is not None else None,
        epochs=passes,
        max_steps=max_steps or math.inf,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        rule=rule,
        folder=None if checkpoint is None else Path(checkpoint),
        callbacks=tuple(callbacks),
        progress=FitProgress(progress is not False and rank() == 0, passes),
    )
    if resume:
        run.resume()
    history = run.train()
    spread.consolidate()
    if not in_place:
        model.load_state_dict(spread.state_dict())
    return history


@dataclass
class FitRun:
    """A run of `fit`, as callbacks see it.

    Attributes:
        model: The distributed model.
        step: The number of steps of this replica so far.
        epoch: The epoch, from 0.
        loss: The loss of the last step, of this replica.
        history: The history so far.
    """

    model: DistributedModel
    data: SampleSource
    validation: SampleSource | None
    metrics: Mapping[str, Metric]
    scheduler: Any
    epochs: float  #: to train, as the next three an argument of `fit`
    max_steps: float
    evaluate_every: int
    checkpoint_every: int
    rule: EarlyStop
    folder: Path | None
    callbacks: Sequence[Callback]
    progress: FitProgress
    step: int = 0
    epoch: int = 0
    loss: float = math.nan
    history: History = field(default_factory=History)
    _asked: bool = False  # a callback has called stop()
    _parts: list[Part] = field(default_factory=list)  # what earlier runs took of this epoch
    _steps: int = 0  # of this replica in this epoch, in this run
    _losses: list[float] = field(default_factory=list)  # since the last row
    _seconds: float = 0.0  # of training
    _last_row: tuple[int, float] = (0, 0.0)  # step and seconds at it
    _earlier: tuple[float, float] = (0.0, 0.0)  # sum and number of losses since it, in the run that is resumed
    _waited: int = 0  # evaluations without improvement

    @property
    def row(self) -> dict[str, float]:
        """The newest row of the history."""
        return self.history.rows[-1] if self.history.rows else {}

    def stop(self) -> None:
        """End the run, on all ranks at the same vote: at once in `on_evaluation` and `on_epoch`, else within 10 steps. One
        rank's call is enough."""
        self._asked = True

    def train(self) -> History:
        """Until the epochs are over or a vote ends the run."""
        self.history.model, self.history.stopped = self.model, ""
        self._call("on_start")
        try:
            while self.epoch < self.epochs and self.step < self.max_steps and not self.history.stopped:
                self._train_epoch()
        finally:
            self.progress.close()
        self.history.stopped = self.history.stopped or ("max_steps" if self.step >= self.max_steps else "epochs")
        self._call("on_end")
        return self.history

    def _train_epoch(self) -> None:
        epoch, began = self.epoch, time.perf_counter()
        self.progress.begin_epoch(self.epoch, self.data.steps(self._parts))
        batches = self.data.training(self.epoch, self._parts, self.model.point.data, self.model.mesh.data)
        for (x, y), last in _and_last(batches):
            self.loss = self.model.step(x, y)
            self._losses.append(self.loss)
            self.step, self._steps = self.step + 1, self._steps + 1
            if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step()
            self._seconds, began = self._seconds + time.perf_counter() - began, time.perf_counter()
            self.progress.step(self.epoch, self._steps, self.step, self.loss, self._rate())
            self._call("on_step")
            reasons = (should_stop(), self.step >= self.max_steps, self._asked)
            evaluates = last or _is_due(self.step, self.evaluate_every)
            saves = _is_due(self.step, self.checkpoint_every) or (last and not self.checkpoint_every)
            due = evaluates or saves or any(reasons[:2])  # on all ranks of the replica; a callback may have asked on one
            if due or (self.callbacks and self.step % VOTE_EVERY == 0):
                self._vote([evaluates, saves, last, *reasons])
                began = time.perf_counter()
            if self.history.stopped:
                return
        if self.epoch == epoch:  # nothing was left of it
            self.epoch, self._parts = epoch + 1, []

    def _vote(self, wanted: list[bool]) -> None:
        """All ranks learn what any of them wants, and do it."""
        replicas, kinds = self.model.mesh.data, len(wanted)
        votes = [*map(float, wanted), *[0.0] * (2 + replicas)]
        if first_of_replica(self.model):  # one rank of each replica
            votes[kinds], votes[kinds + 1] = in_order(self._losses), len(self._losses)
            votes[kinds + 2 + self.model.point.data] = self._steps
        counted = torch.tensor(votes, dtype=torch.float64)
        all_reduce(counted)
        (evaluates, saves, ends, *reasons), (total, count, *steps) = counted[:kinds].tolist(), counted[kinds:].tolist()
        self.history.stopped = next((why for why, voted in zip(REASONS, reasons, strict=True) if voted), "")
        self.step += int(steps[0]) - self._steps  # those of the first replica
        losses = total + self._earlier[0], count + self._earlier[1]
        epoch, over = self.epoch, ends == size()
        each = self.data.batch_size // replicas
        position = [*self._parts, {"size": replicas, "taken": [int(made) * each for made in steps]}]
        if over:
            self.epoch, self._parts, self._steps, position = epoch + 1, [], 0, []
        better = False
        if evaluates or self.history.stopped:
            better = self._add_row(epoch, losses[0] / max(losses[1], 1.0))
            self._call("on_evaluation")
            if over:
                self._call("on_epoch")
            if self.callbacks and not self.history.stopped:  # they have just been called, on all ranks
                asked = torch.tensor([float(self._asked)])
                all_reduce(asked)
                self.history.stopped = "callback" if asked.item() else ""
            losses = 0.0, 0.0
        if self.folder is not None and (saves or better or self.history.stopped):
            self._save(self.folder, position, losses, better)

    def _add_row(self, epoch: int, loss: float) -> bool:
        """Evaluate, and add a row to the history; is it the best?"""
        row = {"epoch": epoch, "step": self.step, "loss": loss}
        if self.validation is not None:
            found = mean_over(self.model, self.validation, self.metrics)
            row |= {f"val_{name}": value for name, value in found.items()}
        row |= {"seconds": self._seconds, "samples_per_s": self._rate()}
        self._losses, self._earlier, self._last_row = [], (0.0, 0.0), (self.step, self._seconds)
        self.history.rows.append(row)
        self.progress.row(epoch, row)
        if rank() == 0:
            log(**row)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(row.get("val_loss", loss))
        rule, best = self.rule, self.history.best
        better = rule.improves(row[rule.metric], best[rule.metric] if best else None)
        self.history.best, self._waited = (row, 0) if better else (best, self._waited + 1)
        if self._waited >= rule.patience:
            self.history.stopped = self.history.stopped or "early stop"
        return better

    def _rate(self) -> float:
        """Samples a second of the whole job since the last row, evaluations left out."""
        step, seconds = self._last_row
        return (self.step - step) * self.data.batch_size / max(self._seconds - seconds, 1e-9)

    def _call(self, name: str) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self)

    def _save(self, folder: Path, position: Sequence[Part], losses: tuple[float, float], best: bool) -> None:
        history, name = self.history, step_name(self.step)
        kept = folder / name if best else history.best_checkpoint
        state = {
            "step": self.step,
            "epoch": self.epoch,
            "parts": position,
            "losses": losses,
            "waited": self._waited,
            "seconds": self._seconds,
            "rows": history.rows,
            "best": history.best,
            "best_checkpoint": kept.name if kept is not None else None,
        }
        self.model.save(folder, state, keep=EVERY_CHECKPOINT)
        history.checkpoint, history.best_checkpoint = folder / name, kept
        if rank() == 0:
            for path in whole_checkpoints(folder):
                if path.name not in (name, state["best_checkpoint"]):
                    remove_checkpoint(path)

    def resume(self) -> None:
        """Go on from the last checkpoint in the folder, if there is one."""
        assert self.folder is not None
        there = whole_checkpoints(self.folder)
        barrier()  # no rank writes before all have looked
        if not there:
            self.progress.say(f"nothing to resume in {self.folder}: the run starts")
            return
        path, state = there[-1], json.loads((there[-1] / MANIFEST).read_text(encoding="utf-8")).get("extra", {})
        if "parts" not in state:
            raise UsageError(
                f"{path} was not written by fit(); choose another folder, or load it with DistributedModel.resume"
            )
        self.step, self.epoch, self._parts = state["step"], state["epoch"], state["parts"]
        self._waited, self._seconds, self._last_row = state["waited"], state["seconds"], (state["step"], state["seconds"])
        self._earlier = state["losses"][0], state["losses"][1]
        best = state["best_checkpoint"]
        self.history = History(state["rows"], "", state["best"], path, path.parent / best if best else None)
        if self.scheduler is not None:
            _replay(self.scheduler, self.step, self.history.rows)
        self.model.resume(path)
        self.progress.say(f"resumes from {path}")


def _check_batch(batch: int, replicas: int, microbatches: int) -> None:
    parts = replicas * microbatches
    if batch % parts:
        near = sorted({max(1, batch // parts) * parts, (batch // parts + 1) * parts})
        raise UsageError(
            f"batch_size={batch} cannot be shared by {replicas} replicas in {microbatches} microbatches each; "
            f"nearest: batch_size={' or '.join(map(str, near))}"
        )


def _rule(early_stop: EarlyStop | int | None, columns: Sequence[str]) -> EarlyStop:
    """The rule by which rows are compared; without `early_stop` it has no end."""
    found = early_stop
    if not isinstance(found, EarlyStop):
        found = EarlyStop(columns[min(1, len(columns) - 1)], sys.maxsize if found is None else found)
    if found.metric not in columns:
        listed, near = ", ".join(columns), nearest(found.metric, columns)
        raise UsageError(f"early_stop: expected a figure of evaluations, got {found.metric!r}; there are {listed}{near}")
    return found


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _and_last(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    before: list[Batch] = []
    for batch in batches:
        yield from ((one, False) for one in before)
        before = [batch]
    yield from ((one, True) for one in before)


def _replay(scheduler: Any, steps: int, rows: Sequence[Mapping[str, float]]) -> None:
    """Bring a new scheduler to its place; its state needs no form in a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the optimizer makes no steps in between
        if isinstance(scheduler, ReduceLROnPlateau):
            for row in rows:
                scheduler.step(row.get("val_loss", row["loss"]))
        else:
            for _ in range(steps):
                scheduler.step()


#: Seconds between two plain lines within an epoch.
SHOWN_EVERY = 10.0


class FitProgress:
    """The display of one run.

    Args:
        shown: Whether anything is shown.
        epochs: The number of epochs of the run; infinite where steps end it.
        console: Where; standard output by default.
    """

    def __init__(self, shown: bool, epochs: float, console: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._shown, self._epochs = shown, epochs
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._told = time.monotonic()

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """An epoch begins; `steps`: how many it has left, None where that is not known."""
        if not self._shown or not self._console.is_terminal:
            return
        if self._bar is None:
            columns = (
                *(TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn()),
                *(TextColumn("{task.fields[figures]}"), TimeRemainingColumn(compact=True)),
            )
            self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            self._bar.start()
        elif self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(self._epoch(epoch), total=steps, figures="")

    def step(self, epoch: int, done: int, step: int, loss: float, rate: float) -> None:
        """A step was made: the `done`-th of its epoch."""
        if not self._shown:
            return
        figures = f"loss {loss:.4f}  {rate:,.0f} samples/s"
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, figures=figures)
            if now - self._told >= 0.1:
                self._told = now
                self._bar.refresh()
        elif now - self._told >= SHOWN_EVERY:
            self._told = now
            self._console.print(f"{self._epoch(epoch)}  step {step}  {figures}")

    def row(self, epoch: int, row: Mapping[str, float]) -> None:
        """An evaluation or the end of an epoch: a line that stays."""
        if self._shown:
            hidden = ("epoch", "step", "seconds", "samples_per_s")
            figures = "  ".join(f"{name} {value:.4f}" for name, value in row.items() if name not in hidden)
            rate = f"{row['samples_per_s']:,.0f} samples/s"
            self._told = time.monotonic()
            self._console.print(f"{self._epoch(epoch)}  step {row['step']:.0f}  {figures}  {rate}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._shown:
            self._console.print(text)

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.stop()

    def _epoch(self, epoch: int) -> str:
        if self._epochs == math.inf:
            return f"epoch {epoch + 1}"
        return f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}"
