"""The launcher of a process, read from its environment variables: torchrun, mpirun, srun, or none.

Pure: the environment is an argument. What each launcher really sets was found by starting it
(torchrun of torch 2.13, Open MPI 4.1, MPICH 4.0, Slurm 22.05). Three surprises:

    Slurm   a batch script has SLURM_PROCID and SLURM_NTASKS too, though its tasks are not started: only a step counts
    MPICH   no variable says which job this is: the caller adds the process that started all of them, which is one a host
    Clouds  some set RANK and WORLD_SIZE to numbers of hosts; mpirun hands them on, so its own variables are looked at first
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from polytempo.errors import UsageError

#: What MASTER_ADDR is when all processes are on one host.
THIS_HOST = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Placement:
    """A process's place among those that were started together."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    name: str  #: the same for all processes of this job, and for no other job that runs now; fit for a file name
    address: str = ""  #: host:port of a store that all hosts reach, where the launcher gives one


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher."""

    name: str
    prefix: str  #: of a job's name
    counts: tuple[str, ...]  #: rank, number of processes, and the same on this host
    job: tuple[str, ...]  #: which of them say which job this is


#: torchrun, and launchers that set the same variables.
TORCHRUN = Launcher(
    "torchrun",
    "torchrun",
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
OPEN_MPI = Launcher(
    "Open MPI",
    "openmpi",
    tuple(f"OMPI_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),  # PMIX_SERVER_URI is each host's own
)
#: mpiexec of MPICH and Intel MPI. The process that started all ranks of a host tells jobs of MPICH apart: see above.
HYDRA = Launcher(
    "Hydra",
    "hydra",
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("I_MPI_HYDRA_UUID", "PMI_PORT", "PMI_JOBID", "parent process"),
)
#: torch's four variables without those of a host: one host where the master is this one, else a host for each.
BY_HAND = Launcher("by hand", "hand", ("RANK", "WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT"))
#: srun. A batch script by itself is no step, and is not taken for one.
SLURM = Launcher(
    "Slurm",
    "slurm",
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_LAUNCHER_PORT"),
)


def placement_of(variables: Mapping[str, str], parent: str = "") -> Placement | None:
    """How this process was started; None when no launcher started it. `parent` names the process that started it."""
    for launcher in (TORCHRUN, OPEN_MPI, HYDRA, BY_HAND, SLURM):
        needed = (*launcher.counts, *launcher.job) if launcher is BY_HAND else launcher.counts
        if all(key in variables for key in needed):
            return _placement(launcher, dict(variables), parent)
    return None


def _placement(launcher: Launcher, variables: dict[str, str], parent: str) -> Placement:
    counts = launcher.counts
    if launcher is SLURM:  # it names the ranks on this host, one by one
        variables["SLURM_GTIDS"] = str(len(variables["SLURM_GTIDS"].split(",")))
    numbers = [_whole(variables, key) for key in counts]
    if launcher is BY_HAND and variables["MASTER_ADDR"] in THIS_HOST:
        numbers, counts = numbers * 2, counts * 2
    elif launcher is BY_HAND:
        numbers = [*numbers, 0, 1]
    rank, size, local_rank, local_size = numbers
    if size < local_size:
        raise UsageError(
            f"{counts[1]} must count processes, got {size}, less than the {local_size} on this host "
            f"({counts[-1]}); it seems to count hosts: unset it, or start with torchrun"
        )
    for number, below, named in ((rank, size, counts[:2]), (local_rank, local_size, counts[2:])):
        if named and number >= below:
            raise UsageError(f"{named[0]} must be below {named[1]}, which is {below}, got {number}; ranks start at 0")
    if launcher is HYDRA and parent and size == local_size:
        variables["parent process"] = parent
    parts = [f"{key}={variables[key]}" for key in launcher.job if key in variables]
    if not parts:
        keys = ", ".join(launcher.job)
        raise UsageError(f"no variable says which job this is (one of {keys}); start with torchrun instead")
    name = f"{launcher.prefix}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    address = ""
    if host and port and launcher in (TORCHRUN, BY_HAND):
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Placement(launcher.name, rank, size, local_rank, local_size, name, address)


def _whole(variables: Mapping[str, str], key: str) -> int:
    text = variables[key].strip()
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{key} must be an integer of at least 0, got {variables[key]!r}; start with polytempo run")
    return int(text)
