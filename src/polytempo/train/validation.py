"""The arguments of a `DistributedOptimizer`, checked, and the plan that follows from them.

    arguments   what the script has given
    plan        what they mean in the job's mode: a value. Nothing has been made or sent for it, so that arguments can be
                tried in another mode, too

The ranks that take the steps together are all of the job, or a group. A group of one makes plain steps. Each step is still
reported to the sequencer, for the budget (`step_reports.py`). In a replica of several ranks only the main group does so: its
answers say when to stop, and the replica's ranks tell each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from polytempo.compression.chain import PushPullCompression
from polytempo.errors import UsageError, nearest
from polytempo.mesh import ReplicaRanks
from polytempo.optim.worker_momentum import known_name
from polytempo.protocol.values import name_in_group
from polytempo.records.lines import MAIN
from polytempo.reducer.optimizer_spec import SpecBuilder
from polytempo.session.session import Session
from polytempo.sync.compatibility import Feature, check_features, conflict
from polytempo.sync.mode import Mode
from polytempo.sync.momentum import MomentumForm, check_kept, check_spike, form_of, has_momentum, is_known
from polytempo.sync.spec import Spec, refused_of
from polytempo.train.communication import Group
from polytempo.train.sparse_embedding import SparseEmbeddingTable, sparse_embedding_tables
from polytempo.train.update import HyperParameters

#: Options with which torch's step refuses a model's parameters on the CPU, and does not refuse what servers hold.
ON_SERVERS = ("capturable", "differentiable")


@dataclass(frozen=True)
class OptimizerGroup:
    """The members, where they are not all ranks of the job."""

    members: tuple[int, ...] = ()  #: ascending; empty: all
    main: bool = True
    in_replica: bool = False  #: its rank is one of several that train a replica of the model, and stop together

    @property
    def is_alone(self) -> bool:
        return len(self.members) == 1

    def reports(self, name: str) -> bool:
        """Does a group of one report its steps? One beside the main one, in a replica, is told by that one to stop."""
        return self.is_alone and (name == MAIN or not self.in_replica)

    def enter(self, session: Session) -> str:
        """Take part with the next optimizer; its name in the job."""
        if self.in_replica and session.client is not None:
            session.client.exchanges.heeds = MAIN  # all ranks of a replica stop by the answers of one clock
        number = session.next_optimizer_id()
        return name_in_group(number, self.members, self.main) if self.members else number


@dataclass(frozen=True)
class OptimizerPlan:
    """What a mode means for an optimizer with its arguments."""

    arguments: OptimizerArguments
    spec: Spec  #: with its defaults for this optimizer written out
    ranks: OptimizerGroup
    together: bool  #: with other ranks
    among_workers: bool  #: do gradients travel without servers?
    here: bool  #: does the wrapped optimizer run on the worker?
    momentum: MomentumForm  #: in which form a worker pushes momentum of its own
    mirrored: list[SparseEmbeddingTable]  #: sparse embeddings that are tables on the servers
    specs: SpecBuilder

    @property
    def apply(self) -> str:
        """Where the update is made; a worker that pushes changes of values makes it itself."""
        return "delta" if self.momentum is MomentumForm.CHANGE else self.arguments.apply

    @property
    def leads(self) -> bool:
        return self.arguments.session.rank == min(self.ranks.members, default=0)

    @cached_property
    def hyper(self) -> HyperParameters:
        """Reads the hyper-parameters, as the job must know them."""
        return HyperParameters(self.spec, self.arguments.optimizer, bare=self.momentum is MomentumForm.GRADIENT)


@dataclass(frozen=True)
class OptimizerArguments:
    """What a `DistributedOptimizer` was given: `settled` says what a mode makes of it, or refuses the mode."""

    session: Session
    optimizer: torch.optim.Optimizer
    model: torch.nn.Module | None
    params: list[torch.nn.Parameter]
    names: list[str]
    groups: list[int]  #: the parameter group of each
    group: Group | ReplicaRanks | None
    via: str | None
    apply: str
    compression: PushPullCompression
    buffers: str
    clip_norm: float | None
    server_tables: bool  #: has the model a `ServerEmbedding`?

    def settled(self, spec: Spec) -> OptimizerPlan:
        """Check the arguments in this mode.

        Raises: UsageError, one line with the fix, for what does not go together."""
        ranks = optimizer_group(self.group, self.session, spec)
        together = self.session.together and not ranks.is_alone
        way = chosen_way(self.via, self.compression, self.session, spec)
        among_workers = together and reduces_among_workers(spec, way, self.session, self.server_tables)
        here = self.apply == "delta" or among_workers or spec.capabilities.averages
        mirrored: list[SparseEmbeddingTable] = []
        rows_travel = together and not here and conflict(spec, Feature.SPARSE_EMBEDDING) is None
        if self.model is not None and rows_travel:
            mirrored = sparse_embedding_tables(self.model, self.optimizer, self.params, self.groups)
        has_tables = self.server_tables or bool(mirrored)
        momentum, fallback = MomentumForm.NONE, ""
        if together and not spec.capabilities.rounds:
            workers = len(ranks.members) or self.session.size  # those that come later are among them
            spec, momentum, fallback = self._with_momentum(spec, workers, has_tables)
            here = here or momentum is MomentumForm.CHANGE
        if self.buffers == "mean" and self.model is None:
            raise UsageError("buffers='mean' needs the model: DistributedOptimizer(optimizer, model, buffers='mean')")
        check_features(spec, {Feature.LBFGS: here and type(self.optimizer) is torch.optim.LBFGS, Feature.ROWS: has_tables})
        if self.clip_norm is not None and has_tables:
            raise UsageError("clip_norm sees dense gradients only, and this model has tables; leave it out")
        apply = "delta" if momentum is MomentumForm.CHANGE else self.apply
        specs = SpecBuilder(spec, apply, self.optimizer, self.compression, self.clip_norm, ranks.members, fallback)
        if together:
            on_servers = self.apply == "delta" and not among_workers
            check_features(spec, {Feature.DELTA_ON_SERVERS: on_servers, Feature.MEAN_OF_BUFFERS: self.buffers == "mean"})
        specs.check(here, together, among_workers)
        if together:
            check_unique(self.params, self.names, on_servers=not among_workers)
        return OptimizerPlan(self, spec, ranks, together, among_workers, here, momentum, mirrored, specs)

    def _with_momentum(self, given: Spec, workers: int, has_tables: bool) -> tuple[Spec, MomentumForm, str]:
        """The spec with its defaults written out, the form of the momentum that each worker keeps, and, where servers keep
        it though the mode would not have it so, why."""
        name, groups = known_name(self.optimizer), self.optimizer.param_groups
        form = form_of(name, groups)
        why_not = given.needs_server or self._why_on_servers(name, form, has_tables)
        of_delta = "apply='delta' pushes what the script's optimizer changes" if self.apply == "delta" else ""
        if given.worker_momentum:
            check_kept(given.text, name, type(self.optimizer).__name__, why_not or of_delta)
        if of_delta:
            if given.spike and workers > 1:
                check_spike(given.text, name, groups, False, of_delta)
            return given, MomentumForm.NONE, ""
        spec = given.settled(name, groups, workers=workers, needs_server=why_not)
        is_open = workers > 1 and given.mode.keeps_momentum and "momentum" not in given.options
        fallback = why_not if is_open and has_momentum(name, groups) else ""
        return spec, form if spec.worker_momentum else MomentumForm.NONE, fallback

    def _why_on_servers(self, name: str, form: MomentumForm, has_tables: bool) -> str:
        """Why momentum has to stay on the servers; empty where it need not."""
        kind = type(self.optimizer).__name__
        if not is_known(name):
            return f"the look-ahead of {kind} is not known"
        if form is MomentumForm.GRADIENT:
            return ""
        if not self.compression.is_lossless:
            return f"compression is for gradients, and {kind} would push changes of values"
        if has_tables:
            return f"the model has tables, whose rows go with gradients, and {kind} would push changes of values"
        on_servers = [name for name in ON_SERVERS if any(group.get(name) for group in self.optimizer.param_groups)]
        return f"with {on_servers[0]}=True {kind} does not run on a worker's parameters" if on_servers else ""

    def refused(self) -> tuple[str, ...]:
        """Of the modes that advice compares, those that these arguments refuse."""
        by_split = self.group.refused if isinstance(self.group, ReplicaRanks) else ()
        return refused_of(self.settled, by_split)


def in_scope(
    sync: str | Mode | Spec | None, via: str | None, group: Group | ReplicaRanks | None, session: Session
) -> tuple[Spec, str | None]:
    """Mode and way of an optimizer: its own, else those of the strategy where it is made inside `with strategy.scope():`,
    else the job's."""
    scope = session.scope if group is None else None
    if group is None and (scope.is_split if scope is not None else session.job.replica > 1):
        raise UsageError(
            f"DistributedOptimizer keeps a whole model on each worker, and the strategy "
            f"{scope.text if scope is not None else session.job.strategy} splits it; use "
            "strategy.distribute(model, loss=..., optimizer=...)"
        )
    if scope is not None:
        sync, via = sync or scope.sync, via or scope.via
    return session.spec_of(sync), via


