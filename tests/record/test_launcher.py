"""Launcher's environment variables that make this process a rank, and those that do not."""

from __future__ import annotations

import os

import pytest

from ringprof.errors import UsageError
from ringprof.record.launcher import RankInfo, launcher_rank, slurm_rendezvous

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "18001",
}  # fmt: skip


def test_rank_from_torchrun_variables() -> None:
    assert launcher_rank(TORCHRUN) == RankInfo(9, 16, 1, 8, node=1)
    assert launcher_rank({**TORCHRUN, "GROUP_RANK": "3"}) == RankInfo(9, 16, 1, 8, node=3)
    elastic = launcher_rank({**TORCHRUN, "TORCHELASTIC_RUN_ID": "7"})
    assert elastic is not None and elastic.parent == os.getppid()


def test_launcher_without_local_variables_is_one_host() -> None:
    assert launcher_rank({"RANK": "1", "WORLD_SIZE": "2"}) == RankInfo(1, 2, 1, 2)


def test_rank_from_srun_variables() -> None:
    rank_info = launcher_rank(SRUN)
    assert rank_info == RankInfo(5, 8, 1, 4, node=1, parent=os.getppid())
    assert slurm_rendezvous(rank_info, SRUN) == {
        "MASTER_ADDR": "gpu07", "MASTER_PORT": "12001", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "first"), [("a1,a2", "a1"), ("a[3,5-9],b1", "a3"), ("rack[01-02]-x", "rack01-x"), ("solo", "solo")]
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    rank_info = launcher_rank(SRUN)
    assert rank_info is not None
    assert slurm_rendezvous(rank_info, {**SRUN, "SLURM_STEP_NODELIST": hosts})["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # the script of a batch job, not a step
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # an interactive shell
        {"WORLD_SIZE": "4"},
    ],
)
def test_processes_without_launcher_variables_are_not_ranks(env: dict[str, str]) -> None:
    assert launcher_rank(env) is None


@pytest.mark.parametrize(
    "wrong", [{"RANK": "x"}, {"RANK": "16"}, {"WORLD_SIZE": ""}, {"LOCAL_WORLD_SIZE": "0"}, {"RANK": "-1"}]
)
def test_invalid_launcher_variables_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        launcher_rank({**TORCHRUN, **wrong})


def test_srun_with_more_tasks_on_one_host_than_on_another() -> None:
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_PROCID": "7"}
    assert launcher_rank({**uneven, "SLURM_NODEID": "2"}) == RankInfo(7, 8, 1, 2, 2, os.getppid())
    assert launcher_rank({**uneven, "SLURM_NODEID": "1", "SLURM_LOCALID": "2"}) == RankInfo(7, 8, 2, 3, 1, os.getppid())
