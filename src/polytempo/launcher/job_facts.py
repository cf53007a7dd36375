"""The job file: what a worker process needs to join its job, written by the launcher, read by `init`."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from polytempo.door import ModeSource
from polytempo.errors import UsageError
from polytempo.launcher.environment import Placement, placement_of
from polytempo.sync.spec import Spec, parse_spec
from polytempo.transport.keys import WorkerKeys, read_key_file
from polytempo.transport.link_relay import EmulatedHost, worker_name

#: The two variables by which a launcher tells a process its job and rank. An argument of `init` wins over them.
JOB_VARIABLE = "POLYTEMPO_JOB"
RANK_VARIABLE = "POLYTEMPO_RANK"
#: The rendezvous address of ranks on several hosts, and the file with their keys, or "insecure"; arguments win over them.
ADDRESS_VARIABLE = "POLYTEMPO_ADDRESS"
KEY_VARIABLE = "POLYTEMPO_KEY_FILE"
#: The debugger that the user has chosen, as PYTHONBREAKPOINT names one; in workers that names ours (`debugger.py`).
BREAKPOINT_VARIABLE, DEBUGGER_VARIABLE = "PYTHONBREAKPOINT", "POLYTEMPO_DEBUGGER"
#: The process that holds a rank in a job, and which: set by `init`, for the processes that this one starts.
WORKER_VARIABLE = "POLYTEMPO_WORKER"


@dataclass
class Emulation:
    """Delays of a worker (`--slow` and `--hiccup`): in proportion to its compute time, and random stalls."""

    factor: float = 1.0
    probability: float = 0.0
    seconds: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def slow_down(self, computed: float) -> None:
        """Sleep after a step that took this number of seconds."""
        hiccup = self.seconds if self.probability and self.dice.random() < self.probability else 0.0
        delay = (self.factor - 1) * computed + hiccup
        if delay > 0:
            time.sleep(delay)


@dataclass(frozen=True)
class JobFacts:
    """The same for all workers of a host."""

    size: int
    addresses: tuple[str, ...]
    sync: str = "bsp"
    seed: int = 0
    first_rank: int = 0  #: of this host
    local_size: int = 1
    incarnation: int = 0
    slow: dict[int, float] = field(default_factory=dict)
    hiccup: tuple[float, float] = (0.0, 0.0)
    link: tuple[float, float] | None = None  #: bytes a second and seconds one way, where the network is emulated
    positions: tuple[dict[str, Any], ...] = ()  #: how far the resumed jobs had read the data
    keys: dict[str, str] | None = None
    #: How gradients travel where the mode allows both; "auto": by all-reduce, unless the script needs servers.
    via: str = "ps"
    meeting: str = ""  #: the rendezvous directory of the workers of this host
    route: str = ""  #: of a job on several hosts: the address by which this host is, or reaches, the launcher's
    insecure: bool = False
    tokens: dict[int, str] = field(default_factory=dict)  #: by rank: the token that authenticates a worker to the servers
    proxies: dict[int, str] = field(default_factory=dict)  #: by rank: its way to all others, where the network is emulated
    strategy: str = ""  #: how the model is spread (--strategy); empty where the script says it, or nothing does
    budgeted: bool = False  #: has the job a budget?
    saves: bool = False  #: does it write checkpoints?
    resumed: bool = False  #: does it go on from one?
    companions: tuple[str, ...] = ()  #: what that one holds beside parameters (`server/resume_rules.py`)
    replica: int = 1  #: workers that share one replica of the model, by that strategy
    host_timeout: float = 5.0  #: seconds in which a link between hosts may come back (--host-timeout)
    reader: int | None = None  #: the rank that has standard input
    debugged: bool = False  #: does its user debug it (--debug)? Then no rank gives up another for being late
    port: int = 0  #: a free one on the launcher's host, for scripts that call torch.distributed
    modes: tuple[ModeSource, ...] = ()  #: files of modes and installed ones, which workers load; their paths are this host's

    @cached_property
    def spec(self) -> Spec:
        """The mode of the job."""
        return parse_spec(self.sync)

    def torch_variables(self, rank: int) -> dict[str, str]:
        """The variables that torchrun sets: `torch.distributed.init_process_group()` works in our workers, too."""
        host = self.route.rpartition(":")[0].strip("[]")
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank - self.first_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": host if host not in ("", "0.0.0.0", "*", "::") else "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }

    def emulation(self, rank: int) -> Emulation:
        """A worker's emulation: its hiccups are the same in every run with the same seed."""
        return Emulation(self.slow.get(rank, 1.0), *self.hiccup, random.Random(f"{self.seed}/{rank}"))

    def emulated_host(self, rank: int) -> EmulatedHost | None:
        """A worker's place on the emulated network; None where the network is real."""
        return EmulatedHost(worker_name(rank), self.proxies[rank]) if rank in self.proxies else None

    def write(self, path: Path) -> None:
        """Write the job file, readable by this user alone: it may hold a key."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(self), file)
        except OSError as error:  # of a full disk; it does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from None


def job_from(data: dict[str, Any]) -> JobFacts:
    """The facts in plain data."""
    facts = {**data, "addresses": data.get("addresses", ())}
    for name in ("slow", "tokens", "proxies"):
        facts[name] = {int(rank): value for rank, value in facts.get(name, {}).items()}
    facts["modes"] = tuple(ModeSource(**source) for source in facts.get("modes", ()))
    for name in ("addresses", "positions", "companions", "hiccup", "link"):
        if facts.get(name) is not None:
            facts[name] = tuple(facts[name])
    return JobFacts(**facts)


def read_job(path: str | Path) -> JobFacts:
    """Read a job file.

    Raises: UsageError when it cannot be read."""
    try:
        return job_from(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"the job file {path} cannot be read: {error}; start the script with polytempo run") from None


def placement_of_environment() -> Placement | None:
    """How another launcher (torchrun, mpirun, srun) started this process; None when none did."""
    process, started = os.getppid(), ""  # with the time of its start the id identifies the process for good
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        started = stat.rpartition(")")[2].split()[19]
    parent = f"{process}-{started}"
    return placement_of(os.environ, parent)  # of another launcher's variables: placement.py says which


def place_of_environment() -> str:
    """Job and rank in this process's variables, which the processes it starts inherit; empty without a launcher."""
    path, rank = os.environ.get(JOB_VARIABLE), os.environ.get(RANK_VARIABLE)
    if path is not None and rank is not None:
        return f"{path} {rank}"
    placement = placement_of(os.environ, "any")  # the placement by another launcher; whose child this is does not matter
    return f"{placement.name} {placement.rank}" if placement is not None else ""


