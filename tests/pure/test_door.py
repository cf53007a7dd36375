"""Modes that users bring: what loads them, and that nothing else does."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from commands import Typed
from sequencing import Bench, optimizer_spec, told_in

from polytempo.cli.main import run
from polytempo.door import (
    DIGEST,
    ModeSource,
    bring,
    bring_file,
    bring_named,
    check_brought,
    check_shared,
    of_this_host,
    read_sync,
    sources_of,
    spec_of_script,
    without_paths,
)
from polytempo.errors import BrokenInvariant, ModeError, SpecError, UsageError
from polytempo.launcher.agent import Agent
from polytempo.launcher.job_facts import JobFacts, job_from
from polytempo.protocol.messages import Assigned, Gone, Refused
from polytempo.records.check import check_lines
from polytempo.server.resume_rules import modes_in
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.run import simulate_job
from polytempo.sync import spec as specs
from polytempo.sync.compatibility import Feature, conflict
from polytempo.sync.mode import Mode
from polytempo.sync.spec import parse_spec, spec_of

OWN = Path(__file__).parents[1] / "modes" / "own_mode.py"


pytestmark = pytest.mark.usefixtures("nothing_brought")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What is there once the file `evil.py` beside it was run."""
    found = tmp_path / "it was run"
    code = OWN.read_text().partition("import annotations\n")[2]
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(found)!r}).touch()\n{code}")
    return found


