"""What users rely on: public names, commands, options. A change here is a change of the contract."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

import polytempo
from polytempo.cli.main import app
from polytempo.sync.spec import MODES

ROOT = Path(__file__).parents[2]


def test_public_names() -> None:
    assert sorted(polytempo.__all__) == [
        "AsuP",
        "Callback",
        "DistributedBatchSampler",
        "DistributedModel",
        "DistributedOptimizer",
        "DistributedSampler",
        "EarlyStop",
        "Explanation",
        "FitRun",
        "Group",
        "History",
        "JobEnded",
        "PeerError",
        "Pipeline",
        "PolytempoError",
        "RankLost",
        "RngState",
        "Schedule",
        "Strategy",
        "Task",
        "UsageError",
        "__version__",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "cross_entropy",
        "describe_model",
        "evaluate",
        "evaluation_statistics",
        "explain_algorithm",
        "fit",
        "gather",
        "init",
        "irecv",
        "is_initialized",
        "isend",
        "launch",
        "local_device",
        "local_rank",
        "local_size",
        "log",
        "new_group",
        "prepare",
        "rank",
        "recv",
        "reduce",
        "reduce_scatter",
        "reform",
        "register_for_checkpointing",
        "scatter",
        "send",
        "should_stop",
        "shutdown",
        "simulate",
        "size",
        "tables",
    ]
    for name in polytempo.__all__:
        assert getattr(polytempo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = polytempo.simulat


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("get_rank", "; write pt.rank()"),
        ("world_size", "; write pt.size()"),
        ("allreduce", "; write pt.all_reduce(tensor, op='mean'), or import polytempo.horovod as hvd"),
        ("DistributedOptimiser", "; nearest: DistributedOptimizer"),
        ("al_reduce", "; nearest: all_reduce"),
        ("xyzzy", "; dir(polytempo) names all it has"),
    ],
)
def test_an_unknown_name_is_answered_with_ours(name: str, says: str) -> None:
    with pytest.raises(AttributeError) as refused:
        getattr(polytempo, name)
    assert str(refused.value) == f"module 'polytempo' has no attribute {name!r}{says}"


def test_what_other_libraries_call_it_is_answered_with_a_public_name() -> None:
    names = [name for names in polytempo._ELSEWHERE.values() for name in names]
    assert len(names) == len(set(names))
    assert not set(names) & set(polytempo.__all__)
    for answer in polytempo._ELSEWHERE:
        written = re.findall(r"pt\.(\w+)", answer)
        assert set(written) <= set(polytempo.__all__)
        assert written or answer == "import polytempo.horovod as hvd"


def test_names_of_the_namespaces() -> None:
    assert sorted(polytempo.tables.__all__) == ["Array", "KV", "ServerEmbedding"]
    assert sorted(polytempo.simulate.__all__) == [
        "Cluster",
        "Constant",
        "Hiccup",
        "Hosts",
        "Link",
        "Lognormal",
        "Outcome",
        "cluster_from",
        "digits",
        "fashion_mnist",
        "fashion_mnist_cnn",
        "simulate_job",
        "train_virtually",
    ]


def options(command: str) -> list[str]:
    parameters = typer.main.get_command(app).commands[command].params
    return sorted(option for parameter in parameters for option in parameter.opts if option.startswith("--"))


def test_commands_and_options() -> None:
    assert sorted(typer.main.get_command(app).commands) == [
        "advise",
        "check",
        "compare",
        "explain",
        "key",
        "modes",
        "picture",
        "plan",
        "run",
        "simulate",
        "worker",
    ]
    assert options("key") == []
    assert options("check") == options("modes") == ["--mode"]
    assert options("explain") == ["--json", "--mode"]
    assert options("advise") == [
        *("--bandwidth", "--batch", "--fixed-time", "--hiccup", "--json", "--latency", "--mode", "--model", "--quiet"),
        *("--samples", "--seed", "--servers", "--slow", "--spread", "--step-time", "--workers"),
    ]
    assert options("picture") == ["--between", "--last", "--out", "--title"]
    assert options("plan") == [
        *(
            "--batch",
            "--devices",
            "--json",
            "--memory",
            "--microbatches",
            "--module",
            "--profile",
            "--repeats",
            "--strategy",
            "--workers",
        ),
    ]
    assert options("worker") == [
        *("--fork", "--host-timeout", "--insecure", "--join", "--key-file", "--mode", "--module", "--quiet", "--workers"),
    ]
    assert options("compare") == [
        "--fork",
        "--hiccup",
        "--json",
        "--link",
        "--metric",
        "--mode",
        "--module",
        "--on-divergence",
        "--out",
        "--overwrite",
        "--picture",
        "--repeats",
        "--samples",
        "--seconds",
        "--seed",
        "--servers",
        "--slow",
        "--steps",
        "--sync",
        "--target",
        "--workers",
    ]
    assert options("run") == [
        "--checkpoint",
        "--checkpoint-errors",
        "--checkpoint-every",
        "--debug",
        "--expect",
        "--fork",
        "--grace",
        "--hiccup",
        "--host-timeout",
        "--insecure",
        "--link",
        "--listen",
        "--max-restarts",
        "--min-workers",
        "--mode",
        "--module",
        "--on-divergence",
        "--overwrite",
        "--quiet",
        "--record",
        "--resume",
        "--samples",
        "--seconds",
        "--seed",
        "--server-device",
        "--servers",
        "--slow",
        "--steps",
        "--strategy",
        "--sync",
        "--timeout",
        "--verbose",
        "--via",
        "--workers",
    ]
    assert options("simulate") == [
        "--bandwidth",
        "--batch",
        "--fixed-time",
        "--hiccup",
        "--json",
        "--latency",
        "--like",
        "--lr",
        "--mode",
        "--model",
        "--overwrite",
        "--per-host",
        "--picture",
        "--quiet",
        "--record",
        "--samples",
        "--scaling",
        "--seconds",
        "--seed",
        "--servers",
        "--shared",
        "--slow",
        "--spread",
        "--step-time",
        "--steps",
        "--steps-each",
        "--sync",
        "--target",
        "--trace",
        "--train",
        "--via",
        "--workers",
    ]


def test_modes() -> None:
    named = [
        "bsp",
        "bsp+backup",
        "bsp+balance",
        "anytime",
        "ssp",
        "dssp",
        "dssp-paper",
        "asp",
        "every",
        "delay",
        "downpour",
        "asup",
    ]
    named += ["local", "adacomm", "diloco", "easgd", "gossip", "adpsgd"]
    assert list(MODES) == named


def test_what_is_read_from_the_environment() -> None:
    """A worker's job, rank, address and key; its debugger; threads; malloc; what children inherit; GPUs."""
    sources = (ROOT / "src").rglob("*.py")
    readers = {path.name: path.read_text(encoding="utf-8") for path in sources}
    found = {name: re.findall(r"os\.environ[^\n]*", text) for name, text in readers.items() if "os.environ" in text}
    forked, replaced = found.pop("forked_process.py"), ("get(name) != value}", "clear()", "update(environment)")
    assert forked == [f"os.environ.{use}" for use in replaced]  # a forked process gets its own
    assert found.pop("main.py") == ["os.environ)"]  # the words that bash asks the completion of
    assert sorted(found) == [
        *("agent.py", "child_process.py", "debugger.py", "job_facts.py", "job_processes.py", "request.py"),
    ]
    assert found["debugger.py"] == ["os.environ[JOB_VARIABLE]).parent / SOCKET))"]
    assert found["child_process.py"] == ["os.environ, **environment}"]
    threads = [use for use in found["job_processes.py"] if use != "os.environ) else KEEP_MEMORY"]  # are any of MALLOC_ set?
    assert len(threads) == 1
    assert all("OMP_NUM_THREADS" in use for use in [*found["agent.py"], *threads])
    ours = r"(JOB|RANK|ADDRESS|KEY|WORKER|DEBUGGER)_VARIABLE|TORCHELASTIC_USE_AGENT_STORE|placement"
    assert all(re.search(ours, use) for use in found["job_facts.py"])
    assert not [name for name, text in readers.items() if "getenv" in text]
