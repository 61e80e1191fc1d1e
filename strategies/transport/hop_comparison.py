"""Comparison of every hop between the ranks of a group, on the host: its channel, and the types and shapes it carries.

A rank's tensors arrive where its peer expects them only if both derive the same `MessageLayout`. Where all ranks of
the group are on one host, each writes a hash of its hops so far into memory that the ranks share, and looks at those of
the others, for about a microsecond and without waiting: the rank that posts a hop last notices a difference before it
sends, the others with their next hop. A layout that is new to the group is waited for, so that all ranks raise before
anything is sent, unless the ranks compare their calls: packed documents make new layouts with every batch. On a CPU,
where a rank that sends waits for its peers, every hop is waited for.

On several hosts, the ranks gather a layout that is new. Once they compare their calls, the hash of all hops before a
call is compared with it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..annotate import annotate
from ..errors import PeerLost, Unsupported
from .call_comparison import compares_calls, shared_words
from .groups import raise_if_stopped, timeout
from .handshake import check_same_call
from .message import MessageLayout

_HISTORY = 1024
"""Hops of each rank that the shared memory keeps; more than a GPU's queues let one rank be ahead of another."""
_KEPT_LAYOUTS = 4096
_SPINNING_S = 1e-3
"""Seconds for which a rank that waits yields its processor only; then it sleeps between two looks."""

_comparisons: WeakKeyDictionary[Any, HopComparison] = WeakKeyDictionary()


def hop_comparison(group: dist.ProcessGroup, processes: Mapping[int, int | None]) -> HopComparison:
    """Return the comparison of the hops of ``group``, which all its strategies share. Collective the first time.

    ``processes``: process ID by global rank, None where this rank cannot see the process.
    """
    if group not in _comparisons:
        _comparisons[group] = HopComparison(group, processes)
    return _comparisons[group]


def forget_hops(group: dist.ProcessGroup) -> None:
    """Forget the hops of ``group``, so that channels that are connected from now on count them anew."""
    _comparisons.pop(group, None)


def hash_of_hops(group: dist.ProcessGroup) -> int:
    """Return the hash of all hops that this rank has posted in ``group``, for ranks that share no memory; else 0."""
    comparison = _comparisons.get(group)
    return 0 if comparison is None or comparison.shares_memory else comparison.hash