def optimizer_group(group: Group | ReplicaRanks | None, session: Session, spec: Spec) -> OptimizerGroup:
    """The members of an optimizer of this mode; `UsageError` where this rank is not one of them, or the mode needs all."""
    if group is None or group.ranks == tuple(range(session.size)):
        return OptimizerGroup()
    ranks = ", ".join(map(str, group.ranks))
    if session.rank not in group.ranks:
        raise UsageError(
            f"rank {session.rank} is not in the group of ranks {ranks}; give DistributedOptimizer the group that it is in"
        )
    if group.ranks[-1] >= session.size:
        raise UsageError(f"expected a group of ranks 0 to {session.size - 1}, got ranks {ranks}")
    check_features(spec, Feature.GROUP, size=session.size, ranks=ranks)
    if isinstance(group, ReplicaRanks):
        return OptimizerGroup(group.ranks, group.main, in_replica=True)
    return OptimizerGroup(group.ranks, main=0 in group.ranks)


def names_of(
    params: list[torch.nn.Parameter],
    named: Iterable[tuple[str, torch.nn.Parameter]] | None,
    model: torch.nn.Module | None,
) -> list[str]:
    """The name of each parameter in error messages."""
    pairs = list(named) if named is not None else list(model.named_parameters()) if model is not None else []
    known = {id(param): name for name, param in pairs}
    return [known.get(id(param), f"parameter {index}") for index, param in enumerate(params)]


