"""Seeded mutants: one small mistake at a time in what decides and what moves bytes, and do the tests notice?

    python benchmarks/mutants.py                          60 mutants of sync/, server/ and reducer/, two at a time
    python benchmarks/mutants.py --count 5 --jobs 16 --packages sync --seed 3
    python benchmarks/mutants.py --list                   only say what they are

A mutant changes one operator, condition, number or call in a copy of `src/`. The quick tests run against that copy, pure
ones first, and stop at the first failure; a mutant that no test notices has survived. The same seed makes the same mutants
of the same code. Of two versions of the code the shares of killed mutants are compared, since their mutants differ.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
PACKAGES = ("sync", "server", "reducer")
QUICK = ["-q", "-x", "--quick", "-m", "not long", "-k", "not ipc", "-p", "no:cacheprovider", "--timeout", "60"]
#: The ladder: what takes seconds comes first.
RUNS = (["tests/pure"], ["tests/tensors", "tests/threads"])
#: Of a file, mutants at most: else long files have all of them.
OF_A_FILE = 3

Change = Callable[[], None]

PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
]
SWAPPED = dict([*PAIRS, *((other, one) for one, other in PAIRS)])
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass
class Mutant:
    """One mistake, and what became of it."""

    file: str
    line: int
    what: str
    killed_by: str = ""  #: a test, "timeout", or "" if it survived
    seconds: float = 0.0


def sites(tree: ast.Module) -> Iterator[tuple[int, str, Change]]:
    """All places of a file at which a mistake can be made: the line, what it is, and what makes it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for parent in ast.walk(node):
                yield from _in_node(parent)


def _in_node(node: ast.AST) -> Iterator[tuple[int, str, Change]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            other = SWAPPED[type(operator)]
            yield node.lineno, f"{type(operator).__name__} -> {other.__name__}", lambda: node.ops.__setitem__(0, other())
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
            new = SWAPPED[type(operator)]()
            yield node.lineno, f"{type(operator).__name__} -> {type(new).__name__}", lambda: setattr(node, "op", new)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield node.lineno, "condition negated", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=int() as value) if type(value) is int:
            yield node.lineno, f"{value} -> {value + 1}", lambda: setattr(node, "value", value + 1)
        case ast.Constant(value=bool() as value):
            yield node.lineno, f"{value} -> {not value}", lambda: setattr(node, "value", not value)
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield node.lineno, f"{name} -> {NAMES[name]}", lambda: setattr(node.func, "id", NAMES[name])
        case ast.Expr(value=ast.Call()):
            yield node.lineno, "call left out", lambda: setattr(node, "value", ast.Constant(None))


def drawn(source: Path, packages: list[str], count: int, seed: int) -> list[tuple[Mutant, str]]:
    """Mutants, each with the whole text of its file."""
    dice, found = random.Random(seed), []
    files = sorted(file for package in packages for file in (source / "polytempo" / package).glob("*.py"))
    weights = [len(file.read_text().splitlines()) for file in files]
    used: dict[Path, int] = {}
    most = OF_A_FILE * len(files)
    while len(found) < min(count, most):
        (file,) = dice.choices(files, weights)
        tree = ast.parse(file.read_text())
        places = list(sites(tree))
        if used.get(file, 0) >= OF_A_FILE:
            continue
        if not places:
            used[file], most = OF_A_FILE, most - OF_A_FILE
            continue
        used[file] = used.get(file, 0) + 1
        line, what, change = dice.choice(places)
        change()
        mutant = Mutant(str(file.relative_to(source)), line, what)
        found.append((mutant, ast.unparse(ast.fix_missing_locations(tree))))
    return found


def tried(mutant: Mutant, text: str, source: Path, limit: float) -> Mutant:
    """Run the tests against the mutant, in this copy of `src/`."""
    file, began = source / mutant.file, time.monotonic()
    before = file.read_text()
    file.write_text(text)
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for tests in RUNS:
            command = [sys.executable, "-m", "pytest", *QUICK, *tests]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
            if done.returncode:
                lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                mutant.killed_by = lines[0].split(" - ")[0] if lines else f"exit {done.returncode}"
                break
    except subprocess.TimeoutExpired:
        mutant.killed_by = "timeout"
    finally:
        file.write_text(before)
    mutant.seconds = time.monotonic() - began
    return mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--limit", type=float, default=420.0, help="seconds of one run of tests; longer is a kill")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mutants = drawn(ROOT / "src", arguments.packages, arguments.count, arguments.seed)
    if arguments.list:
        for mutant, _ in mutants:
            print(f"{mutant.file}:{mutant.line} {mutant.what}")
        return
    with tempfile.TemporaryDirectory(prefix="polytempo-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(arguments.jobs):
            copies.put(Path(shutil.copytree(ROOT / "src", Path(folder) / str(job))))

        def run(pair: tuple[Mutant, str]) -> Mutant:
            copy = copies.get()
            try:
                found = tried(*pair, copy, arguments.limit)
            finally:
                copies.put(copy)
            end = found.killed_by or "SURVIVED"
            print(f"{found.file}:{found.line} {found.what}: {end} ({found.seconds:.0f} s)", flush=True)
            return found

        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(run, mutants))
    killed = sum(bool(mutant.killed_by) for mutant in results)
    print(f"{killed} of {len(results)} killed")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(mutant) for mutant in results], indent=1))


if __name__ == "__main__":
    main()
