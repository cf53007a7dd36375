"""The door: modes that users bring are loaded here, and nowhere else.

    read_sync("lab/own_mode.py:K_BATCH:2")   what a command line says: the file is loaded, `own_mode.py:K_BATCH:2` is parsed
    bring_file("lab/own_mode.py")            code that this machine's own command line names (--mode)
    bring_installed("kbatch")                code of an installed package, by the name of its entry point in the group below
    bring(source)                            either, in another process of a job: if the digest is the same there

No file is named by a message, a record, a checkpoint or a worker's Register: their texts are parsed by `sync/spec.py`, which
looks a name up among what was brought to its process, and loads nothing. `check_brought` and `of_this_host` say in a line
what to add to the command where one is missing. The path of a `ModeSource` is this host's own: it goes from a launcher, or
an agent, to the processes that it starts, and `without_paths` takes it off what other hosts are told.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from polytempo.errors import ModeError, SpecError, UsageError, nearest
from polytempo.sync.mode import Mode, Origin
from polytempo.sync.spec import MODES, OF_FILE, Spec, brought, name_in, origin_named, source_in, spec_of
from polytempo.sync.spec import bring as bring_mode
from polytempo.sync.watch import place_of_error

#: The group of entry points: `[project.entry-points."polytempo.modes"]`, `kbatch = "package.module:K_BATCH"`.
GROUP = "polytempo.modes"
#: Characters of a digest.
DIGEST = 16


@dataclass(frozen=True)
class ModeSource:
    """A file of modes, or an entry point, which all processes of a job must have alike."""

    name: str  #: "own_mode.py", or the entry point's
    digest: str
    path: str = ""  #: of the file, on this host; empty for an entry point, and where another host has told of it

    @property
    def is_file(self) -> bool:
        """Is it a file of modes?"""
        return self.name.endswith(".py")


# What this machine's own command line names.


def read_sync(text: str) -> str:
    """Load what a text on this machine's own command line names; the text as it is from there on, without folders.

    Raises:
        ModeError: What it names cannot be loaded.
        SpecError: Its file has no mode of this name.
    """
    found = OF_FILE.match(text.strip())
    if found is None:
        _look_up(text)
        return text
    if found["file"] in _files_brought():  # by --mode, from wherever it is
        return text
    modes = bring_file(found["file"])
    if found["name"] not in modes:
        raise SpecError(
            f"{found['file']} has no mode {found['name']!r}{nearest(found['name'], modes)}; it has {', '.join(modes)}"
        )
    return name_in(text) + text.strip()[found.end() :]


def bring_named(text: str) -> None:
    """Load what `--mode` names: a file of modes, or the entry point of an installed package.

    Raises:
        ModeError: It cannot be loaded.
        SpecError: Another file of this name was brought already.
    """
    if text.endswith(".py"):
        bring_file(text)
    elif bring_installed(text) is None:
        raise ModeError(f"expected a file of modes such as lab/own_mode.py, or the name of an installed one, got {text!r}")


def bring_file(path: str | Path, digest: str = "") -> dict[str, Mode]:
    """Load a file of modes; from here on texts may name them.

    Args:
        path: The file.
        digest: What its digest must be, where another process has said so.

    Returns:
        Its modes, by their names in it.

    Raises:
        ModeError: It cannot be read or run, or has no modes.
        SpecError: Another file of this name was brought already.
    """
    path = Path(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ModeError(f"cannot read {path}: {error.strerror}; expected a Python file with modes") from None
    origin = Origin(path.name, path.name, str(path.resolve()), _digest(source))
    if digest and origin.digest != digest:
        raise ModeError(f"{path} is not the file that the job was started with; copy that one here, or start the job again")
    known = {name.partition(":")[2]: mode for name, mode in brought().items() if name.startswith(f"{path.name}:")}
    if known and all(mode.origin is not None and mode.origin.digest == origin.digest for mode in known.values()):
        return known
    names = _run(source, origin)
    lines = _lines(source)
    modes = {}
    for name, mode in names.items():
        if isinstance(mode, Mode) and mode.origin is None and not any(mode is own for own in MODES.values()):
            modes[name] = replace(mode, origin=replace(origin, name=f"{path.name}:{name}", line=lines.get(name, 0)))
    if not modes:
        raise ModeError(f"{path.name}: no mode is declared in it; expected NAME = Mode(...)")
    for mode in modes.values():
        bring_mode(mode)
    return modes


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:DIGEST]


def _run(source: bytes, origin: Origin) -> dict[str, Any]:
    """Run a file, the very bytes whose digest was taken; what its names are then."""
    module = ModuleType(f"polytempo_modes_{re.sub('[^0-9a-zA-Z]', '_', origin.file)}_{origin.digest}")
    module.__file__ = origin.code
    sys.modules[module.__name__] = module  # dataclasses and copies look their classes up there
    try:
        exec(compile(source, origin.code, "exec"), module.__dict__)
    except SyntaxError as error:
        raise ModeError(f"{origin.file}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModeError(f"{place_of_error(origin, error)}: {said}") from error
    return dict(module.__dict__)


def _lines(source: bytes) -> dict[str, int]:
    """The lines at which names are assigned in a file."""
    found = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        found.update({target.id: node.lineno for target in targets if isinstance(target, ast.Name)})
    return found


def _look_up(text: str) -> None:
    """Load the mode of an installed package, where a text names one."""
    if name_in(text) not in MODES and name_in(text) not in brought():
        bring_installed(name_in(text))


def bring_installed(name: str) -> Mode | None:
    """Load the mode of an entry point; None where no installed package has one of this name.

    Raises:
        ModeError: It cannot be loaded, or is no mode.
    """
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        return None
    try:
        mode = found.load()
    except Exception as error:
        raise ModeError(
            f"the entry point {name} = {found.value!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(mode, Mode):
        raise ModeError(f"the entry point {name} = {found.value!r} is of type {type(mode).__name__}, expected a Mode")
    file = Path(getattr(sys.modules[found.module], "__file__", "") or found.module)
    source = file.read_bytes() if file.is_file() else b""
    line = _lines(source).get(found.attr, 0)
    mode = replace(mode, origin=Origin(name, file.name, str(file), _digest(source), line))
    bring_mode(mode)
    return mode


def installed() -> tuple[str, ...]:
    """The names of the modes that installed packages have."""
    return tuple(sorted(entry_points(group=GROUP).names))


def spec_of_script(sync: str | Mode | Spec) -> Spec:
    """The spec that a script's `sync=` stands for. A text may name what is installed; it loads no file."""
    if isinstance(sync, str) and OF_FILE.match(sync.strip()) is None:
        _look_up(sync)
    return spec_of(sync)


