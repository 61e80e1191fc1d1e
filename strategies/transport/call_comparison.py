"""Comparison of every call between the ranks of a group, on the host.

Packed documents change with every batch, and lengths of caches with every decode step.

Where all ranks of the group are on one host, each writes a hash of its call into memory that the ranks share, and waits
for those of all others before anything is sent, which takes some microseconds. NCCL and the GPU take no part.
Otherwise, hashes are summed in the store of torch.distributed, three requests per rank.

On GPUs a rank waits only where its documents differ from those of its call before, or its options are new to the group:
once per batch and not once per layer. It says, in the memory or in the store, which call it waits in. The other ranks
send at once, and a thread of each looks twice a second whether a rank waits in a call that its own rank has passed. If
so, every rank raises the same error from the call in which it waits, or from its next call or backward pass.
Communicators of the group are aborted then, since what some ranks have sent is never received, and the group can make
no further call. On a CPU, where a rank that sends waits for its peers, every call is compared before anything is sent.

A hash covers the calls before it. Ranks that have passed calls with different options find out in the memory within
half a second, and in the store when they next wait.

Where hashes of ranks that wait differ, the ranks gather what they were called with, and all raise the same error.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import compress
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import PeerLost, Unsupported
from .copy_engine import stop_copies
from .groups import abort_channels, channel_groups, close_gloo, raise_if_stopped, timeout
from .handshake import WARNED_AFTER_S

_HASH_BITS = 31
"""Bits of a call's hash, in a shared word and in the store; the sum of 4096 of them leaves room to count the ranks."""
_PASSES = 1 << _HASH_BITS
"""Bit of a shared word: the rank has not waited for the others. The bits above it number the call."""
_NUMBER_FROM = _HASH_BITS + 1
_HISTORY = 1024
"""Calls of each rank that the shared memory keeps. A rank that would overwrite what another may still read waits."""
_COUNT_FROM = 44
"""Bit of a sum in the store from which on it counts ranks."""
_SPINNING_S = 1e-3
"""Seconds for which a rank that waits yields its processor only; then it sleeps between two looks."""
INTERVAL_S = 0.5
"""Seconds between two looks at whether a rank waits in a call that this rank has passed."""
_DIFFERENT_DOCUMENTS = (
    "the ranks of a context-parallel group share one batch: give them the same cu_seqlens (one data loader per group,"
    " or the same seed and position)"
)

_comparisons: WeakKeyDictionary[Any, CallComparison] = WeakKeyDictionary()


