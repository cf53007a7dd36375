"""`DistributedModel`: a model that is spread by a strategy, and trained by calls that all ranks make alike.

Each rank holds a shard of a stage of a replica (`distribution.py`). A step is one batch of a replica: its lane runs the
schedule, shards talk inside the layers, and the optimizer of each rank takes its step together with the same part of the
other replicas, as the mode says.

State goes in and out as that of the unsplit model (`state.py`, `checkpoint.py`).

What fails on a rank is told to the whole job, and each rank raises what failed first. A pipeline tells the ranks of its
lane. Here the lanes, tensor groups and replicas of a job are put together: when a rank is lost, ranks that wait for it learn
so themselves, and end; ranks that wait for these would name the wrong one. Before a rank ends it has told all others the
cause, and messages come before the end of a link: a rank that sees another end knows why.

A batch must divide into the microbatches, and the ranks of a replica must have the same. The first is checked by each rank
for itself, so that all refuse alike and nothing is sent. The second in the first steps only, by a digest: a loader that is
seeded or shared differently on two ranks differs from the first batch on.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polytempo.collectives.group import RankGroup
from polytempo.errors import JobEnded, PeerError, PolytempoError, RankLost, UsageError
from polytempo.mesh import Mesh, MeshPoint
from polytempo.pipeline.pipeline import Folder, Pipeline
from polytempo.pipeline.point_to_point import PointToPoint
from polytempo.pipeline.stage_message import rows
from polytempo.strategy.checkpoint import SavedState, read_checkpoint, write_checkpoint
from polytempo.strategy.distribution import Distribution
from polytempo.strategy.state import exchanged
from polytempo.strategy.strategy import Strategy
from polytempo.sync.epoch_parts import parts_of
from polytempo.tensor_parallel.cross_entropy import gather_logits
from polytempo.tensor_parallel.group import RankTensorGroup
from polytempo.train.optimizer import DistributedOptimizer

#: Steps in which the batches of a replica's ranks are compared.
COMPARED_STEPS = 3


class DistributedModel:
    """A model that is spread over the ranks of the job by a strategy: what `Strategy.distribute` returns.

    All ranks call the same methods. The ranks of a replica give the same batches; replicas have batches of their own, as a
    `DistributedSampler` that is made inside `strategy.scope()` gives them.

    Attributes:
        strategy: The strategy, with all that the job has filled in.
        mesh: Which rank is which replica, stage and shard.
        point: The place of this rank: `data`, `pipe`, `tensor`.
        pipeline: The stages of this replica at this rank's shard.
        optimizer: The optimizer of this rank's parameters; give it to a scheduler of learning rates.
        steps: The number of steps so far.
        samples: The number of samples of this replica so far.

    Raises:
        RankLost: In any method, on all ranks: the rank that ended.

    Example:
        ```python
        strategy = pt.Strategy(data=2, pipe=2, microbatches=4)
        with strategy.scope():
            loader = DataLoader(data, batch_size=32, sampler=pt.DistributedSampler(data), drop_last=True)
        spread = strategy.distribute(model, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
        for x, y in loader:
            spread.step(x, y)
        spread.save("saved")
        ```
    """

    def __init__(self, made: Distribution) -> None:
        self._made, self._groups, self._state = made, made.groups, made.state
        self.strategy: Strategy = made.strategy
        self.mesh: Mesh = made.mesh
        self.point: MeshPoint = made.point
        self.pipeline: Pipeline = made.pipeline
        self.optimizer: DistributedOptimizer = made.optimizer
        self.steps = 0
        self.samples = 0
        self._board = PointToPoint(made.groups.job, torch.device("cpu"))  # what has failed first in the job, as far as told
        self._seconds, self._compared = 0.0, 0
        self._earlier: list[dict[str, Any]] = list(made.session.job.positions)

    # Training and evaluation.

    def step(self, x: Any = None, y: Any = None) -> float:
        """Train on a batch of this replica.

        Args:
            x: The inputs; the same on all ranks of the replica. Stages other than the first do not read them.
            y: The targets; the same on all ranks of the replica. Stages other than the last do not read them.

        Returns:
            The mean loss of the batch, on all ranks of the replica.

        Raises:
            UsageError: The batch does not divide into the microbatches, or differs between ranks of the replica.
            RankLost: A rank of the job has ended.
        """
        size = checked_rows(x, y, self.pipeline.microbatches)
        began = time.perf_counter()
        with self._failing_together():
            if self._compared < COMPARED_STEPS:
                compare(self._groups.replica, x, y)
                self._compared += 1
            loss = self.pipeline.step(x, y)
        assert loss is not None
        self._seconds += time.perf_counter() - began
        self.steps += 1
        self.samples += size
        if not self._made.session.together:
            self._made.session.ledger.trained(size)  # else the optimizer's step has told them
        return loss

    def flush(self) -> None:
        """Finish what is under way; with the schedules of a strategy nothing is."""
        with self._failing_together():
            self.pipeline.flush()

    def evaluate(self, x: Any = None, y: Any = None) -> float:
        """The mean loss of a batch of any size, without training, in evaluation mode. All ranks of the replica call it.

        Args:
            x: The inputs.
            y: The targets.

        Returns:
            The mean loss of this replica's batch, on all its ranks.
        """
        with self._failing_together():
            return self.pipeline.evaluate(x, y)

    def predict(self, x: Any = None) -> Any:
        """The outputs of the model for a batch of any size, in evaluation mode. All ranks of the replica call it.

        Args:
            x: The inputs.

        Returns:
            The outputs, on all ranks of the replica.
        """
        with self._failing_together():
            out = self.pipeline.predict(x)
            logits, shards = self._made.plan.logits, self._groups.shards
            if logits is not None and shards is not None and self.point.pipe == self.mesh.pipe - 1:
                out = gather_logits(out, RankTensorGroup(shards), logits[1])
            return moved(exchanged(self._groups.lane, out)[-1], self.pipeline.stage.device)

    # State.

    def consolidate(self) -> None:
        """Make the replicas agree: each takes the job's newest values, or the mean of all. All ranks of the job call it.

        Under bsp they agree at all times. Under local and diloco it ends the block of local steps with an average. Buffers
        of floating point (running statistics of BatchNorm) are averaged in every mode.
        """
        with self._failing_together():
            self._groups.job.barrier().wait()
            self.optimizer.consolidate()
            self._groups.job.barrier().wait()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The values of the unsplit model, parameters and buffers, by its own names. All ranks of the replica call it.

        Returns:
            A dict on the CPU that the unsplit model loads; it is this replica's. Where the mode lets replicas differ, call
            `consolidate()` before.
        """
        with self._failing_together():
            return self._state.gather()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the values of an unsplit model. All ranks of the job call it, with the same values.

        Args:
            state: As `state_dict()` of the unsplit model.

        Raises:
            UsageError: Names or shapes differ.
        """
        self._state.unsplit.check(state)
        with self._failing_together():
            self._groups.job.barrier().wait()
            self._state.load(state)
            self.pipeline.stage.reset_versions()
            if self.optimizer.spec.capabilities.rounds or self.point.data == 0:
                self.optimizer.push_parameters()
            self._groups.job.barrier().wait()
            if not self.optimizer.spec.capabilities.rounds:
                self.optimizer.consolidate()
                self._groups.job.barrier().wait()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state of the unsplit model, by parameter name. All ranks of the replica call it.

        `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(model, optimizer, state)` loads it into a plain
        optimizer of the unsplit model.

        Returns:
            `state` by parameter name, and `param_groups` with the names of their parameters. Servers' state is read from
            them; where each worker keeps its own, with local steps or momentum of its own, it is this replica's. The outer
            momentum of diloco is not part of it.
        """
        with self._failing_together():
            return self._state.gather_optimizer(self.optimizer.state_dict(), self._made.names)

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state of an unsplit model. All ranks of the job call it, with the same state.

        Args:
            state: As `optimizer_state_dict()` returns it, of any strategy.

        Raises:
            UsageError: A parameter is missing in it.
        """
        groups = self.optimizer.inner.state_dict()["param_groups"]
        share = self._state.optimizer_share(state, self._made.names, groups)
        with self._failing_together():
            self._groups.job.barrier().wait()
            self.optimizer.load_state_dict(share)
            self._groups.job.barrier().wait()

    def save(self, directory: Folder, extra: dict[str, Any] | None = None, keep: int = 2) -> None:
        """Write a checkpoint of the unsplit model, its optimizer and the positions in the data. All ranks call it.

        Rank 0 writes `step-N/model.safetensors`, `optimizer.safetensors` and `manifest.json`; they appear all or not at all.
        Any strategy resumes from them, and plain PyTorch loads them.

        Args:
            directory: The folder in which checkpoints are.
            extra: More for the manifest: plain data that `resume` returns.
            keep: How many checkpoints stay there.

        Raises:
            UsageError: It cannot be written; on all ranks.
        """
        self.consolidate()
        with self._failing_together():
            mine = {one.sampler: (one.epoch, one.taken) for one in self._made.session.ledger.positions()}
            each = self.mesh.pipe * self.mesh.tensor  # the ranks of a replica draw the same samples: its first says how many
            replicas = exchanged(self._groups.job, mine)[::each]
            names = dict.fromkeys(name for of_replica in replicas for name in of_replica)
            positions = parts_of({name: [one.get(name) for one in replicas] for name in names}, self._earlier)
            said, ranks = "", []
            if self.optimizer.spec.at_workers:  # of all ranks what is their own: state that no server has, outer momentum
                own = self.optimizer.state_dict()
                ranks = exchanged(self._groups.job, {name: own[name] for name in ("state", "outer") if name in own})
            if self.point.data == 0:
                model = self._state.gather()
                optimizer = self._state.gather_optimizer(self.optimizer.state_dict(), self._made.names)
            if self._made.session.rank == 0:
                facts = {"samples": self.samples, "strategy": str(self.strategy), "positions": positions}
                facts |= {"extra": extra or {}}
                try:
                    write_checkpoint(Path(directory), SavedState(self.steps, model, optimizer, facts, ranks), keep)
                except UsageError as problem:
                    said = str(problem)
            said = exchanged(self._groups.job, said)[0]
        if said:
            raise UsageError(said)

    def resume(self, directory: Folder) -> dict[str, Any]:
        """Go on from the checkpoint of the latest step, of any strategy. All ranks call it, before samplers are made.

        Args:
            directory: A folder of checkpoints, or one of them; all ranks see it.

        Returns:
            What was given to `save` as `extra`.

        Raises:
            UsageError: There is no whole checkpoint, or it is of another model.
        """
        saved = read_checkpoint(directory)
        if not self._holds(saved.model):
            self.load_state_dict(saved.model)
        self.load_optimizer_state_dict(saved.optimizer)
        if len(saved.ranks) == self._made.session.size and saved.facts.get("strategy") == str(self.strategy):
            groups = self.optimizer.inner.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"param_groups": groups, **saved.ranks[self._made.session.rank]})
        self.steps, self.samples = saved.step, int(saved.facts.get("samples", 0))
        self._earlier = list(saved.facts.get("positions", []))
        session = self._made.session  # samplers that are made from now on go on where these parts end
        session.job = replace(session.job, positions=tuple(self._earlier))
        extra: dict[str, Any] = saved.facts.get("extra", {})
        return extra

    def _holds(self, state: dict[str, torch.Tensor]) -> bool:
        """Are these the values of the model, on every rank? Some modes take values only when the optimizer is made."""
        if self.strategy.is_split:
            return False
        mine = self._state.gather()
        same = mine.keys() == state.keys() and all(torch.equal(mine[name].cpu(), state[name]) for name in state)
        return all(exchanged(self._groups.job, same))

    # Figures.

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of this rank so far: rank, steps, samples, seconds (computing, waiting), and bytes_sent by axis (data,
        pipe, tensor) and in all: what is handed to other ranks, sent or in shared memory; over servers, exchanged."""
        groups, built = self._groups, self.pipeline._built
        between = [group for group in built.runtime.gradient_sync.groups if group is not groups.replica]
        by_axis = {
            "data": self.optimizer.stats["bytes_handed"],
            "pipe": handed_in(groups.lane, built.group, *between),
            "tensor": handed_in(groups.shards),
        }
        waiting = sum(done.waited for done in self.pipeline.log) + self.optimizer.stats["waited_s"]
        return {
            "rank": self._made.session.rank,
            "steps": self.steps,
            "samples": self.samples,
            "seconds": {"computing": max(0.0, self._seconds - waiting), "waiting": waiting},
            "bytes_sent": {**by_axis, "all": sum(by_axis.values()) + handed_in(groups.job, groups.replica)},
        }

    # Failures.

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """What fails on one rank is told to all ranks of the job, and each raises the first cause."""
        try:
            yield
        except JobEnded:
            raise
        except Exception as error:
            cause = self._cause(error)
            if cause is not error and isinstance(error, PeerError):
                raise cause from None
            raise

    def _cause(self, error: Exception) -> Exception:
        """The first cause, which may be this error; all other ranks are told."""
        job = self._groups.job
        if job.size == 1:
            return error
        job.engine.read_all()
        if self._board.failed is not None:
            return self._board.failed
        # In words, with the place of the rank that it is about: of the rank that was lost first, or of this one.
        cause, own = error, self._name(job.engine.rank)
        crashed = job.engine.messages.crashed
        if not isinstance(error, PeerError):
            name = "" if isinstance(error, PolytempoError) else f"{type(error).__name__}: "
            cause = PeerError(f"{own} failed: {name}{' '.join(str(error).split())}")
        elif crashed:
            first = min(crashed, key=lambda rank: crashed[rank])
            cause = RankLost(f"{self._name(first)} {self._board.loss_of(first)}: {own} needs it", (first,))
        self._board.fail(cause, [job])
        return cause if isinstance(error, PeerError) else error

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.mesh.point(rank)})"


