"""Records: written, read, replayed and checked; and the checker must be able to say no."""

from __future__ import annotations

import copy
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import EVENTFUL, INSTANT, MODES, NOT_ALONE, STRAGGLER, random_cluster

from polytempo.cli.main import run
from polytempo.errors import BrokenInvariant, RecordError
from polytempo.records.check import check_lines
from polytempo.records.files import EVENTS, META, RecordWriter, read_events, read_meta, to_text
from polytempo.records.lines import RecordLine
from polytempo.records.replay import decisions, replay
from polytempo.simulate.cluster import Cluster
from polytempo.simulate.outcome import meta_of
from polytempo.simulate.run import simulate_job
from polytempo.sync.spec import parse_spec


def record(cluster: Cluster, sync: str, **budget: float) -> list[RecordLine]:
    lines: list[RecordLine] = []
    simulate_job(cluster, sync, record=lines.append, **(budget or {"steps_each": 30}))
    return lines


@pytest.mark.parametrize("cluster", [EVENTFUL, INSTANT, STRAGGLER], ids=["eventful", "instant", "straggler"])
@pytest.mark.parametrize("sync", MODES)
def test_every_mode_keeps_its_promises_and_replays(cluster: Cluster, sync: str) -> None:
    lines = record(cluster, sync)
    spec = parse_spec(sync)
    assert check_lines(lines, spec, cluster.workers) == len(lines) > 60
    assert replay(lines, spec.policy(cluster.workers)) > 60


def test_written_and_read_back(tmp_path: Path) -> None:
    lines: list[RecordLine] = []
    with RecordWriter(tmp_path / "record") as writer:
        outcome = simulate_job(STRAGGLER, "ssp:3", steps=40, record=lambda line: (lines.append(line), writer.write(line)))
        writer.close(meta_of(outcome, STRAGGLER, seed=0))
    assert list(read_events(tmp_path / "record")) == lines
    meta = read_meta(tmp_path / "record")
    assert (meta["spec"], meta["size"], meta["exit_status"]) == ("ssp:3", 4, 0)
    assert [worker["worker"] for worker in meta["workers"]] == [0, 1, 2, 3]


def test_the_first_lines_are_those_of_the_contract() -> None:
    lines = record(Cluster(workers=2), "bsp", steps_each=1)
    assert [to_text(line) for line in lines] == [
        '{"t":0.0,"kind":"join","worker":0,"step":0}',
        '{"t":0.0,"kind":"hold","worker":0,"step":0,"waiting_for":[1],"waiting_count":1,'
        '"reason":"1 of 2 workers have not joined yet"}',
        '{"t":0.0,"kind":"join","worker":1,"step":0}',
        '{"t":0.0,"kind":"release","worker":0,"step":0,"slowest":0}',
        '{"t":0.0,"kind":"release","worker":1,"step":0,"slowest":0}',
        '{"t":1.0,"kind":"push","worker":0,"step":0,"samples":32}',
        '{"t":1.0,"kind":"hold","worker":0,"step":1,"waiting_for":[1],"waiting_count":1,'
        '"reason":"1 ahead of worker 1, bound 0"}',
        '{"t":1.0,"kind":"push","worker":1,"step":0,"samples":32}',
        '{"t":1.0,"kind":"apply","server":0,"version":1,"workers":[0,1],"staleness":[0,0]}',
        '{"t":1.0,"kind":"release","worker":0,"step":1,"slowest":1}',
        '{"t":1.0,"kind":"release","worker":1,"step":1,"slowest":1}',
        '{"t":1.0,"kind":"leave","worker":0,"reason":"finished"}',
        '{"t":1.0,"kind":"leave","worker":1,"reason":"finished"}',
    ]


def find(lines: list[RecordLine], kind: str, nth: int = 0) -> int:
    return [index for index, line in enumerate(lines) if line["kind"] == kind][nth]


def _earlier(lines: list[RecordLine]) -> None:
    lines[50]["t"] = -1.0


def _twice(lines: list[RecordLine]) -> None:
    at = find(lines, "release", 10)
    lines.insert(at, copy.deepcopy(lines[at]))


def _wrong_slowest(lines: list[RecordLine]) -> None:
    lines[find(lines, "release", 10)]["slowest"] += 1


def _lost_release(lines: list[RecordLine]) -> None:
    held = next(line for line in lines[find(lines, "hold", 8) :] if line["kind"] == "hold")
    worker, step = held["worker"], held["step"]
    lines.remove(next(x for x in lines if x["kind"] == "release" and (x["worker"], x["step"]) == (worker, step)))


def _applied_twice(lines: list[RecordLine]) -> None:
    lines[find(lines, "apply", 3)]["workers"] = [0, 0]
    lines[find(lines, "apply", 3)]["staleness"] = [0, 0]


