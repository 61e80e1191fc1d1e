"""Comparison of every call between the ranks of a group, on the host.

Packed documents change with every batch, and lengths of caches with every decode step.

Each rank contributes a hash of its call and waits for those of all others, before anything is sent. Where all ranks of
the group are on one host, the hashes are words in memory that the ranks share, which takes some microseconds. Otherwise
they are added up in the store of torch.distributed: two requests per rank, three for the last. NCCL and the GPU take no
part. Only where the hashes differ do the ranks gather what they were called with, and all raise the same error.
"""

from __future__ import annotations

import mmap
import os
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import PeerLost, Unsupported
from .groups import timeout
from .handshake import WARNED_AFTER_S

_HASH_BITS = 48
"""Bits of a call's hash in a shared word; the other 16 number the call."""
_SUMMAND_BITS = 32
"""Bits of a call's hash that the store adds up; the sum of those of 4096 ranks leaves room to count the ranks."""
_COUNT_FROM = 44
"""Bit of a sum in the store from which on it counts ranks."""
_SPINNING_S = 1e-3
"""Seconds for which a rank that waits yields its processor only; then it sleeps between two looks."""
_DIFFERENT_DOCUMENTS = (
    "the ranks of a context-parallel group share one batch: give them the same cu_seqlens (one data loader per group,"
    " or the same seed and position)"
)

_comparisons: WeakKeyDictionary[Any, CallComparison] = WeakKeyDictionary()