def claim(place: str) -> None:
    """This process holds that rank; the processes that it starts do not."""
    if place:
        os.environ[WORKER_VARIABLE] = f"{os.getpid()} {place}"


def disclaim() -> None:
    """This process no longer holds a rank."""
    os.environ.pop(WORKER_VARIABLE, None)


def claimed_by(place: str) -> int:
    """The process that holds this rank, if it is this one or an ancestor; else 0."""
    worker, _, claimed = os.environ.get(WORKER_VARIABLE, "").partition(" ")
    return int(worker) if place and claimed == place and worker.isdigit() else 0


def chosen_debugger() -> str:
    """The debugger that the user has chosen for `breakpoint()`, as a dotted name; "0" for none."""
    return os.environ.get(DEBUGGER_VARIABLE) or os.environ.get(BREAKPOINT_VARIABLE) or "pdb.set_trace"


@dataclass(frozen=True)
class Way:
    """How ranks on several hosts reach each other."""

    address: str = ""
    keys: WorkerKeys | None = None
    insecure: bool = False
    agent: bool = False  #: the launcher keeps the store
    emulated: EmulatedHost | None = None  #: where the network is emulated


def way_of(address: str | None, key_file: str | None) -> Way:
    """From arguments and, where they are missing, variables. A job with an emulated network has one way for all."""
    job = job_of_environment()
    emulated = job[0].emulated_host(job[1]) if job is not None else None
    if job is not None and emulated is not None and job[0].keys is not None:
        return Way(keys=WorkerKeys(**job[0].keys), emulated=emulated)
    found = address or os.environ.get(ADDRESS_VARIABLE, "")
    file = key_file or os.environ.get(KEY_VARIABLE, "")
    agent = not found and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keys = read_key_file(file) if file not in ("", "insecure") else None
    return Way(found, keys, file == "insecure", agent)


def job_of_environment() -> tuple[JobFacts, int] | None:
    """The job and rank this process was started with; None when no launcher started it."""
    path, rank = os.environ.get(JOB_VARIABLE), os.environ.get(RANK_VARIABLE)
    if path is None or rank is None:
        return None
    return read_job(path), int(rank)
