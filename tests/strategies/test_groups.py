"""Strategies on the process groups of a program: any groups of its ranks, meshes, and hosts of unequal size.

What cannot work is refused in one line on every rank that asked; nothing waits for a rank that will not come.
"""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringprof.strategies import UnknownName, Unsupported, create, names
from ringprof.strategies.transport import groups, handshake
from ringprof.strategies.transport.handshake import HandshakeRequest, assign_hosts
from tests.strategies import cases
from tests.strategies.cases import WorkloadShard
from tests.strategies.ranks import refusal, run_ranks

PROBLEM = WorkloadShard(seq=16, heads=4, kv_heads=2)


def error_of(strategy: Any, problem: WorkloadShard = PROBLEM) -> float:
    return cases.error_of(strategy, problem)


def known_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


# --- groups that only some ranks know ---------------------------------------------------------------


def started_again(rank: int) -> list[bool]:
    """Whether a channel keeps its group, and has another one, which works, in a second life of torch.distributed."""
    world: Any = dist.group.WORLD
    first = groups.process_group("kv", (0,), "token", world)
    same = groups.process_group("kv", (0,), "token", world) is first
    dist.destroy_process_group()
    store: Any = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    world = dist.group.WORLD
    second = groups.process_group("kv", (0,), "token", world)
    dist.barrier(second)
    return [same, second is not first]


@pytest.mark.processes
def test_channel_has_a_new_group_after_reinitialization():
    """The old group's communicator is gone: a collective on it raises."""
    assert run_ranks(1, started_again) == [[True, True]]


