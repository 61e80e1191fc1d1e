"""Storage of each rank's data between pipeline steps: in memory, or in files to keep memory independent of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ringprof.analysis.rank import Detail
from ringprof.analysis.transfers.hops import PeerBlock, Split
from ringprof.analysis.transfers.matching import Matches
from ringprof.analysis.transfers.transfers import Message, Transfer
from ringprof.trace.columns import Int64, Trace
from ringprof.trace.reduced import read_reduced

_NUMBERS = ("activity", "start_ns", "end_ns", "stream", "launched")
_TIMES = ("ready_ns", "wait_ns", "wire_ns")
_NOT_KNOWN = np.iinfo(np.int64).min


class MemoryStore(msgspec.Struct, frozen=True):
    """Traces, transfers and splits by rank, all in memory."""

    traces: Mapping[int, Trace]
    _details: dict[int, Detail] = msgspec.field(default_factory=dict)
    _transfers: dict[int, list[Transfer]] = msgspec.field(default_factory=dict)
    _splits: dict[int, list[Split]] = msgspec.field(default_factory=dict)
    _blocks: dict[int, tuple[PeerBlock, ...]] = msgspec.field(default_factory=dict)
    _matches: list[Matches] = msgspec.field(default_factory=list)

    def trace(self, rank: int) -> Trace:
        """Return one rank's trace."""
        return self.traces[rank]

    def keep_detail(self, rank: int, detail: Detail) -> None:
        """Keep the rank's `Detail`, where there is room for it."""
        self._details[rank] = detail

    def detail(self, rank: int) -> Detail | None:
        """Return the `Detail` last kept; None where there is no room, so that it is rebuilt from the trace."""
        return self._details[rank]

    def matched(self, match: Callable[[], Matches]) -> Matches:
        """Return the matches of a tile; in memory, where there is one tile, they are computed once."""
        if not self._matches:
            self._matches.append(match())
        return self._matches[0]

    def put_transfers(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Keep the rank's transfers, in order."""
        self._transfers[rank] = list(transfers)

    def transfers(self, rank: int) -> list[Transfer]:
        """Return the transfers that `put_transfers` kept."""
        return self._transfers[rank]

    def put_splits(self, rank: int, splits: Sequence[Split]) -> None:
        """Keep wait and wire of the rank's transfers, in their order."""
        self._splits[rank] = list(splits)

    def splits(self, rank: int) -> list[Split]:
        """Return the splits that `put_splits` kept."""
        return self._splits[rank]

    def put_blocks(self, rank: int, blocks: Sequence[PeerBlock]) -> None:
        """Keep the intervals in which the rank's device ran nothing because of peers."""
        self._blocks[rank] = tuple(blocks)

    def blocks(self, rank: int) -> tuple[PeerBlock, ...]:
        """Return the blocks that `put_blocks` kept."""
        return self._blocks[rank]


# --- files: shared by processes of one run of this program, not a format for others -----------------------


class _Content(msgspec.Struct, frozen=True):
    """Data that many transfers of a rank share."""

    kind: str
    group: tuple[str | None, tuple[int, ...]]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    sent_bytes: int | None
    source: str


class _Transfers(msgspec.Struct, frozen=True):
    """File format of one rank's transfers."""

    contents: list[_Content]
    content: bytes
    """Index into ``contents`` for each transfer, as int64."""
    numbers: dict[str, bytes]


class _Splits(msgspec.Struct, frozen=True):
    """File format of one rank's splits."""

    links: list[str]
    link: bytes
    times: dict[str, bytes]


class DiskStore(msgspec.Struct, frozen=True, weakref=True):
    """File-based counterpart of `MemoryStore`, in a scratch folder with the reduced traces.

    The store is plain data, which other processes can use too.
    """

    folder: str
    reduced: dict[int, str]
    """Rank -> path of its reduced trace."""
    shown: dict[int, str]
    """Rank -> display path of its trace."""

    def trace(self, rank: int) -> Trace:
        return msgspec.structs.replace(read_reduced(self.reduced[rank]), path=self.shown[rank], rank=rank)

    def keep_detail(self, rank: int, detail: Detail) -> None:
        pass

    def detail(self, rank: int) -> Detail | None:
        return None

    def matched(self, match: Callable[[], Matches]) -> Matches:
        return match()

    def put_transfers(self, rank: int, transfers: Sequence[Transfer]) -> None:
        index_of: dict[tuple[Any, ...], int] = {}
        contents: list[_Content] = []
        content_indices = []
        for transfer in transfers:
            others = transfer.sends, transfer.receives, transfer.sent_bytes, transfer.source
            # Compared by identity where possible: a group can have as many members as the run has ranks.
            key = (transfer.kind, id(transfer.group), *others)
            if key not in index_of:
                index_of[key] = len(contents)
                contents.append(_Content(transfer.kind, transfer.group, *others))
            content_indices.append(index_of[key])
        numbers = {name: _packed([getattr(transfer, name) for transfer in transfers]) for name in _NUMBERS}
        file = _Transfers(contents, _packed(content_indices), numbers)
        self._path("transfers", rank).write_bytes(msgspec.msgpack.encode(file))

    def transfers(self, rank: int) -> list[Transfer]:
        file = msgspec.msgpack.decode(self._path("transfers", rank).read_bytes(), type=_Transfers)
        columns = [_unpacked(file.numbers[name]).tolist() for name in _NUMBERS]
        result = []
        rows = zip(_unpacked(file.content).tolist(), *columns, strict=True)
        for content_index, activity, start, end, stream, launched in rows:
            content = file.contents[content_index]
            result.append(
                Transfer(
                    rank, activity, content.kind, start, end, stream, launched,
                    content.group, content.sends, content.receives, content.sent_bytes, content.source,
                )
            )  # fmt: skip
        return result

    def put_splits(self, rank: int, splits: Sequence[Split]) -> None:
        links = list(dict.fromkeys(split.link for split in splits))
        index_of = {link: number for number, link in enumerate(links)}
        times = {
            name: _packed([_NOT_KNOWN if (value := getattr(split, name)) is None else value for split in splits])
            for name in _TIMES
        }
        file = _Splits(links, _packed([index_of[split.link] for split in splits]), times)
        self._path("splits", rank).write_bytes(msgspec.msgpack.encode(file))

    def splits(self, rank: int) -> list[Split]:
        file = msgspec.msgpack.decode(self._path("splits", rank).read_bytes(), type=_Splits)
        links = [file.links[number] for number in _unpacked(file.link).tolist()]
        stored = (_unpacked(file.times[name]).tolist() for name in _TIMES)
        columns = [[None if value == _NOT_KNOWN else value for value in column] for column in stored]
        rows = zip(self.transfers(rank), links, *columns, strict=True)
        return [Split(transfer, link, *times) for transfer, link, *times in rows]

    def put_blocks(self, rank: int, blocks: Sequence[PeerBlock]) -> None:
        self._path("blocks", rank).write_bytes(msgspec.msgpack.encode(blocks))

    def blocks(self, rank: int) -> tuple[PeerBlock, ...]:
        return msgspec.msgpack.decode(self._path("blocks", rank).read_bytes(), type=tuple[PeerBlock, ...])

    def _path(self, contents: str, rank: int) -> Path:
        return Path(self.folder, f"{contents}{rank}")


RankStore = MemoryStore | DiskStore


def _packed(values: list[int]) -> bytes:
    """Return integers as int64 bytes."""
    return np.array(values, np.int64).tobytes()


def _unpacked(data: bytes) -> Int64:
    """Return int64 bytes as an array."""
    return np.frombuffer(data, np.int64)
