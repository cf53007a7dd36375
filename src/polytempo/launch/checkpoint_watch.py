"""The checkpoints of a running job, as the disk has them: a process that has died could not say what it had written."""

from __future__ import annotations

from pathlib import Path

from polytempo.checkpoints import (
    has_all_files,
    newest_since,
    partial_checkpoints,
    remove_checkpoint,
    stamp_of,
    whole_checkpoints,
)


class CheckpointWatch:
    """What a job has saved since it began, below a directory; and what it went on from."""

    def __init__(self, directory: Path | None, resumed: Path | None) -> None:
        self.directory = directory
        self._resumed = resumed
        there = whole_checkpoints(directory) if directory is not None else []
        self._before = {checkpoint: stamp_of(checkpoint) for checkpoint in there}
        self._begun = partial_checkpoints(directory) if directory is not None else set()

    def newest(self) -> str:
        """The checkpoint to go on from: the job's newest, else the one it went on from; empty when there is none."""
        found = newest_since(self.directory, self._before) if self.directory is not None else None
        if found is None and self._resumed is not None and has_all_files(self._resumed):
            found = self._resumed
        return "" if found is None else str(found)

    def clear(self) -> None:
        """All servers have ended: what they have begun will never be whole."""
        for partial in partial_checkpoints(self.directory) - self._begun if self.directory is not None else ():
            remove_checkpoint(partial)

    def after(self, trouble: str) -> str:
        """What the last line of an interrupted job says of its checkpoints; `trouble`: why the last was not written."""
        if self.directory is None:
            return ""
        newest = self.newest()
        resume = f"go on with --resume {newest}" if newest else "there is no checkpoint to go on from"
        return f"; {trouble}; {resume}" if trouble else f"; {resume}"