def check_order(optimizer: object, model: object) -> None:
    """Refuse arguments that are no optimizer or no model."""
    wanted = "DistributedOptimizer(optimizer, model)"
    if not isinstance(optimizer, torch.optim.Optimizer):
        if isinstance(optimizer, torch.nn.Module) and isinstance(model, torch.optim.Optimizer):
            raise UsageError(f"the optimizer comes first, then the model: {wanted}; they came the other way round")
        raise UsageError(f"expected {wanted} with a torch.optim.Optimizer first, got a {type(optimizer).__name__}")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"expected {wanted} with a torch.nn.Module second, got a {type(model).__name__}")


def check_unique(params: list[torch.nn.Parameter], names: list[str], on_servers: bool) -> None:
    """Refuse parameters that occur twice in an optimizer or, where servers keep the values of each, share memory."""
    seen: dict[int, str] = {}
    places: dict[int, str] = {}
    for param, name in zip(params, names, strict=True):
        if id(param) in seen:
            raise UsageError(f"{name} is in the optimizer twice, and would be updated twice; give each parameter once")
        seen[id(param)] = name
        other = places.setdefault(param.data_ptr(), name)
        if on_servers and param.numel() and other != name:
            raise UsageError(
                f"{other} and {name} share memory, and servers keep values for each; tie them as one parameter, not by .data"
            )


def check_choices(apply: str, via: str | None, buffers: str, clip_norm: float | None, nonfinite: str) -> None:
    """Refuse unknown values of single arguments."""
    choices = {
        "apply": (apply, ("server", "delta")),
        "buffers": (buffers, ("local", "mean")),
        "nonfinite": (nonfinite, ("count", "refuse")),
        "via": (via or "auto", ("auto", "ps", "allreduce")),
    }
    for name, (given, known) in choices.items():
        if given not in known:
            raise UsageError(f"expected {name} to be {' or '.join(known)}, got {given!r}{nearest(given, known)}")
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"expected clip_norm above 0, got {clip_norm}")


def reduces_among_workers(spec: Spec, via: str | None, session: Session, server_tables: bool) -> bool:
    """Do gradients travel among workers, without servers? A way that the mode or the job does not have is refused."""
    wanted, servers = via or "auto", session.client is not None
    script = {
        Feature.NO_SEQUENCER: not servers,
        Feature.VIA_PS: wanted == "ps",
        Feature.SERVER_EMBEDDING: server_tables,
    }
    check_features(spec, script)
    if spec.capabilities.neighbours:
        return True
    if server_tables and wanted == "allreduce":
        raise UsageError("a ServerEmbedding lives on servers, and via='allreduce' goes without them; leave via= out")
    if server_tables and not servers:
        raise UsageError("a ServerEmbedding lives on servers; start the job with polytempo run --servers 1 (or more)")
    ways = {
        Feature.VIA_ALLREDUCE: wanted == "allreduce",
        Feature.NO_SERVERS: not servers,
        Feature.VIA_PS_WITHOUT_SERVERS: wanted == "ps" and not servers,
    }
    check_features(spec, ways)
    if server_tables or not spec.capabilities.reduces:
        return False
    return not servers or (session.job.via if wanted == "auto" else wanted) in ("auto", "allreduce")


def chosen_way(via: str | None, compressed: PushPullCompression, session: Session, spec: Spec) -> str | None:
    """Compression is for pushes to servers: where the command leaves the way open, a script that compresses gets "ps"."""
    is_open = (
        not spec.capabilities.neighbours
        and via in (None, "auto")
        and session.client is not None
        and session.job.via == "auto"
    )
    return "ps" if is_open and not compressed.is_lossless else via
