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
        "Cluster",
        "PolytempoError",
        "UsageError",
        "__version__",
        "cluster_from",
        "parse_spec",
        "simulate_job",
        "train_virtually",
    ]
    for name in polytempo.__all__:
        if name != "train_virtually":  # loads torch: tests/tensors uses it
            assert getattr(polytempo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = polytempo.simulat


def options(command: str) -> list[str]:
    parameters = typer.main.get_command(app).commands[command].params
    return sorted(option for parameter in parameters for option in parameter.opts if option.startswith("--"))


def test_commands_and_options() -> None:
    assert sorted(typer.main.get_command(app).commands) == ["check", "simulate"]
    assert options("check") == []
    assert options("simulate") == [
        "--bandwidth",
        "--batch",
        "--hiccup",
        "--json",
        "--latency",
        "--lr",
        "--model",
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
        "--train",
        "--via",
        "--workers",
    ]


def test_modes() -> None:
    assert list(MODES) == ["bsp", "bsp+backup", "ssp", "dssp", "dssp-paper", "asp", "every", "delay"]


def test_no_environment_variable_is_read() -> None:
    sources = (ROOT / "src").rglob("*.py")
    assert not [path for path in sources if re.search(r"\bos\.environ|getenv", path.read_text(encoding="utf-8"))]
