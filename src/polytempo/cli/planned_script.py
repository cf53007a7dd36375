"""What `polytempo plan` measures of a script: the model and example that it defines, or those that its pipeline gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from polytempo.errors import PolytempoError, UsageError, nearest

if TYPE_CHECKING:
    from polytempo.pipeline.first_batch import Found


def look_into(script: Path, arguments: Sequence[str]) -> Found:
    """Run a script as python would, with its own arguments, until what is to be measured is known."""
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{script} is not Python: it is no text") from None
    module = ModuleType("polytempo_planned")
    module.__file__ = str(script)
    with _as_its_own_process(script, arguments, module):
        try:
            return _run(script, text, module)
        except PolytempoError:
            raise
        except (Exception, SystemExit) as problem:  # it is its author's to mend
            place = f", line {_line(problem, str(script))}"
            raise UsageError(f"{script}{place}: {type(problem).__name__}: {problem}") from problem


def _run(script: Path, text: str, module: ModuleType) -> Found:
    from polytempo.pipeline.first_batch import Found, Stepped

    try:
        exec(compile(text, str(script), "exec"), module.__dict__)  # the user's own script, as python would run it
        if not any(hasattr(module, name) for name in ("model", "make_model")) and "__main__" in text:
            module.__dict__["__name__"] = "__main__"  # it may make its pipeline there
            exec(compile(text, str(script), "exec"), module.__dict__)
    except Stepped as stepped:
        return stepped.found
    return Found(_made(script, module, "model"), _made(script, module, "example"))


@contextmanager
def _as_its_own_process(script: Path, arguments: Sequence[str], module: ModuleType) -> Iterator[None]:
    """Its arguments, the modules beside it, a job of one; afterwards all is as it was."""
    from polytempo.pipeline.first_batch import pipelines_stop_at_their_first_batch

    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    sys.modules[module.__name__] = module  # some classes look for the module that they are from
    try:
        with pipelines_stop_at_their_first_batch():
            yield
    finally:
        sys.argv, sys.path[:] = before


def _made(script: Path, module: ModuleType, what: str) -> Any:
    for name in (what, f"make_{what}"):
        if hasattr(module, name):
            found = getattr(module, name)
            return found() if name.startswith("make_") else found
    known = [name for name in vars(module) if not name.startswith("__")]
    raise UsageError(
        f"expected {script} to define {what} or make_{what}(), or to train a pt.Pipeline, got neither{nearest(what, known)}"
    )


def _line(problem: BaseException, file: str) -> int:
    """The last line of the script that had to do with it."""
    if isinstance(problem, SyntaxError) and problem.filename == file:
        return problem.lineno or 0
    line, trace = 0, problem.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return line
