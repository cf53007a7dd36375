"""`polytempo run -m package.module`: what `python -m` would run, in each worker."""

from __future__ import annotations

from live import Bench

MODULE = """
import sys
import polytempo as pt
from .words import GREETING
pt.init()
print(__name__, __package__, __spec__.name, GREETING, sys.argv, sys.path[0], pt.rank())
"""


def test_a_module_of_a_package(bench: Bench) -> None:
    (bench.folder / "shop").mkdir()
    (bench.folder / "shop" / "__init__.py").touch()
    (bench.folder / "shop" / "words.py").write_text("GREETING = 'hello'")
    (bench.folder / "shop" / "train.py").write_text(MODULE)
    shown = f"__main__ shop shop.train hello ['{bench.folder}/shop/train.py', '-m', '--lr', '0.1'] {bench.folder}"
    done = bench.run("run", "-n", "2", "--record", "record", "-m", "shop.train", "-m", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {shown} {rank}" for rank in (0, 1)]
    assert "starting 2 workers: -m shop.train" in done.stderr
    assert {**bench.meta()["options"], "script": "shop.train", "runs": "module"} == bench.meta()["options"]
    bench.forks = False  # in new interpreters, which do it by themselves
    assert bench.run("run", "-n", "1", "-m", "shop.train", "-m", "--lr", "0.1").stdout == f"[0] {shown} 0\n"
