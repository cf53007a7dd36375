"""Imports go one way, and what must be pure is pure. The table is the architecture."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "polytempo"

#: Folder (or file): what of polytempo it may import, and what from outside the standard library.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "version": (set(), set()),
    "errors": (set(), set()),
    "imports": (set(), set()),
    "sums": (set(), set()),
    "sync": ({"errors"}, set()),
    "records": ({"errors", "sync"}, set()),
    "simulate": ({"errors", "version", "sync", "records", "sums"}, set()),
    "protocol": ({"errors", "sums"}, {"msgspec"}),
    "coordinate": ({"errors", "sync", "records", "protocol", "sums"}, {"msgspec"}),
    "transport": ({"errors"}, {"zmq", "numpy"}),
    "collectives": ({"errors", "transport", "sums"}, {"torch", "numpy"}),
    "optim": ({"errors", "imports"}, {"torch"}),
    "pipeline": ({"errors"}, set()),
    "planner": ({"errors"}, set()),
    "tables": ({"errors", "protocol", "sums"}, {"torch", "numpy"}),
    "filters": ({"errors"}, {"torch", "numpy"}),
    "parameter_server": (
        {
            *("errors", "sync", "records", "protocol", "coordinate", "transport", "collectives", "optim", "tables"),
            *("filters", "sums"),
        },
        {"torch", "numpy", "zmq", "msgspec", "safetensors"},
    ),
    "train": (
        {"errors", "sync", "protocol", "transport", "collectives", "optim", "tables", "filters", "parameter_server"},
        {"torch", "numpy", "zmq", "msgspec"},
    ),
    "stages": (
        {"errors", "pipeline", "planner", "transport", "collectives", "train", "sums"},
        {"torch", "numpy", "safetensors"},
    ),
    "torch_backend": ({"errors", "imports", "collectives", "train"}, {"torch"}),
    "horovod": ({"errors", "train"}, {"torch", "numpy", "msgspec"}),
    "testing": (
        {"errors", "records", "protocol", "coordinate", "transport", "collectives", "parameter_server", "train"},
        set(),
    ),
    "launch": (
        {
            *("errors", "version", "sync", "records", "protocol", "coordinate", "transport", "optim", "parameter_server"),
            "train",
        },
        {"rich", "torch"},
    ),
    "virtual": ({"errors", "sync", "records", "simulate", "optim"}, {"torch", "numpy"}),
    "report": ({"errors", "records", "simulate", "pipeline", "sums"}, {"matplotlib"}),
    "cli": (
        {
            *("errors", "version", "sync", "records", "simulate", "coordinate", "transport", "launch", "virtual", "report"),
            *("planner", "stages", "sums"),
        },
        {"typer", "rich", "yaml", "torch"},
    ),
    "__main__": ({"cli"}, set()),
    "__init__": ({"version", "errors", "simulate", "sync", "optim", "virtual", "train", "stages", "torch_backend"}, set()),
}

#: No clock, no dice that are not seeded, no threads, no sockets, no files, no environment.
PURE = (
    "sync",
    "protocol",
    "coordinate",
    "simulate",
    "collectives/cuts.py",
    "collectives/steps.py",
    "collectives/ring.py",
    "collectives/halving_doubling.py",
    "collectives/tree.py",
    "collectives/double_tree.py",
    "collectives/linear.py",
    "collectives/shared.py",
    "collectives/hierarchical.py",
    "collectives/plans.py",
    "collectives/expected.py",
    "collectives/check.py",
    "collectives/cost.py",
    "pipeline",
    "planner/search.py",
    "planner/topology.py",
    "planner/explain.py",
    "records/lines.py",
    "records/check.py",
    "records/replay.py",
    "launch/supervise.py",
    "launch/output.py",
    "train/placement.py",
    "errors.py",
    "sums.py",
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
    """Name, room and contents of each; read when first asked for, since whoever collects tests imports this file."""
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
                assert rest[0] in ours | {room}, f"{name} imports {target}"
            elif top not in sys.stdlib_module_names:
                assert top in theirs, f"{name} imports {target}"


def test_what_decides_is_pure() -> None:
    for name, room, tree in modules():
        if not name.startswith(PURE):
            continue
        targets = set(imported(tree))
        assert not {target.split(".")[0] for target in targets} & IMPURE, name
        dice = {target for target in targets if target.split(".")[0] in ("random", "secrets", "uuid")}
        assert dice <= ({"random.Random"} if room == "simulate" else set()), name
        calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not calls & {"open", "print", "input", "eval", "exec"}, name


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


#: Rooms that load torch.
HEAVY_ROOMS = ("virtual", "parameter_server", "train", "horovod", "testing", "launch")
HEAVY = "print(*sorted({'torch', 'zmq', 'numpy', 'matplotlib'} & set(sys.modules)))"


def test_a_simulation_loads_neither_torch_nor_zmq() -> None:
    run = "polytempo.simulate_job(polytempo.Cluster(workers=2), 'ssp:1', steps=10)"
    assert fresh(f"import sys, polytempo; {run}; {HEAVY}").strip() == ""


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
