"""Golden runs: one record for each mode, on a cluster on which everything happens, compared whole."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from clusters import EVENTFUL, MODES

from polytempo.door import bring_file
from polytempo.records.files import to_text
from polytempo.simulate.outcome import meta_of
from polytempo.simulate.run import simulate_job
from polytempo.sync import spec as specs
from polytempo.sync.spec import parse_spec

SOURCE = Path(specs.__file__).parents[1]


def before_312(terms: Iterable[float], start: float = 0) -> float:
    for term in terms:
        start += term
    return start


def since_312(terms: Iterable[float], start: float = 0) -> float:
    listed = list(terms)
    return math.fsum([start, *listed]) if any(isinstance(term, float) for term in listed) else before_312(listed, start)


@pytest.mark.parametrize("sums", [before_312, since_312])
@pytest.mark.parametrize("sync", MODES)
def test_golden(
    sync: str, sums: Callable[..., float], golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes on every Python: Python 3.12 began to make up for rounding in sums of floats."""
    monkeypatch.setattr(builtins, "sum", sums)
    texts: list[str] = []
    outcome = simulate_job(EVENTFUL, sync, seed=7, steps_each=15, record=lambda line: texts.append(to_text(line)))
    meta = meta_of(outcome, EVENTFUL, seed=7)
    meta["versions"] = {}
    golden(f"{sync.replace(':', '-').replace(',', '-')}.jsonl", "\n".join([*texts, json.dumps(meta)]) + "\n")


@pytest.mark.parametrize("sync", ["asp", "ssp:3", "dssp:1..6", "dssp-paper:1..6", "every:4", "delay:3"])
def test_what_a_default_writes_out_changes_no_event(sync: str, golden: Callable[[str, str], None]) -> None:
    """Where momentum lives and how a push is scaled is in the spec, and nowhere else in a record."""
    settled = parse_spec(sync).settled("AdamW", [{"betas": (0.9, 0.999)}], workers=4).text
    assert settled == f"{sync},momentum=lookahead,scale=n^-0.75"
    texts: list[str] = []
    outcome = simulate_job(EVENTFUL, settled, seed=7, steps_each=15, record=lambda line: texts.append(to_text(line)))
    meta = meta_of(outcome, EVENTFUL, seed=7) | {"versions": {}}
    assert settled not in "".join(texts)
    told = "\n".join([*texts, json.dumps(meta)]) + "\n"
    assert told.count(settled) == 2
    golden(f"{sync.replace(':', '-')}.jsonl", told.replace(settled, sync))


@pytest.mark.parametrize("sync", MODES)
def test_same_seed_same_bytes_other_seed_other_bytes(sync: str) -> None:
    def run(seed: int) -> str:
        texts: list[str] = []
        outcome = simulate_job(EVENTFUL, sync, seed=seed, steps_each=10, record=lambda line: texts.append(to_text(line)))
        return "\n".join([*texts, json.dumps(outcome.as_dict())])

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize(
    ("file", "name", "sync"),
    [
        ("barrier.py", "BSP", "bsp"),
        ("ssp.py", "SSP", "ssp:3"),
        ("asynchronous.py", "ASP", "asp"),
        ("every.py", "EVERY", "every:4,wait=1"),
        ("delay.py", "DELAY", "delay:3"),
        ("easgd.py", "EASGD", "easgd:3,rho=0.5,overlap=1"),
    ],
)
def test_a_mode_that_is_brought_in_runs_as_the_same_one_built_in(
    file: str, name: str, sync: str, tmp_path: Path, nothing_brought: None
) -> None:
    """With a watch around each half: event for event, the golden runs."""
    (tmp_path / file).write_text((SOURCE / "sync" / file).read_text(encoding="utf-8"), encoding="utf-8")
    bring_file(tmp_path / file)
    texts: dict[str, list[str]] = {}
    for text in (sync, f"{file}:{name}{sync[len(parse_spec(sync).mode.name) :]}"):
        told = texts[text] = []
        simulate_job(EVENTFUL, text, seed=7, steps_each=15, record=lambda line, told=told: told.append(to_text(line)))
    ours, brought = texts.values()
    assert len(ours) > 50
    assert brought == ours
