"""Verification of the recurrences in a pattern of layers, beside that of their attention."""

from __future__ import annotations

import msgspec

from ringprof.record.layer import LayersShard
from ringprof.record.verify_recurrence import verify_timed_recurrence
from ringprof.run import TensorError, Verification, Workload
from ringprof.workload.recurrences import Operator


def recurrences_of(workload: Workload) -> list[Workload]:
    """Return the recurrences of a workload's pattern, one for each operator; empty without a pattern."""
    operators = dict.fromkeys(workload.pattern if workload.layer else ())
    return [part for operator in operators if (part := workload.part(operator)) and part.recurrent]


def join_verifications(attention: Verification, recurrence: Verification, operator: Operator) -> Verification:
    """Add a recurrence's errors to those of attention, with the operator before their names: ``gdn dq``."""
    errors = attention.errors | _named(recurrence.errors, operator)
    return msgspec.structs.replace(attention, seq=min(attention.seq, recurrence.seq), errors=errors)


def verify_timed_layers(shard: LayersShard, before: Verification, attention: Verification) -> Verification:
    """Verify the first recurrence of each operator in the last timed iteration, and add it to that of attention.

    ``before`` is the verification before timing. Collective: every rank must call this, and gets the same answer.
    Raises `VerificationError`, which names the worst rank and tensor, if a result is wrong.
    """
    timed = attention.timed
    for operator, recurrence in shard.recurrences.items():
        prefix = f"{operator} "
        own = {name.removeprefix(prefix): error for name, error in before.errors.items() if name.startswith(prefix)}
        checked = verify_timed_recurrence(
            recurrence, shard.kept_results[operator], shard.first_rows[operator],
            msgspec.structs.replace(before, errors=own),
        ).timed  # fmt: skip
        assert timed is not None and checked is not None
        timed = msgspec.structs.replace(
            timed, errors=timed.errors | _named(checked.errors, operator), took_ns=timed.took_ns + checked.took_ns,
            same_output=timed.same_output and checked.same_output,
        )  # fmt: skip
    return msgspec.structs.replace(attention, timed=timed)


def _named(errors: dict[str, TensorError], operator: Operator) -> dict[str, TensorError]:
    return {f"{operator} {name}": error for name, error in errors.items()}
