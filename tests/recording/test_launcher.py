"""Launcher's environment variables that make this process a rank, those that do not, and the hosts of ranks."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import pytest

pytest.importorskip("torch", reason="ranks need torch")

from ringprof import cli
from ringprof.errors import RecordError, RingprofError, UsageError
from ringprof.iteration.request import RecordRequest
from ringprof.ranks.launcher import RankInfo, launcher_rank, slurm_rendezvous, this_rank
from ringprof.ranks.machine import RankHost, distinct_host_names, host_numbers
from ringprof.ranks.progress import PositionReporter
from ringprof.recording import as_rank
from ringprof.strategies import Unsupported
from ringprof.strategies.transport.hosts import Hosts
from ringprof.workload.workload import Workload
from tests.cli.test_width import CHECK
from tests.recording.test_progress import RecordingReporter

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


def test_this_rank_follows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", *SRUN):
        monkeypatch.delenv(name, raising=False)
    assert this_rank() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert this_rank() == RankInfo(9, 16, 1, 8, node=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_of_an_external_launcher_shows_progress(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_a_phase(request: object, rank_info: object, position: PositionReporter, *_: object) -> None:
        position.start("warm-up", 1)

    monkeypatch.setattr(as_rank, "_record", start_a_phase)
    monkeypatch.setattr(as_rank, "world_group", lambda *_: nullcontext())
    reporter = RecordingReporter()
    request = RecordRequest(workload=Workload(seq=64, heads=1, kv_heads=1, head_dim=8), strategy="ring", device="cpu")
    assert as_rank.record_as_rank(request, RankInfo(rank, 2, rank, 2), reporter) is None
    assert reporter.lines == (["warm-up of 1"] if rank == 0 else [])


@pytest.mark.parametrize(
    ("outcome", "code", "printing_ranks"),
    [
        (UsageError("refused"), 2, {None, 0}),
        (RecordError("rank 0 hangs"), 3, {None, 0}),
        (RecordError("rank 1 failed"), 3, {None, 0, 1}),
        (CHECK, 1, {None, 0}),
    ],
)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_each_process_of_a_check_has_the_exit_code_and_the_right_ones_print(
    rank: int | None, outcome: object, code: int, printing_ranks: set[int | None],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run_check(_: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("ringprof.cli.check.run_check", run_check)
    monkeypatch.setattr("os._exit", sys.exit)
    for name in ("RANK", "WORLD_SIZE", *SRUN):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
    ended: object
    try:
        ended = cli.run(["check", "json:thing", "--layout", "contiguous"])
    except RingprofError as error:
        # `ringprof.cli.main` prints it, and ends with this code.
        ended, shown = error.exit_code, True
    except SystemExit as end:
        ended, shown = end.code, any(capsys.readouterr())
    else:
        shown = any(capsys.readouterr())
    assert (ended, shown) == (code, rank in printing_ranks)


def test_hosts_with_equal_names_are_numbered() -> None:
    assert distinct_host_names([RankHost("a", 0), RankHost("a", 0), RankHost("b", 1)]) == ["a", "a", "b"]
    assert distinct_host_names([RankHost("pod", 0), RankHost("pod", 1), RankHost("b", 2)]) == ["pod#0", "pod#1", "b"]


@pytest.mark.parametrize(
    ("names", "numbers", "ranks_per_host"),
    [("aabb", [0, 0, 1, 1], 2), ("bbaa", [0, 0, 1, 1], 2), ("abab", [0, 1, 0, 1], 4), ("aabbbb", [0, 0, 1, 1, 1, 1], 6),
     ("aaaa", [0, 0, 0, 0], 4), ("abcd", [0, 1, 2, 3], 1), ("aabaab", [0, 0, 1, 0, 0, 1], 6),
     ("aabbb", [0, 0, 1, 1, 1], 5)],
)  # fmt: skip
def test_host_numbers_and_link_classes(names: str, numbers: list[int], ranks_per_host: int) -> None:
    assert host_numbers(names) == numbers
    hosts = Hosts.from_arguments(len(names), None, numbers)
    assert hosts is not None and hosts.per_host(range(len(names))) == ranks_per_host
    for rank, first in enumerate(names):
        for other, second in enumerate(names):
            assert hosts.link(rank, other) == ("same_host" if first == second else "other_host")


def test_user_option_takes_precedence_over_the_launcher() -> None:
    hosts = Hosts.from_arguments(4, 2, [0, 0, 0, 0])
    assert hosts is not None and hosts.link(1, 2) == "other_host"
    with pytest.raises(Unsupported):
        Hosts.from_arguments(4, None, [0, 0, 0])