def lengths_that_change(rank: int) -> tuple[list[float], list[int]]:
    """Run short documents on two ranks, long ones on four, the shortest on one; then all of it again."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    alone = [dist.new_group([each]) for each in range(4)][rank]
    errors, counts = [], []
    for _ in range(3):
        # Ranks 2 and 3 have nothing to do with the first.
        for group in [pair, None, alone] if rank < 2 else [None, alone, pair]:
            errors += [error_of(create(name, group=group, kernel="reference")) for name in ("zigzag", "burst")]
        counts.append(known_groups())
    return errors, counts


@pytest.mark.processes
def test_changing_cp_degree_creates_each_group_once():
    for errors, counts in run_ranks(4, lengths_that_change):
        assert max(errors) < 1e-13
        assert counts[0] == counts[1] == counts[2]


def strided_groups(rank: int) -> float:
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    problem = replace(PROBLEM, seed=rank % 2)
    return max(error_of(create(name, group=group, kernel="reference"), problem) for name in names())


@pytest.mark.processes
def test_groups_of_non_adjacent_ranks_are_exact():
    assert max(run_ranks(4, strided_groups)) < 1e-13


# --- meshes and refusals ----------------------------------------------------------------------------


def on_a_mesh(rank: int) -> tuple[float, str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    error = max(error_of(create(name, group=mesh["cp"], kernel="reference")) for name in names())
    return error, _refusal(lambda: create("zigzag", group=mesh)), str(groups.backend_for("cpu"))


def _refusal(call: Any) -> str:
    try:
        call()
    except (Unsupported, UnknownName) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return ""


@pytest.mark.processes
def test_one_dimensional_mesh_is_accepted_and_two_refused():
    for error, refused, backend in run_ranks(4, on_a_mesh):
        assert error < 1e-13
        assert refused == "Unsupported: a mesh of 2 dimensions: give one of them, as mesh[NAME] of 'dp', 'cp'"
        assert backend == "gloo"


def from_outside(rank: int) -> str:
    group = dist.new_group([0, 1])
    return _refusal(lambda: create("zigzag", group=group, kernel="reference"))


@pytest.mark.processes
def test_rank_outside_the_group_is_refused_at_once():
    inside, refused = "", "Unsupported: rank {} is not in the group: only its members can have a strategy over it"
    assert run_ranks(3, from_outside) == [inside, inside, refused.format(2)]


def request_different_options(rank: int) -> list[str]:
    calls = [
        lambda: create("zigzag" if rank else "ring"),
        lambda: create("burst", ring_window=2 if rank == 1 else 1),
        lambda: create("zigzag", hops="copy" if rank == 1 else "nccl"),
        lambda: create("zigzg" if rank == 1 else "zigzag"),
        lambda: create("burst", ranks_per_host=1 + rank),
    ]
    return [_refusal(call) for call in calls] + [str(error_of(create("zigzag", kernel="reference")) < 1e-13)]


@pytest.mark.processes
def test_ranks_with_different_options_are_all_refused():
    for rank, (name, params, hops, unknown, hosts, after) in enumerate(run_ranks(2, request_different_options)):
        assert name.startswith("Unsupported: the ranks do not ask for the same: rank 0 for ring() with kernel auto")
        assert "rank 1 for burst(ring_window=2)" in params
        assert ("hops by copy engine need CUDA" in hops) and (("rank 1 refused" in hops) == (rank == 0))
        assert "did you mean 'zigzag'" in unknown and unknown.startswith(
            "UnknownName" if rank else "Unsupported: rank 1"
        )
        assert "ranks_per_host=1" in hosts and "ranks_per_host=2" in hosts
        assert after == "True"


# --- hosts ------------------------------------------------------------------------------------------

WORDS = {"LOCAL_WORLD_SIZE", "LOCAL_RANK", "SLURM_NODEID"}


def request_of(rank: int, **facts: Any) -> HandshakeRequest:
    blank: dict[str, Any] = {"host": "a", "local_world_size": None, "local_rank": None, "node": None}
    return HandshakeRequest(rank=rank, request="", problem=None, token="", **{**blank, **facts})


@pytest.mark.parametrize(
    ("ranks", "world", "hosts"),
    [
        # torchrun: the number on the host
        (
            [request_of(r, local_world_size=4 if r < 4 else 2, local_rank=r % 4) for r in range(6)],
            6,
            [0, 0, 0, 0, 1, 1],
        ),
        ([request_of(r, local_world_size=2, local_rank=r % 2) for r in (2, 3, 5)], 6, [0, 0, 1]),
        # only how many share a host: neighbours do
        ([request_of(r, local_world_size=2) for r in range(4)], 4, [0, 0, 1, 1]),
        ([request_of(r, local_world_size=4 if r < 4 else 2) for r in range(6)], 6, [0, 0, 0, 0, 1, 1]),
        ([request_of(r, local_world_size=8) for r in range(4)], 4, [0, 0, 0, 0]),
        # a number on the host that cannot be one
        ([request_of(r, local_world_size=2, local_rank=r) for r in range(4)], 4, [0, 0, 1, 1]),
        # srun without torchrun, cyclic
        ([request_of(r, node=r % 2) for r in range(4)], 4, [0, 1, 0, 1]),
        # neither: the names; also where only some ranks have variables
        ([request_of(r, host="ab"[r // 2]) for r in range(4)], 4, [0, 0, 1, 1]),
        ([request_of(r, host="ab"[r // 2], local_world_size=4 if r == 0 else None) for r in range(4)], 4, [0, 0, 1, 1]),
    ],
)
def test_hosts_follow_the_launcher_or_host_names(ranks, world, hosts):
    assert list(assign_hosts(ranks, world).values()) == hosts


def test_ambiguous_hosts_of_unequal_size_are_refused():
    ranks = [request_of(rank, local_world_size=4 if rank < 4 else 2) for rank in (0, 4, 5)]
    with pytest.raises(Unsupported, match=r"LOCAL_WORLD_SIZE 2 and 4.*give ranks_per_host"):
        assign_hosts(ranks, 6)


def under(rank: int, variables: list[dict[str, str]]) -> tuple[Any, ...]:
    """Return the parameters chosen under these launcher variables, and the largest error."""
    for name in WORDS:
        os.environ.pop(name, None)
    os.environ |= variables[rank]
    strategies = [create(name, kernel="reference") for name in ("burst", "usp", "double-ring")]
    chosen = [strategies[0].parameters["ring_window"], strategies[1].parameters["ulysses_degree"]]
    seq = 2 * dist.get_world_size()
    return *chosen, max(error_of(strategy, replace(PROBLEM, seq=seq, heads=12)) for strategy in strategies)


@pytest.mark.processes
def test_srun_variables_alone_give_two_hosts():
    for window, degree, error in run_ranks(4, under, [{"SLURM_NODEID": str(rank // 2)} for rank in range(4)]):
        assert (window, degree) == (2, 2) and error < 1e-12


@pytest.mark.processes
def test_hosts_of_four_and_two_ranks_are_consistent():
    sizes = ["4", "4", "4", "4", "2", "2"]
    for window, degree, error in run_ranks(6, under, [{"LOCAL_WORLD_SIZE": size} for size in sizes]):
        # No window divides both hosts: one ring of all.
        assert (window, degree) == (6, 2) and error < 1e-12


# --- copies of strategies ---------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A module that holds a strategy, like a layer of a model."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.strategy = strategy
        self.linear = torch.nn.Linear(2, 2)


def copied_and_pickled(rank: int) -> tuple[bool, float, str, str]:
    layer = Layer(create("usp", kernel="reference", ulysses_degree=2, layout="stripe"))
    twin = copy.deepcopy(layer)
    again = pickle.loads(pickle.dumps(layer))
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    try:
        pickle.dumps(create("zigzag", group=pair))
        said = ""
    except TypeError as refusal:
        said = str(refusal)
    same = twin.strategy is layer.strategy and twin.linear is not layer.linear
    return same, error_of(again.strategy), again.strategy.parameters["layout"], said


@pytest.mark.processes
def test_a_module_that_holds_a_strategy_can_be_copied_and_pickled():
    for same, error, layout, said in run_ranks(4, copied_and_pickled):
        assert same and error < 1e-13 and layout == "stripe"
        assert "cannot be pickled" in said


# --- calls that are not the same on all ranks -------------------------------------------------------


def differing(rank: int, how: str) -> str:
    """Return the error message where the last rank makes a different call."""
    strategy, last = create("zigzag", kernel="reference"), rank == dist.get_world_size() - 1
    q = torch.randn(1, 12 if how == "shape" and last else 8, 4, 8)
    q = q.to(torch.bfloat16 if how == "type" and last else torch.float32).requires_grad_(how == "gradients" and last)
    options: dict[str, Any] = {"causal": {"causal": False}, "lse": {"return_lse": True}}.get(how, {}) if last else {}
    return refusal(strategy.attention, q, q, q, **options)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "first", "other"),
    [
        ("shape", "(1, 8, 4, 8), (1, 8, 4, 8), (1, 8, 4, 8)", "(1, 12, 4, 8), (1, 12, 4, 8), (1, 12, 4, 8)"),
        ("type", "type torch.float32", "type torch.bfloat16"),
        ("causal", "causal=True", "causal=False"),
        ("lse", "return_lse=False", "return_lse=True"),
        ("gradients", "gradients=False", "gradients=True"),
    ],
)
def test_ranks_with_different_calls_get_an_error_with_both(how, first, other):
    """For such a difference gloo would end the process, and NCCL would compute wrong results."""
    for message in run_ranks(2, differing, how):
        assert message.startswith("the ranks do not ask for the same: rank 0 for ")
        assert f"{first}, rank 1 for " in message and message.endswith(other)


def call_alone(rank: int) -> str:
    """Return the error message where the group fails during the check of a call that no other rank makes."""
    strategy = create("zigzag", kernel="reference")
    closed = RuntimeError("Connection closed by peer [127.0.0.1]:42388.\nThis is typically caused by a worker")
    with patch.object(dist, "all_gather_object", side_effect=closed):
        return refusal(strategy.attention, *[torch.randn(1, 8, 4, 8)] * 3)


@pytest.mark.processes
def test_call_that_no_other_rank_makes_is_an_error():
    for message in run_ranks(2, call_alone):
        assert message.startswith(
            "this rank comes with a call that it has not made before, and another rank has not, or"
        )
        assert (
            "q, k and v of shape (1, 8, 4, 8)" in message
            and "Connection closed by peer" in message
            and "\n" not in message
        )


def late(rank: int) -> list[str]:
    """Return the warnings of a rank whose peer makes the same call only after the warning."""
    strategy, warnings_ = create("zigzag", kernel="reference"), list[str]()
    store = dist.distributed_c10d._get_default_store()

    def warn(text: str) -> None:
        warnings_.append(text)
        store.set("warned", "")

    if rank == 1:
        store.wait(["warned"])
    # The rank that comes last must not be warned.
    with patch.object(handshake, "WARNED_AFTER_S", 0.0 if rank == 0 else 60.0), patch.object(warnings, "warn", warn):
        strategy.attention(*[torch.randn(1, 8, 4, 8)] * 3)
    return warnings_


@pytest.mark.processes
def test_rank_waiting_for_the_first_call_of_others_warns():
    (warned,), nothing = run_ranks(2, late)
    assert warned.startswith("rank 0 waits for the others to ask for the same, as all must the first time: ")
    assert "q, k and v of shape (1, 8, 4, 8)" in warned and nothing == []


def compute_without_cuda_queries(rank: int) -> float:
    capture_query = patch.object(
        torch.cuda, "is_current_stream_capturing", side_effect=RuntimeError("initialization error")
    )
    with patch.object(torch.cuda, "is_available", return_value=True), capture_query:
        return error_of(create("zigzag", kernel="reference"))


@pytest.mark.processes
def test_ranks_forked_after_cuda_initialization_use_the_cpu():
    """In such a process every CUDA query fails, although there is a GPU."""
    assert max(run_ranks(2, compute_without_cuda_queries)) < 1e-12
