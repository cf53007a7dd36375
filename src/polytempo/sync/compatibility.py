"""What goes with which mode: one table from (capability, feature) to the reason why not, and what to do about it.

The places that let a job or a script use a feature ask here with `check_features`, which refuses with the text of the table;
no other place knows which modes a feature goes with. A pair that is not in the table goes together.
`docs/reference/modes.md` is the table for people, written by `make figures`.

Texts are templates: `{mode}` is the spec as the user wrote it, the other names are facts that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from polytempo.errors import UsageError
from polytempo.sync.capabilities import PushedWork, Pushes, Unsound
from polytempo.sync.mode import Mode
from polytempo.sync.spec import Spec, every_mode, parse_spec


class Feature(Enum):
    """What a job, a script or a command may want beside a mode."""

    # Who starts the job, and where its values are.
    SERVERS = auto()  #: an option of the command that asks for servers; `option`
    ALLREDUCE = auto()  #: `--via allreduce`; `option`: the mode, as it was given
    SERVERS_BESIDE_ALLREDUCE = auto()  #: both of these; `option`
    OTHER_LAUNCHER = auto()  #: torchrun, mpirun or srun; `launcher`
    NO_SEQUENCER = auto()  #: an optimizer in a job without one
    NO_SERVERS = auto()  #: an optimizer in a job without any
    VIA_PS = auto()  #: `DistributedOptimizer(via="ps")`
    VIA_PS_WITHOUT_SERVERS = auto()  #: the same, in a job that has none
    VIA_ALLREDUCE = auto()  #: `DistributedOptimizer(via="allreduce")`
    SIMULATED_ALLREDUCE = auto()  #: `simulate --via allreduce`; `via`
    SIMULATED_PEERS = auto()  #: `simulate --via peers`; `via`
    SIMULATED_NO_PEERS = auto()  #: another way in a simulation than by itself; `via`
    # Of which ranks.
    GROUP = auto()  #: `group=`; `ranks`, and the `size` of the job
    PIPELINE = auto()  #: replicas of a model in stages
    TENSOR = auto()  #: replicas of a model whose layers are split
    TIED = auto()  #: a parameter that several stages hold; `parameter`, `stages`
    JOINING = auto()  #: workers that come later
    # What a script asks of an optimizer.
    OPTIMIZER = auto()  #: any `DistributedOptimizer`
    DELTA = auto()  #: `apply="delta"`
    DELTA_ON_SERVERS = auto()  #: the same, where changes go to servers
    SELECTION = auto()  #: compression that sends a part of the values; `compression`
    COMPRESSED_ANSWERS = auto()  #: `compression={"pull": ...}`
    COMPRESSION_AMONG_WORKERS = auto()  #: where nothing goes to servers
    COMPRESSED_CHANGES = auto()  #: where what is pushed are no gradients
    COMPRESSED_VALUES = auto()  #: where models are averaged
    SERVER_EMBEDDING = auto()  #: `pt.tables.ServerEmbedding`
    ROWS = auto()  #: rows of any table, which travel beside dense gradients
    SPARSE_EMBEDDING = auto()  #: `nn.Embedding(sparse=True)`, of which only rows travel
    MEAN_OF_BUFFERS = auto()  #: `buffers="mean"`
    LBFGS = auto()  #: run by the worker
    OTHER_OPTIMIZER = auto()  #: than SGD; `optimizer`
    NO_MOMENTUM = auto()  #: an optimizer without; `optimizer`
    KV = auto()  #: `pt.tables.KV`
    FIT = auto()  #: `pt.fit`
    GPU_MEMORY = auto()  #: exchanges with servers through the memory of a GPU
    SYNCHRONIZE = auto()  #: `optimizer.synchronize()`
    NO_SYNC = auto()  #: `optimizer.no_sync()`
    PUSH_PARAMETERS = auto()  #: `optimizer.push_parameters()`
    # What outlives the job.
    CHECKPOINT = auto()  #: `--checkpoint`; `option`
    RESUME = auto()  #: `--resume`


@dataclass(frozen=True)
class Capability:
    """A fact about a mode with its options, from which a row of the table follows."""

    words: str
    holds: Callable[[Spec], bool]


@dataclass(frozen=True)
class Conflict:
    """Why a capability and a feature do not go together, and what to do."""

    reason: str
    remedy: str
    refuses: bool = True  #: else the feature is passed over, and the job runs without it
    nearest: tuple[str, ...] = ()  #: of split models: modes that may go in its place; empty: the same without its options

    def text(self, spec: Spec, **facts: object) -> str:
        """As it is told."""
        return f"{self.reason}; {self.remedy}".format(mode=spec.text, **facts)


ANY = Capability("any mode", lambda spec: True)
NEIGHBOURS = Capability("each worker has a model of its own", lambda spec: spec.capabilities.neighbours)
AVERAGES = Capability("models are averaged", lambda spec: spec.capabilities.averages)
DECOUPLED = Capability(
    "models are averaged as they come", lambda spec: spec.capabilities.averages and not spec.capabilities.rounds
)
PUSHES_GRADIENTS = Capability("gradients are pushed", lambda spec: spec.capabilities.pushes is Pushes.GRADIENTS)
FETCHES = Capability("local steps between pushes and fetches", lambda spec: spec.capabilities.fetches)
SHARES = Capability("batches are shares by speed", lambda spec: spec.capabilities.work is PushedWork.SHARE)
DEADLINES = Capability("rounds end at a deadline", lambda spec: spec.capabilities.work is PushedWork.DEADLINE)
BY_SPEED = Capability("a worker's work follows its speed", lambda spec: spec.capabilities.by_speed)
MICRO_BATCHES = Capability("gradients of whole micro-batches are summed", lambda spec: spec.capabilities.micro > 0)
REDUCES = Capability("workers can reduce among themselves", lambda spec: spec.capabilities.reduces)
NEEDS_SERVERS = Capability(
    "values are on servers", lambda spec: not (spec.capabilities.reduces or spec.capabilities.neighbours)
)
HAS_SERVERS = Capability("values can be on servers, or reduced", lambda spec: not spec.capabilities.neighbours)
OWN_MODELS = Capability(
    "each worker has a model of its own, beside the job's", lambda spec: spec.averaging is not None and spec.averaging.own
)
EARLY = Capability("answers come before updates", lambda spec: spec.capabilities.early)
NOT_COMMON = Capability("workers hold different versions", lambda spec: not spec.capabilities.common)
NO_ROUNDS = Capability("no barrier", lambda spec: not spec.capabilities.rounds)
ROUNDS_OF_GRADIENTS = Capability(
    "rounds of gradients", lambda spec: spec.capabilities.rounds and not spec.capabilities.averages
)
NEVER_WAITS = Capability("pushes are not waited for", lambda spec: not spec.capabilities.waits)
OWN_RULE = Capability("an update rule of its own", lambda spec: bool(spec.mode.rule))
CORRECTED = Capability(
    "stale gradients are corrected on servers", lambda spec: spec.corrections.any and not spec.worker_momentum
)
CORRECTED_APART = Capability("stale gradients are corrected", lambda spec: spec.corrections.any)
COMPENSATED = Capability("dc or dca", lambda spec: spec.corrections.compensation is not None)
FETCHES_AND_COMPENSATES = Capability(
    "local steps, and dc or dca", lambda spec: FETCHES.holds(spec) and COMPENSATED.holds(spec)
)
ADAPTS_MOMENTUM = Capability("momentum=async", lambda spec: spec.corrections.adapts_momentum)
CORRECTS_MOMENTUM = Capability(
    "momentum=async, and the optimizer's rule", lambda spec: spec.corrections.adapts_momentum and not spec.mode.rule
)
LIMITS_ITS_WAIT = Capability("wait=", lambda spec: "wait" in spec.options)

#: What goes with every split of a model.
ALWAYS = ("bsp", "local:8", "diloco:50")

_AT_THE_WORKER = Conflict(
    "--sync {mode} keeps each worker's model at the worker, and servers hold none", "leave {option} out"
)
_NO_SEQUENCER = Conflict("{mode} needs the sequencer of polytempo run, and this job has none", "start it with that")
_BY_ALLREDUCE = Conflict("--via allreduce cannot do {option}", "use --via ps, or leave that option out")
_NO_SERVERS = Conflict("there are no servers: this job was not started by polytempo run", "use sync='bsp' without via='ps'")
_TO_SERVERS = Conflict(
    "compression is for what goes to and from servers", "use via='ps' and apply='server', or leave it out"
)
_ON_SERVERS = Conflict("{mode} needs the gradients on the servers", "leave apply='delta' out")
_FOR_MODELS = Conflict("{mode} is for models, and arrays have rules of their own", "use asp, ssp:3, delay:8, ...")
_NO_SEQUENCER_STARTED = Conflict("sync='{mode}' needs a sequencer, which {launcher} does not start", "use polytempo run")

#: The first row of a feature whose capability a mode has is what is told.
TABLE: dict[tuple[Capability, Feature], Conflict] = {
    (NEIGHBOURS, Feature.SERVERS): _AT_THE_WORKER,
    (NEIGHBOURS, Feature.CHECKPOINT): _AT_THE_WORKER,
    (NEIGHBOURS, Feature.RESUME): Conflict(
        "{mode} keeps each worker's model at the worker, and no checkpoint holds it", "leave --resume out"
    ),
    (NEEDS_SERVERS, Feature.ALLREDUCE): _BY_ALLREDUCE,
    (NEIGHBOURS, Feature.ALLREDUCE): Conflict(
        "{mode} sends models from neighbour to neighbour", "it goes its own way", refuses=False
    ),
    (ANY, Feature.SERVERS_BESIDE_ALLREDUCE): _BY_ALLREDUCE,
    (NEEDS_SERVERS, Feature.OTHER_LAUNCHER): Conflict(
        "sync='{mode}' needs servers, which {launcher} does not start", "use polytempo run"
    ),
    (NEIGHBOURS, Feature.OTHER_LAUNCHER): _NO_SEQUENCER_STARTED,
    (DEADLINES, Feature.OTHER_LAUNCHER): _NO_SEQUENCER_STARTED,
    (NEIGHBOURS, Feature.NO_SEQUENCER): _NO_SEQUENCER,
    (DEADLINES, Feature.NO_SEQUENCER): _NO_SEQUENCER,
    (NEEDS_SERVERS, Feature.NO_SERVERS): _NO_SERVERS,
    (ANY, Feature.VIA_PS_WITHOUT_SERVERS): _NO_SERVERS,
    (NEIGHBOURS, Feature.VIA_PS): Conflict("{mode} keeps each worker's model at the worker", "leave via='ps' out"),
    (NEEDS_SERVERS, Feature.VIA_ALLREDUCE): Conflict(
        "via='allreduce' needs sync='bsp', or averages of models, this is {mode}", "use via='ps'"
    ),
    (NEEDS_SERVERS, Feature.SIMULATED_ALLREDUCE): Conflict(
        "{mode} needs a parameter server, got {via!r}", "use ps, or bsp with {via}"
    ),
    (HAS_SERVERS, Feature.SIMULATED_PEERS): Conflict("{mode} cannot go by {via!r}", "use ps, or gossip:ring with peers"),
    (NEIGHBOURS, Feature.SIMULATED_NO_PEERS): Conflict(
        "{mode} cannot go by {via!r}", "use peers: its values go from worker to worker"
    ),
    (NEIGHBOURS, Feature.GROUP): Conflict(
        "{mode} mixes models between neighbours among all {size} ranks, and the group has ranks {ranks}",
        "leave group= out, or use sync='local:8'",
    ),
    (SHARES, Feature.GROUP): Conflict(
        "{mode} shares a data set among all {size} ranks, and the group has ranks {ranks}",
        "leave group= out, or use sync='bsp'",
    ),
    (NOT_COMMON, Feature.TIED): Conflict(
        "stages {stages} hold {parameter}, and under sync={mode} its copies would be updated in different "
        "orders and drift apart",
        "use bsp, local or diloco, or stages= that keep it in one",
    ),
    (CORRECTED, Feature.DELTA): Conflict("{mode} corrects gradients on the servers", "leave apply='delta' out"),
    (OWN_RULE, Feature.DELTA): _ON_SERVERS,
    (FETCHES, Feature.DELTA): _ON_SERVERS,
    (DEADLINES, Feature.DELTA_ON_SERVERS): Conflict(
        "{mode} over servers has the servers run the optimizer", "use apply='server', or via='allreduce'"
    ),
    (NEIGHBOURS, Feature.SELECTION): Conflict(
        "{mode} sends whole models, which it can cast", "use compression='bf16' or 'fp16', not {compression}"
    ),
    (FETCHES, Feature.COMPRESSED_ANSWERS): Conflict(
        "{mode} reads values whole", "compress pushes alone: compression={{'push': ...}}"
    ),
    (REDUCES, Feature.COMPRESSION_AMONG_WORKERS): _TO_SERVERS,
    (PUSHES_GRADIENTS, Feature.COMPRESSED_CHANGES): _TO_SERVERS,
    (OWN_MODELS, Feature.COMPRESSED_VALUES): Conflict(
        "{mode} goes a part of the way from whole values to whole values", "leave compression out"
    ),
    (EARLY, Feature.DELTA): Conflict("{mode} answers before an update is made", "leave apply='delta' out"),
    (FETCHES_AND_COMPENSATES, Feature.OPTIMIZER): Conflict(
        "{mode}: dc and dca need the weights a gradient was taken on, which local steps make here", "leave them out"
    ),
    (NEIGHBOURS, Feature.SERVER_EMBEDDING): Conflict(
        "{mode} has no servers to hold a ServerEmbedding", "use another mode, such as sync='asp'"
    ),
    (AVERAGES, Feature.SERVER_EMBEDDING): Conflict(
        "rows of a ServerEmbedding are pushed in each step, and {mode} makes local steps", "use bsp"
    ),
    (MICRO_BATCHES, Feature.ROWS): Conflict(
        "{mode} sums the gradients of micro-batches, which rows of tables are not",
        "use sync='bsp+balance' with pt.DistributedBatchSampler, or sync='bsp'",
    ),
    (EARLY, Feature.ROWS): Conflict(
        "{mode} answers a push before it is applied, and the answer brings the rows of tables",
        "use another mode, such as bsp",
    ),
    (FETCHES, Feature.SPARSE_EMBEDDING): Conflict(
        "{mode} makes local steps on the whole table", "all of it travels", refuses=False
    ),
    (DEADLINES, Feature.MEAN_OF_BUFFERS): Conflict(
        "buffers='mean' waits for all workers, and {mode} waits for none", "leave it out"
    ),
    (ROUNDS_OF_GRADIENTS, Feature.LBFGS): Conflict(
        "LBFGS evaluates the loss a different number of times on each worker, so rounds cannot match", "use sync='asp'"
    ),
    (OWN_RULE, Feature.OTHER_OPTIMIZER): Conflict(
        "{mode} brings its own rule", "wrap SGD, whose lr and weight_decay it takes, not {optimizer}"
    ),
    (CORRECTS_MOMENTUM, Feature.NO_MOMENTUM): Conflict(
        "momentum=async needs an optimizer with a momentum to correct, got {optimizer}", "use SGD with momentum"
    ),
    (OWN_RULE, Feature.KV): _FOR_MODELS,
    (FETCHES, Feature.KV): _FOR_MODELS,
    (COMPENSATED, Feature.KV): _FOR_MODELS,
    (ADAPTS_MOMENTUM, Feature.KV): _FOR_MODELS,
    (SHARES, Feature.FIT): Conflict(
        "fit() takes batches of one size, and {mode} shares them by speed",
        "use sync=bsp, or prepare() and a loop of your own",
    ),
    (NEVER_WAITS, Feature.GPU_MEMORY): Conflict(
        "{mode} computes on while a push is under way", "values pass through the host", refuses=False
    ),
    (EARLY, Feature.GPU_MEMORY): Conflict(
        "{mode} answers a push before it is applied", "values pass through the host", refuses=False
    ),
    (EARLY, Feature.SYNCHRONIZE): Conflict(
        "synchronize() waits for the mean, and {mode} answers before it is made", "clip before step(), or use clip_norm="
    ),
    (AVERAGES, Feature.SYNCHRONIZE): Conflict(
        "synchronize() averages gradients, and {mode} averages values", "clip before step()"
    ),
    (DEADLINES, Feature.SYNCHRONIZE): Conflict(
        "synchronize() averages one batch of each worker, and anytime takes several", "use clip_norm="
    ),
    (NO_ROUNDS, Feature.SYNCHRONIZE): Conflict(
        "synchronize() needs a barrier mode, this is {mode}", "clip before step() instead"
    ),
    (BY_SPEED, Feature.NO_SYNC): Conflict(
        "no_sync() sums batches without their weights, and those of {mode} differ in size",
        "leave it out: with bsp+balance,micro=M and under anytime step() itself accumulates",
    ),
    (DEADLINES, Feature.PUSH_PARAMETERS): Conflict(
        "push_parameters() is not possible in anytime", "change values before DistributedOptimizer()"
    ),
    (DECOUPLED, Feature.PUSH_PARAMETERS): Conflict(
        "push_parameters() is not possible in {mode}: values are this worker's own at all times",
        "change them before DistributedOptimizer()",
    ),
    (FETCHES, Feature.PUSH_PARAMETERS): Conflict(
        "push_parameters() is not possible in this job: values are this worker's own between fetches",
        "change values before DistributedOptimizer()",
    ),
}


def _split(found: Unsound) -> Conflict:
    return Conflict(found.reason, "use {instead}", nearest=found.nearest)


def _alone(mode: Mode) -> Capability:
    return Capability(f"the mode {mode.example}", lambda spec: spec.mode is mode)


#: What goes with a model that is split, each mode says in its own file; the theory is in `strategy/soundness.py`.
_SPLIT = {
    **{_alone(mode): _split(mode.split) for mode in every_mode() if mode.split is not None},
    LIMITS_ITS_WAIT: _split(Unsound("stages could leave out different replicas from a barrier (wait=)", ())),
    CORRECTED_APART: _split(Unsound("each stage would correct its part of a step by the staleness that it sees itself", ())),
}
TABLE |= {(key, feature): row for feature in (Feature.PIPELINE, Feature.TENSOR) for key, row in _SPLIT.items()}
TABLE[NOT_COMMON, Feature.TENSOR] = _split(
    Unsound("without a barrier two ranks of a tensor group could read different versions of a weight that both hold", ALWAYS)
)


def conflict(spec: Spec, feature: Feature) -> Conflict | None:
    """What stands between a mode and a feature; None where they go together."""
    if spec.mode.origin is not None and spec.mode.split is not None and feature in (Feature.PIPELINE, Feature.TENSOR):
        return _split(spec.mode.split)  # as ours have a row each
    rows = (row for (capability, of), row in TABLE.items() if of is feature and capability.holds(spec))
    return next(rows, None)


def goes_instead(spec: Spec, feature: Feature, found: Conflict) -> Sequence[str]:
    """The modes to use where this one does not go with a split model: those nearest to it, or else those that always go."""
    plain = (spec.text.split(",")[0] if spec.arguments else spec.mode.name,)
    return [mode for mode in found.nearest or plain if conflict(parse_spec(mode), feature) is None] or ALWAYS


def check_features(spec: Spec, wanted: Feature | Mapping[Feature, bool], **facts: object) -> None:
    """Refuse the first of the features that does not go with a mode.

    Args:
        spec: The mode with its options.
        wanted: A feature; or several, with whether each is wanted.
        **facts: What the texts of these features name, beside the mode.

    Raises:
        UsageError: One line with the reason and what to do.
    """
    features = [wanted] if isinstance(wanted, Feature) else [feature for feature, asked in wanted.items() if asked]
    for feature in features:
        found = conflict(spec, feature)
        if found is not None and found.refuses:
            raise UsageError(found.text(spec, **facts))
