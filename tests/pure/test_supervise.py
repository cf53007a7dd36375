"""What follows from ends and waits, and what is told of errors."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from polytempo.launcher.job_facts import JobFacts
from polytempo.launcher.program import ScriptProgram
from polytempo.launcher.request import RunRequest
from polytempo.launcher.supervisor import (
    AllDone,
    EndJob,
    FailureReport,
    LostServer,
    StoppedProcesses,
    Supervisor,
    last_error,
    waited_too_long,
)
from polytempo.protocol.messages import Status, WorkerStatus

TRAIN = ScriptProgram("train.py")


def waiting(worker: int, held: float, *others: int) -> WorkerStatus:
    return WorkerStatus(worker, 5, 0.0, "waiting", held, held, 9.0, others)


def busy(worker: int, state: str = "computing") -> WorkerStatus:
    return WorkerStatus(worker, 5, 0.0, state, 0.0, 0.0, 9.0, ())


@pytest.mark.parametrize(
    ("workers", "late"),
    [
        ((busy(0), busy(1)), None),
        ((waiting(0, 2.0, 1), busy(1)), None),
        ((waiting(0, 4.0, 1), busy(1)), 1),
        ((waiting(0, 4.0, 1), busy(1, "absent")), 1),
        ((waiting(0, 4.0, 2, 1), busy(1), waiting(2, 3.9, 1)), 1),  # worker 2 came after worker 0, and waits as well
        ((waiting(0, 4.0, 1), busy(1, "lost")), None),
        ((waiting(0, 4.0, 1), waiting(1, 4.0, 0)), None),
    ],
)
def test_only_those_that_do_not_wait_themselves_are_given_up(workers: tuple[WorkerStatus, ...], late: int | None) -> None:
    assert waited_too_long(Status(seconds=9.0, used=0.0, workers=workers), 3.0) == late


def test_a_stopped_process_is_named_in_time_and_given_up_by_the_timeout() -> None:
    watch: StoppedProcesses[str] = StoppedProcesses(limit=30.0)
    said = {now: watch.look(["server 1"] if 2.0 <= now < 28.0 else [], now)[:2] for now in (n / 2 for n in range(70))}
    assert [now for now, (due, _) in said.items() if due] == [3.0, 12.0, 22.0], (
        "after 1 s, after 10, then when it has doubled"
    )
    assert [now for now, (_, again) in said.items() if again] == [28.0]
    assert all(due in ([], ["server 1"]) for due, _ in said.values())
    assert watch.look(["server 0", "server 1"], 100.0) == ([], [], [])
    assert watch.look(["server 0"], 100.5) == ([], [], []), "one that was stopped for a moment is not worth a word"
    assert watch.look(["server 0"], 130.5) == ([], [], ["server 0"])


def test_workers_are_not_given_up_for_waits_that_a_stopped_process_has_caused() -> None:
    watch: StoppedProcesses[str] = StoppedProcesses(limit=3.0)
    assert not watch.held_up(0.0)
    watch.look(["server 1"], 1.0)
    assert watch.held_up(2.0)
    watch.look([], 3.0)
    assert watch.held_up(5.9), "a wait of 3 s may have begun before"
    assert not watch.held_up(6.1)


BEGIN = "Traceback (most recent call last):"
KEY = [BEGIN, '  File "a.py", line 1, in <module>', "KeyError: 3"]
VALUE = [BEGIN, '  File "a.py", line 4, in <module>', "ValueError: no"]
DURING = ["", "During handling of the above exception, another exception occurred:", ""]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([], []),
        (["a warning", "killed"], ["a warning", "killed"]),
        (["a warning", *KEY], KEY),
        ([*KEY, "caught and logged", *VALUE], VALUE),
        (["a warning", *KEY, *DURING, *VALUE], [*KEY, *DURING, *VALUE]),
    ],
)
def test_of_the_last_words_the_last_error_is_shown_with_what_led_to_it(lines: list[str], shown: list[str]) -> None:
    assert last_error(deque(lines)) == shown


FAILED = ("failed", "failed with exit status 1")
KILLED = ("lost", "was killed by SIGKILL")


def test_a_script_that_fails_before_its_first_push_ends_the_job_although_one_worker_would_be_enough() -> None:
    supervisor = Supervisor(3, least=1)
    orders = supervisor.exited(1, *FAILED, accepted=False)
    assert orders == [EndJob("worker 1 failed with exit status 1 before its first push", 1)]
    assert supervisor.ending
    assert supervisor.exited(2, *FAILED, accepted=False) == [], "the first cause is the cause"


def test_after_a_push_a_failure_is_what_min_workers_is_about() -> None:
    supervisor = Supervisor(3, least=2)
    supervisor.training()
    warning = "worker 1 failed with exit status 1; going on with 2 of 3"
    assert supervisor.exited(1, *FAILED, accepted=True) == [FailureReport(1, *FAILED, warning)]
    ended = "worker 0 failed with exit status 1; 1 of 3 workers are left, at least 2 are needed"
    assert supervisor.exited(0, *FAILED, accepted=True) == [EndJob(ended, 0)]


@pytest.mark.parametrize("accepted", [False, True])
def test_a_death_by_a_signal_is_no_mistake_of_the_script_whenever_it_comes(accepted: bool) -> None:
    supervisor = Supervisor(2, least=1, trains=True)
    assert [type(order) for order in supervisor.exited(1, *KILLED, accepted=accepted)] == [FailureReport]
    assert not supervisor.ending


def test_a_finished_worker_that_never_pushed_is_fine() -> None:
    supervisor = Supervisor(1, least=1)
    finished = ("finished", "finished")
    assert supervisor.exited(0, *finished, accepted=False) == [FailureReport(0, *finished), AllDone()]


def test_what_may_never_push_follows_min_workers_if_it_was_given() -> None:
    """A pipeline, or torch.distributed: there is no first push to wait for."""
    supervisor = Supervisor(3, least=1, tolerant=True)
    assert [type(order) for order in supervisor.exited(2, *FAILED, accepted=False)] == [FailureReport]
    assert supervisor.exited(1, *KILLED, accepted=False)[0] == FailureReport(
        1, *KILLED, "worker 1 was killed by SIGKILL; going on with 1 of 3"
    )
    assert not supervisor.ending


def test_and_ends_once_it_shows_that_it_trains() -> None:
    """However fast the first failed and however slow the others are, the outcome is the same."""
    supervisor = Supervisor(3, least=1, tolerant=True)
    supervisor.exited(2, *FAILED, accepted=False)
    assert supervisor.training() == [EndJob("worker 2 failed with exit status 1 before its first push", 2)]
    assert supervisor.training() == []
    late = Supervisor(3, least=1, tolerant=True)
    assert late.training() == []
    assert late.exited(2, *FAILED, accepted=False) == [EndJob("worker 2 failed with exit status 1 before its first push", 2)]


SAVING = "with --checkpoint DIR servers hold it, and save it"


@pytest.mark.parametrize(
    ("server", "lost", "words"),
    [
        (1, LostServer(True, "saved/step-5"), "its part of the model is lost; resume with --resume saved/step-5"),
        (0, LostServer(True, "", SAVING), "its part of the model is lost; there is no checkpoint to resume from"),
        (
            0,
            LostServer(False, "", SAVING),
            "it coordinated the job, which has ended; the model was at the workers, and what the script has not saved is "
            f"lost; {SAVING}",
        ),
        (1, LostServer(False, "", SAVING), "it was needed by the job, which has ended; the model was at the workers"),
    ],
)
def test_a_server_that_ends_takes_the_job_with_it_once(server: int, lost: LostServer, words: str) -> None:
    supervisor = Supervisor(2, least=1)
    (order,) = supervisor.server_exited(server, "was killed by SIGKILL", lost)
    assert isinstance(order, EndJob)
    assert order.cause.startswith(f"server {server} was killed by SIGKILL: {words}")
    assert supervisor.server_exited(0, "finished", lost) == []
    assert supervisor.exited(0, *FAILED, accepted=False) == []


@pytest.mark.parametrize(
    ("request_", "how"),
    [
        (RunRequest(TRAIN), SAVING),
        (RunRequest(TRAIN, sync="local:8"), SAVING),
        (RunRequest(TRAIN, via="allreduce"), "let the script save it: torch.save() on one rank"),
        (
            RunRequest(TRAIN, sync="gossip:ring", workers=3),
            "let the script save it: torch.save() on one rank",
        ),
        (
            RunRequest(TRAIN, checkpoint=Path("saved")),
            "let the script save it: torch.save() on one rank",
        ),
        (RunRequest(TRAIN, strategy="pipe=2", replica=2), "let the script save it: fit(checkpoint=DIR)"),
    ],
    ids=str,
)
def test_how_to_save_names_no_option_that_the_job_would_refuse(request_: RunRequest, how: str) -> None:
    assert request_.how_to_save().startswith(how)
    if how is SAVING:
        replace(request_, checkpoint=Path("saved")).check_mode()


def test_a_job_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'job.json'}'"):
        JobFacts(2, ()).write(tmp_path / "job.json")
