"""What a worker runs, as the command names it: a script or a module, checked before any process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polytempo.errors import UsageError
from polytempo.launcher.function_program import FunctionProgram
from polytempo.launcher.program import ModuleProgram, ScriptProgram, command_again, find_module, program_of


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("shop", "shop/parts", "bare"):
        (tmp_path / name).mkdir()
    for name in ("shop", "shop/parts"):
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the launcher imports no package')")
    for name in ("shop/train.py", "shop/parts/__main__.py", "bare/tool.py", "alone.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shop", "bare", "alone", "moved")]:
        del sys.modules[name]  # packages that were looked into, which the next test must not find


def test_modules_are_found_as_python_finds_them_and_none_is_imported(project: Path) -> None:
    found = {"shop.train": "shop/train.py", "shop.parts": "shop/parts/__main__.py", "alone": "alone.py"}
    found["bare.tool"] = "bare/tool.py"  # of a namespace package
    known = set(sys.modules)
    for name, file in found.items():
        program = ModuleProgram(name, ("--lr", "1"))
        program.check()
        assert program.spec().origin == str(project / file)
        assert program.command(project) == [sys.executable, "-m", name, "--lr", "1"]
    imported = set(sys.modules) - known
    assert not {"shop", "bare", "alone"} & imported
    ModuleProgram("http.server").check()  # of the standard library, not of this directory


def test_a_package_that_chooses_where_its_modules_are(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "moved").mkdir()
    (project / "moved" / "__init__.py").write_text(f"__path__ = [{str(project / 'bare')!r}]")
    ModuleProgram("moved.tool").check()
    assert str(project) not in sys.path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shop.nothing.more", "there is no module shop.nothing.more below"),
        ("nosuch", "expected a name such as package.train"),
        ("alone.py", "leave -m out to run the script alone.py"),
        ("bare", "bare is a package without a __main__; name one of its modules after -m"),
        ("alone.train", "there is no module alone.train"),
    ],
)
def test_a_missing_module_is_refused(name: str, text: str, project: Path) -> None:
    (project / "shop" / "__init__.py").write_text("")
    with pytest.raises(UsageError) as refused:
        ModuleProgram(name).check()
    assert text in str(refused.value)


def test_what_the_record_says_of_it() -> None:
    script, module = program_of("train.py", ["-q"], False), program_of("shop.train", None, True)
    assert (script, module) == (ScriptProgram("train.py", ("-q",)), ModuleProgram("shop.train"))
    assert (script.name, module.name) == ("train.py", "-m shop.train")
    given = {"n": 4, "sync": "ssp:3"}
    assert command_again(script.facts(), given) == command_again({}, given) == "polytempo run -n 4 --sync ssp:3 train.py"
    assert command_again(module.facts(), given) == "polytempo run -n 4 --sync ssp:3 -m shop.train"
    function = FunctionProgram(test_what_the_record_says_of_it)
    assert command_again(function.facts(), given) == 'pt.launch(test_what_the_record_says_of_it, n=4, sync="ssp:3")'
    assert find_module(os.path.basename(__file__)) is None
