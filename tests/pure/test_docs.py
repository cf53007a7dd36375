"""The documentation is true: its tables are those its command makes, its claims hold, its links lead somewhere."""

from __future__ import annotations

import ast
import cmath
import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
import typer
import yaml

import polytempo
import polytempo.simulate
import polytempo.tables
from polytempo.cli.main import app
from polytempo.simulate.description import experiment_from
from polytempo.sync.compatibility import Feature
from polytempo.sync.spec import parse_spec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
#: Horovod's names are read from the source, which loads torch.
HOROVOD = ast.parse((ROOT / "src/polytempo/horovod/__init__.py").read_text(encoding="utf-8"))

COMMANDS = typer.main.get_command(app).commands


def figures_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "figures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bounds() -> ModuleType:
    return figures_of("bounds")


def test_the_page_on_asynchronous_training_is_up_to_date() -> None:
    """Its table, and the words about it."""
    stable = figures_of("stable_rates")
    page = stable.PAGE.read_text(encoding="utf-8")
    assert stable.table().put_into(page) == page, "run: make figures"
    ahead, server, alone = (
        stable.largest_stable_rate(way, 0.9, n) for way, n in (("lookahead", 4), ("server", 4), ("lookahead", 1))
    )
    assert "but a 27th of the rates that are stable for `bsp`" in page
    assert stable.of_bsp(0.9) / server == pytest.approx(27.3, abs=0.1)
    assert "6.3 times that of the servers, and two thirds of what" in page
    assert ahead / server == pytest.approx(6.3, abs=0.05)
    assert ahead / alone == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize(("way", "times", "degrees"), [("server", "5.1", "54"), ("lookahead", "1.6", "19")])
def test_how_far_velocities_are_behind_at_their_limit(way: str, times: str, degrees: str) -> None:
    stable = figures_of("stable_rates")
    rates = stable.rates_on_the_circle(way, 0.9, 4, stable.ANGLES)
    at = abs(rates - stable.largest_stable_rate(way, 0.9, 4)).argmin()
    pushed = complex(stable.PUSHED[way](0.9, 4, cmath.exp(1j * stable.ANGLES[at])))
    assert f"{abs(pushed):.1f}" == times
    assert f"{-math.degrees(cmath.phase(pushed)):.0f}" == degrees
    text = " ".join(stable.PAGE.read_text(encoding="utf-8").split())
    assert f"{times} times the gradient and {degrees} degrees" in text


def test_the_page_on_modes_is_up_to_date() -> None:
    modes = figures_of("modes")
    page = modes.PAGE.read_text(encoding="utf-8")
    assert modes.page_with_tables(page) == page, "run: make figures"


def test_the_page_on_modes_has_every_feature_that_a_user_can_choose() -> None:
    shown = {
        feature for columns in figures_of("modes").COLUMNS.values() for features in columns.values() for feature in features
    }
    of_simulation = {Feature.SIMULATED_ALLREDUCE, Feature.SIMULATED_PEERS, Feature.SIMULATED_NO_PEERS}
    without_mode = {Feature.SERVERS_BESIDE_ALLREDUCE, Feature.VIA_PS_WITHOUT_SERVERS}
    assert shown == set(Feature) - of_simulation - without_mode


@pytest.mark.long
def test_the_page_on_bounds_is_up_to_date(bounds: ModuleType) -> None:
    page = bounds.PAGE.read_text(encoding="utf-8")
    assert bounds.page_with_tables(page) == page, "run: make figures"


@pytest.mark.long
def test_a_bound_settles_at_the_pace_of_the_slow_and_absorbs_stalls(bounds: ModuleType) -> None:
    slow, stalls = bounds.pace().values()
    assert all(rate == pytest.approx(1 / 3, rel=0.03) for rate in slow[:-1])  # bsp and every ssp
    assert slow[-1] == pytest.approx((7 + 1 / 3) / 8, rel=0.01)  # asp
    assert stalls == sorted(stalls)
    assert stalls[-2] > 2.5 * stalls[0]


def test_printed_dssp_is_unbounded_and_ours_is_not(bounds: ModuleType) -> None:
    assert max(lead for _, lead in bounds.leads("dssp-paper:3..15", 2000)) > 1000
    assert max(lead for _, lead in bounds.leads("dssp:3..15", 2000)) == 15


