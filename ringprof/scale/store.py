"""Storage of each rank's data between pipeline steps: in memory, or in files to keep memory independent of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ringprof.analysis.rank import Detail
from ringprof.analysis.transfers.hops import PeerBlock, Split
from ringprof.analysis.transfers.matching import Matches
from ringprof.analysis.transfers.transfers import Group, Transfer
from ringprof.trace.columns import Message, Trace
from ringprof.trace.reduced import read_reduced


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


_Content = tuple[str, tuple[Group, tuple[Message, ...], tuple[Message, ...], int | None, str]]
"""Kind, then group, sends, receives, bytes sent and source, which many transfers of a rank share."""


_Row = tuple[int, int, int, int, int, int]
"""Index into the contents, activity, start, end, stream and launch position of one transfer."""

_Times = tuple[str, int | None, int | None, int | None]
"""Link, ready, wait and wire of one split."""


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
        rows: list[_Row] = []
        for item in transfers:
            others = item.sends, item.receives, item.sent_bytes, item.source
            # Compared by identity where possible: a group can have as many members as the run has ranks.
            index = index_of.setdefault((item.kind, id(item.group), *others), len(index_of))
            if index == len(contents):
                contents.append((item.kind, (item.group, *others)))
            rows.append((index, item.activity, item.start_ns, item.end_ns, item.stream, item.launched))
        self._write("transfers", rank, (contents, rows))

    def transfers(self, rank: int) -> list[Transfer]:
        contents, rows = self._read("transfers", rank, tuple[list[_Content], list[_Row]])
        return [
            Transfer(rank, activity, contents[index][0], start, end, stream, launched, *contents[index][1])
            for index, activity, start, end, stream, launched in rows
        ]

    def put_splits(self, rank: int, splits: Sequence[Split]) -> None:
        self._write("splits", rank, [(split.link, split.ready_ns, split.wait_ns, split.wire_ns) for split in splits])

    def splits(self, rank: int) -> list[Split]:
        times: list[_Times] = self._read("splits", rank, list[_Times])
        return [Split(transfer, *row) for transfer, row in zip(self.transfers(rank), times, strict=True)]

    def put_blocks(self, rank: int, blocks: Sequence[PeerBlock]) -> None:
        self._write("blocks", rank, blocks)

    def blocks(self, rank: int) -> tuple[PeerBlock, ...]:
        blocks: tuple[PeerBlock, ...] = self._read("blocks", rank, tuple[PeerBlock, ...])
        return blocks

    def _write(self, contents: str, rank: int, value: Any) -> None:
        Path(self.folder, f"{contents}{rank}").write_bytes(msgspec.msgpack.encode(value))

    def _read(self, contents: str, rank: int, kind: Any) -> Any:
        return msgspec.msgpack.decode(Path(self.folder, f"{contents}{rank}").read_bytes(), type=kind)


RankStore = MemoryStore | DiskStore
