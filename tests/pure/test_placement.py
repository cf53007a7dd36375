"""How a process was started, told from its variables: real ones, as the launchers set them, and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from polytempo.errors import UsageError
from polytempo.launcher.environment import Placement, placement_of

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "2145714177",
    "OMPI_MCA_orte_hnp_uri": "2145714176.0;tcp://192.0.2.2:52625",
    "PMIX_NAMESPACE": "2145714177",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "2145714176.0;tcp4://127.0.0.1:58045",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "8",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_LAUNCHER_PORT": "38761",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_JOB_ID": "17"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ALL = {"torchrun": TORCHRUN, "Open MPI": OPEN_MPI, "Hydra": HYDRA, "Slurm": SLURM, "by hand": BY_HAND}


def found(variables: Mapping[str, str], parent: str = "4711") -> Placement:
    placement = placement_of(variables, parent)
    assert placement is not None
    return placement


def counts(placement: Placement) -> tuple[int, int, int, int]:
    return placement.rank, placement.size, placement.local_rank, placement.local_size


def test_nobody_started_it() -> None:
    assert placement_of({}) is None
    assert placement_of({"HOME": "/root", "RANK": "0"}) is None
    assert placement_of(BATCH) is None  # rank 0 of 4, it seems, but the other three were never started


@pytest.mark.parametrize("launcher", ALL)
def test_each_launcher_is_known(launcher: str) -> None:
    assert found(ALL[launcher]).launcher == launcher


def test_where_it_is() -> None:
    assert counts(found(TORCHRUN)) == (3, 4, 1, 2)
    assert counts(found(OPEN_MPI)) == (1, 2, 1, 2)
    assert counts(found(HYDRA)) == (1, 2, 1, 2)
    assert counts(found(SLURM)) == (3, 4, 1, 2)
    assert counts(found(BY_HAND)) == (1, 2, 1, 2)


def test_by_hand_on_several_hosts_each_is_a_host() -> None:
    assert counts(found({**BY_HAND, "MASTER_ADDR": "10.0.0.1"})) == (1, 2, 0, 1)
    assert counts(found({**BY_HAND, "MASTER_ADDR": "::1"})) == (1, 2, 1, 2)


def test_a_store_for_several_hosts() -> None:
    assert found(TORCHRUN).address == "10.0.0.1:29500"
    assert found({**BY_HAND, "MASTER_ADDR": "::1"}).address == "[::1]:29500"
    assert found(OPEN_MPI).address == found(SLURM).address == found(HYDRA).address == ""


@pytest.mark.parametrize("launcher", ALL)
def test_all_processes_of_a_job_have_one_name(launcher: str) -> None:
    own = {"RANK", "LOCAL_RANK", "PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID", "SLURM_PROCID", "SLURM_LOCALID"}
    own |= {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"}
    other = {key: "0" if key in own else value for key, value in ALL[launcher].items()}
    other |= {"PMI_FD": "6"} if launcher == "Hydra" else {}
    assert found(other).rank == 0
    assert found(other).name == found(ALL[launcher]).name
    assert found(other).name.replace("-", "").isalnum()


@pytest.mark.parametrize(
    ("variables", "change"),
    [
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "other"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "2145714178"}),
        (OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "2145714176.0;tcp://192.0.2.2:52626"}),
        (HYDRA, {"PMI_PORT": "host:5000"}),
        (SLURM, {"SLURM_JOB_ID": "18"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (BY_HAND, {"MASTER_PORT": "29501"}),
    ],
)
def test_another_job_has_another_name(variables: dict[str, str], change: dict[str, str]) -> None:
    assert found(variables | change).name != found(variables).name


def test_another_parent_is_another_job_of_hydra() -> None:
    assert found(HYDRA, "1").name != found(HYDRA, "2").name


def test_hydra_without_a_word_on_the_job_is_refused() -> None:
    with pytest.raises(UsageError, match="no variable says which job this is"):
        placement_of(HYDRA)
    with pytest.raises(UsageError, match="start with torchrun"):
        placement_of({**HYDRA, "PMI_SIZE": "4"}, "4711")  # the other host has another parent
    assert placement_of({**HYDRA, "PMI_SIZE": "4", "I_MPI_HYDRA_UUID": "bb960000"}) is not None


def test_the_launcher_that_came_last_wins() -> None:
    assert found({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1", **BY_HAND}).launcher == "Open MPI"  # a cloud's, handed on
    assert found({**TORCHRUN, **SLURM}).launcher == "torchrun"
    assert found({**OPEN_MPI, **BATCH}).launcher == "Open MPI"
    assert found({**BY_HAND, **SLURM}).launcher == "by hand"  # in a shell that srun started


@pytest.mark.parametrize("launcher", ALL)
def test_bad_numbers_are_named(launcher: str) -> None:
    variables = ALL[launcher]
    rank = next(key for key in variables if key.endswith(("RANK", "PROCID")))
    for bad in ("", "-1", "one", "1.5", "²"):
        with pytest.raises(UsageError, match=f"^{rank} must be an integer of at least 0, got '{bad}'"):
            placement_of({**variables, rank: bad}, "4711")
    with pytest.raises(UsageError, match=f"^{rank} must be below [A-Z_]+, which is [24], got 9; ranks start at 0"):
        placement_of({**variables, rank: "9"}, "4711")


def test_a_local_rank_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"^LOCAL_RANK must be below LOCAL_WORLD_SIZE, which is 2, got 2"):
        placement_of({**TORCHRUN, "LOCAL_RANK": "2"})


def test_a_world_that_counts_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE must count processes, got 2, less than the 8 on this host") as refusal:
        placement_of({**TORCHRUN, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8"})
    assert "\n" not in str(refusal.value)
