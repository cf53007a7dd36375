"""Every place that refuses, for every mode: it says what the table says, and refuses nothing that the table does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polytempo.compression.chain import parse_compression
from polytempo.door import bring_file
from polytempo.errors import UsageError
from polytempo.launcher.environment import Placement
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.pipeline import builder
from polytempo.reducer.device_exchange import device_of
from polytempo.server.resume_rules import check_modes
from polytempo.session import session as sessions
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.run import resolve_via
from polytempo.strategy import fit as fitting
from polytempo.strategy.soundness import check_pair, check_tied
from polytempo.sync.compatibility import TABLE, Conflict, Feature, conflict
from polytempo.sync.spec import Spec, every_mode, parse_spec
from polytempo.train import kv
from polytempo.train.optimizer import DistributedOptimizer
from polytempo.train.validation import OptimizerArguments, OptimizerPlan, optimizer_group, reduces_among_workers

F = Feature
#: Each mode, each variant, one of a file, and options on which rows depend.
OWN = bring_file(Path(__file__).parents[2] / "examples" / "own_mode.py")
MODES = [
    *dict.fromkeys(mode.example for mode in every_mode()),
    *(f"own_mode.py:{name}:2" for name in OWN),
    *("bsp+balance,micro=8", "every:8,wait=2", "asp,drop=3", "asp,dc=0.1", "asp,momentum=async", "delay:0"),
    *("asup,drop=2", "downpour:push=2,dc=0.1", "asp,momentum=server", "diloco:100,quorum=2,grace=inf"),
]
SGD = torch.optim.SGD


class Passed(Exception):
    """What stands behind the check was reached."""


def stop(*_: object, **__: object) -> None:
    raise Passed


def session_of(size: int = 3, *, servers: bool = True, via: str = "ps") -> Any:
    job = SimpleNamespace(via=via, sync="bsp")
    return SimpleNamespace(size=size, rank=0, together=size > 1, client=object() if servers else None, job=job)


def request(sync: str, **options: Any) -> None:
    RunRequest(ScriptProgram("train.py"), workers=4, sync=sync, **options).check_mode()


def way(sync: str, via: str | None, servers: bool, tables: bool = False) -> None:
    reduces_among_workers(parse_spec(sync), via, session_of(servers=servers), tables)


def settled(
    sync: str,
    kind: Callable[..., torch.optim.Optimizer] = SGD,
    model: nn.Module | None = None,
    *,
    apply: str = "server",
    via: str | None = None,
    compression: Any = None,
    buffers: str = "local",
    tables: bool = False,
) -> OptimizerPlan:
    model = model or nn.Linear(2, 2)
    names, params = zip(*model.named_parameters(), strict=True)
    arguments = OptimizerArguments(
        *(session_of(), kind(params, lr=0.1), model, list(params), list(names), [0] * len(params)),
        *(None, via, apply, parse_compression(compression), buffers, None, tables),
    )
    return arguments.settled(parse_spec(sync))


def other_launcher(sync: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "placement_of_environment", lambda: Placement("torchrun", 0, 2, 0, 2, "job"))
    patch.setattr(sessions, "JobFacts", stop)
    patch.setattr(sessions, "_session", None)
    for name in ("job_of_environment", "started_by"):
        patch.setattr(sessions, name, lambda *_: None)
    sessions.init(sync=sync)


def arrays(sync: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv, "current", lambda: SimpleNamespace(client=None, check_part=stop, spec_of=parse_spec))
    kv.KV({"w": kv.Array(4)}, sync=sync)


def fit(sync: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fitting, "is_initialized", lambda: True)
    patch.setattr(fitting, "size", lambda: 2)
    patch.setattr(fitting.Strategy, "distribute", stop)
    model, data = nn.Linear(2, 2), torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 2))
    chosen = fitting.Strategy(data=2, sync=sync)
    fitting.fit(model, data, loss=nn.MSELoss(), optimizer=lambda p: SGD(p, lr=0.1), strategy=chosen, batch_size=2)


def tied_stages(sync: str) -> None:
    stage = SimpleNamespace(data_axis=SimpleNamespace(optimizer=SimpleNamespace(spec=parse_spec(sync))))
    schedule = SimpleNamespace(flushes=True, replicas=(1,), name="1f1b")
    builder._check_data_axis(stage, schedule, {(0, 1): ["w"]})  # type: ignore[arg-type]


def made(sync: str) -> Any:
    """An optimizer of two workers, as far as its checks look at it."""
    return SimpleNamespace(_spec=parse_spec(sync), _reducer=object(), _set_syncing=stop)


#: What is wanted in this order, and how.
ENTRIES: dict[str, tuple[tuple[Feature, ...], Callable[..., object]]] = {
    "--servers": ((F.SERVERS,), lambda sync: request(sync, servers=1)),
    "--checkpoint": ((F.CHECKPOINT,), lambda sync: request(sync, checkpoint=Path("dir"))),
    "--via allreduce": ((F.ALLREDUCE,), lambda sync: request(sync, via="allreduce")),
    "--via allreduce --servers": (
        (F.SERVERS, F.ALLREDUCE, F.SERVERS_BESIDE_ALLREDUCE),
        lambda sync: request(sync, via="allreduce", servers=1),
    ),
    "resume": ((F.RESUME,), lambda sync: check_modes("step-1", parse_spec(sync), parse_spec(sync))),
    "torchrun": ((F.OTHER_LAUNCHER,), other_launcher),
    "no servers": ((F.NO_SEQUENCER, F.NO_SERVERS), lambda sync: way(sync, None, servers=False)),
    "via=ps": ((F.VIA_PS,), lambda sync: way(sync, "ps", servers=True)),
    "via=ps without servers": (
        (F.NO_SEQUENCER, F.VIA_PS, F.NO_SERVERS, F.VIA_PS_WITHOUT_SERVERS),
        lambda sync: way(sync, "ps", servers=False),
    ),
    "via=allreduce": ((F.VIA_ALLREDUCE,), lambda sync: way(sync, "allreduce", servers=True)),
    "simulate ring": (
        (F.SIMULATED_NO_PEERS, F.SIMULATED_ALLREDUCE),
        lambda sync: resolve_via(parse_spec(sync), "ring", Cluster(workers=4)),
    ),
    "simulate ps": ((F.SIMULATED_NO_PEERS,), lambda sync: resolve_via(parse_spec(sync), "ps", Cluster(workers=4))),
    "simulate peers": ((F.SIMULATED_PEERS,), lambda sync: resolve_via(parse_spec(sync), "peers", Cluster(workers=4))),
    "simulate": ((), lambda sync: resolve_via(parse_spec(sync), "auto", Cluster(workers=4))),
    "group=": ((F.GROUP,), lambda sync: optimizer_group(SimpleNamespace(ranks=(0, 1)), session_of(), parse_spec(sync))),  # type: ignore[arg-type]
    "pipe=": ((F.PIPELINE,), lambda sync: check_pair(parse_spec(sync), 2, 1, "1f1b")),
    "tensor=": ((F.TENSOR,), lambda sync: check_pair(parse_spec(sync), 1, 2, "1f1b")),
    "tied": ((F.TIED,), lambda sync: check_tied(parse_spec(sync), (0, 1), "w")),
    "tied in a pipeline": ((F.TIED,), tied_stages),
    "an optimizer": ((F.OPTIMIZER,), settled),
    "apply=delta": ((F.DELTA_ON_SERVERS, F.DELTA, F.OPTIMIZER), lambda sync: settled(sync, apply="delta")),
    "topk": ((F.OPTIMIZER, F.SELECTION, F.COMPRESSED_VALUES), lambda sync: settled(sync, compression={"push": "topk:0.5"})),
    "casts": ((F.OPTIMIZER, F.COMPRESSED_VALUES), lambda sync: settled(sync, compression={"push": "bf16"})),
    "casts of answers": (
        (F.COMPRESSED_ANSWERS, F.OPTIMIZER, F.COMPRESSED_VALUES),
        lambda sync: settled(sync, compression={"pull": "bf16"}),
    ),
    "casts among workers": (
        (F.VIA_ALLREDUCE, F.COMPRESSION_AMONG_WORKERS),
        lambda sync: settled(sync, compression={"push": "bf16"}, via="allreduce"),
    ),
    "casts of changes": (
        (F.DELTA_ON_SERVERS, F.DELTA, F.OPTIMIZER, F.COMPRESSED_CHANGES, F.COMPRESSED_VALUES),
        lambda sync: settled(sync, apply="delta", compression={"push": "bf16"}),
    ),
    "ServerEmbedding": ((F.SERVER_EMBEDDING, F.ROWS, F.OPTIMIZER), lambda sync: settled(sync, tables=True)),
    "buffers=mean": ((F.MEAN_OF_BUFFERS, F.OPTIMIZER), lambda sync: settled(sync, buffers="mean")),
    "LBFGS": (
        (F.LBFGS, F.DELTA_ON_SERVERS, F.OTHER_OPTIMIZER, F.NO_MOMENTUM, F.DELTA, F.OPTIMIZER),
        lambda sync: settled(sync, torch.optim.LBFGS, apply="delta"),
    ),
    "Adam": ((F.OTHER_OPTIMIZER, F.NO_MOMENTUM, F.OPTIMIZER), lambda sync: settled(sync, torch.optim.Adam)),
    "KV": ((F.KV,), arrays),
    "fit": ((F.FIT,), fit),
    "synchronize": ((F.SYNCHRONIZE,), lambda sync: DistributedOptimizer.synchronize(made(sync))),
    "no_sync": ((F.NO_SYNC,), lambda sync: DistributedOptimizer.no_sync(made(sync)).__enter__()),
    "push_parameters": ((F.PUSH_PARAMETERS,), lambda sync: DistributedOptimizer.push_parameters(made(sync))),
}
#: What is passed over where it does not go with a mode.
PASSED_OVER = {F.ALLREDUCE, F.GPU_MEMORY, F.SPARSE_EMBEDDING}


def expected(spec: Spec, features: tuple[Feature, ...]) -> Conflict | None:
    found = [conflict(spec, feature) for feature in features]
    return next((row for row in found if row is not None and row.refuses), None)


def pattern(row: Conflict) -> str:
    """What a text of this row looks like, whatever the facts are."""
    pieces = re.split(r"\{\w*(?:![rs])?\}", f"{row.reason}; {row.remedy}")
    return ".+".join(re.escape(piece.replace("{{", "{").replace("}}", "}")) for piece in pieces)


def refusal(call: Callable[..., object], *arguments: Any) -> str:
    try:
        call(*arguments)
    except UsageError as error:
        return str(error)
    except (Passed, AttributeError):  # of a stand-in, behind the check
        pass
    return ""


@pytest.mark.parametrize("sync", MODES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_refused_is_in_the_table(entry: str, sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, call = ENTRIES[entry]
    row = expected(parse_spec(sync), features)
    arguments = (sync, monkeypatch) if call in (other_launcher, fit, arrays) else (sync,)
    told = refusal(call, *arguments)
    if row is None:
        assert told == "", "refused, but not by the table"
    else:
        assert re.search(pattern(row), told)
        assert "\n" not in told


def test_every_row_is_told_somewhere() -> None:
    rows = [expected(parse_spec(sync), features) for sync in MODES for features, _ in ENTRIES.values()]
    told = {id(row) for row in rows}
    never = [(key.words, feature.name) for (key, feature), row in TABLE.items() if row.refuses and id(row) not in told]
    assert never == []


def test_every_feature_with_rows_has_a_place_that_asks_for_it() -> None:
    asked = {feature for features, _ in ENTRIES.values() for feature in features}
    assert {feature for _, feature in TABLE} == asked | PASSED_OVER


@pytest.mark.parametrize("sync", MODES)
def test_what_is_passed_over(sync: str) -> None:
    spec = parse_spec(sync)
    devices = SimpleNamespace(of=lambda place: "its device")
    client = SimpleNamespace(pool=SimpleNamespace(registry=object()))
    plain = SimpleNamespace(push_filter="", pull_filter="", tables=())
    found = device_of(devices, client, spec, plain, [torch.zeros(1)])  # type: ignore[arg-type]
    assert (found is None) == (conflict(spec, F.GPU_MEMORY) is not None)


@pytest.mark.parametrize(("sync", "tables"), [("asp", 1), ("delay:8", 1), ("downpour", 0)])
def test_sparse_embeddings_are_tables_where_that_goes(sync: str, tables: int) -> None:
    assert len(settled(sync, model=nn.Embedding(4, 2, sparse=True)).mirrored) == tables
    assert (conflict(parse_spec(sync), F.SPARSE_EMBEDDING) is None) == bool(tables)
