"""Standard output and error of a command whose readers may go away: what cannot be written is dropped, and said once."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import UnsupportedOperation
from typing import TextIO


class StandardStream:
    """One of the two streams."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = ""  #: why nothing can be written any more

    def write(self, text: str) -> bool:
        """Write and flush; false when that failed just now, for the first time."""
        if self.lost:
            return True
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self.lost = error.strerror or str(error)
            silence(self._stream)
            return False
        return True


def silence(stream: TextIO) -> None:
    """Let a stream that cannot be written lead nowhere, or what it still holds fails again when the process ends."""
    with suppress(UnsupportedOperation):  # a stream of a test has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_standard_streams() -> None:
    """A stream that was closed before the start leads nowhere: else the next file opened takes its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # what workers print need not fit this terminal's encoding