def _never_applied(lines: list[RecordLine]) -> None:
    del lines[find(lines, "apply", -1)]


def _skipped_version(lines: list[RecordLine]) -> None:
    lines[find(lines, "apply", 3)]["version"] += 1


def _needless_hold(lines: list[RecordLine]) -> None:
    release = lines[find(lines, "release", 12)]
    hold = {"kind": "hold", "waiting_for": [3], "waiting_count": 1, "reason": "no need"}
    lines.insert(lines.index(release), {**hold, "t": release["t"], "worker": release["worker"], "step": release["step"]})


def _late_joiner_at_zero(lines: list[RecordLine]) -> None:
    at = find(lines, "push", -1)
    lines.insert(at, {"t": lines[at]["t"], "kind": "join", "worker": 9, "step": 0})


def _too_far(lines: list[RecordLine]) -> None:
    hold = lines[find(lines, "hold", 8)]
    lines[lines.index(hold)] = {
        "t": hold["t"],
        "kind": "release",
        "worker": hold["worker"],
        "step": hold["step"],
        "slowest": hold["step"] - 4,
    }


def _push_without_release(lines: list[RecordLine]) -> None:
    lines[find(lines, "push", 8)]["step"] += 1


def _miscounted(lines: list[RecordLine]) -> None:
    lines[find(lines, "hold", 8)]["waiting_count"] += 5


BREAKS = (
    _earlier,
    _twice,
    _wrong_slowest,
    _lost_release,
    _applied_twice,
    _never_applied,
    _skipped_version,
    _needless_hold,
    _late_joiner_at_zero,
    _too_far,
    _push_without_release,
    _miscounted,
)


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_the_checker_sees_a_broken_record(damage: Callable[[list[RecordLine]], None]) -> None:
    lines = record(STRAGGLER, "ssp:3")
    check_lines(lines, parse_spec("ssp:3"), 4)
    damage(lines)
    with pytest.raises(BrokenInvariant, match=r"^(line \d+|at the end)"):
        check_lines(lines, parse_spec("ssp:3"), 4)


def test_the_checker_knows_the_bounds_apart() -> None:
    lines = record(STRAGGLER, "ssp:3")
    with pytest.raises(BrokenInvariant, match=r"breaks ssp:2"):
        check_lines(lines, parse_spec("ssp:2"), 4)
    with pytest.raises(BrokenInvariant, match=r"held without need"):
        check_lines(lines, parse_spec("ssp:4"), 4)
    with pytest.raises(BrokenInvariant):
        check_lines(lines, parse_spec("asp"), 4)


def test_replay_sees_another_decision() -> None:
    lines = record(STRAGGLER, "ssp:3")
    with pytest.raises(BrokenInvariant, match=r"replay expected"):
        replay(lines, parse_spec("ssp:2").policy(4))
    swapped = [{**line, "workers": [3]} if line["kind"] == "apply" else line for line in lines]
    with pytest.raises(BrokenInvariant, match=r"replay updates from"):
        replay(swapped, parse_spec("ssp:3").policy(4))


def test_another_mode_can_be_asked_about_a_record() -> None:
    lines = record(STRAGGLER, "asp")
    assert {line["kind"] for line in decisions(lines, parse_spec("delay:0").policy(4))} == {"join", "hold", "release"}


def test_unreadable_records_name_the_place(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="made with --record"):
        list(read_events(tmp_path))
    (tmp_path / EVENTS).write_text('{"t":0,"kind":"join","worker":0,"step":0}\n{"t":1,\n')
    with pytest.raises(RecordError, match="line 2: not JSON"):
        list(read_events(tmp_path))
    (tmp_path / EVENTS).write_text("[1]\n")
    with pytest.raises(RecordError, match="line 1: expected an object"):
        list(read_events(tmp_path))
    with pytest.raises(RecordError, match="did not end"):
        read_meta(tmp_path)
    (tmp_path / EVENTS).write_bytes(b'{"t":0,"kind":"join"}\n{"t":1,"kind":"\xe4"}\n')
    with pytest.raises(RecordError, match="line 2: not JSON"):
        list(read_events(tmp_path))
    (tmp_path / META).write_bytes(b'{"spec": "\xe4"}')
    with pytest.raises(RecordError, match="not JSON"):
        read_meta(tmp_path)
    (tmp_path / META).write_text(json.dumps({"spec": "bsp"}))
    with pytest.raises(RecordError, match="lacks size"):
        read_meta(tmp_path)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 12))])
