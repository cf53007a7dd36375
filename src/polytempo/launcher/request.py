"""The options of `polytempo run`, checked before any process starts."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polytempo.checkpoints import find_checkpoint, written_later
from polytempo.door import ModeSource, check_brought, sources_of
from polytempo.errors import UsageError, counted, nearest
from polytempo.launcher.program import Program
from polytempo.records.files import check_no_record
from polytempo.server.job_plan import JobPlan, Limits
from polytempo.server.resume_rules import check_modes, modes_in
from polytempo.server.server_device import check_server_device, count_visible, default_servers
from polytempo.sync.compatibility import Feature, check_features
from polytempo.sync.epoch_parts import epoch_to_go_on_with
from polytempo.sync.spec import Spec, parse_spec, refused_of
from polytempo.units import written_rate, written_seconds


@dataclass(frozen=True)
class RunRequest:
    """A job to be started on this host."""

    program: Program
    workers: int = 2
    servers: int | None = None
    sync: str = "bsp"
    modes: tuple[str, ...] = ()  #: files of modes, and installed ones, that the command line has named beside it (--mode)
    via: str = "auto"
    record: Path | None = None
    overwrite: bool = False  #: replace a record that is there
    limits: Limits = field(default_factory=Limits)
    slow: dict[int, float] = field(default_factory=dict)
    hiccup: tuple[float, float] = (0.0, 0.0)
    link: tuple[float, float] | None = None  #: bytes a second and seconds one way of the emulated network
    own_links: dict[int, float] = field(default_factory=dict)  #: rank to bytes a second, where they are others
    listen: str | None = None
    expect: int = 0
    checkpoint: Path | None = None
    checkpoint_every: int = 0
    resume: Path | None = None
    min_workers: int | None = None
    seed: int = 0
    timeout: float | None = None
    host_timeout: float = 5.0
    insecure: bool = False
    checkpoint_errors: str = "stop"
    on_divergence: str = "warn"
    grace: float = 20.0
    strategy: str = ""  #: how the script's model is spread, as it was checked; empty without --strategy
    replica: int = 1  #: workers that share one replica of the model, by that strategy
    server_device: str = "auto"  #: where servers keep values: "auto", "cpu", "cuda" or "cuda:I"
    gpus: int = 0  #: that are visible on this host
    debug: int | None = None  #: the worker that has the terminal
    fork: bool = False  #: fork the processes from the launcher instead of starting interpreters
    refused: tuple[str, ...] = ()  #: modes that do not go with the strategy, of those that advice compares

    @cached_property
    def spec(self) -> Spec:
        """The mode."""
        return parse_spec(self.sync)

    @property
    def size(self) -> int:
        """Workers here and elsewhere."""
        return self.workers + self.expect

    @property
    def reader(self) -> int | None:
        """The worker that has standard input: the one that is debugged, or the only one."""
        return 0 if self.debug is None and self.size == self.workers == 1 else self.debug

    @property
    def least(self) -> int:
        """The job ends with fewer workers: --min-workers; by default all where none may be missing
        (`bsp`, `local` and the like), else one."""
        if self.min_workers is not None:
            return self.min_workers
        return self.size if self.spec.capabilities.common else 1

    @property
    def shards(self) -> int:
        """Servers to start, at least one: without parameters it still runs the coordinator."""
        if self.servers is not None:
            return self.servers
        return default_servers(self.gpus, self.workers, self.server_device) if self.way == "ps" else 1

    @property
    def way(self) -> str:
        """How gradients travel: "ps" or "allreduce"; or "peers": models, to neighbours."""
        if self.spec.capabilities.neighbours:
            return "peers"
        if self.via == "auto":  # between hosts, servers outlive more
            return "ps" if self._needs_servers() or self.listen else "allreduce"
        return self.via

    def _needs_servers(self) -> str:
        """The option that only a parameter server can fulfil; empty when there is none."""
        can = self.spec.capabilities
        if not can.reduces and not can.neighbours:
            return f"--sync {self.sync}"
        options = {
            "--servers": self.servers,
            "--server-device": self.server_device if self.server_device.startswith("cuda") else None,
            "--checkpoint": self.checkpoint,
            "--resume": self.resume,
            "--via ps": True if self.via == "ps" else None,
        }
        return next((name for name, value in options.items() if value is not None), "")

    def in_words(self) -> str:
        """The line that says what is started."""
        workers = counted(self.workers, "worker")
        servers = f" and {counted(self.shards, 'server')}" if self.way == "ps" else ""
        by = ", gradients by all-reduce" if self.via == "allreduce" else ""
        spread = f", {self.strategy}" if self.strategy else ""
        return f"starting {workers}{servers}: {self.program.name}{by}{spread}"

    def link_in_words(self) -> str:
        """The line that says that the network is emulated; empty where it is not."""
        if self.link is None:
            return ""
        latency = f", {written_seconds(self.link[1])} one way" if self.link[1] else ""
        speed = f"{written_rate(self.link[0])} each way{latency}"
        own = "".join(f", worker {rank} {written_rate(rate)}" for rank, rate in sorted(self.own_links.items()))
        return f"the network is emulated: every worker is a host of its own, with {speed}{own} (--link)"

    def push_options(self) -> list[str]:
        """Options about pushes to servers, which a script that trains without pushes ignores."""
        options: dict[str, Any] = {
            "--sync": self.sync if self.sync != "bsp" else None,
            "--servers": self.servers,
            "--server-device": self.server_device if self.server_device != "auto" else None,
            "--via": self.via if self.via != "auto" else None,
            "--slow": "" if self.slow else None,
            "--hiccup": "" if self.hiccup != (0.0, 0.0) else None,
            "--checkpoint": self.checkpoint,
            "--resume": self.resume,
            "--timeout": self.timeout,
            "--on-divergence": self.on_divergence if self.on_divergence != "warn" else None,
        }
        return [f"{name} {value}".rstrip() for name, value in options.items() if value is not None]

    def check_mode(self) -> None:
        """Refuse a mode that does not go with the number of workers, or with the way of gradients that was asked for."""
        self.spec.policy(self.size)
        known = ("auto", "ps", "allreduce")
        if self.via not in known:
            raise UsageError(f"expected --via {', '.join(known)}, got {self.via!r}{nearest(self.via, known)}")
        option, by_allreduce = self._needs_servers(), self.via == "allreduce"
        wanted = {
            Feature.SERVERS: bool(option),
            Feature.CHECKPOINT: self.checkpoint is not None,
            Feature.ALLREDUCE: by_allreduce,
            Feature.SERVERS_BESIDE_ALLREDUCE: by_allreduce and bool(option),
        }
        check_features(self.spec, wanted, option=option)

    def refused_modes(self) -> tuple[str, ...]:
        """The modes with which this command would be refused, of those that advice compares."""
        return refused_of(lambda spec: replace(self, sync=spec.text).check_mode(), self.refused)

    def how_to_save(self) -> str:
        """What to do for a model that is at the workers, so that it outlives the job."""
        if self.replica > 1:
            return "let the script save it: fit(checkpoint=DIR), or DistributedModel.save(DIR)"
        by_script = "let the script save it: torch.save() on one rank, after optimizer.consolidate()"
        if self.checkpoint is not None:  # the script has chosen that servers hold nothing
            return by_script
        try:
            replace(self, checkpoint=Path("DIR")).check_mode()
        except UsageError:
            return by_script
        return "with --checkpoint DIR servers hold it, and save it"

    def checked(self) -> CheckedRequest:
        """Check the request and find the checkpoint to resume from.

        Raises: UsageError, one line with the fix, for what cannot work."""
        self._check_counts()
        check_word("--on-divergence", self.on_divergence, ("warn", "stop"))
        self.check_mode()
        _look_at(self.spec, self.size)
        check_server_device(self.server_device, self.gpus)
        self.program.check()
        for rank in self.own_links:
            if not 0 <= rank < self.size:
                raise UsageError(f"--link names worker {rank}, but there are workers 0 to {self.size - 1}")
        for rank, factor in self.slow.items():
            if not 0 <= rank < self.size:
                raise UsageError(f"--slow names worker {rank}, but there are workers 0 to {self.size - 1}")
            if factor < 1:
                raise UsageError(
                    f"--slow can only make slower: worker {rank} was given the factor {factor:g}, expected 1 or more"
                )
        if self.listen is not None:
            check_free(self.listen)
        for option, directory in (("--checkpoint", self.checkpoint), ("--resume", self.resume)):
            check_is_text(option, directory)
        if self.record is not None:
            check_no_record(self.record, self.overwrite)
        path, manifest = find_checkpoint(self.resume) if self.resume else (None, {})
        saved, warnings = modes_in(manifest), list[str]()
        if path is not None:
            warnings = check_brought(f"the checkpoint {path.name}", saved)
            before = replace(self, sync=manifest.get("sync", self.sync))  # the same job in the checkpoint's mode
            check_modes(path.name, before.spec, self.spec)
        self._check_checkpoint()
        plan = JobPlan(self.size, self.shards, self.sync, self.limits, self.checkpoint_every, manifest)
        modes = sources_of((self.sync, *saved), self.modes)
        return CheckedRequest(self, plan, path, modes, tuple(warnings))

    def _check_checkpoint(self) -> None:
        check_word("--checkpoint-errors", self.checkpoint_errors, ("stop", "continue"))
        if not self.grace > 0:
            raise UsageError(f"expected --grace above 0 seconds, got {self.grace:g}")
        if self.checkpoint is None:
            if self.checkpoint_every:
                raise UsageError("--checkpoint-every needs --checkpoint DIR")
            return
        try:
            self.checkpoint.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.checkpoint):
                pass
        except OSError as error:
            raise UsageError(f"cannot write to --checkpoint {self.checkpoint}: {error.strerror}; choose another") from None

    def _check_counts(self) -> None:
        if self.workers < (0 if self.expect else 1):
            raise UsageError(f"expected at least 1 worker, got {self.workers}; use -n 1 or more")
        if self.shards < 1:
            raise UsageError(f"expected at least 1 server, got {self.servers}; use --servers 1 or more")
        if self.checkpoint_every < 0:
            raise UsageError(f"expected --checkpoint-every 1 or more, got {self.checkpoint_every}")
        if bool(self.listen) != bool(self.expect):
            raise UsageError("--listen HOST:PORT and --expect N belong together; give both or neither")
        if self.link is not None and self.listen:
            raise UsageError(
                "--link emulates a network on one host, and between hosts it is real; leave out --link or --listen"
            )
        if self.insecure and not self.listen:
            raise UsageError("--insecure is about --listen, which was not given; leave it out")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.size:
            raise UsageError(f"expected --min-workers between 1 and {self.size}, got {self.min_workers}")
        if self.debug is not None and not 0 <= self.debug < self.workers:
            raise UsageError(f"--debug names worker {self.debug}; expected one of this host, 0 to {self.workers - 1}")
        check_host_timeout(self.host_timeout)
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"expected --timeout above 0 seconds, got {self.timeout:g}")


@dataclass(frozen=True)
class CheckedRequest:
    """A request that was checked, with its plan and the checkpoint to resume from."""

    request: RunRequest
    plan: JobPlan
    resume: Path | None
    modes: tuple[ModeSource, ...] = ()  #: that all processes of the job load
    warnings: tuple[str, ...] = ()

    def note(self) -> str:
        """Where a resumed job goes on, and whether another checkpoint was written later; empty where it does not resume."""
        if self.resume is None or self.request.resume is None:
            return ""
        parts = self.plan.resumed.get("positions", ())
        epoch = f", epoch {epoch_to_go_on_with(parts)}" if parts else ""
        later = written_later(self.request.resume, self.resume) if self.resume != self.request.resume else None
        other = f"; {later} was written later: name it to go on from there" if later else ""
        return f"resumed at step {self.plan.first_step}{epoch}, from {self.resume}{other}"

    def options(self) -> dict[str, Any]:
        """The options that meta.json records."""
        request = self.request
        return {
            **request.program.facts(),
            "servers": request.shards,
            "via": request.way,
            "slow": {str(rank): factor for rank, factor in request.slow.items()},
            "hiccup": list(request.hiccup),
            "link": list(request.link) if request.link else None,
            **({"own_links": {str(rank): rate for rank, rate in request.own_links.items()}} if request.own_links else {}),
            "min_workers": request.least,
            **({"on_divergence": request.on_divergence} if request.on_divergence != "warn" else {}),
            **({"server_device": request.server_device} if request.server_device != "auto" else {}),
            **({"strategy": request.strategy} if request.strategy else {}),
            "refused": list(request.refused_modes()),
            "resumed_from": self.resume.name if self.resume else None,
        }


#: Seconds that a first look at a mode may take; it takes a fraction of one.
LOOK = 10.0


def _look_at(spec: Spec, workers: int) -> None:
    """Play a small job of a mode that was brought in: what it may not do is found before any process starts.

    Raises: ModeError, one line with file and line."""
    if spec.mode.origin is not None:
        from polytempo.proving.check import first_look
        from polytempo.proving.endless import returning_within

        with returning_within(spec, LOOK):
            first_look(spec, workers)


def check_word(option: str, word: str, known: Sequence[str]) -> None:
    """Refuse another value of an option than one of these words."""
    if word not in known:
        raise UsageError(f"expected {option} {' or '.join(known)}, got {word!r}{nearest(word, known)}")


def check_is_text(option: str, path: Path | None) -> None:
    """Refuse a name that is not UTF-8: safetensors cannot open it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        hint = "" if sys.getfilesystemencoding() == "utf-8" else ", or set PYTHONUTF8=1: the locale is not UTF-8"
        raise UsageError(
            f"the name of {option} {path} is not UTF-8, and safetensors cannot open it; choose another{hint}"
        ) from None


def split_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, colon, port = text.rpartition(":")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))  # of IPv6 without its brackets
    if not colon or not host or bare or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UsageError(f"expected HOST:PORT such as 10.0.0.1:7077 or [fd00::1]:7077 for {option}, got {text!r}")
    return host, int(port)


def check_host_timeout(seconds: float) -> None:
    """Heartbeats come twice a second: at least one second, or the first delay would end the job."""
    if not seconds >= 1:
        raise UsageError(f"expected --host-timeout of at least 1 second, got {seconds:g}")


def check_free(listen: str) -> None:
    """Refuse an address that cannot be listened on."""
    host, port = split_address(listen, "--listen")
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        with socket.create_server((host.strip("[]"), port), family=family):
            pass
    except OSError as error:
        raise UsageError(f"cannot listen on {listen}: {error.strerror or error}; choose another port or address") from None


def visible_gpus() -> int:
    """GPUs of this host that CUDA_VISIBLE_DEVICES leaves visible, found without loading torch or CUDA."""
    try:
        files = sum(1 for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name))
    except OSError:
        files = 0
    return count_visible(files, os.environ.get("CUDA_VISIBLE_DEVICES"))