def compares_calls(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of ``group`` have begun to compare their calls."""
    return group in _comparisons


def compare_call(
    group: dist.ProcessGroup, call: Mapping[str, Any], processes: Mapping[int, int | None], *, may_pass: bool = False,
    hops: int = 0,
) -> None:  # fmt: skip
    """Check that all ranks of ``group`` make the same ``call``: numbers, types, texts and tuples of integers.

    ``processes``: process ID by global rank, None where this rank cannot see the process. With ``may_pass``, a call
    with the documents of the one before may return before the ranks are known to agree, and a later one then raises the
    error. ``hops`` is a hash of this rank's hops before the call. Collective otherwise. Raises `Unsupported` on every
    rank where two calls differ, and `PeerLost` where a rank does not come.
    """
    if group not in _comparisons:
        _comparisons[group] = CallComparison(group, processes, may_pass=may_pass)
    _comparisons[group].check(group, call, may_pass=may_pass, hops=hops)


def raise_if_refused(group: dist.ProcessGroup) -> None:
    """Raise `Unsupported` if the ranks of ``group`` have made different calls, and this one has passed its own."""
    if (comparison := _comparisons.get(group)) is not None and comparison.refusal is not None:
        raise Unsupported(comparison.refusal)


def forget_comparison(group: dist.ProcessGroup) -> None:
    """Forget the calls of ``group`` and why they were refused: its next call with documents begins anew."""
    _comparisons.pop(group, None)


def wake_comparison(group_name: str) -> None:
    """Let this rank look at `groups.stopped` where it waits in the store; ranks that wait in memory look by themselves.

    Another thread calls it.
    """
    for comparison in list(_comparisons.values()):
        if comparison.group_name == group_name:
            comparison.wake()


class CallComparison:
    """The calls of the ranks of one group, counted and compared."""

    def __init__(self, group: dist.ProcessGroup, processes: Mapping[int, int | None], *, may_pass: bool) -> None:
        """Connect the ranks. Collective. Strategies over the same group, and so one thread per group, share it."""
        # The group is the key of a weak dictionary and must not be kept.
        self._ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._rank, self._size, self._calls = dist.get_rank(group), dist.get_world_size(group), 0
        self._processes = {rank: processes.get(rank) for rank in self._ranks}
        # A row of words per call, the number of each rank's last call, and of the call that is refused.
        self._numbers_from = _HISTORY * self._size
        token, self._words = shared_words(group, self._processes, self._numbers_from + self._size + 1)
        self.group_name = group.group_name
        self.refusal: str | None = None
        """Why no further call is possible; None while the ranks' calls are equal as far as this rank knows."""
        self._documents: Any = self  # no documents are equal to it
        self._kinds: dict[tuple[Any, ...], int] = {}
        """All other parts of the calls that the ranks have compared, with their hashes."""
        self._hash = 0
        """Hash of this rank's calls since one was refused."""
        self._recent = deque[tuple[int, Mapping[str, Any]]]([(0, {})], _HISTORY)
        """Number and parts of this rank's last calls."""
        self._waited = 0, 0
        """Numbers of the last two calls in which this rank waited for the others."""
        self._lost = ""
        """Which rank has ended, as the thread has seen; empty while all exist."""
        self._lets_pass = may_pass
        """Whether a thread looks for ranks that wait in a call that this one has passed."""
        if self._words is None or may_pass:
            self._connect_store(f"ringprof:calls:{token}", group)

    def check(self, group: dist.ProcessGroup, call: Mapping[str, Any], *, may_pass: bool, hops: int = 0) -> None:
        """Compare one call of ``group``, as `compare_call` does."""
        may_pass &= self._lets_pass
        kind = tuple(value for name, value in call.items() if name != "documents")
        digest, documents = self._kinds.get(kind), call.get("documents", ())
        passes = may_pass and digest is not None and documents == self._documents
        if digest is None:
            # Hashes of integers are equal in all processes, those of strings are not.
            values = [hash(value) if isinstance(value, tuple) else value for value in kind]
            digest = int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest(), "little")
        if passes:
            call = {**call, "documents": self._documents}  # not one more copy of them
        else:
            # Before the count, since the thread that looks reads the count first.
            self._waited = self._waited[1], self._calls + 1
        if self._words is None or self._lets_pass:
            self._recent.append((self._calls + 1, call))
        self._calls += 1
        raise_if_refused(group)
        if self._lost:
            raise PeerLost(self._lost)
        self._hash = _hash_after(self._hash, digest, () if passes else documents)
        if hops and not passes:
            self._hash, call = hash((self._hash, hops)), {**call, "hash of the hops before": hops}
        digest_bits = self._hash % (1 << _HASH_BITS)
        if self._words is not None:
            self._words[self._calls % _HISTORY * self._size + self._rank] = (
                (self._calls % 2**32) << _NUMBER_FROM | passes << _HASH_BITS | digest_bits
            )
            self._words[self._numbers_from + self._rank] = self._calls
        if passes:
            if self._words is not None and self._calls % (_HISTORY // 4) == 0:
                self._wait_for(self._ranks_behind)
            return
        equal = self._compare_in_store(digest_bits) if self._words is None else self._compare_in_memory()
        if not equal:
            self._hash = 0
            raise Unsupported(difference(dict(zip(self._ranks, _gather(group, dict(call)), strict=True))))
        if may_pass:
            self._documents, self._kinds[kind] = documents, digest

    def _row(self, number: int) -> list[int]:
        """Return every rank's word of the call of this number, or of the call `_HISTORY` before it."""
        first = number % _HISTORY * self._size
        words: list[int] = self._words[first : first + self._size].tolist()
        return words

    def _compare_in_memory(self) -> bool:
        """Wait for the words of all ranks; return whether they are equal.

        Raises `Unsupported` where a rank has passed the call.
        """
        number = self._calls % 2**32

        def missing() -> list[int]:
            words = self._row(self._calls)
            passing = [word & _PASSES and word >> _NUMBER_FROM == number for word in words]
            if any(passing):
                self._words[-1] = self._calls  # every rank's thread sees it, and this one's provides the error
                return list(compress(self._ranks, passing))
            return [rank for rank, word in zip(self._ranks, words, strict=True) if word >> _NUMBER_FROM != number]

        self._wait_for(missing)
        return len(set(self._row(self._calls))) == 1

    def _ranks_behind(self) -> list[int]:
        """Return the ranks whose words this rank must not overwrite yet."""
        numbers = self._words[self._numbers_from : -1].tolist()
        return [rank for rank, number in zip(self._ranks, numbers, strict=True) if number < self._calls - _HISTORY // 2]

    def _wait_for(self, missing: Callable[[], list[int]]) -> None:
        """Wait until no rank is missing. Raises `PeerLost` where one does not come, and `Unsupported` if refused."""
        begin = time.monotonic()
        warned_at, looked_at = begin + WARNED_AFTER_S, begin + 1
        while ranks := missing():
            if self.refusal is not None:
                raise Unsupported(self.refusal)
            raise_if_stopped(self.group_name)
            now = time.monotonic()
            if now > looked_at:
                looked_at = now + 1
                ended = self._ended(ranks)
                if ended or now - begin > timeout().total_seconds():
                    problem = "has ended" if ended else "does not come"
                    raise PeerLost(f"rank {(ended or ranks)[0]} {problem}: {_WAITED}")
                if now > warned_at:
                    warned_at = float("inf")
                    warnings.warn(f"rank {dist.get_rank()} waits for rank {ranks[0]}: {_WAITED}", stacklevel=2)
            if now - begin < _SPINNING_S:
                os.sched_yield()  # time.sleep(0) takes the 50 us of the timer's slack
            else:
                time.sleep(1e-4)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        """Return those of some ranks whose process has ended."""
        return [rank for rank in ranks if not os.path.exists(f"/proc/{self._processes[rank]}")]

    def _connect_store(self, key: str, group: dist.ProcessGroup) -> None:
        """Connect this rank to the store, and start the thread that looks for ranks which wait. Collective."""
        self._key = key
        store: Any = c10d._world.pg_map[c10d._get_default_group()][1]
        # Clients of their own: a request does not wait for the answer to another thread's.
        self._store, self._thread_store = store.clone(), store.clone()
        self._refused = threading.Event()
        self._obsolete: list[str] = []
        if self._words is None:
            self._store.set(f"{key}:waits:{self._rank}", "0")
        if self._rank == 0:
            self._store.set(f"{key}:refused", "0")
        _gather(group, True)
        look_regularly(self, "ringprof-calls")

    def _compare_in_store(self, summand: int) -> bool:
        """Add this rank's hash and a count of 1 to the sum in the store, and wait for the sum of all ranks."""
        key = f"{self._key}:{self._calls}"
        try:
            self._store.set(f"{self._key}:waits:{self._rank}", str(self._calls))
            total = self._store.add(key, (1 << _COUNT_FROM) + summand)
            if total >> _COUNT_FROM == self._size:
                self._store.set(f"{key}:sum", str(total))
                # All ranks are here, so none waits for the sum of the call before.
                before = f"{self._key}:{self._waited[0]}"
                self._obsolete += [before, f"{before}:sum"]
            else:
                total = int(self._store.get(f"{key}:sum"))
        except RuntimeError as error:
            raise PeerLost(f"a rank has ended or does not come: {_WAITED} ({error})") from error
        if not total:
            self._refused.wait(timeout().total_seconds())
            raise_if_stopped(self.group_name)
            raise Unsupported(self.refusal or "the ranks make different calls")
        return bool(total % (1 << _COUNT_FROM) == self._size * summand)

    def wake(self) -> None:
        """End this rank's wait in the store."""
        if self._words is None:
            self._refused.set()
            with suppress(RuntimeError):
                self._thread_store.set(f"{self._key}:{self._waited[-1]}:sum", "0")

    def look(self) -> bool:
        """Look once whether a rank waits in a call that this rank has passed; return whether to look again.

        If so, all ranks publish their calls, and none makes another. Runs in a thread. Raises `RuntimeError` where the
        store has ended.
        """
        store, key = self._thread_store, self._key
        refused = self._refused_in_store() if self._words is None else self._refused_in_memory()
        if not refused and self._words is not None and (ended := self._ended(self._ranks)):
            self._lost = f"rank {ended[0]} has ended: {_WAITED}"
            return False
        if not refused:
            return True
        refused = int(store.compare_set(f"{key}:refused", "0", str(refused)))
        if self._words is not None:
            self._words[-1] = refused
        recent = list(self._recent)
        _, call = next((entry for entry in reversed(recent) if entry[0] <= refused), recent[0])
        parts = {name: list(value) if isinstance(value, tuple) else str(value) for name, value in call.items()}
        store.set(f"{key}:call:{self._rank}", json.dumps(parts))
        try:
            by_rank = [json.loads(store.get(f"{key}:call:{rank}")) for rank in range(self._size)]
            plain = [{name: tuple(x) if isinstance(x, list) else x for name, x in parts.items()} for parts in by_rank]
            self.refusal = difference(dict(zip(self._ranks, plain, strict=True)))
        except RuntimeError as error:
            self.refusal = f"the ranks make different calls, and one has ended: {_WAITED} ({error})"
        self._refused.set()
        if self._words is None:
            store.set(f"{key}:{self._waited[-1]}:sum", "0")
        # Streams of this process may wait for what no rank sends.
        stop_copies(self.refusal, channel_groups(self.group_name))
        abort_channels(self.group_name)
        close_gloo(self.group_name)
        return False

    def _refused_in_store(self) -> int:
        """Return the number of the call that is refused, or in which a rank waits that this one has passed; else 0."""
        store, key = self._thread_store, self._key
        # Read before the store: a number that is older than these two cannot be there any more.
        calls, waited = self._calls, self._waited
        while self._obsolete:
            store.delete_key(self._obsolete.pop())
        keys = [*(f"{key}:waits:{rank}" for rank in range(self._size)), f"{key}:refused"]
        values = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        *waits, refused = map(int, values)
        return refused or next((number for number in waits if number <= calls and number not in waited), 0)

    def _refused_in_memory(self) -> int:
        """Return the number of the call that is refused, or that a rank has passed and another made otherwise; else 0.

        Hashes cover the calls before, so the last call that all ranks have made shows any difference.
        """
        if refused := self._words[-1]:
            return int(refused)
        numbers = self._words[self._numbers_from : -1].tolist()
        for number in range(min(numbers), max(numbers) - _HISTORY, -1):
            row = self._row(number)
            is_there = all(word >> _NUMBER_FROM == number % 2**32 for word in row)
            if not is_there or len(set(row)) == 1 or not any(word & _PASSES for word in row):
                break
            refused = number
        return int(refused)


def _hash_after(before: int, digest: int, documents: tuple[int, ...]) -> int:
    """Return the hash of all calls up to one, from that ``before`` it and its parts.

    Only of integers: hashes of strings, and before Python 3.12 of None, differ between processes.
    """
    return hash((before, digest, documents))


class _Looks(Protocol):
    def look(self) -> bool:
        """Look once; return whether to look again. Raises RuntimeError where the store has ended."""


def look_regularly(looks: _Looks, name: str) -> None:
    """Start a thread that looks every `INTERVAL_S`, for as long as the object exists and wants it."""
    stopped = threading.Event()
    thread = threading.Thread(target=_look_forever, args=(ref(looks), stopped), name=name, daemon=True)
    thread.start()
    # At the latest when the interpreter exits: a thread must not be inside the store then.
    finalize(looks, _stop, thread, stopped)


def _look_forever(looks: ref[_Looks], stopped: threading.Event) -> None:
    """Look until told to stop, while the object and the store exist."""
    while not stopped.wait(INTERVAL_S):
        if (present := looks()) is None:
            return
        try:
            if not present.look():
                return
        except RuntimeError:
            # The store has ended: calls that wait in it raise the error.
            return
        del present


def _stop(thread: threading.Thread, stopped: threading.Event) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(2 * INTERVAL_S)


_WAITED = "the ranks of its group compare their calls, and all must make the same"


def difference(calls: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe the first part in which the calls, by global rank, differ, and how to make them agree."""
    first = next(iter(calls.values()))
    name = next((name for name in first if len({call.get(name) for call in calls.values()}) > 1), None)
    if name is None:
        return "the ranks change from one call to another, but not all at the same one: all must make the same calls"
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


def shared_words(group: dist.ProcessGroup, processes: Mapping[int, int | None], count: int) -> tuple[str, Any]:
    """Return (token of this memory, ``count`` words of 64 bits that the ranks of ``group`` share). Collective.

    The words are zero at first, and None where a rank cannot share them, as on another host.
    """
    own_file = os.memfd_create("ringprof") if hasattr(os, "memfd_create") and dist.get_rank(group) == 0 else None
    if own_file is not None:
        os.ftruncate(own_file, 8 * count)
    token, file = _gather(group, (uuid.uuid4().hex, own_file))[0]
    words = _map_words(processes[dist.get_process_group_ranks(group)[0]], file, count)
    if not all(_gather(group, words is not None)):
        words = None
    if own_file is not None:
        os.close(own_file)
    return token, words


def _map_words(process: int | None, file: int | None, count: int) -> Any:
    """Return the words in a process's ``file``; None where this rank cannot share them."""
    if file is None or process is None:
        return None
    try:
        with open(f"/proc/{process}/fd/{file}", "r+b") as shared:
            return memoryview(mmap.mmap(shared.fileno(), 8 * count)).cast("Q")
    except (OSError, ValueError):
        return None


def _gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
