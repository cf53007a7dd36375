"""Modes that are brought in and declare, tell or make what cannot work: one line with file and line, before a job starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polytempo.door import bring_file
from polytempo.errors import ModeError, SpecError
from polytempo.proving.check import check, first_look
from polytempo.proving.endless import returning_within
from polytempo.sync.compatibility import Feature, conflict
from polytempo.sync.spec import parse_spec

ESYNC = (Path(__file__).parents[2] / "examples" / "esync.py").read_text(encoding="utf-8")


pytestmark = pytest.mark.usefixtures("nothing_brought")


def brought(folder: Path, old: str = "", new: str = "") -> None:
    assert not old or ESYNC.count(old) == 1
    file = folder / "esync.py"
    file.write_text(ESYNC.replace(old, new) if old else ESYNC, encoding="utf-8")
    bring_file(file)


PARTLY = """class Partly(BlockMachine):
    def handle(self, event, now, part=0):
        orders = super().handle(event, now, part)
        return [Install(part, 0.5) if isinstance(order, Install) else order for order in orders]


ESYNC = Mode("""
TOLD = "NextBlock(self._steps(worker))"
CAN = "pushes=Pushes.VALUES, update=MadeOf.ALL, work=PushedWork.LOCAL"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (TOLD, "self._steps(worker)", r"tells worker 0 4, of type int; expected nothing, or one of NextBlock"),
        (
            TOLD,
            "NextBlock(self._steps(worker) * 1.0)",
            r"tells worker 0 NextBlock\(period=4.0\), which does not pass a message",
        ),
        (TOLD, "NextBlock(0)", r"tells worker 0 NextBlock\(period=0\); a block has at least 1 step"),
        (CAN, CAN.replace("VALUES", "GRADIENTS"), r"declare Capabilities\(pushes=Pushes.VALUES\), or another machine"),
        (CAN, CAN.partition(", work")[0], r"declares work=PushedWork.BATCH, and its machine makes local steps"),
        ("    averaging=averaging,\n", "", r"has a machine of blocks, and no averaging="),
        ("    machine=machine_of_blocks(averaging),\n", "", r"and its machine brings 'gradient'; declare"),
        ("def averaging(k: int,", "def averaging(workers: int, k: int,", r"averaging\(\) missing 1 required positional"),
        (
            'options={"most": whole_number("M", at_least=1)}',
            'options={"most": 3}',
            r"declares most=3; expected what reads it",
        ),
        (
            "    averaging=averaging,\n",
            "    averaging=averaging,\n    tells={'x': list},\n",
            r"the field x as <class 'list'>",
        ),
        ("self.room.enter(worker, push.step + 1)", "pass", r"worker 0 may not start step 1"),
        (
            "return [Apply(pushes, rate=1.0), *(",
            "return [Apply(pushes[:1], rate=1.0), *(",
            r"before its last push is applied",
        ),
    ],
)
def test_it_is_found_before_a_job_starts(old: str, new: str, said: str, tmp_path: Path) -> None:
    def start() -> None:
        brought(tmp_path, old, new)
        first_look(parse_spec("esync.py:ESYNC:4"), 4)

    with pytest.raises(ModeError, match=rf"^esync\.py:\d+: .*{said}") as told:
        start()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lambda workers, k, most=None: ESync(workers, k, most)", "lambda workers, k: ESync(workers, k)", "argument 'most'"),
        ("def averaging(k: int, most: int | None = None)", "def averaging(k: int)", "argument 'most'"),
    ],
)
def test_options_that_no_command_has_given_are_tried(old: str, new: str, said: str, tmp_path: Path) -> None:
    brought(tmp_path, old, new)
    finding = check(parse_spec("esync.py:ESYNC:4"), lambda: 0.0, games=0, worlds=10, alone=False).finding
    assert finding is not None
    assert re.match(r"esync\.py:\d+: TypeError: .*" + said, finding.line)


def test_what_torch_fails_at_is_a_finding(tmp_path: Path) -> None:
    brought(tmp_path, "return Averaging(k)", "return Averaging(k, most)")
    finding = check(parse_spec("esync.py:ESYNC:4"), lambda: 0.0, games=0, worlds=10).finding
    assert finding is not None
    assert (finding.promise, finding.line[:9]) == ("alone", "esync.py:")


def test_the_example_passes_and_says_which_options_exclude_each_other(tmp_path: Path) -> None:
    brought(tmp_path)
    report = check(parse_spec("esync.py:ESYNC:2"), lambda: 0.0, games=40, worlds=400)
    assert report.finding is None
    with pytest.raises(SpecError, match="use most=4 or more"):
        parse_spec("esync.py:ESYNC:4,most=2").policy(2)


@pytest.mark.parametrize(("kept", "said"), [("", r"declare Averaging\(own=True\)"), (", own=True", "")])
def test_a_part_of_the_way_needs_a_model_of_ones_own(kept: str, said: str, tmp_path: Path) -> None:
    text = ESYNC.replace("ESYNC = Mode(", PARTLY).replace("    BlockMachine,\n", "")
    text = text.replace("from polytempo.modes import (", "from polytempo.modes import (\n    BlockMachine,\n    Install,")
    text = text.replace("return Averaging(k)", f"return Averaging(k{kept})")
    text = text.replace("machine_of_blocks(averaging)", "lambda worker, last, *a, **o: Partly(averaging(*a, **o), last)")
    (tmp_path / "partly.py").write_text(text, encoding="utf-8")
    bring_file(tmp_path / "partly.py")
    if not said:
        first_look(parse_spec("partly.py:ESYNC:2"), 2)
        return
    with pytest.raises(ModeError, match=rf"^partly\.py:\d+: .*{said}"):
        first_look(parse_spec("partly.py:ESYNC:2"), 2)


def test_code_that_does_not_return_is_found(tmp_path: Path) -> None:
    brought(tmp_path, "        self._measure(push, now)\n", "        while True:\n            pass\n")
    spec = parse_spec("esync.py:ESYNC:4")
    with pytest.raises(ModeError, match=r"^esync\.py:\d+: does not return within 0\.2 s$"), returning_within(spec, 0.2):
        first_look(spec, 4)


def test_a_mode_of_a_file_needs_servers(tmp_path: Path) -> None:
    brought(tmp_path)
    spec = parse_spec("esync.py:ESYNC:4")
    assert spec.capabilities.common
    assert not spec.capabilities.reduces
    told = conflict(spec, Feature.ALLREDUCE)
    assert told is not None


def test_a_spec_is_shown_by_its_text(tmp_path: Path) -> None:
    brought(tmp_path)
    assert repr(parse_spec("esync.py:ESYNC:4,most=9")) == "Spec('esync.py:ESYNC:4,most=9')"
