"""Shell completion, as bash asks for it: commands, options, modes; nothing behind the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polytempo.cli.main import run
from polytempo.cli.options import complete_mode, join_broken_words
from polytempo.sync.spec import MODES

#: What is typed, as bash breaks it into words, the last one incomplete; and what it is offered.
TYPED = (
    (("ru",), ["run"]),
    (("run", "--check"), ["--checkpoint", "--checkpoint-every", "--checkpoint-errors"]),
    (("run", "--sync", "ss"), ["ssp:3"]),
    (("compare", "--sync", "=", "lo"), ["local:8"]),
    (("simulate", "--sync", "dssp", ":", "3..15", "--sync", "ssp", ":", "3", "--scal"), ["--scaling"]),
    (("run", "--sync", "ssp", ":"), []),
    (("run", "train.py", "--s"), []),
    (("run", "--record", "ou"), []),
)


@pytest.mark.parametrize(("words", "offered"), TYPED, ids=[" ".join(words) for words, _ in TYPED])
def test_what_is_offered(
    words: tuple[str, ...], offered: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "_POLYTEMPO_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(("polytempo", *words)),
        "COMP_CWORD": f"{len(words)}",
    }
    join_broken_words(asked)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert run([]) == 0
    shown = capfd.readouterr()
    assert (shown.out.split(), shown.err) == (offered, "")


def test_every_mode_is_offered_until_its_name_is_typed() -> None:
    assert [example for example, _ in complete_mode("")] == [mode.example for mode in MODES.values()]
    assert complete_mode("ssp:") == []


def test_other_shells_break_no_words() -> None:
    asked = {"_POLYTEMPO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "polytempo run --sync ssp:3 --st"}
    join_broken_words(asked)
    assert asked["_TYPER_COMPLETE_ARGS"] == "polytempo run --sync ssp:3 --st"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path) -> None:
    command = tmp_path / "polytempo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m polytempo "$@"\n', encoding="utf-8")
    command.chmod(0o700)
    typed = "polytempo run --sync ssp : 3 --sl"
    asks = f"""
        eval "$(_POLYTEMPO_COMPLETE=source_bash polytempo)"
        COMP_WORDS=({typed}); COMP_CWORD=6; _polytempo_completion polytempo; echo "${{COMPREPLY[*]}}"
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", asks], capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False
    )
    assert (done.stdout, done.stderr) == ("--slow\n", "")
