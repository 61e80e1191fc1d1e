"""Prediction of other projects' strategies (peers): which of ringprof's strategies stands for which.

A dry run needs code that communicates through ringprof's channels. torch's ring does, in a dry run; the others are
predicted as the bundled strategy with the same blocks and transfers, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringprof.errors import UnsupportedWorkloadError
from ringprof.prediction.query import Query
from ringprof.strategies.catalog import PEERS

_FP32_RING: Mapping[str, Any] = {"grad_wire": "fp32"}
_ZIGZAG_USP: Mapping[str, Any] = {**_FP32_RING, "layout": "zigzag"}
_STAND_INS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    # These rings send dK and dV in float32 from the first block on, one hop per rank.
    "ring-flash-attn/ring": ("ring", _FP32_RING, {"legacy_schedule": True}),
    "ring-flash-attn/zigzag": ("zigzag", _FP32_RING, {"legacy_schedule": True}),
    "ring-flash-attn/stripe": ("stripe", _FP32_RING, {"legacy_schedule": True}),
    "yunchang/ulysses": ("ulysses", {}, {}),
    "yunchang/usp": ("usp", _ZIGZAG_USP, {"legacy_schedule": True}),
    "transformer-engine/p2p": ("megatron", {}, {"pairwise": True}),
    "transformer-engine/a2a": ("ulysses", {}, {}),
    "transformer-engine/all_gather": ("allgather", {"layout": "zigzag"}, {}),
    "transformer-engine/a2a+p2p": ("usp", {"layout": "zigzag"}, {"pairwise": True}),
}


def stand_in(query: Query) -> Query:
    """Return the query that predicts a query of a peer; any other query unchanged.

    Raises `UnsupportedWorkloadError` for a peer that no bundled strategy stands for.
    """
    peer = query.strategy
    if peer not in PEERS:
        return query
    if query.hops == "copy":
        raise UnsupportedWorkloadError(f"strategy {peer!r} sends by its own NCCL calls: no hops by copy engine")
    if peer == "torch-cp":
        return replace(query, hops="nccl")
    if peer not in _STAND_INS:
        raise UnsupportedWorkloadError(
            f"strategy {peer!r} cannot be predicted: its code runs on GPUs alone, and no bundled strategy sends alike"
        )
    name, params, options = _STAND_INS[peer]
    own = {"deterministic", *(("ulysses_degree", "ring_degree", "placement") if name == "usp" else ())}
    unknown = next((key for key in query.params if key not in own), None)
    if unknown is not None:
        raise UnsupportedWorkloadError(f"strategy {peer!r} has no parameter {unknown!r}")
    return replace(query, strategy=name, params={**params, **query.params}, hops="nccl", stands_for=peer, **options)
