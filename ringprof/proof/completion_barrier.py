"""A barrier after each call of a user's attention, built on the store of torch.distributed.

Collectives cannot be used: where one rank fails, the others may be in the middle of the attention's own collectives.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ringprof.errors import RecordError
from ringprof.ranks.process_group import GroupRanks
from ringprof.ranks.rank_errors import error_kind, error_line, is_consequence

_POLL_S = 0.02
_REFUSAL_S = 10.0
"""Time that a rank that refuses a call waits for the others to refuse it, too."""
_SETTLE_S = 2.0
"""Time that a rank that seems to have lost a peer waits for the failure report of the rank that failed by itself."""
_checks_per_group: Counter[str] = Counter()
"""Number of checks that each group has started, by the group's ranks."""


class CompletionBarrier:
    """A barrier over the ranks of one check; all ranks must create their barriers in the same order of checks."""

    def __init__(self, ranks: GroupRanks, limit_s: float) -> None:
        self._ranks, self._limit_s = ranks, limit_s
        self._store: Any = None
        if ranks.size > 1:
            untyped: Any = dist
            members = "-".join(map(str, ranks.numbers))
            _checks_per_group[members] += 1
            self._store = untyped.PrefixStore(
                f"ringprof:check:{members}:{_checks_per_group[members]}", untyped.distributed_c10d._get_default_store()
            )

    def report_failure(self, where: str, error: Exception) -> RecordError:
        """Report this rank's failed call to the other ranks; return the error to raise.

        A failure that follows from the loss of a peer is not reported. The error is then the failure that another rank
        reports within `_SETTLE_S`, if any.
        """
        message = f"rank {self._ranks.number} failed in {where}: {error_line(error)}"
        if self._store is None:
            return RecordError(message)
        if is_consequence(error_kind(error), str(error)):
            deadline = time.monotonic() + _SETTLE_S
            while time.monotonic() < deadline:
                if failure := self._reported_failure():
                    return RecordError(failure)
                time.sleep(_POLL_S)
            return RecordError(message)
        self._store.set("failed", message)
        return RecordError(message)

    def wait_for_all(self, where: str, refusal: str = "") -> list[str]:
        """Wait until all ranks have returned from a call; return every rank's ``refusal``, in rank order.

        A refusal is the error of a call that may be left out, empty where it succeeded. Raises `RecordError` where a
        rank has failed, does not return within the time limit, or does not follow another's refusal.
        """
        if self._store is None:
            return [refusal]
        self._store.set(f"{where}:{self._ranks.number}", refusal)
        keys = {number: f"{where}:{number}" for number in self._ranks.numbers}
        limit_s = min(_REFUSAL_S, self._limit_s) if refusal else self._limit_s
        deadline, pause = time.monotonic() + limit_s, _POLL_S
        while not self._store.check(list(keys.values())):
            if failure := self._reported_failure():
                raise RecordError(failure)
            if time.monotonic() > deadline and refusal:
                # The others wait for this rank in the attention's own collectives.
                message = f"rank {self._ranks.number} failed in {where}: {refusal}"
                self._store.set("failed", message)
                raise RecordError(message)
            if time.monotonic() > deadline:
                missing = [str(number) for number, key in keys.items() if not self._store.check([key])]
                raise RecordError(
                    f"rank {', '.join(missing)} did not come back from {where} within {self._limit_s:g} s of"
                    f" rank {self._ranks.number}: it hangs, or waits for what no rank sends"
                )
            time.sleep(pause)
            pause = min(0.5, 1.2 * pause)
        return [self._store.get(key).decode() for key in keys.values()]

    def _reported_failure(self) -> str:
        """Return the failure that a rank has reported; empty where none has."""
        with suppress(RuntimeError):  # the store is lost with the rank that hosts it
            return str(self._store.get("failed").decode()) if self._store.check(["failed"]) else ""
        return ""
