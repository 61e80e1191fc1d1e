"""Kinds of activities: the key, label, NCCL name, group and colour of each.

A new kind needs a record here and rules that recognise it (`ringprof.analysis.kinds.rules`). The first colours are from
Okabe and Ito, chosen to be distinguishable with any colour vision (M. Okabe, K. Ito, "Color Universal Design", 2008).
The colours of other compute kinds are as far from these, and from one another, as these are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, YELLOW, GREY = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#8A8A8A",
)  # fmt: skip


class Kind(NamedTuple):
    """One kind of device activity."""

    key: str
    """Key in JSON, frames and rules."""
    label: str
    """Name in reports."""
    group: str
    """Category that its time counts in: ``attention`` and ``compute`` (both computation), ``communication``, ``memory``
    or ``other_groups``."""
    colour: str
    operation: str = ""
    """NCCL's name of a communication kind, for sentences; empty where the label serves."""


_RECORDS = (
    Kind("flash_fwd", "flash forward", "attention", BLUE),
    Kind("flash_bwd", "flash backward", "attention", SKY),
    Kind("recurrence", "linear recurrence", "compute", "#2DE1E1"),
    Kind("merge", "merge", "compute", GREEN),
    Kind("gemm", "matrix product", "compute", YELLOW),
    Kind("convolution", "convolution", "compute", "#8F9A2E"),
    Kind("embedding", "embedding", "compute", "#8C2D9E"),
    Kind("norm", "norm", "compute", "#4B4FC4"),
    Kind("softmax", "softmax", "compute", "#A5A5FF"),
    Kind("elementwise", "elementwise", "compute", "#B5DB8C"),
    Kind("reduction", "reduction", "compute", "#3F6B14"),
    Kind("cast", "cast and quantize", "compute", "#F4A58A"),
    Kind("permute", "permute and gather", "compute", "#1F8A9E"),
    Kind("optimizer", "optimizer", "compute", "#8A4B3A"),
    Kind("other", "other compute", "compute", GREY),
    Kind("send_recv", "send/recv", "communication", ORANGE, "SendRecv"),
    Kind("all_to_all", "all-to-all", "communication", ORANGE, "AllToAll"),
    Kind("all_gather", "all-gather", "communication", ORANGE, "AllGather"),
    Kind("reduce_scatter", "reduce-scatter", "communication", ORANGE, "ReduceScatter"),
    Kind("all_reduce", "all-reduce", "communication", ORANGE, "AllReduce"),
    Kind("broadcast", "broadcast", "communication", ORANGE, "Broadcast"),
    Kind("copy_engine", "peer copies", "communication", ORANGE, "peer copy"),
    Kind("comm_other", "other communication", "communication", ORANGE),
    Kind("memcpy", "memory copies", "memory", PURPLE),
    Kind("memset", "memory sets", "memory", PURPLE),
    Kind("other_groups", "other groups", "other_groups", GREY),
)

KIND = {kind.key: kind for kind in _RECORDS}
KINDS = tuple(KIND)
"""Keys of all kinds; a column of kinds holds indices into this tuple."""
CODE = {key: code for code, key in enumerate(KINDS)}


def _kinds_in(*groups: str) -> tuple[str, ...]:
    """Return the keys of all kinds in these groups."""
    return tuple(kind.key for kind in _RECORDS if kind.group in groups)


ATTENTION = _kinds_in("attention")
COMPUTE = _kinds_in("attention", "compute")
COMMUNICATION = _kinds_in("communication")
MEMORY = _kinds_in("memory")
OTHER_GROUPS = "other_groups"
"""Communication of process groups that the user did not choose; occurs only where a group was chosen."""
_NAMED = {
    "recurrence": ("recurrence",),
    "matrix_products": ("gemm", "convolution"),
    "optimizer": ("optimizer",),
    "merge_and_copies": ("merge", "permute"),
}
COMPUTE_PARTS = {
    **_NAMED,
    "other_compute": tuple(
        kind for kind in _kinds_in("compute") if not any(kind in named for named in _NAMED.values())
    ),
}
"""Parts of the compute time outside attention. Where kernels of two parts overlap, the first gets the time."""
POINT_TO_POINT = ("send_recv", "copy_engine")
"""Kinds of communication between two ranks; all other communication kinds involve a whole group."""


def is_kind(codes: npt.NDArray[np.int8], *kinds: str) -> npt.NDArray[np.bool_]:
    """Return a mask of the codes that are one of these kinds; code -1 is no kind."""
    return np.array([*(key in kinds for key in KINDS), False])[codes]


def in_a_sentence(kind: str) -> str:
    """Return a kind's name for use in a sentence: ``SendRecv``, ``peer copy``."""
    return KIND[kind].operation or KIND[kind].label