def test_random_clusters_keep_every_promise_in_every_mode(seed: int) -> None:
    """`make proof` takes 300 of them."""
    cluster = random_cluster(seed)
    for sync in MODES:
        if sync not in NOT_ALONE or cluster.workers > 1:
            lines = record(cluster, sync)
            spec = parse_spec(sync)
            check_lines(lines, spec, cluster.workers)
            replay(lines, spec.policy(cluster.workers))


@pytest.mark.parametrize(
    ("progress", "status", "text"),
    [
        ({"what": "pipeline of 2 stages", "steps": 3}, 2, "is the record of a pipeline, which follows its schedule"),
        (None, 0, "bsp: no step was pushed, so there is nothing to check in 1 line"),
    ],
)
def test_a_record_without_decisions_is_not_said_to_keep_promises(
    progress: object, status: int, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RecordWriter(tmp_path) as writer:
        writer.write({"t": 1.0, "kind": "metric", "worker": 0, "steps": 3})
        writer.close({"spec": "bsp", "size": 2, "job": {"progress": progress}})
    assert run(["check", str(tmp_path)]) == status
    said = capfd.readouterr()
    assert text in said.out + said.err


def test_events_that_cannot_be_written_are_an_error_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / EVENTS).symlink_to("/dev/full")
    writer = RecordWriter(tmp_path)
    writer.write({"t": 1.0, "kind": "metric", "worker": 0})
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / EVENTS}'"):
        writer.close({"spec": "bsp"})
    writer.abandon()


def test_a_meta_that_cannot_be_written_is_an_error_with_its_name_and_leaves_none(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.write({"t": 1.0, "kind": "metric", "worker": 0})
    writer.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk: a part of it fits
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / META}'"):
            writer.close({"spec": "bsp", "size": 2, "long": "x" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS]


def test_names_that_are_no_text_are_kept(tmp_path: Path) -> None:
    """Python reads a byte of a name that does not fit the locale as a surrogate, which UTF-8 cannot write."""
    name = os.fsdecode(b"tr\xe4in.py")
    line = {"t": 1.0, "kind": "fault", "worker": 0, "cause": f"{name} caf\u00e9 \ud800"}
    assert "\u00e4" in to_text({"t": 0.0, "kind": "fault", "cause": "tr\udcc3\udca4in.py"}), (
        "as LC_ALL=C reads a name in UTF-8"
    )
    with RecordWriter(tmp_path / "record") as writer:
        writer.write(line)
        writer.close({"spec": "bsp", "size": 2, "options": {"script": name}})
    assert list(read_events(tmp_path / "record")) == [line]
    assert read_meta(tmp_path / "record")["options"]["script"] == name
    assert "caf\u00e9" in (tmp_path / "record" / EVENTS).read_text(encoding="utf-8")


def test_a_simulated_record_is_overwritten_only_when_told_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def simulate(*options: str) -> int:
        return run(["simulate", "--steps", "20", "-q", "--record", str(tmp_path / "rec"), *options])

    assert simulate("--sync", "bsp") == 0
    before = (tmp_path / "rec" / META).read_bytes()
    assert simulate("--sync", "asp") == 2
    refused = f"polytempo: {tmp_path}/rec holds the record of an earlier job; choose another directory, or add --overwrite\n"
    assert capfd.readouterr().err == refused
    assert (tmp_path / "rec" / META).read_bytes() == before
    assert simulate("--sync", "asp", "--overwrite") == 0
    assert read_meta(tmp_path / "rec")["spec"] == "asp"
    both = ("--sync", "ssp:1", "--sync", "asp")  # each in its own folder
    assert (simulate(*both), simulate(*both), simulate(*both, "--overwrite")) == (0, 2, 0)


@pytest.mark.parametrize("command", [("explain",), ("check",), ("advise",), ("simulate", "--like")])
def test_where_there_is_no_record_it_is_said(
    command: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def said(place: Path) -> str:
        assert run([*command, str(place)]) == 2
        return capfd.readouterr().err.removeprefix("polytempo: ").strip()

    expected = "expected a directory written with --record"
    missing = tmp_path / "nosuch"
    if command == ("advise",):  # it takes a file too
        assert said(missing) == f"there is no {missing}; {expected.replace('--', 'run --')}, or a YAML file with a cluster"
    else:
        assert said(missing) == f"there is no record in {missing}: there is no such directory; {expected}"
        assert said(Path(__file__)) == f"there is no record in {__file__}: it is a file; {expected}"
    assert said(tmp_path) == f"there is no record in {tmp_path}; {expected}"
    for mode in ("bsp", "asp"):
        with RecordWriter(tmp_path / mode) as writer:
            writer.close({"spec": mode, "size": 2})
    assert said(tmp_path) == f"there is no record in {tmp_path} itself; there is one in {tmp_path}/asp, {tmp_path}/bsp"