# The processes of a job, on this host and on others.


def bring(source: ModeSource) -> None:
    """Load what the launcher of this process, or its agent, has loaded.

    Raises:
        ModeError: It is not here, or differs.
    """
    if source.is_file:
        if Path(source.path).name != source.name:
            raise ModeError(_missing("the job uses", source.name, "this host's"))
        bring_file(source.path, source.digest)
        return
    mode = bring_installed(source.name)
    if mode is None or mode.origin is None:
        raise ModeError(f"the mode {source.name} is of a package that is not installed here; install it on every host")
    if mode.origin.digest != source.digest:
        raise ModeError(f"the mode {source.name} differs from that of the job: install the same version on every host")


def sources_of(texts: Iterable[str], named: Iterable[str | Path] = ()) -> tuple[ModeSource, ...]:
    """What the processes of a job must bring: for the modes of these texts, and what `--mode` has named; all is here."""
    wanted = {Path(file).name if str(file).endswith(".py") else str(file) for file in named}
    origins = [origin for text in texts if (origin := origin_named(text)) is not None]
    origins += [mode.origin for mode in brought().values() if mode.origin is not None and mode.origin.source in wanted]
    found = {one.source: ModeSource(one.source, one.digest, one.code if one.of_file else "") for one in origins}
    return tuple(found.values())


def without_paths(sources: Iterable[ModeSource]) -> tuple[ModeSource, ...]:
    """What another host is told of them: names and digests."""
    return tuple(replace(source, path="") for source in sources)


def of_this_host(sources: Iterable[ModeSource]) -> tuple[ModeSource, ...]:
    """What a job on another host uses, as this host's own command line has named it.

    Raises:
        ModeError: It has not, or names other files.
    """
    files, found = _files_brought(), []
    for source in sources:
        if not source.is_file:
            bring(source)
            found.append(replace(source, path=""))
            continue
        here = files.get(source.name)
        if here is None:
            raise ModeError(_missing("the job uses", source.name, "this host's"))
        if here.digest != source.digest:
            raise ModeError(
                f"{here.code} is not the file that the job was started with; copy that one here, or start the job again"
            )
        found.append(replace(source, path=here.code))
    return tuple(found)


def check_shared(spec: Spec, sources: Iterable[ModeSource]) -> None:
    """Refuse a mode that the servers of this job do not have: they do not run the script.

    Raises:
        UsageError: In a line that says what to do.
    """
    origin = spec.mode.origin
    if origin is None or any(source.name == origin.source for source in sources):
        return
    if not origin.digest:
        raise UsageError(
            f"{spec.text} is an object of this process, which servers do not have; put it into a file, and start the job "
            "with --mode FILE.py or --sync FILE.py:NAME"
        )
    raise UsageError(f"the servers of this job do not have {origin.source}; start the job with --mode {origin.source}")


# What records and checkpoints name.


def digests_of(sources: Iterable[ModeSource]) -> dict[str, str]:
    """What a record says of them."""
    return {source.name: source.digest for source in sources}


def check_brought(what: str, modes: Mapping[str, str]) -> list[str]:
    """Look whether the modes of a record or a checkpoint are here; those of installed packages are looked up.

    Args:
        what: The record or checkpoint, for messages.
        modes: Its modes, as texts, each with the digest of its file; empty where that is not known.

    Returns:
        Warnings, a line for each file that differs.

    Raises:
        ModeError: One is of a file that was not given.
    """
    told = {}
    for text, digest in modes.items():
        source = source_in(text)
        if OF_FILE.match(text.strip()) is None:
            _look_up(text)
        elif source not in _files_brought():
            raise ModeError(_missing(f"{what} uses", source))
        origin = origin_named(text)
        if origin is not None and digest not in ("", origin.digest):
            told[source] = f"{source} is not as it was when {what} was made: its digest differs"
    return list(told.values())


def _files_brought() -> dict[str, Origin]:
    """The files of modes that this process has loaded, by name, each with the origin of one of its modes."""
    origins = (mode.origin for mode in brought().values() if mode.origin is not None)
    return {origin.file: origin for origin in origins if origin.of_file}


def _missing(who: str, file: str, whose: str = "the") -> str:
    return f"{who} {file}, which {whose} command line does not name; add --mode path/to/{file}"