@pytest.mark.long
def test_idle_falls_from_50_to_2_percent(bounds: ModuleType) -> None:
    idle = bounds.idle_shares()
    assert idle == sorted(idle, reverse=True)
    assert idle[0] == pytest.approx(0.50, abs=0.02)
    assert idle[-1] == pytest.approx(0.02, abs=0.005)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def public_names() -> Iterator[str]:
    for module in (polytempo, polytempo.simulate, polytempo.tables):
        for name in module.__all__:
            if name not in ("__version__", "simulate", "tables"):
                yield f"{module.__name__}.{name}"
    assigned = {ast.unparse(node.targets[0]): node.value for node in HOROVOD.body if isinstance(node, ast.Assign)}
    yield from (f"polytempo.horovod.{name}" for name in ast.literal_eval(assigned["__all__"]))


def test_the_reference_has_every_public_name_once() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    returned = {"polytempo.train.kv.ArrayHandle", "polytempo.train.kv.Future", "polytempo.train.prepare.SharedLoader"}
    assert sorted(set(shown) - returned) == sorted(public_names())


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == pages


def test_the_files_of_the_architecture_are_there() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    missing = [path for path in re.findall(r"`([a-z_/]+\.py)`", text) if not (ROOT / "src/polytempo" / path).is_file()]
    assert [path for path in missing if not (ROOT / path).is_file()] == []


def test_the_changelog_names_what_is_there() -> None:
    """But for the old names of its table, each beside the new one."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    names = {name.rstrip(".") for name in re.findall(r"`pt\.([\w.]+)", text)}
    known = {name.removeprefix("polytempo.") for name in public_names()} | {"simulate", "tables"}
    assert len(names) > 20
    assert names - known == set()
    typed = {
        option for quoted in re.findall(r"`([^`]*)`", text) for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", quoted)
    }
    options = {option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts}
    assert typed - options == {"--only", "--install-completion", "--help"}, "of make proof, and of no single command"


def test_what_the_readme_says_of_a_page_is_there() -> None:
    """A link with an anchor leads to a heading, and the page about launchers has those that the README names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for page, anchor in re.findall(r"\]\(([\w/-]+\.md)#([\w-]+)\)", text):
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"README links to {page}#{anchor}"
    section = (
        (DOCS / "run.md")
        .read_text(encoding="utf-8")
        .partition("## Under torchrun, mpirun and srun")[2]
        .partition("\n## ")[0]
    )
    for launcher in ("torchrun", "mpirun", "srun"):
        assert re.search(rf"^{launcher} ", section, re.MULTILINE), f"no command of {launcher}"


def test_readme_shows_the_two_commands_first() -> None:
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:30])
    assert screen.index("make demo") < screen.index("make test")


def test_the_file_shown_in_the_docs_and_the_example_are_good() -> None:
    text = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    shown = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    for content in (shown[1], (ROOT / "examples/mixed.yaml").read_text(encoding="utf-8")):
        experiment = experiment_from(yaml.safe_load(content))
        for sync in experiment.sync:
            parse_spec(sync).policy(experiment.cluster.workers)


def test_every_promise_names_tests_that_exist() -> None:
    text = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    rows = [row.strip("| ").split("|") for row in text.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 100
    assert [row for row in rows if len(row) != 3] == [], "a row that is not promise, holds, test does not render"
    assert [row for row in rows if not re.search(r"\.py`|same", row[2])] == []
    named = [name for row in rows for name in re.findall(r"`(\w+/[\w/]+\.py)`", row[2])]
    assert [name for name in named if not any((base / name).is_file() for base in (ROOT / "tests", ROOT))] == []


def test_the_tutorial_on_modes_builds_the_example() -> None:
    page = (ROOT / "docs" / "write-a-mode.md").read_text(encoding="utf-8")
    steps, rest = page.split("## Step 3", 1)
    example = (ROOT / "examples" / "own_mode.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", steps, flags=re.S)
    shown = [block for block in blocks if not block.startswith("OPTIONS")]
    assert len(shown) >= 6
    assert [block for block in shown if block not in example and indent(block, "    ") not in example] == []
    esync = (ROOT / "examples" / "esync.py").read_text(encoding="utf-8")
    assert [block in esync for block in re.findall(r"```python\n(.*?)```", rest, flags=re.S)].count(True) == 2