def install(folder: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with an entry point, as pip leaves one."""
    info = folder / "lab_modes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-modes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[polytempo.modes]\n{name} = {value}\n")
    (folder / "lab_modes.py").write_text(OWN.read_text())
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "lab_modes", raising=False)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    return said


# What a command line names.


def test_a_command_line_loads_a_file_and_the_mode_is_a_name_from_there_on() -> None:
    assert read_sync(f"{OWN}:LEAD:2") == "own_mode.py:LEAD:2"
    spec = parse_spec("own_mode.py:LEAD:2")
    assert (spec.text, spec.arguments, spec.mode.name) == ("own_mode.py:LEAD:2", (2,), "lead")
    assert parse_spec(f"{OWN}:LEAD:2").text == "own_mode.py:LEAD:2", "whatever folder a text has, it is a name"
    assert len(spec.digest) == DIGEST
    assert read_sync("ssp:3") == "ssp:3"


def test_a_file_that_was_named_by_mode_need_not_be_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bring_named(str(OWN))
    assert read_sync("own_mode.py:LEAD:2") == "own_mode.py:LEAD:2"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, "cannot read .*lab.py: No such file or directory; expected a Python file with modes"),
        ("def (", r"^lab.py:1: invalid syntax"),
        ("X = 1", "^lab.py: no mode is declared in it; expected NAME = Mode"),
        ("import math\n\n1 / 0", r"^lab.py:3: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_in_a_line(source: str | None, expected: str, tmp_path: Path) -> None:
    if source is not None:
        (tmp_path / "lab.py").write_text(source)
    with pytest.raises(ModeError, match=expected) as refused:
        read_sync(f"{tmp_path}/lab.py:X:2")
    assert "\n" not in str(refused.value)


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="has no mode 'LED'; nearest: LEAD; it has LEAD, K_BATCH"):
        read_sync(f"{OWN}:LED:2")
    with pytest.raises(SpecError, match=r"expected a whole number S of at least 0 in 'own_mode\.py:LEAD:many'"):
        parse_spec(read_sync(f"{OWN}:LEAD:many"))
    with pytest.raises(ModeError, match=r"expected a file of modes such as lab/own_mode\.py"):
        bring_named("lab/own_mode")


def test_two_files_of_one_name_are_refused_and_a_file_may_be_edited(tmp_path: Path) -> None:
    (tmp_path / "own_mode.py").write_text(OWN.read_text().replace("LEAD = ", "OTHER = "))
    bring_file(OWN)
    with pytest.raises(SpecError, match=r"own_mode\.py was brought from another file; give yours another name"):
        bring_file(tmp_path / "own_mode.py")
    (tmp_path / "mine.py").write_text(OWN.read_text())
    bring_file(tmp_path / "mine.py")
    before = parse_spec("mine.py:LEAD:1").digest
    (tmp_path / "mine.py").write_text(OWN.read_text() + "\n# as a cell of a notebook is run again\n")
    bring_file(tmp_path / "mine.py")
    assert parse_spec("mine.py:LEAD:1").digest != before


def test_an_installed_mode_is_looked_up_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "kb", "lab_modes:K_BATCH", monkeypatch)
    assert read_sync("kb:3") == "kb:3"
    assert parse_spec("kb:3").mode.name == "kbatch"
    (source,) = sources_of(["kb:3"])
    assert (source.name, source.path) == ("kb", "")
    bring(source)
    with pytest.raises(ModeError, match="the mode kb differs from that of the job: install the same version"):
        bring(replace(source, digest="another"))
    with pytest.raises(ModeError, match="the mode kc is of a package that is not installed here"):
        bring(ModeSource("kc", "0"))
    assert spec_of_script("kb:2").text == "kb:2"
    assert run(["modes"]) == 0


def test_an_entry_point_that_is_no_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "kb", "lab_modes:Bound", monkeypatch)
    with pytest.raises(ModeError, match="the entry point kb = 'lab_modes:Bound' is of type ABCMeta, expected a Mode"):
        read_sync("kb:3")


# The commands.


def test_commands_take_files_of_modes(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    checked = typed.start(f"polytempo run -n 2 --sync {OWN}:LEAD:2 train.py")
    assert (checked.request.sync, checked.plan.sync) == ("own_mode.py:LEAD:2", "own_mode.py:LEAD:2")
    (source,) = checked.modes
    assert (source.name, source.path) == ("own_mode.py", str(OWN))
    named = typed.start(f"polytempo run --mode {OWN} train.py")
    assert (named.request.sync, named.modes) == ("bsp", (source,))
    compared = typed.start(f"polytempo compare --sync own_mode.py:LEAD:2 --mode {OWN} train.py")
    assert compared.modes == (source,)
    assert run(["run", "--sync", f"{OWN}:LED", "train.py"]) == 2
    assert "nearest: LEAD" in one_line(capsys)


def test_launch_takes_what_a_command_line_takes(typed: Typed) -> None:
    def work() -> None:
        pass

    checked = typed.launch(f"pt.launch(work, n=2, sync={f'{OWN}:LEAD:2'!r})", work)
    assert (checked.request.sync, checked.modes[0].path) == ("own_mode.py:LEAD:2", str(OWN))
    checked = typed.launch(f"pt.launch(work, n=2, modes=[{str(OWN)!r}])", work)
    assert checked.modes[0].path == str(OWN)


def test_launch_refuses_an_object_without_a_file(typed: Typed) -> None:
    import polytempo as pt

    with pytest.raises(UsageError, match="anew:2 is an object of this process, which servers do not have; put it into a"):
        pt.launch(print, n=2, sync=own("LEAD", "anew")(2))


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    return Typed(tmp_path, monkeypatch)


def own(name: str, called: str = "") -> Mode:
    """A mode as a script declares it: an object, with nothing behind it."""
    mode = replace(bring_file(OWN)[name], origin=None)
    return replace(mode, name=called or mode.name, example=f"{called or mode.name}:2")


def test_modes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["modes", "--mode", str(OWN)]) == 0
    told = capsys.readouterr().out
    assert all(len(line) <= 100 for line in told.splitlines())
    facts = {line.split()[0]: line.split()[1:] for line in told.splitlines() if " yes" in line}
    assert facts["bsp"] == ["yes", "yes", "-", *5 * ["yes"]]
    assert facts["gossip:ring"][:4] == ["-", "-", "yes", "-"]
    assert facts["own_mode.py:LEAD:2"] == ["yes", "-", "-", "-", "yes", "-", "yes", "yes"]
    assert "own_mode.py:K_BATCH:2    an update of each K pushes" in told


def test_what_was_not_thought_through_does_not_go_with_a_split_model() -> None:
    bring_file(OWN)
    assert conflict(parse_spec("own_mode.py:LEAD:2"), Feature.PIPELINE) is not None


# Objects.


def test_an_object_is_simulated_and_one_of_a_named_file_is_that_of_the_file() -> None:
    outcome = simulate_job(Cluster(workers=3), own("K_BATCH", "anew")(2), steps=30)
    assert (outcome.sync, outcome.steps) == ("anew:2", 30)
    assert spec_of(own("LEAD")(2)).text == "own_mode.py:LEAD:2", "its code is of a file that was named"


def test_servers_need_a_file() -> None:
    spec = spec_of(own("LEAD", "anew")(2))
    with pytest.raises(UsageError, match="which servers do not have; put it into a file, and start the job"):
        check_shared(spec, ())
    with pytest.raises(UsageError, match=r"the servers of this job do not have own_mode\.py; start the job with"):
        check_shared(parse_spec("own_mode.py:LEAD:2"), ())
    check_shared(parse_spec("own_mode.py:LEAD:2"), sources_of(["own_mode.py:LEAD:2"]))
    check_shared(parse_spec("ssp:3"), ())


# The processes of a job.


def test_another_process_loads_the_same_file_or_none(tmp_path: Path) -> None:
    bring_file(OWN)
    (source,) = sources_of(["own_mode.py:LEAD:2", "ssp:3"])
    bring(source)
    assert sources_of([], [OWN]) == (source,)
    with pytest.raises(ModeError, match="is not the file that the job was started with; copy that one here"):
        bring(replace(source, digest="another"))
    with pytest.raises(ModeError, match=r"the job uses own_mode\.py, which this host's command line does not name"):
        bring(replace(source, path=""))


def test_facts_of_another_host_name_no_path_and_none_of_theirs_is_used(marker: Path) -> None:
    bring_file(OWN)
    facts = JobFacts(2, ("tcp://a:1",), modes=sources_of(["own_mode.py:LEAD:2"]))
    (told,) = job_from(json.loads(json.dumps(asdict(replace(facts, modes=without_paths(facts.modes)))))).modes
    assert told == ModeSource("own_mode.py", facts.modes[0].digest, "")
    assert of_this_host([told])[0].path == str(OWN)
    assert of_this_host([replace(told, path=str(marker.with_name("evil.py")))])[0].path == str(OWN)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["evil.py", "{folder}/evil.py", "../evil.py"])
def test_an_agent_loads_nothing_that_a_message_names(
    name: str, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agent, sent = Agent.__new__(Agent), list[Gone]()
    monkeypatch.setattr(agent, "_send_end", sent.append)
    source = asdict(ModeSource(name.format(folder=tmp_path), "", str(tmp_path / "evil.py")))
    job = {**asdict(JobFacts(2, ("tcp://a:1",), "evil.py:LEAD:2")), "modes": [source]}
    with pytest.raises(ModeError, match=r"which this host's command line does not name; add --mode path/to/") as refused:
        agent._facts_of(Assigned(job=job, ranks=(1,), tokens=()))
    assert not marker.exists()
    assert "\n" not in str(refused.value)
    assert [(gone.worker, gone.reason) for gone in sent] == [(1, "failed")], "the job's host is told"


def test_an_agent_with_another_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "own_mode.py").write_text(OWN.read_text() + "\n# another\n")
    bring_file(OWN)
    told = without_paths(sources_of(["own_mode.py:LEAD:2"]))
    specs._BROUGHT.clear()
    bring_file(tmp_path / "own_mode.py")
    with pytest.raises(ModeError, match=r"own_mode\.py is not the file that the job was started with; copy that one here"):
        of_this_host(told)


def test_digests_are_compared_at_joining() -> None:
    bring_file(OWN)
    digest = parse_spec("own_mode.py:LEAD:2").digest
    refused = joined("own_mode.py:LEAD:2", "another", digest)
    assert "the file of own_mode.py:LEAD:2 at worker 0 is not that of the servers" in refused[0]
    refused = joined("own_mode.py:LEAD:2", digest, "another")
    assert "the digest of the mode's file is 'another' at worker 1" in refused[0]
    assert joined("own_mode.py:LEAD:2", digest, digest) == []
    assert joined("bsp", "", "") == []


def joined(sync: str, *digests: str) -> list[str]:
    """Why workers are refused that register with these digests, one after another."""
    bench, effects = Bench(sync, size=len(digests)), []
    for worker, digest in enumerate(digests):
        effects += bench.sequencer.register(worker, 0, "0", optimizer_spec(sync, digest=digest), 0.0)
    return [message.reason for _, message in told_in(effects) if isinstance(message, Refused)]


# What others write: a record, a checkpoint, a message, an experiment. None of it loads anything.


def test_a_register_of_a_worker_loads_nothing(marker: Path) -> None:
    text = f"{marker.with_name('evil.py')}:LEAD:2"
    (reason,) = joined(text, "")
    assert "such a file is loaded only where this machine's command line names it" in reason
    assert not marker.exists()


@pytest.mark.parametrize(
    "command", [["check", "rec"], ["explain", "rec"], ["simulate", "-q", "--like", "rec"], ["advise", "-q", "rec"]]
)
def test_a_record_loads_nothing(
    command: list[str], marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["simulate", "-q", "--sync", "ssp:2", "--workers", "2", "--steps", "40", "--record", "rec"]) == 0
    meta = json.loads(Path("rec/meta.json").read_text())
    meta["spec"] = meta["job"]["sync"] = f"{tmp_path}/evil.py:LEAD:2"
    meta["modes"] = {"evil.py": "", f"{tmp_path}/evil.py": ""}
    Path("rec/meta.json").write_text(json.dumps(meta))
    capsys.readouterr()
    status = run(command)
    assert not marker.exists()
    if command[0] in ("check", "explain"):  # the others need the machines of a record, not its mode
        assert status == 2
        assert "uses evil.py, which the command line does not name; add --mode path/to/evil.py" in one_line(capsys)


def test_a_checkpoint_loads_nothing(marker: Path, tmp_path: Path, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    text, saved = f"{tmp_path}/evil.py:LEAD:2", tmp_path / "saved" / "step-00000010"
    saved.mkdir(parents=True)
    proposal = {"apply": "server", "optimizer": "SGD", "sync": text, "tensors": [], "digest": "0"}
    manifest = {"step": 10, "size": 2, "files": [], "sync": text, "tracks": {"0": {"proposal": proposal, "version": 1}}}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert run(["run", "--resume", str(saved), "train.py"]) == 2
    assert "step-00000010 uses evil.py, which the command line does not name" in one_line(capsys)
    assert not marker.exists()
    checked = typed.start(f"polytempo run --resume {saved} --mode {tmp_path}/evil.py train.py")
    assert [source.name for source in checked.modes] == ["evil.py"]
    assert checked.warnings == ("evil.py is not as it was when the checkpoint step-00000010 was made: its digest differs",)
    assert modes_in(manifest) == {text: "0"}


def test_an_experiment_loads_nothing(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.yaml").write_text("cluster: {workers: 2}\nsync: ['evil.py:LEAD:2']\nbudget: {steps: 20}\n")
    assert run(["simulate", "-q", "experiment.yaml"]) == 2
    assert "add --mode evil.py" in one_line(capsys)
    assert not marker.exists()
    assert run(["simulate", "-q", "experiment.yaml", "--mode", "evil.py"]) == 0
    assert marker.exists(), "the marker is what it is taken for"


# Records.


def test_a_record_is_read_with_the_file_that_the_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--workers", "3", "--slow", "2:3", "--steps", "90", "--record", "rec"]
    assert run(["simulate", "-q", *words, "--sync", f"{OWN}:LEAD:2", "--sync", f"{OWN}:K_BATCH:2"]) == 0
    digest = parse_spec("own_mode.py:LEAD:2").digest
    assert json.loads(Path("rec/own_mode.py-LEAD-2-ps/meta.json").read_text())["modes"] == {"own_mode.py": digest}
    specs._BROUGHT.clear()
    parse_spec.cache_clear()
    capsys.readouterr()
    assert run(["check", "rec/own_mode.py-LEAD-2-ps"]) == 2
    assert "add --mode path/to/own_mode.py" in one_line(capsys)
    for name in ("LEAD", "K_BATCH"):
        assert run(["check", f"rec/own_mode.py-{name}-2-ps", "--mode", str(OWN)]) == 0
        assert "keep every promise; replay gives the same" in capsys.readouterr().out
    specs._BROUGHT.clear()
    parse_spec.cache_clear()
    Path("own_mode.py").write_text(OWN.read_text() + "\n# edited since\n")
    assert run(["explain", "rec/own_mode.py-LEAD-2-ps", "--mode", "own_mode.py"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("polytempo: warning: own_mode.py is not as it was when the record rec/own_mode.py-LEAD-2-ps was")


def test_a_record_is_held_to_what_the_mode_promises(tmp_path: Path) -> None:
    bring_file(OWN)
    lines: list[dict[str, Any]] = []
    simulate_job(Cluster(workers=3, slow={2: 3.0}), "own_mode.py:LEAD:4", steps=90, record=lines.append)
    check_lines(lines, parse_spec("own_mode.py:LEAD:4"), 3)
    with pytest.raises(BrokenInvariant, match=r"breaks own_mode\.py:LEAD:2: the slowest is at"):
        check_lines(lines, parse_spec("own_mode.py:LEAD:2"), 3)
    with pytest.raises(BrokenInvariant, match="held without need"):
        check_lines(lines, parse_spec("own_mode.py:LEAD:5"), 3)


def test_names_of_ours_mean_nothing_in_a_brought_mode(tmp_path: Path) -> None:
    """A mode that calls itself `bsp`, and averages, is checked by what it promises all the same."""
    source = OWN.read_text().replace('"kbatch"', '"bsp"').replace("    KBatch,\n", "    KBatch,\n    capabilities=VALUES,\n")
    values = "from polytempo.modes import Capabilities, Pushes\n\nVALUES = Capabilities(pushes=Pushes.VALUES)\n"
    (tmp_path / "named.py").write_text(source.replace("LEAD = ", f"{values}LEAD = "))
    bring_file(OWN)
    lines: list[dict[str, Any]] = []
    simulate_job(Cluster(workers=3, slow={2: 2.0}), "own_mode.py:K_BATCH:2", steps=30, record=lines.append)
    bring_file(tmp_path / "named.py")
    assert parse_spec("named.py:K_BATCH:2").mode.name == "bsp"
    assert check_lines(lines, parse_spec("named.py:K_BATCH:2"), 3) == len(lines)
    with pytest.raises(BrokenInvariant):
        check_lines(lines, parse_spec("bsp"), 3)


def test_what_was_brought_is_checked_in_records_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_brought("it", {"ssp:3": "", "bsp": ""}) == []
    install(tmp_path, "kb", "lab_modes:K_BATCH", monkeypatch)
    assert check_brought("it", {"kb:2": "0"}) == ["kb is not as it was when it was made: its digest differs"]
