"""Strategies for recurrences by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy, StateA2A, StateRing, StateScan

from ..errors import UnknownName, Unsupported, nearest_name
from ..transport.communicator import Communicator
from .kernels import NAMES

STRATEGIES: dict[str, type[RecurrentStrategy]] = {
    "state-ring": StateRing, "state-scan": StateScan, "state-a2a": StateA2A,
}  # fmt: skip
PEERS = ("fla/cp",)
"""Strategies of other packages: `peers.FlaContextParallel`."""


def create_recurrent(name: str, group: Any = None, kernel: str = "auto") -> RecurrentStrategy:
    """Create a strategy for recurrences over the ranks of ``group``: a process group or a DeviceMesh (None: the world).

    ``name`` is ``state-ring``, ``state-scan`` or ``state-a2a``, or ``fla/cp``, flash-linear-attention's context
    parallelism of the gated delta rule. ``kernel`` is ``reference``, ``fla`` or ``auto``.
    Collective: all ranks call it with the same arguments. Without torch.distributed, this process is the only rank.
    Raises `UnknownName` for other names, and `Unsupported` for a mesh of several dimensions, on a rank outside the
    group, where the arguments differ between ranks, and for a peer whose package is not installed.
    """
    problem: Exception | None = None
    for kind, value, known in (("strategy", name, (*STRATEGIES, *PEERS)), ("kernel", kernel, NAMES)):
        if value not in known:
            listed = f"{nearest_name(value, known)}; there are: {', '.join(known)}"
            problem = UnknownName(f"no {kind} {value!r} for recurrences{listed}")
    if name in PEERS and find_spec("fla") is None:
        problem = Unsupported(f"{name} needs flash-linear-attention: pip install '.[fla]' in a clone of ringprof")
    comm = Communicator(group, hops="nccl", request=f"{name} with kernel {kernel}", problem=problem)
    if name in PEERS:
        from .peers import FlaContextParallel  # imports Triton

        return FlaContextParallel(comm, kernel)
    return STRATEGIES[name](comm, kernel)
