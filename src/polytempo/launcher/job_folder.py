"""The folder of a job on this host: sockets, the job file, the key. It is removed with the job, however that ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from polytempo.launcher import orphan_cleanup
from polytempo.launcher.job_facts import JOB_VARIABLE

#: Seconds that the janitor may take to end when there is nothing to clean up.
PATIENCE = 5.0


class JobFolder:
    """A private folder, and a janitor that removes it if this process is killed."""

    def __init__(self, who: str) -> None:
        self.path = private_directory()
        self.job_file = self.path / "job.json"
        command = [sys.executable, "-I", "-S", os.path.abspath(orphan_cleanup.__file__)]
        self._janitor = subprocess.Popen(
            [*command, who, str(os.getpid()), str(self.path), f"{JOB_VARIABLE}={self.job_file}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def mark(self) -> dict[str, str]:
        """The variable by which the janitor finds the processes of the job."""
        return {JOB_VARIABLE: str(self.job_file)}

    def remove(self) -> None:
        """Remove the folder: all processes have ended. The janitor ends too."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._janitor.stdin is not None
        with suppress(BrokenPipeError):
            self._janitor.stdin.write(b"!")
            self._janitor.stdin.close()
        try:
            self._janitor.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()


def private_directory() -> Path:
    """A directory only this user can enter, with a path short enough for a socket."""
    directory = tempfile.mkdtemp(prefix="polytempo-")
    if len(directory) > 80:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="polytempo-", dir="/tmp")
    return Path(directory)
