"""Standard output and error of a command whose reader may go away: what cannot be written is dropped, with one warning."""

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
        self.lost = ""  #: why writing failed; then all later text is dropped

    def write(self, text: str) -> bool:
        """Write and flush; false when that failed just now, for the first time."""
        if self.lost:
            return True
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # of a stream that is not ours to set up
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError as error:
            self.lost = error.strerror or str(error)
            silence(self._stream)
            return False
        return True


def silence(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to /dev/null, or its buffer fails again when the process ends."""
    with suppress(UnsupportedOperation):  # a stream of a test has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_standard_streams() -> None:
    """Open streams that were closed before the start on /dev/null: else the next file opened takes their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # the output of workers need not fit this terminal's encoding
