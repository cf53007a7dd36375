"""Public names say what they take, return and raise: the reference (`make docs`) is made of their docstrings."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

import polytempo
import polytempo.horovod
import polytempo.simulate
import polytempo.tables

MODULES: list[ModuleType] = [polytempo, polytempo.horovod, polytempo.simulate, polytempo.tables]
#: Made by the library, never by a script.
HANDLES = {"DistributedModel", "FitRun", "Group", "Task"}


def described(function: Any, text: str) -> list[str]:
    """Parameters that the text does not describe."""
    taken = inspect.signature(function).parameters
    public = [name for name in taken if name != "self" and name[0] != "_"]
    return [name for name in public if not re.search(rf"^ +\*{{0,2}}{name}: ", text, re.MULTILINE)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_arguments_and_results_of_public_names_are_described(module: ModuleType) -> None:
    for name in module.__all__:
        thing = getattr(module, name)
        if not callable(thing):
            continue
        text = thing.__doc__ or ""
        assert text.strip(), name
        if not inspect.isclass(thing):
            assert described(thing, text) == [], name
            returns = inspect.signature(thing).return_annotation
            if returns != "None" and inspect.signature(thing).parameters:
                assert "Returns:" in text, name
        elif name not in HANDLES and not issubclass(thing, Exception) and thing.__init__ is not object.__init__:
            assert described(thing.__init__, text) == [], name
