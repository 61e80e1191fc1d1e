"""Tapes that are asked for several times: kept, and for another length scaled where that is the same.

What a rank does over twice the tokens is mostly what it does over half of them, with twice the rows and bytes. So of
another length the first and the last rank are run; where they do what scaling says, so do those between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from ringprof.foresee.links import Cluster
from ringprof.foresee.question import Question
from ringprof.foresee.tape import shared, tape
from ringprof.json_object import JsonObject
from ringprof.record.tape.program import AttentionCall, Op, Post, Program, Tape, Touch

_SIZES: Mapping[type, tuple[str, ...]] = {AttentionCall: ("q", "kv"), Touch: ("bytes",), Post: ("messages",)}
_LIKE = 1e-3
"""How far from scaled the memory may be: its blocks are rounded up."""


class Tapes:
    """For `predict`, as `ringprof.foresee.tape.tape_of`, over and over: for one look at a problem."""

    def __init__(self) -> None:
        self._kept: dict[Any, Tape] = {}

    def of(self, question: Question, cluster: Cluster, ranks: Sequence[int] | None) -> Tape:
        """The programs of ``ranks``. Raises as `tape_of`."""
        workload, params = shared(question, cluster)
        one_length = msgspec.structs.replace(workload, seq=0)
        key = (
            question.strategy, one_length, cluster.size, cluster.gpus_per_host, question.kernel, question.hops,
            tuple(sorted(params.items())), question.older, tuple(ranks) if ranks is not None else None,
        )  # fmt: skip
        given: JsonObject = {
            "ranks_per_host": cluster.gpus_per_host, "kernel": question.kernel, "hops": question.hops,
            "params": params, "older": question.older,
        }  # fmt: skip
        known = self._kept.get(key)
        if known is not None and known.workload.seq == workload.seq:
            return known
        made = None
        if known is not None and len(known.programs) > 2 and workload.mask().plain:
            ends = [known.programs[0].rank, known.programs[-1].rank]
            made = _scaled(known, tape(question.strategy, workload, cluster.size, ranks=ends, **given))
        if made is None:
            made = tape(question.strategy, workload, cluster.size, ranks=ranks, **given)
        if known is None:
            self._kept[key] = made
        return made


def _scaled(known: Tape, ends: Tape) -> Tape | None:
    """``known`` at the length of ``ends``, its first and last rank; None where these do something else."""
    factor = Fraction(ends.workload.seq, known.workload.seq)
    try:
        programs = [_times(program, factor) for program in known.programs]
    except ValueError:
        return None
    for made, run in zip((programs[0], programs[-1]), ends.programs, strict=True):
        if made.ops != run.ops or abs(made.peak_bytes / run.peak_bytes - 1) > _LIKE:
            return None
    programs[0], programs[-1] = ends.programs
    return msgspec.structs.replace(ends, programs=programs)


def _times(program: Program, factor: Fraction) -> Program:
    """Raises ValueError where a size would be no whole number."""
    ops = [_larger(op, factor) for op in program.ops]
    return msgspec.structs.replace(program, ops=ops, peak_bytes=round(program.peak_bytes * factor))


def _larger(op: Op, factor: Fraction) -> Op:
    sizes = {name: _product(getattr(op, name), factor) for name in _SIZES.get(type(op), ())}
    return msgspec.structs.replace(op, **sizes) if sizes else op


def _product(size: Any, factor: Fraction) -> Any:
    if isinstance(size, tuple):
        return tuple(_product(one, factor) for one in size)
    whole, rest = divmod(size * factor.numerator, factor.denominator)
    if rest:
        raise ValueError("no whole number")
    return whole
