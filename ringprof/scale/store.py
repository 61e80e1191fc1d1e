"""Files of a run of many ranks: what one step of the analysis leaves for the next, each rank in files of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ringprof.analysis.transfers.hops import Split
from ringprof.analysis.transfers.transfers import Message, Transfer
from ringprof.trace.columns import Int64, Trace
from ringprof.trace.reduced import read_reduced

_NUMBERS = ("activity", "start_ns", "end_ns", "stream", "launched")
_TIMES = ("ready_ns", "wait_ns", "wire_ns")
_NOT_KNOWN = np.iinfo(np.int64).min


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


@dataclass(frozen=True)
class Store:
    """A scratch folder, and where the reduced trace of each rank is."""

    folder: str
    reduced: dict[int, str]
    """Rank -> reduced trace."""
    shown: dict[int, str]
    """Rank -> the path of its trace, for people."""

    def trace(self, rank: int) -> Trace:
        """One rank's trace."""
        trace = read_reduced(self.reduced[rank])
        return Trace(**{**vars(trace), "path": self.shown[rank], "rank": rank})

    # --- transfers: between processes of one run of this program, not for others -------------------------

    def put_transfers(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Keep one rank's communication, in order."""
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
        """What `put_transfers` kept."""
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
        """Keep wait and wire of one rank's transfers, in their order."""
        links = list(dict.fromkeys(part.link for part in splits))
        place = {link: number for number, link in enumerate(links)}
        times = {
            name: _packed([_NOT_KNOWN if (value := getattr(part, name)) is None else value for part in splits])
            for name in _TIMES
        }
        file = _Splits(links, _packed([place[part.link] for part in splits]), times)
        self._path("splits", rank).write_bytes(msgspec.msgpack.encode(file))

    def splits(self, rank: int) -> list[Split]:
        """What `put_splits` kept."""
        file = msgspec.msgpack.decode(self._path("splits", rank).read_bytes(), type=_Splits)
        links = [file.links[number] for number in _unpacked(file.link).tolist()]
        columns = [
            [None if value == _NOT_KNOWN else value for value in _unpacked(file.times[name]).tolist()]
            for name in _TIMES
        ]
        rows = zip(self.transfers(rank), links, *columns, strict=True)
        return [Split(transfer, link, *times) for transfer, link, *times in rows]

    def _path(self, what: str, rank: int) -> Path:
        return Path(self.folder, f"{what}{rank}")


def _packed(values: list[int]) -> bytes:
    return np.array(values, np.int64).tobytes()


def _unpacked(data: bytes) -> Int64:
    return np.frombuffer(data, np.int64)
