"""What follows from ends and waits, and what is told of errors."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from polytempo.launch.supervise import last_error, waited_too_long
from polytempo.protocol.messages import Status, WorkerStatus
from polytempo.train.job import JobFacts


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


def test_a_job_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'job.json'}'"):
        JobFacts(2, ()).write(tmp_path / "job.json")