class HopComparison:
    """The hops of the ranks of one group, counted and compared."""

    def __init__(self, group: dist.ProcessGroup, processes: Mapping[int, int | None]) -> None:
        # The group is the key of a weak dictionary and must not be kept.
        self._ranks, self._size, self._rank = dist.get_process_group_ranks(group), group.size(), group.rank()
        self._group_name = group.group_name
        self._processes = {rank: processes.get(rank) for rank in self._ranks}
        # A row of words per hop, then the number of the hop that a rank has refused.
        _, self._words = shared_words(group, self._processes, _HISTORY * self._size + 1)
        self.shares_memory = self._words is not None
        self._number = 0
        self.hash = 0
        """Hash of the channels and layouts of all hops so far."""
        self._digests: dict[tuple[str, MessageLayout], int] = {}
        self._recent = deque[tuple[str, MessageLayout]](maxlen=_HISTORY)

    def check(self, group: dist.ProcessGroup, channel: str, layout: MessageLayout, *, waits: bool = False) -> bool:
        """Compare the next hop of this rank; return whether it is new and not known to be equal on all ranks.

        With ``waits``, do not return before all ranks have posted it, whether it is new or not. Raises `Unsupported`
        where the ranks' hops differ, and `PeerLost` where a rank has ended.
        """
        key = channel, layout
        digest = self._digests.get(key)
        is_new = digest is None
        if digest is None:
            digest = self._add(channel, layout)
        self._recent.append(key)
        self._number = number = self._number + 1
        self.hash = (self.hash * 31 + digest) & 0xFFFFFFFF
        words = self._words
        if words is None:
            if is_new and not compares_calls(group):
                check_same_call(group, f"hop {number}, of {_described(channel, layout)}")
            return False
        size = self._size
        word, first = (number & 0xFFFFFFFF) << 32 | self.hash, number % _HISTORY * size
        words[first + self._rank] = word
        row = words[first : first + size].tolist()
        if row.count(word) != size:
            # A rank that has refused a hop posts no more, so that the row stays incomplete.
            if words[-1] or any([other != word and other >> 32 == word >> 32 for other in row]):
                self._raise_if_different()
            if waits or (is_new and not compares_calls(group)):
                self.wait()
                return False
        return is_new

    def wait(self) -> None:
        """Wait until all ranks have posted this rank's latest hop. Raises like `check`."""
        # On a CPU a late peer is waited for here, not in the wait for the hop itself.
        with annotate("wait-for-all", self._recent[-1][0]):
            begin = looked_at = time.monotonic()
            while missing := self._raise_if_different():
                raise_if_stopped(self._group_name)
                now = time.monotonic()
                if now > looked_at + 1:
                    looked_at = now
                    ended = [rank for rank in missing if _has_ended(self._processes[rank])]
                    if ended or now - begin > timeout().total_seconds():
                        problem = "has ended before" if ended else "does not come to"
                        raise PeerLost(f"rank {(ended or missing)[0]} {problem} {self._own(self._number)}")
                if now - begin < _SPINNING_S:
                    os.sched_yield()
                else:
                    time.sleep(1e-4)

    def _add(self, channel: str, layout: MessageLayout) -> int:
        if len(self._digests) >= _KEPT_LAYOUTS:
            self._digests.clear()
        text = _described(channel, layout).encode()
        digest = self._digests[channel, layout] = int.from_bytes(blake2b(text, digest_size=4).digest(), "little")
        return digest

    def _raise_if_different(self) -> list[int]:
        """Raise `Unsupported` at the first hop in which another rank differs; return the ranks that lag behind."""
        oldest = max(1, self._number - len(self._recent) + 1)
        behind: list[int] = []
        different, refused = 0, self._words[-1]
        for number in range(self._number, oldest - 1, -1):
            own, others = self._row(number)
            if number == self._number:
                behind = [rank for rank, word in others.items() if word >> 32 != own >> 32]
            if any(word != own and word >> 32 == own >> 32 for word in others.values()):
                different = number
            elif not refused and all(word == own for word in others.values()):
                break  # a hash covers the hops before
        if different:
            self._words[-1] = different
            own, others = self._row(different)
            ranks = [rank for rank, word in others.items() if word != own and word >> 32 == own >> 32]
            listed = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            raise Unsupported(
                f"the ranks post different hops: {listed} {'have' if len(ranks) > 1 else 'has'} another than"
                f" {self._own(different)}; all must make the same calls, with tensors of the same shapes and types"
            )
        if refused:
            raise Unsupported(f"another rank has refused hop {refused}, which differs between ranks")
        return behind

    def _row(self, number: int) -> tuple[int, dict[int, int]]:
        """Return the words of a hop: this rank's, and those of the other ranks."""
        first = number % _HISTORY * self._size
        words = dict(zip(self._ranks, self._words[first : first + self._size].tolist(), strict=True))
        return words.pop(self._ranks[self._rank]), words

    def _own(self, number: int) -> str:
        channel, layout = self._recent[number - self._number - 1]
        return f"rank {self._ranks[self._rank]}'s hop {number}, of {_described(channel, layout)}"


def _has_ended(process: int | None) -> bool:
    """Return whether a process has ended, even if its parent does not know yet."""
    try:
        _, _, state = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(") ")
    except OSError:
        return True
    return state[0] in "ZX"


def _described(channel: str, layout: MessageLayout) -> str:
    tensors = ", ".join(f"{str(dtype).removeprefix('torch.')} {tuple(shape)}" for dtype, shape in layout.shapes)
    return f"channel {channel!r} with {tensors}"
