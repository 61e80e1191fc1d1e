"""What the pipeline keeps of each rank between its steps: in memory, or in files so that ranks do not add to memory."""

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
    """Traces, transfers and their splits by rank: all in memory, each thing once."""

    traces: Mapping[int, Trace]
    _details: dict[int, Detail] = msgspec.field(default_factory=dict)
    _transfers: dict[int, list[Transfer]] = msgspec.field(default_factory=dict)
    _splits: dict[int, list[Split]] = msgspec.field(default_factory=dict)
    _blocks: dict[int, tuple[PeerBlock, ...]] = msgspec.field(default_factory=dict)
    _matches: list[Matches] = msgspec.field(default_factory=list)

    def trace(self, rank: int) -> Trace:
        """One rank's trace."""
        return self.traces[rank]

    def keep_detail(self, rank: int, detail: Detail) -> None:
        """Keep what its figures come from, where there is room for it."""
        self._details[rank] = detail

    def detail(self, rank: int) -> Detail | None:
        """What was last kept of it; None where there is no room, so that it is made from the trace again."""
        return self._details[rank]

    def matched(self, match: Callable[[], Matches]) -> Matches:
        """The matches of a tile, found once where there is one tile only."""
        if not self._matches:
            self._matches.append(match())
        return self._matches[0]

    def put_transfers(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Keep its communication, in order."""
        self._transfers[rank] = list(transfers)

    def transfers(self, rank: int) -> list[Transfer]:
        """Its transfers, as they were kept."""
        return self._transfers[rank]

    def put_splits(self, rank: int, splits: Sequence[Split]) -> None:
        """Keep wait and wire of its transfers, in their order."""
        self._splits[rank] = list(splits)

    def splits(self, rank: int) -> list[Split]:
        """What `put_splits` kept."""
        return self._splits[rank]

    def put_blocks(self, rank: int, blocks: Sequence[PeerBlock]) -> None:
        """Keep the times in which its device ran nothing because of peers."""
        self._blocks[rank] = tuple(blocks)

    def blocks(self, rank: int) -> tuple[PeerBlock, ...]:
        """Return the blocks that `put_blocks` kept."""
        return self._blocks[rank]


# --- files: between processes of one run of this program, not for others ----------------------------------


class _Content(msgspec.Struct, frozen=True):
    """What many transfers of a rank have in common."""

    kind: str
    group: tuple[str | None, tuple[int, ...]]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    sent_bytes: int | None
    source: str


class _Transfers(msgspec.Struct, frozen=True):
    contents: list[_Content]
    content: bytes
    """For each transfer an index into ``contents``, as int64."""
    numbers: dict[str, bytes]


class _Splits(msgspec.Struct, frozen=True):
    links: list[str]
    link: bytes
    times: dict[str, bytes]


class DiskStore(msgspec.Struct, frozen=True, weakref=True):
    """As `MemoryStore`, in a scratch folder, with the reduced traces: plain data, for other processes, too."""

    folder: str
    reduced: dict[int, str]
    """Rank -> reduced trace."""
    shown: dict[int, str]
    """Rank -> the path of its trace, for people."""

    def trace(self, rank: int) -> Trace:
        return msgspec.structs.replace(read_reduced(self.reduced[rank]), path=self.shown[rank], rank=rank)

    def keep_detail(self, rank: int, detail: Detail) -> None:
        pass

    def detail(self, rank: int) -> Detail | None:
        return None

    def matched(self, match: Callable[[], Matches]) -> Matches:
        return match()

    def put_transfers(self, rank: int, transfers: Sequence[Transfer]) -> None:
        places: dict[tuple[Any, ...], int] = {}
        contents: list[_Content] = []
        content = []
        for one in transfers:
            # By identity where it can be: a group has as many members as the run has ranks.
            key = (one.kind, id(one.group), one.sends, one.receives, one.sent_bytes, one.source)
            if key not in places:
                places[key] = len(contents)
                contents.append(_Content(one.kind, one.group, one.sends, one.receives, one.sent_bytes, one.source))
            content.append(places[key])
        numbers = {name: _packed([getattr(one, name) for one in transfers]) for name in _NUMBERS}
        self._path("transfers", rank).write_bytes(
            msgspec.msgpack.encode(_Transfers(contents, _packed(content), numbers))
        )

    def transfers(self, rank: int) -> list[Transfer]:
        file = msgspec.msgpack.decode(self._path("transfers", rank).read_bytes(), type=_Transfers)
        columns = [_unpacked(file.numbers[name]).tolist() for name in _NUMBERS]
        result = []
        rows = zip(_unpacked(file.content).tolist(), *columns, strict=True)
        for place, activity, start, end, stream, launched in rows:
            content = file.contents[place]
            result.append(
                Transfer(
                    rank, activity, content.kind, start, end, stream, launched,
                    content.group, content.sends, content.receives, content.sent_bytes, content.source,
                )
            )  # fmt: skip
        return result

    def put_splits(self, rank: int, splits: Sequence[Split]) -> None:
        links = list(dict.fromkeys(part.link for part in splits))
        place = {link: number for number, link in enumerate(links)}
        times = {
            name: _packed([_NOT_KNOWN if (value := getattr(part, name)) is None else value for part in splits])
            for name in _TIMES
        }
        file = _Splits(links, _packed([place[part.link] for part in splits]), times)
        self._path("splits", rank).write_bytes(msgspec.msgpack.encode(file))

    def splits(self, rank: int) -> list[Split]:
        file = msgspec.msgpack.decode(self._path("splits", rank).read_bytes(), type=_Splits)
        links = [file.links[number] for number in _unpacked(file.link).tolist()]
        columns = [
            [None if value == _NOT_KNOWN else value for value in _unpacked(file.times[name]).tolist()]
            for name in _TIMES
        ]
        rows = zip(self.transfers(rank), links, *columns, strict=True)
        return [Split(transfer, link, *times) for transfer, link, *times in rows]

    def put_blocks(self, rank: int, blocks: Sequence[PeerBlock]) -> None:
        self._path("blocks", rank).write_bytes(msgspec.msgpack.encode(blocks))

    def blocks(self, rank: int) -> tuple[PeerBlock, ...]:
        return msgspec.msgpack.decode(self._path("blocks", rank).read_bytes(), type=tuple[PeerBlock, ...])

    def _path(self, what: str, rank: int) -> Path:
        return Path(self.folder, f"{what}{rank}")


RankStore = MemoryStore | DiskStore


def _packed(values: list[int]) -> bytes:
    return np.array(values, np.int64).tobytes()


def _unpacked(data: bytes) -> Int64:
    return np.frombuffer(data, np.int64)