def moved(out: Any, device: torch.device) -> Any:
    """Outputs on a device."""
    if isinstance(out, torch.Tensor):
        return out.to(device)
    return tuple(moved(one, device) for one in out) if isinstance(out, tuple | list) else out


def handed_in(*groups: RankGroup | None) -> int:
    """Bytes that this rank has handed over so far, in the collectives and single messages of these groups."""
    own = [group for group in groups if group is not None]
    return sum(group.engine.messages.handed[group.context + kind] for group in own for kind in (0, 1))


def checked_rows(x: Any, y: Any, microbatches: int) -> int:
    """The number of samples of a batch.

    Raises: UsageError where it does not divide into the microbatches; the text names the nearest sizes."""
    if x is None and y is None:
        raise UsageError("expected step(x, y) with the same batch on all ranks of a replica, got None for both")
    size = rows(x if x is not None else y)
    if size == 0 or size % microbatches:
        below = size // microbatches * microbatches
        near = " or ".join(str(one) for one in (below, below + microbatches) if one)
        raise UsageError(
            f"a batch of {size} samples does not divide into {microbatches} microbatches; nearest: a batch of {near} (for a "
            "DataLoader drop_last=True)"
        )
    return size


def digest(batch: Any, before: int = 1) -> int:
    """A figure that differs, but for chance, for batches with different values or shapes; 0 for no batch."""
    if batch is None:
        return 0
    if isinstance(batch, torch.Tensor):
        plain = batch.detach().cpu().contiguous()
        found = zlib.crc32(repr((tuple(plain.shape), plain.dtype)).encode(), before)
        return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), found)
    if isinstance(batch, dict):
        batch = list(batch.items())
    if isinstance(batch, tuple | list):
        for value in batch:
            before = digest(value, before)
        return before
    return zlib.crc32(repr(batch).encode(), before)


def compare(replica: RankGroup | None, x: Any, y: Any) -> None:
    """Refuse batches that differ between the ranks of a replica. A rank may leave out what its stage does not read.

    Raises: UsageError on all of them, naming two ranks."""
    if replica is None or replica.size == 1:
        return
    mine = torch.tensor([digest(x), digest(y)])
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(replica.size)]
    replica.all_gather(found, mine).wait()
    for place, what in enumerate(("inputs", "targets")):
        given = {rank: int(pair[place]) for rank, pair in zip(replica.ranks, found, strict=True) if int(pair[place])}
        first = next(iter(given), 0)
        other = next((rank for rank, figure in given.items() if figure != given[first]), None)
        if other is not None:
            raise UsageError(
                f"ranks {first} and {other} belong to one replica and got different {what}: the ranks of a replica train on "
                "the same batch; make the sampler inside strategy.scope(), and seed what draws data alike"
            )
