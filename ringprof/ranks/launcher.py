"""Rank as which torchrun, srun or ringprof itself started this process, from its environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ringprof.common.validation import whole
from ringprof.errors import UsageError, require_packages


@dataclass(frozen=True)
class RankInfo:
    """Numbers of one rank, in the world and on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int = 0
    """Number that the launcher gave this rank's host."""
    parent: int | None = None
    """Process id of the launcher, which a rank does not outlive; None if the parent may be a shell that ends before."""

    def variables(self, address: str, port: object) -> dict[str, str]:
        """Return the environment variables by which torch.distributed knows this rank and where the ranks meet."""
        values = {
            "MASTER_ADDR": address, "MASTER_PORT": port, "RANK": self.rank, "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_world_size,
        }  # fmt: skip
        return {name: str(value) for name, value in values.items()}


_parent = os.getppid()
"""Process id of the parent at the start of this process. The parent may have ended when torch is loaded."""


def launcher_rank(environment: Mapping[str, str] | None = None) -> RankInfo | None:
    """Return the rank as which torchrun, a compatible launcher or srun started this process; None if none did.

    For Slurm only a step started by ``srun`` counts: the script of a batch job has the job's variables, too, but is one
    process. Raises `UsageError` for contradictory variables.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        world = _integer(env, "WORLD_SIZE")
        per_host = max(1, _integer(env, "LOCAL_WORLD_SIZE", world))
        rank = _integer(env, "RANK")
        node = _integer(env, "GROUP_RANK", rank // per_host)
        parent = _parent if "TORCHELASTIC_RUN_ID" in env else None
        return _validated(RankInfo(rank, world, _integer(env, "LOCAL_RANK", rank % per_host), per_host, node, parent))
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        world = _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1))
        if world == 1:
            return None
        rank = _integer(env, "SLURM_PROCID")
        node = _integer(env, "SLURM_NODEID", -1)
        per_host = _tasks_per_host(env, world, max(0, node))
        local = _integer(env, "SLURM_LOCALID", rank % per_host)
        return _validated(RankInfo(rank, world, local, per_host, rank // per_host if node < 0 else node, _parent))
    return None


def this_rank() -> RankInfo | None:
    """Return the rank as which torchrun or srun started this process; None if this process is to start the ranks.

    Raises `UsageError` for contradictory variables, and `MissingExtraError` without the packages that ranks need.
    """
    rank_info = launcher_rank()
    require_packages("torch", "psutil")
    return rank_info


def slurm_rendezvous(rank_info: RankInfo, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that torch.distributed needs and srun does not set, such as rank 0's address."""
    env = os.environ if environment is None else environment
    # Different jobs on one host need different ports, below the range of ephemeral ports.
    port = 12_000 + _integer(env, "SLURM_JOB_ID", 0) % 18_000
    return rank_info.variables(env.get("MASTER_ADDR") or _first_host(env), env.get("MASTER_PORT") or port)


def _first_host(env: Mapping[str, str]) -> str:
    """Return the first host of Slurm's node list: ``gpu[07-09,12],x`` begins with ``gpu07``."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", hosts)
    if match is None:
        raise UsageError(f"SLURM_STEP_NODELIST={hosts!r} cannot be read: set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "") + (match[3] or "")


def _tasks_per_host(env: Mapping[str, str], world: int, node: int) -> int:
    """Return the number of tasks on host ``node``; Slurm writes ``8(x2),4`` for two hosts of 8 and one of 4."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None or int(match[1]) < 1:
            return world
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else world


def _validated(rank_info: RankInfo) -> RankInfo:
    if not 0 <= rank_info.rank < rank_info.world_size or not 0 <= rank_info.local_rank < rank_info.local_world_size:
        raise UsageError(f"the launcher's variables make no sense: rank {rank_info.rank} of {rank_info.world_size}")
    return rank_info


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    number = whole(text) if text is not None else None
    if number is None:
        raise UsageError(f"{name}={text!r} is not a number: unset it, or start through torchrun or srun")
    return number
