"""Hints name commands that work: those in the sources are parsed, and what a refusal says to do is done until it works."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from random import Random

import pytest
from commands import COMMANDS, OPTION, Typed, commands_in, options_of, parse
from strategy_costs import machine
from test_explanation import LINK, measured

from polytempo.cli.compare import _show
from polytempo.cli.main import run
from polytempo.errors import UsageError
from polytempo.pipeline.layer_profile import Layer, Profile, save_profile
from polytempo.report.live import LiveRun, RepeatedRun
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.run import simulate_job
from polytempo.strategy.explanation import explain_plan
from polytempo.strategy.search import SearchSpace, search
from polytempo.sync.spec import MODES, parse_spec

PACKAGE = Path(__file__).parents[2] / "src" / "polytempo"
#: Options of the program itself, and of scripts in examples.
OTHERS = {"--version", "--install-completion", "--blocks", "--lr"}
#: Words behind `polytempo` in sentences of which it is the subject.
PROSE = {"as", "drew", "rounds"}


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    return Typed(tmp_path, monkeypatch)


@cache
def texts() -> tuple[tuple[str, str, bool], ...]:
    """Files of the package and their texts that may name commands, options or modes, with X for what is filled in; and
    whether they are documentation."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {id(part) for node in joined for part in node.values}
        name = str(path.relative_to(PACKAGE))
        found += [(name, "".join(_part(part) for part in node.values), False) for node in joined]
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                found.append((name, node.value, id(node) in documentation))
    return tuple(one for one in found if "polytempo" in one[1] or "--" in one[1] or "sync=" in one[1])


def _part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "X"


def test_commands_and_options_in_messages_exist() -> None:
    known, seen = options_of() | OTHERS, set()
    for name, text, documentation in texts():
        where = f"{name}: {text!r}"
        assert set(OPTION.findall(text)) <= known, where
        assert set(re.findall(r"polytempo ([a-z]+)\b", text)) <= {*COMMANDS, *PROSE}, where
        for command in () if documentation else commands_in(text):
            seen.add(command)
            if "--help" not in command:
                assert parse(command), where
    assert len(seen) > 30
    assert {"polytempo run --servers 1", "polytempo picture FOLDER", "polytempo plan SCRIPT --json FILE"} <= seen


def test_commands_are_found_in_sentences() -> None:
    found = list(
        commands_in(
            "start it with polytempo run --servers 1 (or more); polytempo simulate --train digits compares; "
            "(more: polytempo explain 'my record') polytempo worker --join a:1 --key-file k.key SCRIPT, polytempo drew"
        )
    )
    assert found == [
        "polytempo run --servers 1",
        "polytempo simulate --train digits",
        "polytempo explain 'my record'",
        "polytempo worker --join a:1 --key-file k.key SCRIPT",
    ]
    for wrong in ("polytempo run --server 1", "polytempo explain", "polytempo simulate --train"):
        with pytest.raises(Exception, match=r"(?i)no such option|missing|requires"):
            parse(wrong) if wrong != "polytempo explain" else COMMANDS["explain"].make_context("explain", [])


def test_modes_in_messages_exist() -> None:
    named = set()
    for _, text, documentation in texts():
        if not documentation and "X" not in text:
            for mode in re.findall(r"(?:--sync |\bsync=)'?([a-z][a-z+:.,=0-9-]*[a-z0-9])", text):
                named.add(parse_spec(mode).mode.name)
    assert len(named) >= 4


@pytest.mark.parametrize(
    "words", ["simulate -n 4 --slow 3:3 --model 100MB --bandwidth 1Gb/s", "advise -n 4 --slow 3:3", "plan"]
)
def test_what_a_command_prints_names_its_own_options_and_those_of_run(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words.split()
    if words == "plan":  # of a profile whose times differ much
        layers = tuple(Layer(f"layer{number}", 1.0, 1.0, 1e6, 1e6, spread_s=0.9) for number in range(8))
        save_profile(Profile("shaky", layers, 32), tmp_path / "shaky.json")
        command += ["--profile", str(tmp_path / "shaky.json")]
    assert run(command) == 0
    told = "".join(capsys.readouterr())
    assert set(OPTION.findall(told)) <= options_of(command[0], "run") | {"--train"}
    assert OPTION.findall(told), "there is a hint in it"
    for hint in commands_in(told):
        assert parse(hint)


def test_what_compare_prints_is_an_option_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = simulate_job(Cluster(workers=2), "bsp", steps=20)
    one = LiveRun(outcome, ((0.0, 0.1), (1.0, 0.9)))
    for repeats in (1, 5):
        _show([RepeatedRun(outcome, one.curve, runs=(one,) * repeats)], 0.8, "two workers", repeats, "train.py", "accuracy")
        assert set(OPTION.findall(capsys.readouterr().out)) <= options_of("compare")
    assert parse("polytempo compare --repeats 5 train.py")["repeats"] == 5


@pytest.mark.parametrize("world", [1, 2, 4, 6])
def test_each_way_that_plan_shows_is_accepted_by_run(world: int, typed: Typed) -> None:
    """Data, pipeline and tensor parallelism alone, the choice of `auto`, and the runner-up that its reason names."""
    space, where = SearchSpace(world, 24), machine(world, 2, LINK)
    profiles = measured(space)
    shown = explain_plan(space, profiles, where, search(space, profiles, where))
    ways = [row.name for row in shown.rows if row.prediction is not None]
    ways += re.findall(r"(?:data|pipe|tensor)=[a-z0-9=,]*[a-z0-9]", shown.why)
    assert len(set(ways)) >= min(world, 3)
    for way in ways:
        request = typed.start(f"polytempo run --strategy {way} train.py").request
        assert request.size == world


# What a refusal says to do.


def mended(options: dict[str, str], said: str) -> dict[str, str]:
    """The command after what its refusal says; modes of a list are taken in turn."""
    if "use --via ps" in said:
        return options | {"--via": "ps"}
    if found := re.search(r"leave (--[a-z-]+)[^;]* out", said):
        return {name: value for name, value in options.items() if name != found[1]}
    if "use fit(checkpoint=...)" in said:
        return {name: value for name, value in options.items() if name != "--checkpoint"}
    if found := re.search(r"; use --min-workers (\d+)", said):
        return options | {"--min-workers": found[1]}
    if found := re.search(r"; (?:use|nearest:) ([a-z+]+[a-z0-9:.=]*)", said):
        return options | {"--sync": found[1]}
    raise AssertionError(f"nothing to do is said: {said}")


def refusal(typed: Typed, options: dict[str, str]) -> str:
    try:
        typed.start(" ".join(["polytempo run -n 4", *(f"{name} {value}" for name, value in options.items()), "train.py"]))
    except UsageError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("seed", range(4))
def test_what_a_refusal_says_to_do_is_accepted_in_the_end(seed: int, typed: Typed) -> None:
    dice, refusals = Random(seed), 0
    choices = {
        "--sync": [mode.example for mode in MODES.values()],
        "--via": ["", "", "ps", "allreduce"],
        "--servers": ["", "", "2"],
        "--checkpoint": ["", "", "saved"],
        "--min-workers": ["", "", "1"],
        "--strategy": ["", "", "data=4", "data=2,pipe=2", "data=2,tensor=2"],
    }
    for _ in range(60):
        options, said = {name: value for name, values in choices.items() if (value := dice.choice(values))}, "?"
        for _ in range(6):
            said = refusal(typed, options)
            if not said:
                break
            refusals += 1
            after = mended(options, said)
            assert after != options, said
            options = after
        assert not said, options
    assert refusals > 15