def compares_calls(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of ``group`` have begun to compare their calls."""
    return group in _comparisons


def compare_call(group: dist.ProcessGroup, call: Mapping[str, Any], processes: Mapping[int, int | None]) -> None:
    """Check that all ranks of a group make the same ``call``: numbers, types, texts and tuples of integers. Collective.

    ``processes``: process ID by global rank, None where this rank cannot see the process. Raises `Unsupported` on every
    rank where two calls differ, and `PeerLost` where a rank does not come.
    """
    if group not in _comparisons:
        _comparisons[group] = CallComparison(group, processes)
    _comparisons[group].check(group, call)


class CallComparison:
    """The calls of the ranks of one group, counted and compared."""

    def __init__(self, group: dist.ProcessGroup, processes: Mapping[int, int | None]) -> None:
        """Connect the ranks. Collective. Strategies over the same group, and so one thread per group, share it."""
        # The group is the key of a weak dictionary and must not be kept.
        self._ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._rank, self._size, self._calls = dist.get_rank(group), dist.get_world_size(group), 0
        self._processes = {rank: processes.get(rank) for rank in self._ranks}
        own_file = os.memfd_create("ringprof") if hasattr(os, "memfd_create") and self._rank == 0 else None
        if own_file is not None:
            os.ftruncate(own_file, 16 * self._size)
        token, file = _gather(group, (uuid.uuid4().hex, own_file))[0]
        self._words = self._map(file)
        if not all(_gather(group, self._words is not None)):
            self._words = None
        if own_file is not None:
            os.close(own_file)
        self._key = f"ringprof:calls:{token}"
        self._store: Any = None
        if self._words is None:
            store: Any = c10d._world.pg_map[c10d._get_default_group()][1]
            # A client of its own: another thread's requests do not wait for the answer of this one's.
            self._store = store.clone() if hasattr(store, "clone") else store

    def check(self, group: dist.ProcessGroup, call: Mapping[str, Any]) -> None:
        """Compare one call of ``group``, as `compare_call` does."""
        self._calls += 1
        # Hashes of integers are equal in all processes, those of strings are not.
        values = [hash(value) if isinstance(value, tuple) else value for value in call.values()]
        digest = int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little")
        equal = self._compare_in_store(digest) if self._words is None else self._compare_in_memory(digest)
        if not equal:
            raise Unsupported(difference(dict(zip(self._ranks, _gather(group, dict(call)), strict=True))))

    def _map(self, file: int | None) -> Any:
        """Return the 2 x N words of the first rank's ``file``; None where this rank cannot share them."""
        process = self._processes[self._ranks[0]]
        if file is None or process is None:
            return None
        try:
            with open(f"/proc/{process}/fd/{file}", "r+b") as shared:
                return memoryview(mmap.mmap(shared.fileno(), 16 * self._size)).cast("Q")
        except (OSError, ValueError):
            return None

    def _compare_in_memory(self, digest: int) -> bool:
        """Write this rank's word and wait for those of the others.

        Words of even and odd calls have places of their own: a rank can be one call ahead of another, never two.
        """
        number = self._calls % 2**16
        word = number << _HASH_BITS | digest % 2**_HASH_BITS
        first = self._calls % 2 * self._size
        self._words[first + self._rank] = word
        begin = time.monotonic()
        warned_at, looked_at = begin + WARNED_AFTER_S, begin + 1
        while True:
            words = self._words[first : first + self._size].tolist()
            if words.count(word) == self._size:
                return True
            missing = [rank for rank, x in zip(self._ranks, words, strict=True) if x >> _HASH_BITS != number]
            if not missing:
                return False
            now = time.monotonic()
            if now > looked_at:
                looked_at = now + 1
                ended = [rank for rank in missing if not os.path.exists(f"/proc/{self._processes[rank]}")]
                if ended or now - begin > timeout().total_seconds():
                    problem = "has ended" if ended else "does not come"
                    raise PeerLost(f"rank {(ended or missing)[0]} {problem}: {_WAITED}")
                if now > warned_at:
                    warned_at = float("inf")
                    warnings.warn(f"rank {dist.get_rank()} waits for rank {missing[0]}: {_WAITED}", stacklevel=2)
            time.sleep(0 if now - begin < _SPINNING_S else 1e-4)

    def _compare_in_store(self, digest: int) -> bool:
        """Add this rank's hash and a count of 1 to the sum in the store, and wait for the sum of all ranks."""
        summand = digest % 2**_SUMMAND_BITS
        key = f"{self._key}:{self._calls}"
        try:
            total = self._store.add(key, (1 << _COUNT_FROM) + summand)
            if total >> _COUNT_FROM == self._size:
                self._store.set(f"{key}:sum", str(total))
                # All ranks are here, so none waits for the sum of the call before.
                for old in (f"{self._key}:{self._calls - 1}", f"{self._key}:{self._calls - 1}:sum"):
                    self._store.delete_key(old)
            else:
                total = int(self._store.get(f"{key}:sum"))
        except RuntimeError as error:
            raise PeerLost(f"a rank has ended or does not come: {_WAITED} ({error})") from error
        return bool(total % (1 << _COUNT_FROM) == self._size * summand)


_WAITED = "the ranks of its group compare their calls, and all must make the same"


def difference(calls: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe the first part in which the calls, by global rank, differ, and how to make them agree."""
    first = next(iter(calls.values()))
    name = next(name for name in first if len({call[name] for call in calls.values()}) > 1)
    values = {rank: call[name] for rank, call in calls.items()}
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    listed = "; ".join(
        f"rank{'s' if len(some) > 1 else ''} {_listed(some)}: {_shown(value, list(ranks))}"
        for value, some in ranks.items()
    )
    advice = _DIFFERENT_DOCUMENTS if name == "documents" else "all must make the same call"
    return f"the ranks call with different {name}: {listed}; {advice}"


_MOST_LISTED = 8


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_MOST_LISTED])) + (", ..." if len(ranks) > _MOST_LISTED else "")


def _shown(value: Any, values: Sequence[Any]) -> str:
    """Return a value in a few words: of long documents, the first bound that differs."""
    if not isinstance(value, tuple) or len(value) <= _MOST_LISTED:
        return "none" if value == () else str(list(value) if isinstance(value, tuple) else value)
    last = len(value) - 1
    bound = next((i for i in range(1, last) if any(other[i : i + 1] != value[i : i + 1] for other in values)), last)
    return f"{last} documents, of which number {bound} ends at {value[bound]}"


def _gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
