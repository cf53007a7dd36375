"""Golden runs: compared whole, rewritten only with `pytest --rewrite-golden`. And a collector with less to look at."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from polytempo.sync import spec

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis keeps those of a test
ENDING = str(Path(__file__).parent / "ending")

# How long an example takes on a busy machine says nothing: time does not decide a test. `make test` tries the same examples
# each time; `make proof` draws new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("new", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden files anew instead of comparing")
    parser.addoption("--quick", action="store_true", help="as in make check: a quarter of the random examples")
    parser.addoption("--proof", action="store_true", help="as in make proof: all of what takes a minute by itself")


def pytest_configure(config: pytest.Config) -> None:
    """What `ending/sitecustomize.py` says holds for all processes that tests start. So do signals as in a terminal, which
    `nohup` and a shell's background jobs ignore: tests of signals would fail for it."""
    hypothesis.settings.load_profile("new" if config.getoption("--proof") else "same")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = os.environ.get("PYTHONPATH", "")
    if ENDING not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ENDING, before)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--quick`: the first quarter of each property's examples; `make test` tries them all. Tests marked `proof` are
    left to `make proof`."""
    if not config.getoption("--proof"):
        left = [item for item in items if item.get_closest_marker("proof")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("proof")]
    properties = {function for item in items if hasattr(function := getattr(item, "obj", None), SETTINGS)}
    for function in properties if config.getoption("--quick") else ():
        usual = getattr(function, SETTINGS)
        setattr(function, SETTINGS, hypothesis.settings(usual, max_examples=max(5, usual.max_examples // 4)))


def pytest_collection_finish() -> None:
    """Torch and thousands of tests stay until the end: whoever collects garbage need not go through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_brought(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test is a process of its own, as far as modes of users go."""
    monkeypatch.setattr(spec, "_BROUGHT", {})
    spec.parse_spec.cache_clear()
    yield
    spec.parse_spec.cache_clear()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}; make it with --rewrite-golden and read it"
        assert text == path.read_text(encoding="utf-8")

    return compare
