"""The launcher of a process, read from its environment variables: torchrun, mpirun, srun, or none.

Pure: the environment is an argument. What each launcher really sets was found by starting it
(torchrun of torch 2.13, Open MPI 4.1, MPICH 4.0, Slurm 22.05). Three surprises:

    Slurm   a batch script has SLURM_PROCID and SLURM_NTASKS too, though its tasks are not started: only a step counts
    MPICH   no variable says which job this is: the caller adds the process that started all of them, which is one a host
    Clouds  some set RANK and WORLD_SIZE to numbers of hosts; mpirun hands them on, so its own variables are looked at first
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Launcher(Protocol):
    """The variables of one launcher."""

    name: str

    def detect(self, variables: Mapping[str, str]) -> Placement | None:
        """The placement in these variables; None when they are not this launcher's."""


class Torchrun:
    """torchrun, and launchers that set the same variables."""

    name = "torchrun"
    _counts = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    _job = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")

    def detect(self, variables: Mapping[str, str]) -> Placement | None:
        if not _has(variables, self._counts):
            return None
        name = _job_name(self.name, variables, self._job)
        return _placement(self.name, variables, self._counts, name, _master(variables))


class ByHand:
    """torch's four variables without those of a host: one host where the master is this one, else a host for each."""

    name = "by hand"
    _counts = ("RANK", "WORLD_SIZE")
    _job = ("MASTER_ADDR", "MASTER_PORT")

    def detect(self, variables: Mapping[str, str]) -> Placement | None:
        if not _has(variables, (*self._counts, *self._job)):
            return None
        name, address = _job_name("hand", variables, self._job), _master(variables)
        if variables["MASTER_ADDR"] in THIS_HOST:
            return _placement(self.name, variables, self._counts * 2, name, address)
        rank, size = (_whole(variables, key) for key in self._counts)
        return _checked(Placement(self.name, rank, size, 0, 1, name, address), self._counts)


class OpenMpi:
    """mpirun of Open MPI."""

    name = "Open MPI"
    _counts = tuple(f"OMPI_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    _job = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")  # PMIX_SERVER_URI is each host's own

    def detect(self, variables: Mapping[str, str]) -> Placement | None:
        if not _has(variables, self._counts):
            return None
        return _placement(self.name, variables, self._counts, _job_name("openmpi", variables, self._job))


class Hydra:
    """mpiexec of MPICH and Intel MPI. `parent` tells jobs of MPICH apart: see above."""

    name = "Hydra"
    _counts = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    _job = ("I_MPI_HYDRA_UUID", "PMI_PORT", "PMI_JOBID")

    def __init__(self, parent: str = "") -> None:
        self._parent = parent

    def detect(self, variables: Mapping[str, str]) -> Placement | None:
        if not _has(variables, self._counts):
            return None
        one_host = _whole(variables, "PMI_SIZE") == _whole(variables, "MPI_LOCALNRANKS")
        more = {"parent process": self._parent} if one_host and self._parent else {}
        name = _job_name("hydra", {**variables, **more}, (*self._job, "parent process"))
        return _placement(self.name, variables, self._counts, name)


class Slurm:
    """srun. A batch script by itself is no step, and is not taken for one."""

    name = "Slurm"
    _counts = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS")
    _job = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_LAUNCHER_PORT")

    def detect(self, variables: Mapping[str, str]) -> Placement | None:
        if not _has(variables, self._counts):
            return None
        here = len(variables["SLURM_GTIDS"].split(","))  # the ranks on this host, one by one
        name = _job_name("slurm", variables, self._job)
        return _placement(self.name, {**variables, "SLURM_GTIDS": str(here)}, self._counts, name)


def placement_of(variables: Mapping[str, str], parent: str = "") -> Placement | None:
    """How this process was started; None when no launcher started it. `parent` names the process that started it."""
    launchers: tuple[Launcher, ...] = (Torchrun(), OpenMpi(), Hydra(parent), ByHand(), Slurm())
    found = (launcher.detect(variables) for launcher in launchers)
    return next((placement for placement in found if placement is not None), None)


def _has(variables: Mapping[str, str], keys: Sequence[str]) -> bool:
    return all(key in variables for key in keys)


def _whole(variables: Mapping[str, str], key: str) -> int:
    text = variables[key].strip()
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{key} must be an integer of at least 0, got {variables[key]!r}; start with polytempo run")
    return int(text)


def _placement(
    launcher: str, variables: Mapping[str, str], counts: Sequence[str], name: str, address: str = ""
) -> Placement:
    rank, size, local_rank, local_size = (_whole(variables, key) for key in counts)
    return _checked(Placement(launcher, rank, size, local_rank, local_size, name, address), counts)


def _checked(placement: Placement, counts: Sequence[str]) -> Placement:
    if placement.size < placement.local_size:
        raise UsageError(
            f"{counts[1]} must count processes, got {placement.size}, less than the {placement.local_size} on this host "
            f"({counts[3]}); it seems to count hosts: unset it, or start with torchrun"
        )
    _check_below(placement.rank, placement.size, counts[:2])
    _check_below(placement.local_rank, placement.local_size, counts[2:])
    return placement


def _check_below(rank: int, size: int, keys: Sequence[str]) -> None:
    if keys and rank >= size:
        raise UsageError(f"{keys[0]} must be below {keys[1]}, which is {size}, got {rank}; ranks start at 0")


def _job_name(prefix: str, variables: Mapping[str, str], keys: Sequence[str]) -> str:
    parts = [f"{key}={variables[key]}" for key in keys if key in variables]
    if not parts:
        raise UsageError(f"no variable says which job this is (one of {', '.join(keys)}); start with torchrun instead")
    return f"{prefix}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


def _master(variables: Mapping[str, str]) -> str:
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    if not (host and port):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
