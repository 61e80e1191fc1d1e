"""Who has come back from a call of a user's attention, told through the store of torch.distributed.

Not through its collectives: where one rank fails, the others may be in the middle of the attention's own.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ringprof.errors import RecordError
from ringprof.record.process_group import GroupRanks
from ringprof.record.shutdown.rank_errors import error_kind, error_line, is_consequence

_POLL_S = 0.02
_SETTLE_S = 2.0
"""How long a rank that seems to have lost its peers waits for the word of the one that failed by itself."""
_checks: Counter[str] = Counter()
"""How many each group has made."""


class CompletionBarrier:
    """The ranks of a check, which all make one, in the same order of checks."""

    def __init__(self, ranks: GroupRanks, limit_s: float) -> None:
        self._ranks, self._limit_s = ranks, limit_s
        self._store: Any = None
        if ranks.size > 1:
            untyped: Any = dist
            members = "-".join(map(str, ranks.numbers))
            _checks[members] += 1
            self._store = untyped.PrefixStore(
                f"ringprof:check:{members}:{_checks[members]}", untyped.distributed_c10d._get_default_store()
            )

    def failed(self, where: str, error: Exception) -> RecordError:
        """The error to end with, where this rank's call has failed: another rank's where this one follows from it."""
        said = f"rank {self._ranks.number} failed in {where}: {error_line(error)}"
        if self._store is None:
            return RecordError(said)
        if is_consequence(error_kind(error), str(error)):
            deadline = time.monotonic() + _SETTLE_S
            while time.monotonic() < deadline:
                if told := self._cause():
                    return RecordError(told)
                time.sleep(_POLL_S)
            return RecordError(said)
        self._store.set("failed", said)
        return RecordError(said)

    def all_back(self, where: str) -> None:
        """Wait until all ranks are back from a call. Raises `RecordError` for one that has failed or does not come."""
        if self._store is None:
            return
        self._store.set(f"{where}:{self._ranks.number}", "back")
        keys = {number: f"{where}:{number}" for number in self._ranks.numbers}
        deadline, pause = time.monotonic() + self._limit_s, _POLL_S
        while not self._store.check(list(keys.values())):
            if told := self._cause():
                raise RecordError(told)
            if time.monotonic() > deadline:
                missing = [str(number) for number, key in keys.items() if not self._store.check([key])]
                raise RecordError(
                    f"rank {', '.join(missing)} did not come back from {where} within {self._limit_s:g} s of"
                    f" rank {self._ranks.number}: it hangs, or waits for what no rank sends"
                )
            time.sleep(pause)
            pause = min(0.5, 1.2 * pause)

    def _cause(self) -> str:
        with suppress(RuntimeError):  # the store goes with the rank that holds it
            return str(self._store.get("failed").decode()) if self._store.check(["failed"]) else ""
        return ""
