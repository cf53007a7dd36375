"""Imports go one way, and what must be pure is pure. The table is the architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import polytempo.simulate
import polytempo.tables

SOURCE = Path(__file__).parents[2] / "src" / "polytempo"

#: Folder (or file): what of polytempo it may import, and what from outside the standard library.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "version": (set(), set()),
    "errors": (set(), set()),
    "lazy_imports": ({"errors"}, set()),
    "summation": (set(), set()),
    "profile_ranges": (set(), {"torch"}),
    "options": ({"errors"}, set()),
    "units": ({"errors"}, set()),
    "checkpoints": ({"errors"}, set()),
    "mesh": ({"errors"}, set()),
    "sync": ({"errors", "options", "summation"}, {"msgspec"}),
    "modes": ({"errors", "options", "sync"}, set()),
    "door": ({"errors", "sync"}, set()),
    "records": ({"checkpoints", "errors", "sync"}, set()),
    "optim": ({"errors", "lazy_imports", "sync"}, {"torch"}),
    "tasks": ({"errors"}, {"torch", "numpy"}),
    "simulate": (
        {"errors", "lazy_imports", "version", "sync", "records", "optim", "summation", "units", "tasks"},
        {"torch", "numpy"},
    ),
    "proving": ({"errors", "sync", "simulate", "units"}, {"msgspec", "torch"}),
    "protocol": ({"errors", "summation", "sync", "units"}, {"msgspec"}),
    "transport": ({"errors"}, {"zmq", "numpy"}),
    "device": ({"errors", "transport"}, {"torch", "numpy"}),
    "collectives": ({"errors", "transport", "summation", "device", "profile_ranges", "units"}, {"torch", "numpy"}),
    "tables": ({"errors", "lazy_imports", "options", "protocol", "summation"}, {"torch", "numpy"}),
    "compression": ({"errors", "options"}, {"torch", "numpy"}),
    "server": (
        {
            *("errors", "checkpoints", "summation", "sync", "records", "protocol", "transport", "collectives", "optim"),
            *("tables", "compression", "device"),
        },
        {"torch", "numpy", "zmq", "msgspec", "safetensors"},
    ),
    "launcher": (
        {
            "door",
            "checkpoints",
            "device",
            "errors",
            "mesh",
            "version",
            "sync",
            "proving",
            "records",
            "protocol",
            "transport",
            "optim",
            "server",
            "units",
        },
        {"rich", "torch", "cloudpickle"},
    ),
    "client": (
        {"errors", "device", "protocol", "transport", "tables", "compression", "server", "launcher", "profile_ranges"},
        {"torch", "numpy", "zmq", "msgspec"},
    ),
    "session": (
        {"door", "errors", "sync", "protocol", "transport", "collectives", "optim", "launcher", "client", "device"},
        {"torch", "numpy"},
    ),
    "reducer": (
        {
            *("errors", "summation", "sync", "protocol", "transport", "collectives", "optim", "compression", "server"),
            *("client", "session", "device", "profile_ranges"),
        },
        {"torch", "numpy", "msgspec"},
    ),
    "train": (
        {
            *("errors", "sync", "protocol", "transport", "collectives", "optim", "tables", "compression", "server"),
            *("launcher", "client", "session", "reducer", "mesh", "records", "device", "profile_ranges"),
        },
        {"torch", "numpy", "msgspec"},
    ),
    "pipeline": (
        {
            *("checkpoints", "device", "errors", "options", "summation", "units", "transport", "collectives", "session"),
            *("train", "profile_ranges", "sync"),
        },
        {"torch", "numpy", "safetensors"},
    ),
    "traces": ({"errors", "sync", "simulate", "pipeline"}, {"numpy"}),
    "tensor_parallel": ({"errors", "collectives"}, {"torch"}),
    "strategy": (
        {
            *(
                "checkpoints",
                "errors",
                "mesh",
                "options",
                "summation",
                "units",
                "sync",
                "collectives",
                "launcher",
                "session",
            ),
            *("reducer", "train", "pipeline", "tensor_parallel"),
        },
        {"torch", "rich", "safetensors"},
    ),
    "torch_backend": ({"errors", "lazy_imports", "transport", "collectives", "launcher", "client", "session"}, {"torch"}),
    "horovod": ({"errors", "session", "reducer", "train"}, {"torch", "numpy", "msgspec"}),
    "testing": (
        {
            *("door", "errors", "checkpoints", "records", "protocol", "transport", "collectives", "server", "launcher"),
            *("client", "session", "train", "device", "sync"),
        },
        set(),
    ),
    "report": ({"errors", "sync", "records", "simulate", "pipeline", "summation", "units"}, {"matplotlib"}),
    "cli": (
        {
            *("errors", "version", "sync", "records", "simulate", "server", "transport", "launcher", "report", "pipeline"),
            *("summation", "units", "strategy", "traces", "tasks", "door", "options", "proving"),
        },
        {"typer", "rich", "yaml", "torch"},
    ),
    "__main__": ({"cli"}, set()),
    "__init__": (
        {
            *(
                "version",
                "errors",
                "lazy_imports",
                "simulate",
                "tables",
                "cli",
                "collectives",
                "optim",
                "session",
                "train",
                "pipeline",
            ),
            *("strategy", "tensor_parallel", "torch_backend"),
        },
        set(),
    ),
}

#: Namespaces for users: they name modules above themselves, which are imported on first use.
NAMESPACES = {"tables/__init__.py": {"train"}}

#: No clock, no dice that are not seeded, no threads, no sockets, no files, no environment.
PURE = (
    "errors.py",
    "mesh.py",
    "options.py",
    "summation.py",
    "units.py",
    "sync",
    "protocol",
    "server/sequencer.py",
    "server/optimizer_clock.py",
    "server/sample_ledger.py",
    "server/effects.py",
    "server/job_figures.py",
    "server/job_plan.py",
    "server/server_device.py",
    "reducer/ballot.py",
    "reducer/buckets.py",
    "reducer/buckets.py",
    "simulate",
    "collectives/cost.py",
    "collectives/device_choice.py",
    "collectives/direct.py",
    "collectives/halving_doubling.py",
    "collectives/hierarchical.py",
    "collectives/plans.py",
    "collectives/quorum.py",
    "collectives/ring.py",
    "collectives/shared_memory.py",
    "collectives/steps.py",
    "collectives/tree.py",
    "proving/check.py",
    "proving/driver.py",
    "proving/games.py",
    "proving/judge.py",
    "proving/orders.py",
    "proving/small_job.py",
    "proving/states.py",
    "proving/telling.py",
    "proving/walk.py",
    "pipeline/actions.py",
    "pipeline/check.py",
    "pipeline/deferred_gradients.py",
    "pipeline/plan_report.py",
    "pipeline/planner.py",
    "pipeline/schedules.py",
    "pipeline/timeline.py",
    "records/check.py",
    "records/lines.py",
    "records/replay.py",
    "report/advice.py",
    "report/recorded_cluster.py",
    "report/scaling.py",
    "launcher/environment.py",
    "launcher/supervisor.py",
    "launcher/terminal_output.py",
    "strategy/bytes_moved.py",
    "strategy/costs.py",
    "strategy/explanation.py",
    "strategy/parallel_plan.py",
    "strategy/prediction.py",
    "strategy/search.py",
    "strategy/step_time.py",
    "strategy/job_options.py",
    "strategy/soundness.py",
    "traces/analysis.py",
    "traces/causes.py",
    "traces/job.py",
    "traces/modes.py",
    "traces/step_times.py",
    "transport/link_emulation.py",
)
#: Training in virtual time uses torch; everything else in `simulate` is pure.
VIRTUAL = (
    "simulate/replicas.py",
    "simulate/virtual_model.py",
    "simulate/virtual_training.py",
)
IMPURE = {
    "time",
    "datetime",
    "os",
    "io",
    "pathlib",
    "socket",
    "threading",
    "multiprocessing",
    "asyncio",
    "subprocess",
    "sys",
}


@cache
def modules() -> list[tuple[str, str, ast.Module]]:
    """Name, room and syntax tree of each; read on first use, since collecting tests imports this file."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        room = name.split("/")[0].removesuffix(".py")
        found.append((name, room, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_is_in_the_table() -> None:
    assert {room for _, room, _ in modules()} == set(ALLOWED)


def test_the_table_itself_has_no_way_back() -> None:
    order = list(ALLOWED)
    for room, (ours, _) in ALLOWED.items():
        if room != "__init__":
            assert all(order.index(other) < order.index(room) for other in ours)


def test_imports_go_one_way() -> None:
    for name, room, tree in modules():
        ours, theirs = ALLOWED[room]
        for target in imported(tree):
            top, *rest = target.split(".")
            if top == "polytempo":
                assert rest[0] in ours | {room} | NAMESPACES.get(name, set()), f"{name} imports {target}"
            elif top not in sys.stdlib_module_names:
                assert top in theirs, f"{name} imports {target}"


def test_what_decides_is_pure() -> None:
    for name, room, tree in modules():
        if not name.startswith(PURE) or name.startswith(VIRTUAL):
            continue
        targets = set(imported(tree))
        assert not {target.split(".")[0] for target in targets} & (IMPURE | {"torch", "numpy", "zmq"}), name
        dice = {target for target in targets if target.split(".")[0] in ("random", "secrets", "uuid")}
        assert dice <= ({"random.Random"} if room in ("simulate", "proving") else set()), name
        calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not calls & {"open", "print", "input", "eval", "exec"}, name


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


#: Rooms that load torch.
HEAVY_ROOMS = ("server", "launcher", "client", "session", "reducer", "train", "pipeline", "horovod", "testing")
HEAVY = "print(*sorted({'torch', 'zmq', 'numpy', 'matplotlib'} & set(sys.modules)))"


def test_a_simulation_loads_neither_torch_nor_zmq() -> None:
    run = "simulate.simulate_job(simulate.Cluster(workers=2), 'ssp:1', steps=10)"
    assert fresh(f"import sys; from polytempo import simulate; {run}; {HEAVY}").strip() == ""


def test_namespaces_load_their_names_on_first_use() -> None:
    assert all(getattr(polytempo.simulate, name) is not None for name in dir(polytempo.simulate))
    assert sorted(dir(polytempo.tables)) == sorted(polytempo.tables.__all__) == ["Array", "KV", "ServerEmbedding"]
    assert sorted(polytempo.simulate.__all__) == dir(polytempo.simulate)
    with pytest.raises(AttributeError, match=r"'polytempo\.simulate' has no attribute 'Clusters'"):
        _ = polytempo.simulate.Clusters


def test_the_command_without_training_loads_neither_torch_nor_zmq() -> None:
    call = "polytempo.cli.main.run(['simulate', '--steps', '20', '-q'])"
    assert fresh(f"import sys, polytempo.cli.main; {call}; {HEAVY}").splitlines()[-1].strip() == ""


@pytest.mark.long  # some of them load torch
def test_every_module_can_be_imported_first() -> None:
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name, _, _ in modules()]
    light = [
        f"polytempo.{name}"
        for name in names
        if name not in ("__init__", "__main__") and name.split(".")[0] not in HEAVY_ROOMS
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", code, *reversed(light)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_type_name_exists_once() -> None:
    defined: dict[str, list[str]] = {}
    for name, _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                alias = node.targets[0].id
                if alias[0].isupper() and not alias.isupper():
                    defined.setdefault(alias, []).append(name)
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


def test_sentences_are_about_things() -> None:
    """Somebody, nobody and their kin hide the rank, the server or the process that is meant."""
    vague = re.compile(r"\b(some|no|every|any)body\b|\bwhoever\b|\bso many\b", re.IGNORECASE)
    found = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if vague.search(path.read_text("utf-8"))]
    assert found == []
