"""Errors are ours, and the ones that Python, PyTorch and Horovod raise in the same place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polytempo import errors
from polytempo.checkpoints import MANIFEST, find_checkpoint
from polytempo.errors import PolytempoError, UsageError
from polytempo.transport.keys import read_key_file

BUILT_IN = {
    "UsageError": ValueError,
    "HyperDiffer": ValueError,
    "WrongType": TypeError,
    "ModeError": ValueError,
    "SpecError": ValueError,
    "ClusterError": ValueError,
    "OrderError": RuntimeError,
    "StuckError": RuntimeError,
    "PeerError": RuntimeError,
    "RankLost": RuntimeError,
    "JobEnded": RuntimeError,
    "RecordError": ValueError,
    "BrokenInvariant": ValueError,
}


def test_each_error_is_a_built_in_one_too_and_stands_in_the_tree() -> None:
    ours = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PolytempoError)}
    assert set(ours) - {"PolytempoError"} == set(BUILT_IN)
    for name, built_in in BUILT_IN.items():
        assert issubclass(ours[name], built_in)
        assert f" {name}" in str(errors.__doc__)


def test_what_is_refused_inside_is_not_taken_for_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A UsageError is a ValueError now, as is text that is no JSON: they are told apart."""
    key = tmp_path / "key"
    key.write_text("{}")
    key.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        read_key_file(key)
    checkpoint = tmp_path / "step-1"
    checkpoint.mkdir()
    (checkpoint / "part").write_bytes(b"x")
    (checkpoint / MANIFEST).write_text(json.dumps({"files": [{"file": "part", "digest": "0"}]}))
    with pytest.raises(UsageError) as refusal:
        find_checkpoint(checkpoint)
    assert str(refusal.value).endswith("is damaged: its digest is not the manifest's")
